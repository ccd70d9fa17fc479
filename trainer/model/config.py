"""What the user decides about the model, the engine, the learner and the warm-up: records only.

Owns the frozen dataclasses that `trainer.config.schema` nests. Each field carries its documentation
and its limits in `metadata` (`doc`, `ge`, `gt`, `le`, `unit`), from which the config checks and
docs/config.md are made. Imports no torch, so that a config is read and checked before any process
starts. Nothing raises here: `problems()` lists all mistakes of a record as (field, message).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "EngineConfig",
    "LearnerConfig",
    "ModelConfig",
    "Problem",
    "UpcycleConfig",
    "WarmupConfig",
]

Problem = tuple[str, str]
"""(field name, what is wrong and what is allowed)."""

CHAR_ALPHABET = "0123456789<>=+-*/., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ()[]?!:\n"
GIB, MIB = 1 << 30, 1 << 20
_LIMITS: tuple[tuple[str, str], ...] = (("ge", "at least"), ("gt", "above"), ("le", "at most"))


def _setting(default: Any, doc: str, **limits: Any) -> Any:
    return field(default=default, metadata={"doc": doc, **limits})


def _breaks(key: str, value: float, bound: float) -> bool:
    if value != value:  # NaN obeys no limit
        return True
    return value < bound if key == "ge" else value <= bound if key == "gt" else value > bound


def field_problems(record: Any) -> list[Problem]:
    """Values outside the limits that the fields state in `metadata`, and choices that are none."""
    found: list[Problem] = []
    hints = typing.get_type_hints(type(record))
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        allowed = typing.get_args(hints[item.name])
        if typing.get_origin(hints[item.name]) is Literal and value not in allowed:
            found.append((item.name, f"is {value!r}; allowed are {', '.join(map(str, allowed))}"))
        for key, words in _LIMITS:
            bound = item.metadata.get(key)
            if bound is not None and value is not None and _breaks(key, value, bound):
                found.append((item.name, f"is {value!r}; it must be {words} {bound}"))
    return found


@dataclass(frozen=True)
class UpcycleConfig:
    """A dense model becomes a mixture of experts: each MLP is copied `experts` times.

    With `noise` 0 the logits equal the dense model's; a small noise lets the experts drift apart.
    """

    experts: int = _setting(4, "Copies of each MLP.", ge=2)
    top_k: int = _setting(2, "Experts that each token uses.", ge=1)
    noise: float = _setting(
        0.01, "Deviation of the noise on each expert tensor, relative to the tensor's own.", ge=0
    )
    seed: int = _setting(0, "Seed of the noise and of the new router.")

    def problems(self) -> list[Problem]:
        found = field_problems(self)
        if self.top_k > self.experts:
            found.append(("top_k", f"is {self.top_k}, more than the {self.experts} experts"))
        return found


@dataclass(frozen=True)
class ModelConfig:
    """Where the model comes from. Exactly one of `path`, `gguf` and `config` is given."""

    path: str | None = _setting(None, "A local Hugging Face folder.")
    gguf: str | None = _setting(
        None, "A .gguf file, or the name of an installed package that holds one (not imported)."
    )
    config: Mapping[str, Any] | None = _setting(
        None,
        "A Hugging Face config with `architecture` (Qwen3MoeForCausalLM, ...), initialised from "
        "`init_seed`.",
    )
    tokenizer: str = _setting(
        "auto", "`auto` (the model's own), `char` (one token a character), or a local folder."
    )
    alphabet: str = _setting(CHAR_ALPHABET, "Characters that the `char` tokenizer knows.")
    dtype: Literal["float32", "bfloat16", "float16"] = _setting(
        "float32", "Type of the weights in learner and engine."
    )
    experts_implementation: Literal["grouped_mm", "eager", "batched_mm"] = _setting(
        "grouped_mm", "How transformers computes the experts; grouped_mm is the fastest."
    )
    init_seed: int = _setting(0, "Seed of the weights of a model from scratch.")
    upcycle: UpcycleConfig | None = field(
        default=None, metadata={"doc": "Make a mixture of experts of a dense model."}
    )
    cache_dir: str | None = _setting(
        ".cache/shmrl", "Where a converted GGUF file and warmed-up weights are kept."
    )

    def problems(self) -> list[Problem]:
        found = field_problems(self)
        given = [name for name in ("path", "gguf", "config") if getattr(self, name) is not None]
        if len(given) != 1:
            text = f"give exactly one of path, gguf, config; given: {', '.join(given) or 'none'}"
            found.append(("path", text))
        if self.config is not None and "architecture" not in self.config:
            found.append(("config", "lacks `architecture`, such as Qwen3MoeForCausalLM"))
        if self.config is not None and self.tokenizer == "auto":
            found.append(("tokenizer", "a model from scratch has none: say `char` or a folder"))
        if self.gguf is not None and self.cache_dir is None:
            found.append(("cache_dir", "is needed with gguf: it keeps the converted model"))
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            found.append(("alphabet", "must hold each character once, and at least one"))
        if self.upcycle is not None:
            found += [(f"upcycle.{name}", text) for name, text in self.upcycle.problems()]
        return found

    @property
    def is_mixture(self) -> bool | None:
        """Whether the model has experts, as far as the config alone can tell; None: look at it."""
        if self.upcycle is not None:
            return True
        if self.config is not None:
            name = str(self.config.get("architecture", ""))
            return "Moe" in name or name.startswith(("Mixtral", "Olmoe"))
        return None


@dataclass(frozen=True)
class EngineConfig:
    """The model that generates: how many sequences at once, in how much memory, where."""

    max_batch: int = _setting(64, "Sequences that decode together.", ge=1)
    kv_bytes: int = _setting(
        GIB, "Memory for keys and values of running sequences.", ge=1, unit="bytes"
    )
    prefix_bytes: int = _setting(
        64 * MIB,
        "Memory for keys and values kept for group mates and next turns; the oldest go first. "
        "0 keeps none.",
        ge=0,
        unit="bytes",
    )
    prefill_tokens_max: int = _setting(8192, "Context tokens computed in one forward pass.", ge=1)
    waiting_max: int = _setting(65536, "Requests that may wait; one more is an error.", ge=1)
    seed: int = _setting(0, "Seeds, with its session id, a sequence whose request names no seed.")
    device: str = _setting(
        "cpu", "Device of the engine, such as cpu or cuda:1; replicas take those that follow it."
    )
    memory_fraction: float | None = _setting(
        None, "Share of the device's memory, when the learner is on it, too.", gt=0, le=1
    )
    threads: int = _setting(1, "Arithmetic threads of an engine process.", ge=1)
    inline: bool = _setting(True, "The engine lives in the producer's process.")
    replicas: int = _setting(1, "Engine processes, when not inline.", ge=1)

    def problems(self) -> list[Problem]:
        return field_problems(self)


@dataclass(frozen=True)
class LearnerConfig:
    """The update: advantages, loss, correction, optimizer, memory. Formulas: docs/losses.md."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "mean"] = _setting(
        "grpo",
        "Advantage within a group: `grpo` (reward - mean) / deviation, `dr_grpo` reward - mean, "
        "`rloo` reward - mean of the others, `mean` reward - mean of the batch.",
    )
    loss: Literal["grpo", "gspo", "cispo", "decoupled_ppo", "reinforce"] = _setting(
        "grpo", "Policy loss. DAPO is `grpo` with clip_high 0.28 and normalize token."
    )
    normalize: Literal["token", "rollout", "constant"] = _setting(
        "token",
        "`token`: mean over tokens (DAPO); `rollout`: mean over rollouts of their means (GRPO); "
        "`constant`: sum divided by rollouts x constant_tokens (Dr. GRPO).",
    )
    constant_tokens: int = _setting(1024, "See normalize.", ge=1, unit="tokens")
    clip_low: float = _setting(0.2, "The ratio is clipped below 1 - clip_low.", ge=0, le=1)
    clip_high: float = _setting(
        0.2, "The ratio is clipped above 1 + clip_high; for gspo about 4e-4.", ge=0
    )
    clip_dual: float | None = _setting(
        None, "Bound on the loss of a token with a negative advantage, in units of it.", gt=1
    )
    old_logprobs: Literal["rollout", "learner"] = _setting(
        "rollout",
        "Against whom the ratio is taken: the engine's recorded log-probs, or the learner's own "
        "before the update (`correction` then bridges the two; decoupled_ppo always does).",
    )
    correction: Literal["none", "truncate", "mask"] = _setting(
        "none",
        "Importance weight learner/engine per token: not used, capped at correction_max, or zero "
        "outside correction_min ... correction_max.",
    )
    correction_min: float = _setting(0.5, "See correction.", ge=0)
    correction_max: float = _setting(2.0, "See correction.", ge=1)
    kl_coef: float = _setting(
        0.0, "Weight of the k3 estimate of KL(policy | reference); above 0 one is kept.", ge=0
    )
    entropy_coef: float = _setting(0.0, "Weight of the entropy bonus.", ge=0)
    temperature: float = _setting(
        1.0, "Must be the sampling temperature: log-probs are taken under it.", gt=0
    )
    replay: bool = _setting(
        True, "Force the recorded experts in forward, backward and recomputation."
    )
    lr: float = _setting(2e-4, "Learning rate of AdamW after its warm-up.", ge=0)
    betas: tuple[float, float] = _setting((0.9, 0.99), "AdamW's two decay rates.")
    eps: float = _setting(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = _setting(0.0, "AdamW's weight decay (matrices only).", ge=0)
    clip_norm: float = _setting(1.0, "Gradients are scaled down to this norm.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = _setting(
        "constant", "Learning rate after its warm-up."
    )
    warmup_steps: int = _setting(10, "Optimizer steps until the learning rate is full.", ge=0)
    decay_steps: int = _setting(
        0, "Optimizer step at which linear and cosine reach lr_min_ratio x lr.", ge=0
    )
    lr_min_ratio: float = _setting(0.1, "See decay_steps.", ge=0, le=1)
    minibatches: int = _setting(
        1, "Optimizer steps in one train step; the batch is cut by rollout.", ge=1
    )
    micro_tokens: int = _setting(
        16384, "Tokens in one packed forward pass; gradients add up over passes.", ge=1
    )
    share_prompts: bool = _setting(
        True, "Compute a prompt once for the traces of a batch that begin with it."
    )
    logit_bytes: int = _setting(
        256 * MIB,
        "Logits alive at once; more response tokens are done in chunks and recomputed.",
        ge=1,
        unit="bytes",
    )
    checkpointing: bool = _setting(False, "Recompute each layer's activations in the backward.")
    autocast: bool = _setting(
        False, "bfloat16 arithmetic with float32 weights, where the device has it."
    )
    overlong_buffer: int = _setting(
        0, "DAPO's soft penalty on the last so many tokens below the limit; 0: none.", ge=0
    )
    deterministic: bool = _setting(False, "Only algorithms that repeat bit for bit.")
    seed: int = _setting(0, "Seed of whatever the learner draws.")
    device: str = _setting("cpu", "Device of the learner, such as cpu or cuda:0.")
    memory_fraction: float | None = _setting(
        None, "Share of the device's memory, when an engine is on it, too.", gt=0, le=1
    )
    threads: int = _setting(1, "Arithmetic threads of the learner.", ge=1)
    ranks: int = _setting(1, "Learner processes; more than 1 is not built yet.", ge=1)

    def problems(self) -> list[Problem]:
        found = field_problems(self)
        if self.correction_max < self.correction_min:
            found.append(("correction_max", "must be at least correction_min"))
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            found.append(("betas", f"are {self.betas!r}; give two numbers from 0 to below 1"))
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            found.append(("decay_steps", f"must be above warmup_steps ({self.warmup_steps})"))
        if self.ranks > 1:
            found.append(("ranks", f"is {self.ranks}; several ranks are not built yet: use 1"))
        return found


@dataclass(frozen=True)
class WarmupConfig:
    """A short supervised start, so that RL has rewards to see."""

    steps_max: int = _setting(200, "Supervised steps at most; 0 switches the warm-up off.", ge=0)
    target: float = _setting(
        0.3, "Stop once the held-out accuracy at temperature 1 has reached this share.", ge=0, le=1
    )
    eval_every: int = _setting(10, "Steps between two looks at the accuracy.", ge=1)
    eval_prompts: int = _setting(256, "Held-out prompts of one look.", ge=1)
    batch: int = _setting(128, "Examples in one step.", ge=1)
    lr: float = _setting(2e-3, "Learning rate of AdamW.", gt=0)
    betas: tuple[float, float] = _setting((0.9, 0.95), "AdamW's two decay rates.")
    clip_norm: float = _setting(1.0, "Gradients are scaled down to this norm.", gt=0)
    answer_tokens_max: int = _setting(16, "Tokens generated for a held-out answer.", ge=1)
    seed: int = _setting(0, "Seed of the held-out sampling.")

    def problems(self) -> list[Problem]:
        return field_problems(self)
