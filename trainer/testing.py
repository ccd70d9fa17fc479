"""Helpers for tests of code that runs on the lifecycle: virtual time, and groups made by hand.

`run_virtual` runs a coroutine on a loop whose clock jumps to the next timer as soon as nothing else
is to be done: an hour of waiting costs nothing, and the order of events is the same each time. A
loop with nothing left to wait for raises `Deadlock` instead of hanging. Public: for users' tests
too.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from trainer.rollout import Group, Prompt, Rollout, Status
from trainer.segment import IGNORE_LABEL, Segment
from trainer.trace import TraceStore

__all__ = ["Deadlock", "VirtualTimeLoop", "make_segment", "run_virtual", "store_group"]

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits, and no timer is set that could change it."""


class _JumpingSelector(selectors.BaseSelector):
    """Never blocks: instead of waiting for `timeout` seconds it tells the clock to jump."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now = 0.0
        #: Work in threads that the loop waits for in real time.
        self.in_threads = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.in_threads:
            return self._real.select(timeout)
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("nothing is scheduled: every task waits for another")
        self.now += timeout
        return []

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Any:
        return self._real.get_map()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual. Executors work and take no virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._jumping.in_threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._jumping.in_threads -= 1

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        self._jumping.in_threads += 1
        future = super().run_in_executor(executor, func, *args)

        def done(_: object) -> None:
            self._jumping.in_threads -= 1

        future.add_done_callback(done)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def make_segment(
    n: int,
    *,
    model_step: int | None = 0,
    layers: int = 2,
    top_k: int = 2,
    text: str = "",
    first_token: int = 0,
    last_routed: bool = True,
) -> Segment:
    """`n` tokens counted up from `first_token`; `model_step` None: not sampled; `layers` 0: no
    routing.
    """
    token_ids = np.arange(first_token, first_token + n, dtype=np.int32)
    sampled = model_step is not None
    routed = None
    if layers:
        rows = n if last_routed else n - 1
        routed = (
            (np.arange(rows * layers * top_k) % 8).astype(np.uint8).reshape(rows, layers, top_k)
        )
    return Segment(
        token_ids=token_ids,
        labels=token_ids if sampled else np.full(n, IGNORE_LABEL, np.int32),
        logprobs=np.full(n, -0.5 if sampled else 0.0, np.float32),
        model_steps=np.full(n, model_step if model_step is not None else -1, np.int32),
        text=text,
        routed_experts=routed,
    )


def store_group(
    traces: TraceStore,
    uid: str,
    *,
    owner: str = "producer-0",
    task: str = "math",
    size: int = 2,
    status: Status = Status.COMPLETED,
    model_step: int = 0,
    n_prompt: int = 4,
    n_response: int = 6,
    reward: float | None = 1.0,
) -> Group:
    """A group of `size` rollouts with a shared prompt and one response each, stored as
    `owner`'s.
    """
    ids = [f"{uid}-{k}" for k in range(size)]
    for session_id in ids:
        traces.open(session_id, owner)
    traces.insert_shared(ids, make_segment(n_prompt, model_step=None, text="prompt"))
    rollouts = []
    for k, session_id in enumerate(ids):
        response = make_segment(n_response, model_step=model_step, first_token=100 + k)
        leaf = traces.insert(session_id, response, parent=0)
        rollouts.append(
            Rollout(
                session_id=session_id,
                prompt_uid=uid,
                task=task,
                status=status,
                reward=reward,
                leaves=(leaf,),
                turns=(leaf,),
                n_prompt_tokens=n_prompt,
                n_response_tokens=n_response,
                n_sampled_tokens=n_response,
                model_step_min=model_step,
                model_step_max=model_step,
            )
        )
    return Group(
        uid=uid, task=task, prompt=Prompt(uid, task, text="prompt"), rollouts=tuple(rollouts)
    )
