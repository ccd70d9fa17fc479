"""`make gpu-check`: whether engine and learner hold on this machine's devices, and how fast.

Checks, on the CPU and then on each kind of use of a GPU: equal log-probs of engine and learner for
every family, training in bfloat16, weights through the arena, copies from the arena to the device,
new weights between two decode steps, learner and engine on one device with a memory split and on
two devices. Prints one table and needs less than ten minutes. The exit status is 0 when every check
that could run has passed; a machine without CUDA says so after the CPU part.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmstore import Store
from shmstore.testing import temporary_store
from trainer.devices import prepare_device
from trainer.engine.protocol import GenerateRequest, Generation, SamplingParams
from trainer.engine.torch_engine import TorchEngine
from trainer.learner import Learner
from trainer.model_config import EngineConfig, LearnerConfig, ModelConfig
from trainer.models import build_model
from trainer.rollout import IGNORE_LABEL, Trace
from trainer.weights import load_into, publish

LOGPROB_BOUND = 1e-4
LOGPROB_BOUND_BF16 = 0.5
"""bfloat16 engine against a float32 learner, greatest gap of one token with replay on."""
COPY_BYTES = 256 << 20
ARENA = "2GiB"
_COMMON = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "head_dim": 64,
    },
    "OlmoeForCausalLM": {"num_experts": 16, "num_experts_per_tok": 4},
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "LlamaForCausalLM": {},
}


@dataclass(frozen=True)
class Size:
    """How large the models of one part are."""

    hidden: int
    layers: int
    sequences: int
    new_tokens: int


SMALL = Size(hidden=128, layers=3, sequences=32, new_tokens=24)
LARGE = Size(hidden=1024, layers=12, sequences=256, new_tokens=128)


@dataclass(frozen=True)
class Row:
    """One line of the table; `good` None: a figure without a verdict."""

    name: str
    figure: str
    good: bool | None


def _model(architecture: str, size: Size, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    config = {
        **_COMMON,
        **_FAMILIES[architecture],
        "architecture": architecture,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.hidden,
    }
    if architecture == "Qwen3MoeForCausalLM":
        config["moe_intermediate_size"] = size.hidden
    model, tokenizer = build_model(
        ModelConfig(config=config, tokenizer="char"), device, torch.float32
    )
    with torch.no_grad():
        for value in model.parameters():  # far from uniform, or every comparison would pass
            if value.ndim >= 2:
                value.mul_(4.0)
    return model.to(dtype), tokenizer


def _requests(size: Size, offset: int = 0) -> list[GenerateRequest]:
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(2, 80, 8 + index % 24).astype(np.int32)
        for index in range(size.sequences // 4)
    ]
    return [
        GenerateRequest(
            request_id=f"r{index + offset}",
            session_id=f"s{index + offset}",
            token_ids=prompts[index // 4],
            params=SamplingParams(max_new_tokens=size.new_tokens, seed=index),
            group_id=f"g{index // 4 + offset}",
        )
        for index in range(size.sequences)
    ]


def _trace(asked: GenerateRequest, made: Generation) -> Trace:
    ids = np.concatenate([asked.token_ids, made.token_ids])
    start = len(asked.token_ids)
    labels = np.where(np.arange(len(ids)) < start, IGNORE_LABEL, ids).astype(np.int32)
    logprobs = np.concatenate([np.zeros(start, np.float32), made.logprobs])
    steps = np.concatenate([np.full(start, -1, np.int32), made.model_steps])
    routed = made.routed_experts
    if routed is not None:
        routed = np.concatenate([routed, np.zeros_like(routed[:1])])
    return Trace(ids, labels, logprobs, steps, routed)


def _generate(model: Any, tokenizer: Any, size: Size) -> tuple[list[Trace], float]:
    """Traces, and tokens per second of the second of two equal rounds."""

    async def run() -> tuple[list[Trace], float]:
        engine = TorchEngine(model, tokenizer, EngineConfig(max_batch=size.sequences))
        try:
            await asyncio.gather(*[engine.generate(one) for one in _requests(size, 100_000)])
            asked = _requests(size)
            began = time.perf_counter()
            made = await asyncio.gather(*[engine.generate(one) for one in asked])
            seconds = time.perf_counter() - began
        finally:
            await engine.aclose()
        traces = [_trace(one, two) for one, two in zip(asked, made, strict=True)]
        return traces, sum(len(one.token_ids) for one in made) / seconds

    return asyncio.run(run())


def _gap(learner: Learner, traces: list[Trace]) -> float:
    return max(
        float(np.abs(mine - trace.logprobs).max())
        for mine, trace in zip(learner.logprobs(traces), traces, strict=True)
    )


def check_equal_logprobs(device: str, size: Size) -> Iterator[Row]:
    """Float32 engine and learner, every family, every token."""
    for architecture in _FAMILIES:
        model, tokenizer = _model(architecture, size, device, torch.float32)
        traces, _ = _generate(model, tokenizer, size)
        gap = _gap(Learner(model, LearnerConfig()), traces)
        yield Row(f"{device} {architecture}: |Δ log-prob|", f"{gap:.1e}", gap < LOGPROB_BOUND)


def check_speed(device: str, size: Size, *, autocast: bool) -> Iterator[Row]:
    """Tokens per second of both halves, and that a train step's figures are finite."""
    kind = torch.bfloat16 if autocast else torch.float32
    name = f"{device} {'bfloat16' if autocast else 'float32'}"
    engine_model, tokenizer = _model("Qwen3MoeForCausalLM", size, device, kind)
    traces, generated = _generate(engine_model, tokenizer, size)
    yield Row(f"{name}: tokens generated/s", f"{generated:,.0f}", None)
    model, _ = _model("Qwen3MoeForCausalLM", size, device, torch.float32)
    learner = Learner(model, LearnerConfig(autocast=autocast, lr=1e-5))
    if autocast:
        gap = _gap(learner, traces)
        yield Row(f"{name}: |Δ log-prob|, replay", f"{gap:.1e}", gap < LOGPROB_BOUND_BF16)
    advantages = np.linspace(-1.0, 1.0, len(traces)).tolist()
    learner.train_step(traces, advantages)
    _wait(device)
    began = time.perf_counter()
    figures = learner.train_step(traces, advantages)
    _wait(device)
    trained = sum(len(trace) for trace in traces) / (time.perf_counter() - began)
    finite = all(np.isfinite(value) for value in figures.values())
    yield Row(f"{name}: tokens trained/s", f"{trained:,.0f}", finite)


