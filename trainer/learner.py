"""The model that trains: traces and advantages in, one update and its figures out.

Owns the weights, the optimizer and, with `kl_coef`, a frozen reference. Knows nothing of actors or
the arena: a trace is a few arrays, also when they are read-only views of it. Promises that what a
train step computes does not depend on how the batch was cut into passes (but for rounding), and
that with equal weights and replay on its log-probs are the engine's. One thread.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from trainer.errors import ConfigError, SnapshotError, TrainerError
from trainer.loss import correction_weights, kl_k3, policy_loss, token_weights
from trainer.model.config import LearnerConfig
from trainer.model.packed_forward import (
    PackedTraces,
    TokenScores,
    score,
    share_key,
    trained_positions,
)
from trainer.model.shared_packing import shared_passes
from trainer.optim import Optimizer
from trainer.packing import pack_in_passes
from trainer.routing import Routing
from trainer.segment import Trace

__all__ = ["Learner", "UpdateNotFinite"]

_SKIPPED_IN_A_ROW_MAX = 3
"""Updates with a gradient that is not finite, one after another, before the learner gives up."""
_STATE_FILE = "learner.safetensors"


class UpdateNotFinite(TrainerError):
    """Several updates in a row had a gradient that is not finite; the weights are still good."""


@dataclass
class _Figures:
    """Sums over the tokens of a train step; tensors, so that no pass waits for its figures."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, values: torch.Tensor) -> None:
        total = values.detach().sum()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def peak(self, name: str, values: torch.Tensor) -> None:
        top = values.detach().max()
        self.peaks[name] = torch.maximum(self.peaks[name], top) if name in self.peaks else top

    def result(self, tokens: float, updates: int) -> dict[str, float]:
        """Means over the tokens, and the greatest; `loss` is the mean over the updates."""
        means = {name: float(total) / tokens for name, total in self.sums.items()}
        means["loss"] *= tokens / updates
        return {**means, **{name: float(top) for name, top in self.peaks.items()}}


@dataclass(frozen=True)
class _Item:
    """One trace of a batch and what is to be learnt from it."""

    index: int
    """Place of the trace in the batch."""
    trace: Trace
    positions: NDArray[np.int64]
    advantages: NDArray[np.float32]
    """One for each position."""
    rollout: int
    old: NDArray[np.float32] | None = None
    """The learner's log-probs before the update, where they had to be computed first."""


