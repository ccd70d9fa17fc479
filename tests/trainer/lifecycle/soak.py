"""`python -m tests.trainer.lifecycle.soak [--groups N]`: scenario (e) at length.

Failed, filtered and completed groups in turn through one buffer in one small arena. Memory in the
arena and of this process has to be as flat at the end as it was after the first hundredth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import psutil

from shmstore import Store
from shmstore.testing import assert_empty, temporary_store
from trainer.replay import ReplayBuffer
from trainer.rollout import Status
from trainer.testing import store_group
from trainer.trace import TraceStore

#: Growth of this process's memory that is taken for noise.
NOISE_BYTES = 16 << 20


async def run(store: Store, n: int) -> tuple[list[int], list[int]]:
    """`n` groups; -> (bytes in the arena, resident bytes of this process), a hundred times."""
    traces, buffer = TraceStore(store), ReplayBuffer(store)
    process = psutil.Process()
    used: list[int] = []
    resident: list[int] = []
    for i in range(n):
        status = (Status.FAILED, Status.FILTERED, Status.COMPLETED)[i % 3]
        await buffer.put(store_group(traces, f"g{i}", status=status), owner="producer-0")
        if status is Status.COMPLETED:
            batch = await buffer.take({"math": 1}, train_step=1 + i, owner="learner")
            traces.release(batch.session_ids, owner="learner")
        if i % max(1, n // 100) == 0:
            used.append(store.stats().used)
            resident.append(process.memory_info().rss)
    buffer.check_books()
    print(buffer.accounts.ledger.report(buffer.held()))
    return used, resident


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    options = parser.parse_args()
    with temporary_store("8MiB", max_objects=1 << 12, max_sessions=1 << 10) as store:
        used, resident = asyncio.run(run(store, options.groups))
        assert_empty(store)
    print(
        f"arena {min(used[1:])} to {max(used[1:])} bytes, process {resident[1]} to {resident[-1]}"
    )
    flat = max(used[1:]) == min(used[1:]) and resident[-1] - resident[1] < NOISE_BYTES
    print("flat" if flat else "NOT flat")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
