"""A worker that crashes: its caller hears why, its supervisor starts it again, up to a limit.

python examples/actors/supervised_crash.py
"""

from __future__ import annotations

import os
import signal

import actors


class Worker:
    async def work(self, x: int) -> int:
        return x * 2

    async def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def incarnation(self) -> int:
        return actors.current().incarnation


async def main() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker, name="worker", restart=actors.Restart(max=1, within=60))
        events = worker.watch()
        for attempt in (1, 2):
            try:
                await worker.crash.using(when_down="wait")()
            except actors.ActorDied as died:
                print(f"crash {attempt}: {died.reason}, exit code {died.exit_code}")
            if attempt == 1:
                # Calls during a restart fail at once, unless they say that they can wait.
                print("answer after the restart:", await worker.work.using(when_down="wait")(21))
                print("incarnation:", await worker.incarnation())
        async for event in events:
            print(f"event: {event.kind}" + (f" ({event.reason})" if event.reason else ""))


if __name__ == "__main__":
    actors.run(main())
