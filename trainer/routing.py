"""Which experts each token went to: recorded in the engine, forced in the learner.

Owns the forward hooks on the router modules of transformers' mixture-of-experts models. Routing is
`[tokens, layers, top_k]`, in the narrowest unsigned type that holds the expert count. Replay forces
the recorded experts and recomputes their gate weights from the live router logits the way that
family does, so gradients reach the router. Rows follow the order of tokens in the forward pass,
which is the packed order (`packing.py`): no pads. Not for several threads on one model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trainer.errors import ConfigError
from trainer.segment import narrowest_unsigned

__all__ = [
    "RouterInfo",
    "Routing",
    "UnsupportedRouter",
    "narrow_array",
    "router_modules",
    "stack_recorded",
    "storage_dtype",
]

_ALWAYS_NORMALIZED = frozenset({"MixtralTopKRouter"})
"""Routers whose chosen probabilities are always scaled to sum to one; others say so themselves."""
RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class UnsupportedRouter(ConfigError):
    """A router whose gate weights this module does not know how to recompute."""


class RouterInfo:
    """Shape of the routing of a model: `layers` with experts, `top_k` of `experts` each."""

    def __init__(self, model: nn.Module) -> None:
        routers = router_modules(model)
        self.layers = len(routers)
        self.top_k = int(routers[0].top_k) if routers else 0
        self.experts = int(routers[0].num_experts) if routers else 0

    @property
    def dtype(self) -> np.dtype[Any]:
        return narrowest_unsigned(self.experts)


def router_modules(model: nn.Module) -> list[Any]:
    """The routers in layer order; empty for a dense model. Raises UnsupportedRouter."""
    routers: list[Any] = [
        module for module in model.modules() if type(module).__name__.endswith("TopKRouter")
    ]
    for router in routers:
        name = type(router).__name__
        if name not in _ALWAYS_NORMALIZED and not isinstance(
            vars(router).get("norm_topk_prob"), bool
        ):
            raise UnsupportedRouter(
                f"{name} is not known here; known are Qwen3Moe, Qwen2Moe, Olmoe and Mixtral routers"
            )
    if len({(router.top_k, router.num_experts) for router in routers}) > 1:
        raise UnsupportedRouter("layers with different expert counts or top_k cannot be recorded")
    return routers


def _is_normalized(router: Any) -> bool:
    return type(router).__name__ in _ALWAYS_NORMALIZED or bool(router.norm_topk_prob)


class Routing:
    """The hooks on one model. At most one of `record` and `replay` is active at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.info = RouterInfo(model)
        self._recorded: list[torch.Tensor | None] | None = None
        self._forced: torch.Tensor | None = None  # int64 [layers, T, top_k]
        self._known: torch.Tensor | None = None  # bool [T, 1]; None: all
        self._handles = [
            router.register_forward_hook(self._hook(layer, _is_normalized(router)))
            for layer, router in enumerate(router_modules(model))
        ]

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def record(self) -> Iterator[list[torch.Tensor | None]]:
        """Forward passes inside store each layer's indices, int64 `[T, top_k]`, in the list given.

        A second forward pass overwrites the first.
        """
        self._assert_free()
        self._recorded = [None] * self.info.layers
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replay(self, routed: torch.Tensor, known: torch.Tensor | None = None) -> Iterator[None]:
        """Forward passes inside, and their recomputation in a backward inside, use these experts.

        routed: integers `[T, layers, top_k]` in packed order; known: bool `[T]`, rows that are
        not known are routed live. Raises ValueError on another shape.
        """
        self._assert_free()
        wanted = (self.info.layers, self.info.top_k)
        if routed.ndim != 3 or tuple(routed.shape[1:]) != wanted:
            raise ValueError(
                f"routed experts have shape {tuple(routed.shape)}; this model needs "
                f"[tokens, {wanted[0]}, {wanted[1]}]"
            )
        self._forced = routed.permute(1, 0, 2).to(torch.int64).contiguous()
        self._known = None if known is None or bool(known.all()) else known.unsqueeze(1)
        try:
            yield
        finally:
            self._forced = self._known = None

    def _assert_free(self) -> None:
        assert self._forced is None, "a replay is active on this model"
        assert self._recorded is None, "a recording is active on this model"

    def _hook(self, layer: int, normalized: bool) -> Any:
        def hook(_router: nn.Module, _inputs: Any, output: RouterOutput) -> RouterOutput | None:
            if self._recorded is not None:
                self._recorded[layer] = output[2]
                return None
            if self._forced is None:
                return None
            logits, weights, chosen = output
            forced = self._forced[layer]
            if self._known is not None:
                forced = torch.where(self._known, forced, chosen)
            gates = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, forced)
            if normalized:
                gates = gates / gates.sum(dim=-1, keepdim=True)
            return logits, gates.to(weights.dtype), forced

        return hook


def stack_recorded(recorded: list[torch.Tensor | None], kind: torch.dtype) -> torch.Tensor:
    """One forward pass's indices as `[T, layers, top_k]` of `storage_dtype`."""
    layers = [indices for indices in recorded if indices is not None]
    assert len(layers) == len(recorded), "a router was not called in the forward pass"
    return torch.stack(layers, dim=1).to(kind)


def storage_dtype(narrow: np.dtype[Any]) -> torch.dtype:
    """How the narrow type is held in tensors: torch has few operations for uint16, so its bits are
    held as int16 (`narrow_array` turns them back).
    """
    return torch.uint8 if narrow == np.uint8 else torch.int16


def narrow_array(routing: torch.Tensor) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Routing of `storage_dtype` as a numpy array of the narrow type, copied from its device."""
    array = routing.cpu().numpy()
    return array if routing.dtype == torch.uint8 else array.view(np.uint16)
