"""`python -m tests.simulation [--seeds N] [--first S]`: many random runs; the first violation stops
it with its seed.
"""

from __future__ import annotations

import argparse
import collections
import logging
import time
import traceback

from tests.simulation.world import simulate

PROGRESS_EVERY = 250


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    logging.disable()  # of rollouts that fail as they are meant to
    started = time.monotonic()
    ended: collections.Counter[str] = collections.Counter()
    trained = 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            outcome = simulate(seed)
        except BaseException:
            traceback.print_exc()
            print(f"seed {seed} failed: repeat with --first {seed} --seeds 1")
            return 1
        ended["all steps" if outcome["ended"] == "steps" else "end of data"] += 1
        trained += sum(len(uids) for uids in outcome["history"].values())
        if seed % PROGRESS_EVERY == 0:
            print(f"... {seed}, {time.monotonic() - started:.0f} s", flush=True)
    seconds = time.monotonic() - started
    print(f"{options.seeds} runs in {seconds:.0f} s: {dict(ended)}, {trained} groups trained")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