class Learner:
    """Trains one model. `close` takes the routing hooks off it again."""

    def __init__(self, model: Any, config: LearnerConfig, *, reference: Any | None = None) -> None:
        """`model` holds float32 weights on its device. `reference`: for the KL term; by default a
        copy of the model as it is now. Raises ConfigError.
        """
        problems = config.problems()
        if problems:
            raise ConfigError("; ".join(f"learner.{name} {text}" for name, text in problems))
        _check_model(model, config)
        self.model, self.config = model, config
        self.device: torch.device = model.device
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        if config.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.train()  # transformers recomputes in training mode only; nothing here drops out
        self._reference = _frozen(model, reference) if config.kl_coef > 0 else None
        self._reference_routing = None if self._reference is None else Routing(self._reference)
        self.routing = Routing(model)
        self._replays = config.replay and self.routing.info.layers > 0
        self.optimizer = Optimizer(model, config)
        self._skipped = 0

    def close(self) -> None:
        self.routing.remove()
        if self._reference_routing is not None:
            self._reference_routing.remove()

    # --- training -------------------------------------------------------------------------------

    def train_step(
        self,
        traces: Sequence[Trace],
        advantages: Sequence[float] | Sequence[ArrayLike] | NDArray[np.float32],
        *,
        rewards: Sequence[float] | None = None,
        rollout_ids: Sequence[int] | None = None,
        train_step: int = 0,
        max_token_staleness: int | None = None,
    ) -> dict[str, float]:
        """One train step: `minibatches` optimizer steps over the batch; → its figures.

        advantages: one number a trace, or an array with one a token of it. rollout_ids: the rollout
        of each trace, where one has several; by default each is its own. max_token_staleness:
        tokens older than that at `train_step` are left out of the loss (L18). Traces without a
        trained token are skipped. Without any token to train, `tokens` is 0 and nothing is updated.
        The figures are described in docs/losses.md.

        Raises UpdateNotFinite, RoutingMissing, ConfigError.
        """
        ids = list(range(len(traces))) if rollout_ids is None else list(rollout_ids)
        masks = [_fresh_enough(trace, train_step, max_token_staleness) for trace in traces]
        items = self._items(traces, advantages, ids, masks)
        figures: dict[str, float] = {
            "train_step": train_step,
            "lr": self.optimizer.lr,
            "tokens": sum(len(item.positions) for item in items),
            "traces": len(items),
        }
        if rewards is not None and len(rewards):
            figures["reward"] = float(np.mean(np.asarray(rewards, dtype=np.float64)))
        if not items:
            return figures
        items = self._with_old_logprobs(items)
        sums = _Figures()
        norms, skipped = [], 0
        chosen = list(dict.fromkeys(item.rollout for item in items))
        parts = min(self.config.minibatches, len(chosen))
        for part in np.array_split(np.array(chosen), parts):
            mine = set(part.tolist())
            norm, done = self._update([item for item in items if item.rollout in mine], sums)
            norms.append(norm)
            skipped += not done
        figures["grad_norm"] = float(np.mean(norms))
        figures["updates_skipped"] = skipped
        return {**figures, **sums.result(figures["tokens"], parts)}

    def _items(
        self,
        traces: Sequence[Trace],
        advantages: Sequence[float] | Sequence[ArrayLike] | NDArray[np.float32],
        rollout_ids: Sequence[int],
        masks: Sequence[NDArray[np.bool_] | None],
    ) -> list[_Item]:
        if not len(advantages) == len(rollout_ids) == len(traces):
            raise ConfigError(
                f"{len(traces)} traces need as many advantages (given {len(advantages)}) and "
                f"rollout_ids (given {len(rollout_ids)})"
            )
        items = []
        for index, trace in enumerate(traces):
            positions = trained_positions(trace, masks[index])
            if not len(positions):
                continue
            given = np.asarray(advantages[index], dtype=np.float32)
            if given.ndim and given.shape != trace.token_ids.shape:
                raise ConfigError(
                    f"advantages of trace {index} have shape {given.shape}; need a number, or one "
                    f"for each of its {len(trace)} tokens"
                )
            tokenwise = given[positions] if given.ndim else np.full(len(positions), given)
            items.append(_Item(index, trace, positions, tokenwise, rollout_ids[index]))
        return items

    def _with_old_logprobs(self, items: list[_Item]) -> list[_Item]:
        """With several optimizer steps, the learner's log-probs before the first of them."""
        if self.config.minibatches == 1 or not self._uses_learner_logprobs:
            return items
        scored = self._scored(items, replay=self._replays)
        return [dataclasses.replace(item, old=old) for item, old in zip(items, scored, strict=True)]

    @property
    def _uses_learner_logprobs(self) -> bool:
        config = self.config
        return config.old_logprobs == "learner" or config.loss == "decoupled_ppo"

    def _update(self, items: list[_Item], sums: _Figures) -> tuple[float, bool]:
        """One optimizer step; → the gradient's norm, and whether the step was taken."""
        weights = token_weights(
            self.config.normalize,
            np.concatenate([np.full(len(item.positions), item.rollout) for item in items]),
            self.config.constant_tokens,
        )
        ends = np.cumsum([len(item.positions) for item in items])
        shares = np.split(weights, ends[:-1])
        self.optimizer.zero_grad()
        for indices in self._pass_indices(items, routing=self._replays):
            chosen = [items[index] for index in indices]
            packed = self._pack(chosen, routing=self._replays)
            weight = self._column([shares[index] for index in indices])
            # The backward belongs inside: recomputed layers must meet the same experts.
            with packed.replay(self.routing):
                loss = self._loss(packed, chosen, weight, sums)
                loss.backward()  # type: ignore[no-untyped-call]
        norm = float(self.optimizer.clip())
        if not np.isfinite(norm):
            self.optimizer.zero_grad()
            self._skipped += 1
            if self._skipped >= _SKIPPED_IN_A_ROW_MAX:
                raise UpdateNotFinite(
                    f"{self._skipped} updates in a row had a gradient norm of {norm}; lower "
                    "learner.lr, or look at the rewards and at the engine's log-probs"
                )
            return 0.0, False
        self._skipped = 0
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, True

    def _loss(
        self, packed: PackedTraces, items: list[_Item], counts: torch.Tensor, sums: _Figures
    ) -> torch.Tensor:
        config = self.config
        scores = self._score(packed)
        advantage = self._column([item.advantages for item in items])
        before = scores.logp.detach()
        if items[0].old is not None:
            before = self._column([item.old for item in items if item.old is not None])
        old = before if self._uses_learner_logprobs else packed.rollout_logp
        token = policy_loss(config, scores.logp, old, advantage, packed.rollout, packed.rollouts)
        weight = correction_weights(config, before, packed.rollout_logp)
        loss = token.loss * weight
        if config.kl_coef > 0:
            divergence = kl_k3(scores.logp, self._reference_logp(packed))
            loss = loss + config.kl_coef * divergence
            sums.add("kl_reference", divergence)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * scores.entropy
        part = (loss * counts).sum()
        gap = (scores.logp.detach() - packed.rollout_logp).abs()
        sums.add("loss", part)
        sums.add("entropy", scores.entropy)
        sums.add("ratio_mean", token.ratio)
        sums.add("clip_frac", token.clipped.float())
        sums.add("correction_mean", weight)
        sums.add("kl_engine", kl_k3(packed.rollout_logp, scores.logp.detach()))
        sums.add("logprob_diff_mean", gap)
        sums.peak("logprob_diff_max", gap)
        return part

    def _reference_logp(self, packed: PackedTraces) -> torch.Tensor:
        """The reference goes through the same experts, so that equal weights mean no divergence."""
        assert self._reference is not None
        assert self._reference_routing is not None
        with torch.no_grad(), packed.replay(self._reference_routing), self._autocast():
            return self._score_with(self._reference, packed).logp

    # --- scoring --------------------------------------------------------------------------------

    def logprobs(
        self, traces: Sequence[Trace], *, replay: bool | None = None
    ) -> list[NDArray[np.float32]]:
        """Log-probs float32 `[T]` of each trace's labelled tokens under the weights as they are, 0
        elsewhere. `replay`: through the recorded experts; by default as in training.
        """
        items = self._items(traces, [0.0] * len(traces), range(len(traces)), [None] * len(traces))
        uses = self._replays if replay is None else replay and self.routing.info.layers > 0
        result = [np.zeros(len(trace), dtype=np.float32) for trace in traces]
        for item, scored in zip(items, self._scored(items, replay=uses), strict=True):
            result[item.index][item.positions] = scored
        return result

    def _scored(self, items: list[_Item], *, replay: bool) -> list[NDArray[np.float32]]:
        scored: dict[int, NDArray[np.float32]] = {}
        for indices in self._pass_indices(items, routing=replay):
            packed = self._pack([items[index] for index in indices], routing=replay)
            with torch.no_grad(), packed.replay(self.routing):
                logp = self._score(packed).logp.cpu().numpy()
            ends = np.cumsum([len(items[index].positions) for index in indices])
            for index, part in zip(indices, np.split(logp, ends[:-1]), strict=True):
                scored[index] = part
        return [scored[index] for index in range(len(items))]

    def _pass_indices(self, items: list[_Item], *, routing: bool) -> list[list[int]]:
        lengths = [int(item.positions[-1]) for item in items]
        if not self.config.share_prompts:
            return pack_in_passes(lengths, self.config.micro_tokens)
        keys = [
            share_key(item.trace, item.positions, self.device, routing=routing) for item in items
        ]
        return shared_passes(
            [index if key is None else key for index, key in enumerate(keys)],
            [int(item.positions[0]) for item in items],
            lengths,
            self.config.micro_tokens,
        )

    def _pack(self, items: list[_Item], *, routing: bool) -> PackedTraces:
        return PackedTraces(
            [item.trace for item in items],
            [item.positions for item in items],
            self.device,
            routing=routing,
            share=self.config.share_prompts,
        )

    def _score(self, packed: PackedTraces) -> TokenScores:
        with self._autocast():
            return self._score_with(self.model, packed)

    def _score_with(self, model: Any, packed: PackedTraces) -> TokenScores:
        return score(
            model,
            packed,
            temperature=self.config.temperature,
            logit_bytes=self.config.logit_bytes,
            entropy_grad=self.config.entropy_coef > 0,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.config.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _column(self, parts: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    # --- state ----------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that a learner goes on from, by name: weights, AdamW's moments and steps, the
        random state. Views of the live tensors on the CPU: copy before the next train step.
        """
        arrays: dict[str, NDArray[Any]] = {
            f"weights/{name}": value.detach().cpu().numpy()
            for name, value in self.model.named_parameters()
        }
        arrays.update(self.optimizer.state_arrays())
        arrays["rng/cpu"] = torch.get_rng_state().numpy()
        return arrays

    @torch.no_grad()
    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Goes on from what `state_arrays` gave. Raises SnapshotError for another model's state."""
        for name, value in self.model.named_parameters():
            source = arrays.get(f"weights/{name}")
            if source is None or source.shape != tuple(value.shape):
                raise SnapshotError(
                    f"the learner's state is of another model: weights/{name} is "
                    f"{'missing' if source is None else source.shape}, not {tuple(value.shape)}"
                )
            value.copy_(torch.from_numpy(np.array(source)))
        self.optimizer.load_state_arrays(arrays)
        if "rng/cpu" in arrays:
            torch.set_rng_state(torch.from_numpy(np.array(arrays["rng/cpu"])))

    def save(self, folder: Path) -> None:
        """Writes `learner.safetensors` into an existing folder."""
        from safetensors.numpy import save_file

        arrays = {name: np.ascontiguousarray(value) for name, value in self.state_arrays().items()}
        save_file(arrays, str(folder / _STATE_FILE))

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote. Raises SnapshotError."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(str(folder / _STATE_FILE))
        except (OSError, SafetensorError) as error:
            raise SnapshotError(f"{folder / _STATE_FILE} cannot be read: {error}") from error
        self.load_state_arrays(arrays)


def _fresh_enough(
    trace: Trace, train_step: int, staleness_max: int | None
) -> NDArray[np.bool_] | None:
    """Tokens whose staleness, train step - model step - 1, is within the bound; None: all."""
    if staleness_max is None:
        return None
    return np.asarray(train_step - trace.model_steps - 1 <= staleness_max)


def _frozen(model: Any, reference: Any | None) -> Any:
    """The reference of the KL term; made before there are hooks that a copy would carry along."""
    frozen = copy.deepcopy(model) if reference is None else reference
    return frozen.eval().requires_grad_(False)


def _check_model(model: Any, config: LearnerConfig) -> None:
    if model.dtype != torch.float32:
        raise ConfigError(
            f"the learner trains float32 weights, the model has {model.dtype}; build it with "
            "dtype=torch.float32 (learner.autocast gives bfloat16 arithmetic)"
        )
    drops = [
        name
        for name in ("attention_dropout", "router_jitter_noise", "hidden_dropout")
        if getattr(model.config, name, 0.0)
    ]
    if drops and config.checkpointing:
        raise ConfigError(
            f"model.config.{drops[0]} must be 0: with checkpointing the model is in training mode, "
            "and noise there makes the learner's log-probs differ from the engine's"
        )
