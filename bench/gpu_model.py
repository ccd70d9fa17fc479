"""Engine and learner on one device: equal log-probs, and tokens a second.

Owns the models of `make gpu-check` and what they generate. Each part is a generator of rows and
runs on any torch device, the CPU too; `bench/gpu_check.py` says which and with what size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.report import Row, at_least, at_most
from trainer.engine.protocol import GenerateRequest, Generation, SamplingParams
from trainer.engine.torch_engine import TorchEngine
from trainer.learner import Learner
from trainer.model.config import EngineConfig, LearnerConfig, ModelConfig
from trainer.model.models import build_model
from trainer.segment import IGNORE_LABEL, Trace

LOGPROB_BOUND = 1e-4
LOGPROB_BOUND_BF16 = 0.1
"""Mean gap of one token between a bfloat16 engine and a learner with replay on."""
SHARPEN = 4.0
_COMMON = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
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
MIXTURE = "Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class Size:
    """How large the models of one part are, and how much they generate."""

    hidden: int
    layers: int
    sequences: int
    new_tokens: int


SMALL = Size(hidden=128, layers=3, sequences=32, new_tokens=24)
LARGE = Size(hidden=1024, layers=8, sequences=256, new_tokens=128)


def synchronize(device: str) -> None:
    """Until the device has done what it was asked."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def model_on(
    device: str, size: Size, dtype: torch.dtype = torch.float32, architecture: str = MIXTURE
) -> tuple[Any, Any]:
    """A model from scratch and its tokenizer; the same weights on every device."""
    config = {
        **_COMMON,
        **FAMILIES[architecture],
        "architecture": architecture,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.hidden,
    }
    if architecture == MIXTURE:
        config["moe_intermediate_size"] = size.hidden
    model, tokenizer = build_model(
        ModelConfig(config=config, tokenizer="char"), device, torch.float32
    )
    with torch.no_grad():
        for value in model.parameters():  # far from uniform, or every comparison would pass
            if value.ndim >= 2:
                value.mul_(SHARPEN)
    return model.to(dtype), tokenizer


def requests(size: Size, offset: int = 0) -> list[GenerateRequest]:
    """Prompts of different lengths, four rollouts each."""
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(2, 80, 8 + index % 24).astype(np.int32)
        for index in range(-(-size.sequences // 4))
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


def equal_logprobs(device: str, size: Size) -> Iterator[Row]:
    """Float32 engine and learner, every family, every token."""
    for architecture in FAMILIES:
        model, tokenizer = model_on(device, size, architecture=architecture)
        traces, _ = _generate(model, tokenizer, size)
        gaps = _gaps(Learner(model, LearnerConfig()), traces)
        yield Row(
            f"log-probs on {device}, float32",
            f"{architecture.removesuffix('ForCausalLM')}, greatest gap",
            float(gaps.max()),
            "count",
            n=len(gaps),
            goals=(at_most(LOGPROB_BOUND),),
        )


def half_precision_logprobs(device: str, size: Size) -> Iterator[Row]:
    """A bfloat16 engine against learners that replay its routing, and one that does not."""
    engine_model, tokenizer = model_on(device, size, torch.bfloat16)
    traces, _ = _generate(engine_model, tokenizer, size)
    work = f"log-probs on {device}, bfloat16 engine"
    found = {}
    for name, config in (
        ("float32 learner, replay off", LearnerConfig(replay=False)),
        ("float32 learner, replay on", LearnerConfig()),
        ("autocast learner, replay on", LearnerConfig(autocast=True)),
    ):
        learner = Learner(model_on(device, size)[0], config)
        gaps = _gaps(learner, traces)
        learner.close()
        found[name] = float(gaps.mean())
        replays = config.replay
        yield Row(
            work,
            f"{name}, mean gap",
            found[name],
            "count",
            n=len(gaps),
            reference="replay off" if replays else None,
            ratio=found[name] / found["float32 learner, replay off"] if replays else None,
            goals=(at_most(LOGPROB_BOUND_BF16),) if replays else (),
        )


def speed(device: str, size: Size, *, half: bool) -> Iterator[Row]:
    """Tokens a second of both halves, and that a train step's figures are finite."""
    work = f"tokens a second on {device}, {'bfloat16' if half else 'float32'}"
    model, tokenizer = model_on(device, size, torch.bfloat16 if half else torch.float32)
    traces, generated = _generate(model, tokenizer, size)
    yield Row(work, "generated", generated, "1/s", n=len(traces))
    del model
    learner = Learner(model_on(device, size)[0], LearnerConfig(autocast=half, lr=1e-5))
    advantages = np.linspace(-1.0, 1.0, len(traces)).tolist()
    learner.train_step(traces, advantages)
    synchronize(device)
    began = time.perf_counter()
    figures = learner.train_step(traces, advantages)
    synchronize(device)
    trained = sum(len(trace) for trace in traces) / (time.perf_counter() - began)
    yield Row(work, "trained", trained, "1/s", n=len(traces))
    finite = [bool(np.isfinite(value)) for value in figures.values()]
    yield Row(
        work, "share of finite figures", sum(finite) / len(finite), "x", goals=(at_least(1.0),)
    )


def _generate(model: Any, tokenizer: Any, size: Size) -> tuple[list[Trace], float]:
    """Traces, and tokens per second of the second of two equal rounds."""

    async def run() -> tuple[list[Trace], float]:
        engine = TorchEngine(model, tokenizer, EngineConfig(max_batch=size.sequences))
        try:
            await asyncio.gather(*[engine.generate(one) for one in requests(size, 100_000)])
            asked = requests(size)
            began = time.perf_counter()
            made = await asyncio.gather(*[engine.generate(one) for one in asked])
            seconds = time.perf_counter() - began
        finally:
            await engine.aclose()
        traces = [_trace(one, two) for one, two in zip(asked, made, strict=True)]
        return traces, sum(len(one.token_ids) for one in made) / seconds

    return asyncio.run(run())


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


def _gaps(learner: Learner, traces: list[Trace]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """|learner's log-prob - engine's| of every generated token."""
    return np.concatenate(
        [
            np.abs(mine - trace.logprobs)[trace.labels != IGNORE_LABEL]
            for mine, trace in zip(learner.logprobs(traces), traces, strict=True)
        ]
    )
