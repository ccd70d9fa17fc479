"""Copies between arena and device, and weights on their way, beside plain pinned memory.

Each part is a generator of rows and runs on any torch device; on the CPU "pinned" is plain memory
and no figure has a goal, because there is nothing to be asynchronous.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.arenas import arena
from bench.gpu_model import Size, model_on, requests, synchronize
from bench.report import Goal, Lap, Row, at_least, at_most, collect, interleave, lap, size_name
from shmstore import Store
from shmstore.copies import Copies, page_locked
from trainer.devices import prepare_device
from trainer.engine.protocol import WeightsVersion
from trainer.engine.torch_engine import TorchEngine
from trainer.weights import WeightsReader, WeightsWriter

LAPS = 10
RATIO_MAX = 1.25
"""An arena copy on a GPU may cost this much of the same copy from or to pinned memory."""
WEIGHTS_RATIO_MAX = 1.6
"""The same for weights, a hundred tensors instead of one, where the bytes are what takes time."""
WEIGHTS_BYTES_MIN = 256 << 20
_SETTLE_S_MAX = 5.0


def copies(device: str, n_bytes: int) -> Iterator[Row]:
    """Both directions, the first use, and that the call returns before the copy has ended."""
    with arena(4 * n_bytes) as store:
        host = torch.arange(n_bytes // 4, dtype=torch.int32)
        ref, far = store.put(host), torch.empty_like(host, device=device)
        near = _pinned(host, device)

        def upload() -> None:
            with Copies(store, device) as batch:
                batch.upload(store.get(ref), far)

        def put() -> None:
            store.free(store.put(far))

        first_s = _lap(upload, device)() * 1e-9
        wrong = int((far.cpu() != host).sum())
        there = f"arena → {device}, {size_name(n_bytes)}"
        taken = interleave(
            {
                "pinned memory": _lap(lambda: far.copy_(near, non_blocking=True), device),
                "arena": _lap(upload, device),
                "pageable memory": _lap(lambda: far.copy_(host), device),
                "store.get(device=)": _lap(lambda: store.get(ref, device=device), device),
            },
            LAPS,
        )
        floor = ("pinned memory", taken["pinned memory"])
        yield taken["pinned memory"].row(there, "pinned memory")
        yield taken["arena"].row(there, "arena", against=floor, goals=_on_gpu(device, RATIO_MAX))
        yield taken["pageable memory"].row(there, "pageable memory", against=floor)
        if device != "cpu":  # there it is a view
            yield taken["store.get(device=)"].row(there, "store.get(device=)", against=floor)
        yield Row(there, "arena, first use", first_s, note="with the page-locking")
        yield Row(there, "items that differ", wrong, "count", goals=(at_most(0),))
        yield from _asynchrony(there, upload, device)

        back = f"{device} → arena, {size_name(n_bytes)}"
        taken = interleave(
            {
                "pinned memory": _lap(lambda: near.copy_(far, non_blocking=True), device),
                "store.put": _lap(put, device),
            },
            LAPS,
        )
        yield taken["pinned memory"].row(back, "pinned memory")
        yield taken["store.put"].row(
            back,
            "store.put and free",
            against=("pinned memory", taken["pinned memory"]),
            goals=_on_gpu(device, RATIO_MAX),
        )
        wrong = int((store.get(store.put(far)) != host).sum())
        yield Row(back, "items that differ", wrong, "count", goals=(at_most(0),))
        yield from _arena_facts(store, device)


def weights(source: str, target: str, size: Size) -> Iterator[Row]:
    """Published by a model on one device, taken by another, at rest and between decode steps."""
    model, _ = model_on(source, size)
    other, tokenizer = model_on(target, size)
    n_bytes = sum(value.nbytes for value in model.parameters())
    work = f"weights {source} → {target}, {n_bytes >> 20} MiB"
    bound = WEIGHTS_RATIO_MAX if n_bytes >= WEIGHTS_BYTES_MIN else math.inf
    with arena(2 * n_bytes + (64 << 20)) as store:
        session = "weights"
        writer, reader = WeightsWriter(model, store), WeightsReader(other, store)

        def renew() -> WeightsVersion:
            store.sessions.release([session], owner="gpu-check")
            store.sessions.open(session, owner="gpu-check")
            return writer.publish(1, session=session)

        down = collect(_raw(source, n_bytes, down=True), LAPS)
        published = collect(_lap(renew, source), LAPS)
        yield down.row(work, f"pinned copy from {source}")
        yield published.row(
            work,
            "publish",
            against=("pinned copy", down),
            goals=_on_gpu(source, bound),
        )
        version = renew()
        up = collect(_raw(target, n_bytes, down=False), LAPS)
        taken = collect(_lap(lambda: reader.load(version), target), LAPS)
        yield up.row(work, f"pinned copy to {target}")
        yield taken.row(work, "take", against=("pinned copy", up), goals=_on_gpu(target, bound))
        if source != "cpu" and target != "cpu":
            direct = collect(_lap(lambda: _copy_parameters(model, other), target), LAPS)
            yield direct.row(work, "device to device, no arena", against=("pinned copy", up))
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.01)
        version = renew()
        seconds, steps = asyncio.run(_in_flight(store, other, tokenizer, version, size))
        yield Row(work, "take, while decoding", seconds)
        fresh = sum(step == 1 for step in steps)
        yield Row(work, "tokens of the new weights", fresh, "count", goals=(at_least(1),))
        different = sum(
            not torch.equal(one.cpu(), two.cpu())
            for one, two in zip(model.parameters(), other.parameters(), strict=True)
        )
        yield Row(work, "parameters that differ", different, "count", goals=(at_most(0),))
        yield from _arena_facts(store, target)
        store.sessions.release([session], owner="gpu-check")


def memory_split(device: str) -> Iterator[Row]:
    """A process that is given a share gets an error beyond it, and the device goes on."""
    total = torch.cuda.get_device_properties(device).total_memory
    prepare_device(device, memory_fraction=0.25)
    refused = 0
    try:
        torch.empty(total // 2, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        refused = 1
    within = torch.zeros(total // 8, dtype=torch.uint8, device=device)
    work = f"memory split on {device}"
    yield Row(work, "half refused, a quarter given", refused, "count", goals=(at_least(1),))
    yield Row(work, "taken within the share", within.nbytes, "B")


async def _in_flight(
    store: Store, model: Any, tokenizer: Any, version: Any, size: Size
) -> tuple[float, list[int]]:
    """Seconds of a swap between two decode steps, and the model step of every token."""
    engine = TorchEngine(
        model, tokenizer, load_weights=lambda m, v: WeightsReader(m, store).load(v)
    )
    try:
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests(size)]
        await asyncio.sleep(0)  # the requests are in the engine's queue, before the swap
        began = time.perf_counter()
        await engine.load_weights(version, "in_flight")
        seconds = time.perf_counter() - began
        made = await asyncio.gather(*tasks)
    finally:
        await engine.aclose()
    return seconds, [int(step) for one in made for step in one.model_steps]


def _arena_facts(store: Store, device: str) -> Iterator[Row]:
    """What was page-locked, and that finished copies hold nothing."""
    locked, refused = page_locked(store)
    goals = (at_most(0),) if device != "cpu" else ()
    yield Row(f"arena, {device}", "page-locked", locked, "B")
    yield Row(f"arena, {device}", "refused by CUDA", refused, "B", goals=goals)
    synchronize(device)
    began = time.perf_counter()
    while store.stats().pinned and time.perf_counter() - began < _SETTLE_S_MAX:
        time.sleep(0.01)
    pinned = store.stats().pinned
    yield Row(f"arena, {device}", "views left", pinned, "count", goals=(at_most(0),))


def _asynchrony(work: str, upload: Callable[[], None], device: str) -> Iterator[Row]:
    """How long the call takes, of the time until the copy has ended."""
    if device == "cpu":
        return
    calls, wholes = [], []
    for _ in range(LAPS):
        began = time.perf_counter()
        upload()
        calls.append(time.perf_counter() - began)
        synchronize(device)
        wholes.append(time.perf_counter() - began)
    call_s, whole_s = sorted(calls)[LAPS // 2], sorted(wholes)[LAPS // 2]
    yield Row(
        work,
        "arena, until the call returns",
        call_s,
        n=LAPS,
        reference="the copy",
        ratio=call_s / whole_s,
        goals=(at_most(0.5, "ratio"),),
    )


def _raw(device: str, n_bytes: int, *, down: bool) -> Lap:
    """One copy of so many bytes between the device and pinned memory."""
    far = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    near = _pinned(torch.empty(n_bytes, dtype=torch.uint8), device)
    sink, source = (near, far) if down else (far, near)
    return _lap(lambda: sink.copy_(source, non_blocking=True), device)


def _copy_parameters(source: Any, target: Any) -> None:
    with torch.no_grad():
        for one, two in zip(source.parameters(), target.parameters(), strict=True):
            two.copy_(one, non_blocking=True)


def _pinned(host: torch.Tensor, device: str) -> torch.Tensor:
    return host.clone() if device == "cpu" else host.pin_memory()


def _lap(work: Callable[[], object], device: str) -> Lap:
    """`work` and all that it started on the device."""

    def whole() -> None:
        work()
        synchronize(device)

    return lap(whole)


def _on_gpu(device: str, ratio_max: float) -> tuple[Goal, ...]:
    wanted = device != "cpu" and math.isfinite(ratio_max)
    return (at_most(ratio_max, "ratio"),) if wanted else ()
