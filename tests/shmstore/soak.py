"""Minutes of random work by processes that are killed at random: `python -m tests.shmstore.soak
--seconds 60`.

Not a test of the suite but its long form (`make soak`). Workers open sessions, put, build, read
each other's objects and check every byte, transfer, truncate, release, fork and leave; the parent
kills them at random moments, starts new ones, and audits the arena all the while. What an object
must contain follows from its session's id and its position alone, so a byte read through the wrong
ref cannot go unseen. Exit status 1 on the first unsound audit, wrong byte or unexpected error; the
seed is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
import zlib
from contextlib import suppress
from typing import Any

import numpy as np

from shmstore import (
    NotOwner,
    ObjectFreed,
    SessionExists,
    SessionReleased,
    Store,
    StoreFull,
)
from shmstore.testing import unique_name

WORKERS = 3
LIFE_S_MAX = 0.5
SESSIONS = 40
OWNERS = ("producer", "replay", "learner")
GONE = (SessionReleased, SessionExists, ObjectFreed, NotOwner, StoreFull)


def content(session: str, position: int, length: int) -> np.ndarray[Any, Any]:
    """What the object at this place must contain."""
    return np.full(length, zlib.crc32(f"{session}/{position}".encode()), np.uint32)


def work(name: str, seed: int) -> None:
    """One worker, until it is killed or tired. Every session is written by the worker that opened
    it."""
    rng = random.Random(seed)
    store = Store.attach(name)
    s = store.sessions
    owner, heir = rng.sample(OWNERS, k=2)
    s.bind(owner, heir=rng.choice((None, heir)))
    mine: dict[str, int] = {}
    kept: list[Any] = []
    while True:
        with suppress(*GONE):
            step(store, rng, mine, kept)
        if rng.random() < 0.002:
            os._exit(0)  # with everything open
        if rng.random() < 0.01:
            kept.clear()
            store.close()
            store = Store.attach(name)
            s = store.sessions


def step(store: Store, rng: random.Random, mine: dict[str, int], kept: list[Any]) -> None:
    """One random operation."""
    s, action = store.sessions, rng.randrange(10)
    if action == 0:
        session = f"{os.getpid()}-{rng.randrange(SESSIONS)}"
        s.open(session, owner=rng.choice(OWNERS))
        mine[session] = 0
    elif action <= 3 and mine:
        session = rng.choice(list(mine))
        length = rng.choice((1, 100, 1000, 20_000, 200_000))
        data = content(session, mine[session], length)
        mine_next = mine.pop(session) + 1
        if rng.random() < 0.5:
            store.put(data, session=session, timeout=0.01)
        else:
            with store.build(length, np.uint32, session=session, timeout=0.01) as draft:
                draft.array[...] = data
        mine[session] = mine_next
    elif action <= 6 and (ids := s.list()):
        session = rng.choice(ids)
        for position, entry in enumerate(s.objects(session)):
            view = store.get(entry.ref)
            expected = content(session, position, 1)[0]
            if int(view.min()) != expected or int(view.max()) != expected:
                raise AssertionError(f"wrong bytes in {session} at {position}")
            if rng.random() < 0.1:
                kept.append(view)
        del kept[:-20]
    elif action == 7:
        ids = rng.sample(s.list(), k=min(4, len(s.list())))
        s.transfer(ids, rng.choice(OWNERS), rng.choice(OWNERS), strict=rng.random() < 0.3)
    elif action == 8:
        ids = rng.sample(s.list(), k=min(6, len(s.list())))
        s.release(ids, owner=rng.choice(OWNERS), strict=rng.random() < 0.2)
    else:
        kept.append(store.put({"loose": bytes(rng.randrange(100_000))}))


def spawn(name: str, seed: int) -> int:
    """Fork a worker; returns its pid. The child ends through os._exit only."""
    child = os.fork()
    if child == 0:
        try:
            work(name, seed)
        except AssertionError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(3)
        except BaseException as error:  # the worker's boundary: reported, then fatal
            os.write(2, f"worker: {error!r}\n".encode())
            os._exit(4)
    return child


def soak(seconds: float, seed: int) -> int:
    """Run; returns how many workers were killed. Raises SystemExit(1) on anything wrong."""
    rng = random.Random(seed)
    name = unique_name("soak")
    kills = 0
    with Store.create(name, "32MiB", max_objects=1 << 12, max_sessions=256) as store:
        workers = [spawn(name, rng.randrange(1 << 30)) for _ in range(WORKERS)]
        try:
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                time.sleep(rng.random() * LIFE_S_MAX)  # the moment of the next death
                index = rng.randrange(WORKERS)
                with suppress(ProcessLookupError):
                    os.kill(workers[index], signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(workers[index], 0)[1])
                if code not in (0, -signal.SIGKILL):
                    raise SystemExit(f"a worker ended with {code}")
                kills += 1
                if problems := store.check():
                    raise SystemExit("unsound:\n" + "\n".join(problems))
                workers[index] = spawn(name, rng.randrange(1 << 30))
        finally:
            for worker in workers:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                with suppress(ChildProcessError):  # the one that ended by itself is reaped
                    os.waitpid(worker, 0)
            store.sweep()
            store.sessions.release(store.sessions.list(), owner="*")
            stats, problems = store.stats(), store.check()
            Store.unlink(name)
        if problems or stats.used or stats.objects or stats.sessions or stats.clients != 1:
            raise SystemExit(f"not empty at the end: {problems} {stats}")
    return kills


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    kills = soak(arguments.seconds, arguments.seed)
    print(f"sound after {kills} deaths")


if __name__ == "__main__":
    main()
