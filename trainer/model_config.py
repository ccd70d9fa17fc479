"""What the user decides about the model, the engine, the learner and the warm-up: records only.

Owns the frozen dataclasses that `trainer/config.py` nests, with their defaults and limits. Imports
no torch, so that a config is read and checked before any process starts. Reading a config never
raises here: each record lists its own mistakes through `problems()` as (field, message), so that
the caller reports all of them at once with their path in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

DTYPES = ("float32", "bfloat16", "float16")
EXPERT_KERNELS = ("grouped_mm", "eager", "batched_mm")
CHAR_ALPHABET = "0123456789<>=+-*/., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ()[]?!:\n"


def _at_least(record: object, name: str, least: float, problems: list[Problem]) -> None:
    value = vars(record)[name]
    if not isinstance(value, (int, float)) or math.isnan(value) or value < least:
        problems.append((name, f"is {value!r}; it must be at least {least}"))


def _one_of(record: object, name: str, allowed: tuple[str, ...], problems: list[Problem]) -> None:
    value = vars(record)[name]
    if value not in allowed:
        problems.append((name, f"is {value!r}; allowed are {', '.join(allowed)}"))


@dataclass(frozen=True)
class UpcycleConfig:
    """A dense model becomes a mixture of experts: each MLP is copied `experts` times.

    With `noise` 0 the logits equal the dense model's; a small noise lets the experts drift apart.
    """

    experts: int = 4
    top_k: int = 2
    noise: float = 0.01
    """Standard deviation of the noise on each expert's weights, relative to that tensor's own."""
    seed: int = 0

    def problems(self) -> list[Problem]:
        found: list[Problem] = []
        _at_least(self, "experts", 2, found)
        _at_least(self, "top_k", 1, found)
        _at_least(self, "noise", 0.0, found)
        if self.top_k > self.experts:
            found.append(("top_k", f"is {self.top_k}, more than the {self.experts} experts"))
        return found


@dataclass(frozen=True)
class ModelConfig:
    """Where the model comes from. Exactly one of `path`, `gguf` and `config` is given.

    `path` is a local Hugging Face folder. `gguf` is a `.gguf` file, or the name of an installed
    package that contains one (the package is not imported). `config` is a Hugging Face config as a
    mapping with `architecture` (`Qwen3MoeForCausalLM`, ...), initialised from `init_seed`.
    """

    path: str | None = None
    gguf: str | None = None
    config: Mapping[str, Any] | None = None
    tokenizer: str = "auto"
    """`auto` (the model's own), `char` (one token a character of `alphabet`), or a local folder."""
    alphabet: str = CHAR_ALPHABET
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    experts_implementation: Literal["grouped_mm", "eager", "batched_mm"] = "grouped_mm"
    init_seed: int = 0
    upcycle: UpcycleConfig | None = None
    cache_dir: str | None = ".cache/shmrl"
    """Where a converted GGUF file is kept, so that the next start takes 0.1 s; None: nowhere."""

    def problems(self) -> list[Problem]:
        found: list[Problem] = []
        given = [name for name in ("path", "gguf", "config") if vars(self)[name] is not None]
        if len(given) != 1:
            found.append(
                ("path", f"give exactly one of path, gguf, config; given: {given or 'none'}")
            )
        if self.config is not None and "architecture" not in self.config:
            found.append(("config", "lacks `architecture`, such as Qwen3MoeForCausalLM"))
        if self.config is not None and self.tokenizer == "auto":
            found.append(
                ("tokenizer", "a model from scratch has no tokenizer: say `char` or a folder")
            )
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            found.append(("alphabet", "must hold each character once, and at least one"))
        _one_of(self, "dtype", DTYPES, found)
        _one_of(self, "experts_implementation", EXPERT_KERNELS, found)
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
    """The built-in engine: how many sequences at once, in how much memory, on which device."""

    max_batch: int = 64
    """Sequences that decode together."""
    kv_bytes: int = 1 << 30
    """Keys and values of the running sequences; a request waits until it fits."""
    prefix_bytes: int = 64 << 20
    """Keys and values kept for group mates and next turns; the oldest go first. 0 keeps none."""
    prefill_tokens_max: int = 8192
    """Context tokens computed in one forward pass; a longer context is cut into several."""
    waiting_max: int = 65536
    """Requests that may wait for admission; one more is an error of that rollout."""
    steps_per_hop: int = 16
    """Decode steps in the worker thread before it looks at the loop again, if nobody asks."""
    seed: int = 0
    """Seeds the sequences whose request names none."""
    device: str = "cpu"
    memory_fraction: float | None = None
    """Share of the device's memory that this process may use, when learner and engine share it."""
    inline: bool = True
    """The engine lives in the producer's process."""
    replicas: int = 1
    """Engine processes when not inline."""

    def problems(self) -> list[Problem]:
        found: list[Problem] = []
        for name in ("max_batch", "kv_bytes", "prefill_tokens_max", "waiting_max"):
            _at_least(self, name, 1, found)
        for name in ("steps_per_hop", "replicas"):
            _at_least(self, name, 1, found)
        _at_least(self, "prefix_bytes", 0, found)
        _fraction(self.memory_fraction, "memory_fraction", found)
        if self.inline and self.replicas != 1:
            found.append(("replicas", f"is {self.replicas}, but an inline engine is exactly one"))
        return found


def _fraction(value: float | None, name: str, found: list[Problem]) -> None:
    if value is not None and not 0.0 < value <= 1.0:
        found.append((name, f"is {value!r}; it must be above 0 and at most 1"))


@dataclass(frozen=True)
class LearnerConfig:
    """The update: advantages, loss, correction, optimizer, memory. docs/losses.md has the formulas."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "mean"] = "grpo"
    loss: Literal["grpo", "gspo", "cispo", "decoupled_ppo", "reinforce"] = "grpo"
    normalize: Literal["token", "rollout", "constant"] = "token"
    """The loss is a mean over tokens (DAPO), over rollouts of their means (GRPO), or a sum over
    tokens divided by rollouts × `constant_tokens` (Dr. GRPO)."""
    constant_tokens: int = 1024
    clip_low: float = 0.2
    clip_high: float = 0.2
    """0.28 is DAPO's clip-higher. For gspo 3e-4 and 4e-4 are the paper's; for cispo `clip_high`
    bounds the weight from above."""
    clip_dual: float | None = None
    """Upper bound on the loss of a token with a negative advantage, in units of it (3.0 is usual)."""
    old_logprobs: Literal["rollout", "learner"] = "rollout"
    """Against whom the ratio is taken: the engine's recorded log-probs, or the learner's own before
    the update (then `correction` bridges the two; decoupled_ppo always does)."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Importance weight learner / engine per token: not used, capped at `correction_max`, or set to
    zero outside `correction_min` … `correction_max`."""
    correction_min: float = 0.5
    correction_max: float = 2.0
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy ‖ reference); above 0 a frozen reference is kept."""
    entropy_coef: float = 0.0
    temperature: float = 1.0
    """Must be the sampling temperature, so that log-probs are those of the sampled distribution."""
    replay: bool = True
    """Force the recorded experts in forward, backward and recomputation."""
    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 10
    decay_steps: int = 0
    """Train step at which linear and cosine reach `lr_min_ratio` × lr."""
    lr_min_ratio: float = 0.1
    minibatches: int = 1
    """Optimizer steps in one train step; the batch is cut into that many parts by rollout."""
    micro_tokens: int = 16384
    """Tokens in one packed forward pass; gradients add up over the passes of an optimizer step."""
    logit_bytes: int = 256 << 20
    """Logits alive at once; more response tokens are done in chunks, recomputed in the backward."""
    checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""
    autocast: bool = False
    """bfloat16 arithmetic with float32 weights, where the device has it."""
    overlong_buffer: int = 0
    """DAPO's soft penalty for the last so many tokens below the limit; 0: none."""
    deterministic: bool = False
    """Only algorithms that repeat bit for bit."""
    seed: int = 0
    device: str = "cpu"
    memory_fraction: float | None = None
    ranks: int = 1

    def problems(self) -> list[Problem]:
        return list(self._problems())

    def _problems(self) -> Iterator[Problem]:
        found: list[Problem] = []
        _one_of(self, "estimator", ("grpo", "dr_grpo", "rloo", "mean"), found)
        _one_of(self, "loss", ("grpo", "gspo", "cispo", "decoupled_ppo", "reinforce"), found)
        _one_of(self, "normalize", ("token", "rollout", "constant"), found)
        _one_of(self, "old_logprobs", ("rollout", "learner"), found)
        _one_of(self, "correction", ("none", "truncate", "mask"), found)
        _one_of(self, "schedule", ("constant", "linear", "cosine"), found)
        for name in ("constant_tokens", "minibatches", "micro_tokens", "logit_bytes"):
            _at_least(self, name, 1, found)
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef", "lr", "weight_decay"):
            _at_least(self, name, 0.0, found)
        for name in ("warmup_steps", "decay_steps", "overlong_buffer", "correction_min"):
            _at_least(self, name, 0, found)
        for name in ("clip_norm", "temperature", "eps"):
            _at_least(self, name, 1e-12, found)
        _fraction(self.memory_fraction, "memory_fraction", found)
        yield from found
        if self.clip_dual is not None and self.clip_dual <= 1.0:
            yield ("clip_dual", f"is {self.clip_dual!r}; it must be above 1, or absent")
        if self.correction_max < max(1.0, self.correction_min):
            yield ("correction_max", "must be at least 1 and at least correction_min")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield ("betas", f"are {self.betas!r}; give two numbers from 0 to below 1")
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            yield ("decay_steps", f"must be above warmup_steps ({self.warmup_steps})")
        if self.ranks != 1:
            yield ("ranks", f"is {self.ranks}; several learner ranks are not built yet: use 1")


@dataclass(frozen=True)
class WarmupConfig:
    """A short supervised start on compact number sorting, so that RL has rewards to see."""

    steps_max: int = 200
    """0 switches the warm-up off."""
    target: float = 0.3
    """Stop once the held-out accuracy at temperature 1 has reached this share."""
    eval_every: int = 10
    eval_prompts: int = 256
    batch: int = 128
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    seed: int = 0
    task: Literal["number_sorting"] = "number_sorting"
    min_numbers: int = 4
    max_numbers: int = 6

    def problems(self) -> list[Problem]:
        found: list[Problem] = []
        _one_of(self, "task", ("number_sorting",), found)
        for name in ("eval_every", "eval_prompts", "batch", "min_numbers"):
            _at_least(self, name, 1, found)
        for name in ("steps_max", "lr", "target"):
            _at_least(self, name, 0, found)
        if self.max_numbers < self.min_numbers:
            found.append(("max_numbers", f"is below min_numbers ({self.min_numbers})"))
        return found
