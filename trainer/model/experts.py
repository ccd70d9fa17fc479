"""The experts' matrix products under autocast.

transformers' grouped product runs in the type of the weights, and autocast does not know it: with
`learner.autocast` the experts, most of a mixture's arithmetic, would go on in float32, on a GPU
without the fast kernel and with a wait for each layer. `EXPERTS` computes the same on weights in
autocast's type; gradients arrive in the weights' own. Without autocast it is transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["EXPERTS", "register_experts"]

EXPERTS = "shmrl_grouped_mm"


def register_experts() -> None:
    """Makes `EXPERTS` known to transformers. Repeating it changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts_forward)


class _Narrowed:
    """An experts module whose weights have another type; all else is the module's."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module = module
        self.gate_up_proj = module.gate_up_proj.to(dtype)
        self.down_proj = module.down_proj.to(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _experts_forward(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """hidden `[T, H]`, chosen int64 and gates `[T, top_k]` → `[T, H]`."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        module = _Narrowed(module, torch.get_autocast_dtype(kind))
    mixed: torch.Tensor = grouped_mm_experts_forward(module, hidden, chosen, gates)
    return mixed
