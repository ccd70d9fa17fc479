"""AdamW with a schedule, and its state as plain arrays.

Owns the optimizer's parameter groups (weight decay on matrices only) and the learning rate of each
optimizer step. The state is named by parameter, so that it survives a change of their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.errors import SnapshotError
from trainer.model.config import LearnerConfig

__all__ = ["Optimizer", "learning_rate"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: LearnerConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = config.decay_steps - config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / span)
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.lr_min_ratio + (1.0 - config.lr_min_ratio) * shape)


class Optimizer:
    """AdamW over all parameters of a model."""

    def __init__(self, model: torch.nn.Module, config: LearnerConfig) -> None:
        self._config = config
        self._named = dict(model.named_parameters())
        matrices = [value for value in self._named.values() if value.ndim >= 2]
        others = [value for value in self._named.values() if value.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.steps = 0
        """Optimizer steps done."""

    @property
    def lr(self) -> float:
        """The rate that the next step will use."""
        return learning_rate(self._config, self.steps)

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> torch.Tensor:
        """Scales the gradients down to `clip_norm`; → their norm before that."""
        return torch.nn.utils.clip_grad_norm_(list(self._named.values()), self._config.clip_norm)

    def step(self) -> None:
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        self.steps += 1

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """`adam/NAME/exp_avg` and `exp_avg_sq` as views on the CPU, copies from a GPU; the number
        of steps of each parameter and of all.
        """
        arrays: dict[str, NDArray[Any]] = {"adam/steps": np.array([self.steps], dtype=np.int64)}
        for name, value in self._named.items():
            state = self._adam.state.get(value)
            if not state:
                continue
            for moment in _MOMENTS:
                arrays[f"adam/{name}/{moment}"] = state[moment].detach().cpu().numpy()
            arrays[f"adam/{name}/step"] = state["step"].detach().cpu().numpy().reshape(1)
        return arrays

    @torch.no_grad()
    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """What `state_arrays` gave. Raises SnapshotError when it belongs to another model."""
        if "adam/steps" not in arrays:
            raise SnapshotError("the learner's state holds no optimizer steps")
        self._adam.state.clear()
        for name, value in self._named.items():
            if f"adam/{name}/step" not in arrays:
                continue
            state: dict[str, torch.Tensor] = {
                "step": torch.tensor(
                    float(arrays[f"adam/{name}/step"][0]), dtype=torch.float32, device=value.device
                )
            }
            for moment in _MOMENTS:
                source = arrays.get(f"adam/{name}/{moment}")
                if source is None or source.shape != tuple(value.shape):
                    raise SnapshotError(
                        f"the optimizer's {moment} of {name} is missing or misshapen"
                    )
                state[moment] = torch.empty_like(value).copy_(torch.from_numpy(np.array(source)))
            self._adam.state[value] = state
        self.steps = int(arrays["adam/steps"][0])
