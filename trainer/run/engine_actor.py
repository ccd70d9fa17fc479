"""An engine as a process of its own (`engine.inline: false`), and the construction of any engine.

Owns, in its process: the model, its cores, the torch engine. `make_engine` is also what the
producer uses when the engine is inline. Spawned by `trainer.run.wiring`, asked by the producer's
router; survives nothing: after a death the supervisor starts it afresh and the driver gives it
the current weights before it is asked.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from trainer.config import Config
from trainer.engine.protocol import WeightsVersion
from trainer.errors import TrainerError
from trainer.placement import Cores, keep_for_good, own_device, rest_device
from trainer.run.engine_link import ServedEngine

if TYPE_CHECKING:
    from shmstore import Store
    from trainer.engine.torch_engine import TorchEngine
    from trainer.model.config import EngineConfig

__all__ = [
    "EngineActor",
    "EngineSetup",
    "EngineUse",
    "leave_out",
    "make_engine",
    "to_bytes",
    "use_of",
    "use_without_engine",
    "uses_of",
    "weights_of",
]


@dataclass(frozen=True)
class EngineSetup:
    """All that an engine's process needs."""

    config: Config
    cores: Cores
    index: int = 0


class EngineUse(msgspec.Struct, frozen=True, array_like=True):
    """Work done since the process began. Of the CPU time, `cpu_s` is the engine's own and
    `process_cpu_s` that of the whole process it lives in.
    """

    tokens_generated: int
    busy_s: float
    cpu_s: float
    process_cpu_s: float
    running: int
    waiting: int
    kv_bytes: int


def leave_out(
    use: Mapping[str, EngineUse], before: Mapping[str, EngineUse], after: Mapping[str, EngineUse]
) -> dict[str, EngineUse]:
    """Counters of a time before `before` with what was done from there to `after` added, so that
    what is counted from them on leaves that out. An engine that began anew keeps its own.
    """
    return {
        name: _plus(found, before[name], after[name])
        if name in before and name in after and before[name].busy_s <= after[name].busy_s
        else found
        for name, found in use.items()
    }


def _plus(use: EngineUse, before: EngineUse, after: EngineUse) -> EngineUse:
    return replace(
        use,
        tokens_generated=use.tokens_generated + after.tokens_generated - before.tokens_generated,
        busy_s=use.busy_s + after.busy_s - before.busy_s,
        cpu_s=use.cpu_s + after.cpu_s - before.cpu_s,
        process_cpu_s=use.process_cpu_s + after.process_cpu_s - before.process_cpu_s,
    )


#: New weights and what the engines had done, once a step, as bytes: pickling them takes longer.
to_bytes = msgspec.msgpack.Encoder().encode
weights_of = msgspec.msgpack.Decoder(WeightsVersion).decode
uses_of = msgspec.msgpack.Decoder(dict[str, EngineUse]).decode


def make_engine(config: Config, threads: int, store: Store) -> tuple[TorchEngine, Any]:
    """The torch engine and its tokenizer; weights come from the arena."""
    import torch

    from trainer.devices import prepare_device
    from trainer.engine.torch_engine import TorchEngine
    from trainer.model.models import build_model
    from trainer.weights import WeightsReader

    torch.set_num_threads(threads)
    device = own_device(config.engine.device)
    prepare_device(device, config.engine.memory_fraction)
    model, tokenizer = build_model(config.model, device)

    reader = WeightsReader(model, store, check=False)

    def load(_model: Any, version: WeightsVersion) -> None:
        reader.load(version)

    engine = TorchEngine(model, tokenizer, _repeatable(config), load_weights=load)
    return engine, tokenizer


def _repeatable(config: Config) -> EngineConfig:
    """The engine's fields; of a deterministic run such that it computes one sequence at a time, and
    each from its beginning: the last bits depend on what else is in a pass, and that on time.
    """
    engine = config.engine
    if not config.run.deterministic:
        return engine
    asked_max = engine.waiting_max + engine.max_batch
    return dataclasses.replace(engine, max_batch=1, prefix_bytes=0, waiting_max=asked_max - 1)


def use_of(engine: TorchEngine) -> EngineUse:
    """The engine's counters as the driver reads them."""
    found = engine.counters
    return EngineUse(
        tokens_generated=found.tokens_generated,
        busy_s=found.busy_s,
        cpu_s=found.cpu_s,
        process_cpu_s=time.process_time(),
        running=found.running,
        waiting=found.waiting,
        kv_bytes=found.kv_bytes,
    )


def use_without_engine() -> EngineUse:
    """The CPU time of this process, in which no engine is."""
    return EngineUse(0, 0.0, 0.0, time.process_time(), 0, 0, 0)


class EngineActor(ServedEngine):
    """The torch engine as an actor."""

    def __init__(self, setup: EngineSetup) -> None:
        from actors import current

        setup.cores.pin()
        store = current().runtime.store
        if store is None:
            raise TrainerError("the engine was spawned in a runtime without a store")
        self._device = setup.config.engine.device
        self._engine, _ = make_engine(setup.config, setup.cores.threads, store)
        super().__init__(self._engine)
        keep_for_good()

    async def rest(self) -> None:
        """Gives cached memory of the device back (colocated schedule)."""
        rest_device(self._device)

    async def use(self) -> EngineUse:
        """What it has done so far."""
        return use_of(self._engine)

    async def aclose(self) -> None:
        """Ends the engine's thread."""
        await self._engine.aclose()
