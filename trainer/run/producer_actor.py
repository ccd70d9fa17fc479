"""The producer as a process: conversations, judges, and the engine when it is inline.

Owns, in its process: the producer loop, environments and judges, the engine or the router over
engine processes, its cores. What it opens in the arena it holds as its owner name, without an
heir, so a death releases it (lifecycle L12). A loop that ends by an error tells the dispatcher,
which tells whoever waits.

Spawned by `trainer.run.wiring`; `start` is called by the driver, again after each restart.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.engine.protocol import (
    Engine,
    EngineInfo,
    SamplingParams,
    SyncMode,
    Tokenizer,
    WeightsVersion,
)
from trainer.engine.router import EngineRouter
from trainer.environments import ByTask
from trainer.errors import NotStarted, TrainerError
from trainer.evaluation import Evaluator
from trainer.pending import ProducerConfig, ProducerParts
from trainer.placement import Cores, keep_for_good, rest_device
from trainer.producer import PauseReport, Producer
from trainer.rollout import Prompt
from trainer.run.engine_actor import (
    EngineUse,
    make_engine,
    to_bytes,
    use_of,
    use_without_engine,
    weights_of,
)
from trainer.run.engine_link import EngineLink
from trainer.trace import TraceStore

if TYPE_CHECKING:
    from actors import Handle
    from shmstore import Store
    from trainer.engine.torch_engine import TorchEngine

__all__ = ["ProducerActor", "ProducerSetup", "groups_at_once"]

_log = logging.getLogger("trainer")

_SESSION_PREFIX = "r"
"""Not the run's name: engines draw their seeds from session ids, and two runs of one configuration
have to sample the same."""
_JUDGE_WAIT_S_MIN = 600.0
"""A verdict may wait this long for a free judge; its own limit is `judge.timeout_s`."""
_EVAL_OWNER = "eval"


@dataclass(frozen=True)
class ProducerSetup:
    """All that the process needs to build itself, again after a death."""

    config: Config
    owner: str
    cores: Cores


class ProducerActor:
    """See the module."""

    def __init__(self, setup: ProducerSetup) -> None:
        from actors import current

        setup.cores.pin()
        self._setup = setup
        self._config = setup.config
        store = current().runtime.store
        if store is None:
            raise TrainerError("the producer was spawned in a runtime without a store")
        self._store: Store = store
        self._inline: TorchEngine | None = None
        self._router: EngineRouter | None = None
        self._engines: Mapping[str, Handle] = {}
        self._parts: ProducerParts | None = None
        self._producer: Producer | None = None
        self._loop_task: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------

    async def prepare(self, engines: Mapping[str, Handle]) -> None:
        """Makes engine and parts, which takes seconds and needs no weights. Twice is no error."""
        if self._parts is not None:
            return
        self._engines = engines
        engine, tokenizer = await self._make_engine(engines)
        self._tasks = ByTask(self._config.tasks)
        self._parts = ProducerParts(
            engine=engine,
            traces=TraceStore(self._store),
            tokenizer=tokenizer,
            environment=self._tasks,
            judge=self._tasks,
            one_turn=self._tasks.one_turn,
        )
        keep_for_good()

    async def start(
        self, desk: Handle | None, engines: Mapping[str, Handle], weights: WeightsVersion
    ) -> int:
        """Takes the weights, and produces if there is a desk to draw from.

        -> the incarnation of this process, so that the driver knows whom it has started.
        """
        from actors import current

        config = self._config
        await self.prepare(engines)
        if self._router is not None:
            await asyncio.gather(*(self._router.up(name, weights) for name in engines))
        else:
            await self._ready.engine.load_weights(weights, "pause")
        self._tell_of_weights()  # to one that was started already, with older ones
        if desk is not None and self._producer is None:
            self._store.sessions.bind(self._setup.owner, heir=None)
            self._producer = Producer(
                desk,
                self._ready,
                self._producer_config(config.rollout.rollouts_per_prompt, self._params()),
                owner=self._setup.owner,
                run_name=_SESSION_PREFIX,
            )
            self._loop_task = asyncio.create_task(self._produce(self._producer, desk))
        return current().incarnation

    @property
    def _ready(self) -> ProducerParts:
        if self._parts is None:
            raise NotStarted("the producer was asked to work before start()")
        return self._parts

    async def _make_engine(self, engines: Mapping[str, Handle]) -> tuple[Engine, Tokenizer]:
        if not engines:
            engine, tokenizer = await asyncio.to_thread(
                make_engine, self._config, self._setup.cores.threads, self._store
            )
            self._inline = engine
            return engine, tokenizer
        from actors import ActorDied
        from trainer.model.models import build_tokenizer

        info = await _described(engines)
        links = {name: EngineLink(handle) for name, handle in engines.items()}
        self._router = EngineRouter(links, info, (ActorDied,))
        return self._router, build_tokenizer(self._config.model)

    async def _produce(self, producer: Producer, desk: Handle) -> None:
        try:
            await producer.run()
        except Exception as error:  # the task's end: whoever waits for its rollouts must hear of it
            _log.exception("production ends")
            await desk.fail(self._setup.owner, f"{type(error).__name__}: {error}")
            raise

    def _params(self) -> SamplingParams:
        rollout = self._config.rollout
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
        )

    def _producer_config(self, group_size: int, params: SamplingParams) -> ProducerConfig:
        config = self._config
        limits_s = [task.judge.timeout_s for task in config.tasks]
        return ProducerConfig(
            group_size=group_size,
            groups_max=groups_at_once(config, group_size, max(1, len(self._engines))),
            params=params,
            partial_rollout=config.schedule.partial_rollout,
            judge_timeout_s=max(_JUDGE_WAIT_S_MIN, *limits_s),
            filter_equal_rewards=config.replay.filter_equal_rewards,
        )

    async def stop(self) -> None:
        """Ends production in order: pending work is cancelled and given back."""
        if self._producer is not None:
            await self._producer.stop(self._config.schedule.pause_timeout_s)
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        if self._parts is not None:
            await self._tasks.aclose()
        if self._inline is not None:
            await self._inline.aclose()
        if self._router is not None:
            await self._router.aclose()

    # -- weights ---------------------------------------------------------------------------------

    async def load_weights(self, weights: bytes, mode: SyncMode) -> bytes:
        """Every engine takes the weights; -> `use`, which is wanted once a step as well. Both as
        `to_bytes` writes them.
        """
        await self._ready.engine.load_weights(weights_of(weights), mode)
        self._tell_of_weights()
        return to_bytes(await self.use())

    def _tell_of_weights(self) -> None:
        """Work may wait for them."""
        if self._producer is not None:
            self._producer.weights_taken()

    async def engine_up(self, name: str, weights: WeightsVersion) -> None:
        """An engine process was started again: it takes the weights, then requests."""
        if self._router is not None:
            await self._router.up(name, weights)
            self._tell_of_weights()

    async def pause(self, timeout_s: float) -> PauseReport:
        """No new work; pending rollouts are aborted into the buffer. See `Producer.pause`."""
        if self._producer is None:
            raise NotStarted("the producer was asked to pause before start()")
        return await self._producer.pause(timeout_s)

    async def rest(self) -> None:
        """Engines give cached memory of their devices back (colocated schedule)."""
        if self._inline is not None:
            rest_device(self._config.engine.device)
        await self._ask_engines("rest")

    async def resume(self) -> None:
        """Go on."""
        if self._producer is not None:
            await self._producer.resume()

    async def use(self) -> dict[str, EngineUse]:
        """What each engine, and this process, has done since its process began; the dead are left
        out.
        """
        if self._inline is not None:
            return {"inline": use_of(self._inline)}
        return {"producer": use_without_engine(), **await self._ask_engines("use")}

    async def _ask_engines(self, method: str) -> dict[str, Any]:
        """What the engine processes answer; the dead are left out."""
        from actors import ActorDied

        async def ask(name: str, handle: Handle) -> tuple[str, Any] | None:
            try:
                return name, await handle.method(method)()
            except ActorDied:
                return None

        found = await asyncio.gather(*(ask(n, h) for n, h in self._engines.items()))
        return dict(pair for pair in found if pair is not None)

    # -- evaluation ------------------------------------------------------------------------------

    async def evaluate(
        self, prompts: Sequence[Prompt], rollouts_each: int, temperature: float
    ) -> dict[str, float]:
        """Held-out rewards (lifecycle L22): in total and, of a mixture, by task; what failed."""
        self._store.sessions.bind(_EVAL_OWNER, heir=None)
        rollout = self._config.rollout
        params = SamplingParams(
            max_new_tokens=rollout.max_new_tokens, temperature=temperature, stop=rollout.stop
        )
        config = self._producer_config(rollouts_each, params)
        evaluator = Evaluator(self._ready, config, prompts, owner=_EVAL_OWNER)
        report = await evaluator.run()
        for error in report.errors:
            _log.warning("a rollout of the evaluation failed: %s", error)
        by_task = report.reward_mean_by_task if len(self._config.tasks) > 1 else {}
        return {
            "reward": report.reward_mean,
            **{f"reward/{task}": mean for task, mean in by_task.items()},
            "rollouts": report.rollouts,
            "failed": report.failed,
            "response_tokens_mean": report.response_tokens_mean,
        }


def groups_at_once(config: Config, group_size: int, engines: int) -> int:
    """What the engines or a batch hold, and as much again: the slots of those that end are taken by
    others at once. Without them an engine rested 3 to 6 % of an async run.

    No more than the engines let wait, who fail one more; half of that, for an evaluation may go on
    beside.
    """
    full = math.ceil(config.engine.max_batch * engines / group_size)
    accepted = (config.engine.max_batch + config.engine.waiting_max) * engines // 2
    wanted = max(full, config.rollout.prompts_per_step) + full
    return max(1, min(wanted, accepted // group_size))


async def _described(engines: Mapping[str, Handle]) -> EngineInfo:
    """The constants of the model, from the first engine that is not dead for good."""
    from actors import ActorDied

    info: EngineInfo
    *others, last = engines.values()
    for engine in others:
        try:
            info = await engine.describe.using(when_down="wait")()
        except ActorDied:
            continue
        return info
    info = await last.describe.using(when_down="wait")()
    return info
