"""Small models of each family and traces of what an engine generated; shared by these tests.

Weights are made large (`SHARPEN`) so that distributions are far from uniform and routers far from
undecided: with freshly initialised weights every comparison would pass by accident.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainer.engine.protocol import GenerateRequest, Generation, SamplingParams
from trainer.engine.torch_engine import TorchEngine
from trainer.model.config import EngineConfig, ModelConfig
from trainer.model.models import build_model
from trainer.model.tokenizer import ModelTokenizer
from trainer.segment import IGNORE_LABEL, Trace

SHARPEN = 8.0
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "architecture": "OlmoeForCausalLM",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
    },
    "mixtral": {
        "architecture": "MixtralForCausalLM",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "intermediate_size": 128},
    "llama": {"architecture": "LlamaForCausalLM", "intermediate_size": 128},
}
MIXTURES = ("qwen3_moe", "olmoe", "mixtral")
_built: dict[tuple[str, str], tuple[Any, ModelTokenizer]] = {}


def family(name: str, attention: str = "shmrl_packed") -> tuple[Any, ModelTokenizer]:
    """A fresh copy of a small model with sharp distributions, and its tokenizer."""
    key = (name, attention)
    if key not in _built:
        config = ModelConfig(config={**COMMON, **FAMILIES[name]}, tokenizer="char")
        model, tokenizer = build_model(config, attention=attention)
        with torch.no_grad():
            for value in model.parameters():
                if value.ndim >= 2:
                    value.mul_(SHARPEN)
        _built[key] = (model, tokenizer)
    model, tokenizer = _built[key]
    return copy.deepcopy(model), tokenizer


def request(
    name: str,
    context: Sequence[int] | np.ndarray[Any, Any],
    *,
    group: str | None = None,
    known: int = 0,
    session: str | None = None,
    **params: Any,
) -> GenerateRequest:
    """A request for up to 16 tokens unless `params` says otherwise; seeded by its name."""
    values = {"max_new_tokens": 16, "seed": sum(name.encode()), **params}
    return GenerateRequest(
        request_id=name,
        session_id=session or f"session-{name}",
        token_ids=np.asarray(context, dtype=np.int32),
        params=SamplingParams(**values),
        group_id=group,
        n_routed_known=known,
    )


def generate(
    model: Any,
    tokenizer: ModelTokenizer,
    requests: Sequence[GenerateRequest],
    config: EngineConfig | None = None,
) -> list[Generation]:
    """All requests at once through one engine."""

    async def run() -> list[Generation]:
        engine = TorchEngine(model, tokenizer, config)
        try:
            return await asyncio.gather(*[engine.generate(one) for one in requests])
        finally:
            await engine.aclose()

    return asyncio.run(run())


def trace_of(asked: GenerateRequest, made: Generation) -> Trace:
    """The trace that a trace store would export for one turn."""
    ids = np.concatenate([asked.token_ids, made.token_ids]).astype(np.int32)
    start = len(asked.token_ids)
    labels = np.full(len(ids), IGNORE_LABEL, dtype=np.int32)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    steps = np.full(len(ids), -1, dtype=np.int32)
    labels[start:], logprobs[start:], steps[start:] = (
        made.token_ids,
        made.logprobs,
        made.model_steps,
    )
    routed = made.routed_experts
    if routed is not None:
        routed = np.concatenate([routed, np.zeros_like(routed[:1])])
    return Trace(ids, labels, logprobs, steps, routed)


def prompts(tokenizer: ModelTokenizer, count: int) -> list[list[int]]:
    """Prompts of different lengths."""
    digits = "314159265358979323846"
    return [tokenizer.encode(digits[i % 5 : i % 5 + 1 + i % 7] + "<") for i in range(count)]


def sampled_traces(model: Any, tokenizer: ModelTokenizer, count: int, **params: Any) -> list[Trace]:
    """Traces of different lengths, prompts shared by groups of four."""
    contexts = prompts(tokenizer, count // 4 + 1)
    asked = [
        request(
            f"r{i}", contexts[i // 4], group=f"g{i // 4}", **{"max_new_tokens": 8 + i % 9, **params}
        )
        for i in range(count)
    ]
    made = generate(model, tokenizer, asked)
    return [trace_of(one, two) for one, two in zip(asked, made, strict=True)]