def check_weights(source: str, target: str, size: Size, store: Store) -> Iterator[Row]:
    """Published by a model on one device, taken by an engine on another while it decodes."""
    model, _ = _model("Qwen3MoeForCausalLM", size, source, torch.float32)
    other, tokenizer = _model("Qwen3MoeForCausalLM", size, target, torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.01)
    session = f"weights-{source}-{target}"
    store.sessions.open(session, owner="gpu-check")
    began = time.perf_counter()
    version = publish(model, store, 1, session=session)
    published = time.perf_counter() - began

    async def run() -> tuple[float, set[int]]:
        engine = TorchEngine(other, tokenizer, load_weights=lambda m, v: load_into(m, store, v))
        try:
            tasks = [asyncio.create_task(engine.generate(one)) for one in _requests(size)]
            await asyncio.sleep(0)  # the requests are in the engine's queue, before the swap
            began = time.perf_counter()
            await engine.load_weights(version, "in_flight")
            seconds = time.perf_counter() - began
            made = await asyncio.gather(*tasks)
        finally:
            await engine.aclose()
        return seconds, {int(step) for one in made for step in one.model_steps}

    taken, steps = asyncio.run(run())
    equal = all(
        torch.equal(one.detach().cpu(), two.detach().cpu())
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
    )
    store.sessions.release([session], owner="gpu-check")
    name = f"weights {source} → {target}, {version.nbytes >> 20} MiB"
    yield Row(f"{name}: publish", f"{published * 1e3:.1f} ms", None)
    yield Row(f"{name}: take in flight", f"{taken * 1e3:.1f} ms", equal and 1 in steps)


def check_copies(device: str, store: Store) -> Iterator[Row]:
    """From the arena to the device, beside a pinned copy of the same size."""
    source = torch.arange(COPY_BYTES // 4, dtype=torch.int32)
    ref = store.put(source)
    times = []
    for _ in range(3):  # the first registers the memory
        began = time.perf_counter()
        copied = store.get(ref, device=device)
        _wait(device)
        times.append(time.perf_counter() - began)
    equal = torch.equal(copied.cpu(), source)
    pinned = source.pin_memory()
    began = time.perf_counter()
    pinned.to(device, non_blocking=True)
    _wait(device)
    floor = time.perf_counter() - began
    rate = COPY_BYTES / times[-1] / 1e9
    yield Row(f"arena → {device}: first copy", f"{times[0] * 1e3:.1f} ms", equal)
    yield Row(f"arena → {device}", f"{rate:.1f} GB/s, {times[-1] / floor:.2f} x pinned", equal)


def check_memory_split(device: str) -> Iterator[Row]:
    """A process that is given a share gets an error beyond it, and the device goes on."""
    total = torch.cuda.get_device_properties(device).total_memory
    prepare_device(device, memory_fraction=0.25)
    try:
        torch.empty(int(total * 0.5), dtype=torch.uint8, device=device)
        refused = False
    except torch.cuda.OutOfMemoryError:
        refused = True
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    yield Row(f"{device}: memory split is kept", "25 % of the device", refused)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


@contextmanager
def _exact_float32() -> Iterator[None]:
    """No TF32: the comparison is about us, not about the tensor cores."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _parts(store: Store) -> Iterator[Callable[[], Iterator[Row]]]:
    yield lambda: check_equal_logprobs("cpu", SMALL)
    yield lambda: check_speed("cpu", SMALL, autocast=False)
    yield lambda: check_weights("cpu", "cpu", SMALL, store)
    if not torch.cuda.is_available():
        return
    gpu = "cuda:0"
    yield lambda: check_equal_logprobs(gpu, SMALL)
    yield lambda: check_speed(gpu, LARGE, autocast=True)
    yield lambda: check_weights(gpu, gpu, LARGE, store)
    yield lambda: check_weights("cpu", gpu, SMALL, store)
    yield lambda: check_copies(gpu, store)
    yield lambda: check_memory_split(gpu)
    if torch.cuda.device_count() > 1:
        yield lambda: check_weights(gpu, "cuda:1", LARGE, store)
        yield lambda: check_equal_logprobs("cuda:1", SMALL)


def main() -> int:
    """Runs everything and prints the table; → 0 when nothing failed."""
    rows: list[Row] = []
    with temporary_store(ARENA) as store, _exact_float32():
        for part in _parts(store):
            for row in part():
                rows.append(row)
                verdict = {True: "good", False: "BAD", None: ""}[row.good]
                print(f"{row.name:<58} {row.figure:>28}  {verdict}", flush=True)
    if not torch.cuda.is_available():
        print("no CUDA device here: the GPU part was not run")
    return 1 if any(row.good is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
