"""A dense model becomes a mixture of experts by copying each MLP.

Promises that with zero noise the logits equal the dense model's: every expert is the old MLP and
the chosen gates sum to one. Called by `models.build_model` only.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.errors import ConfigError
from trainer.model.config import UpcycleConfig

__all__ = ["UpcycleError", "upcycle"]

_SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class UpcycleError(ConfigError):
    """A dense model for which no mixture of experts with the same attention is known."""


def _target(dense: Any, config: UpcycleConfig) -> tuple[Any, Any]:
    """The mixture's class and its config."""
    import transformers

    old = dense.config
    shared = {name: getattr(old, name) for name in _SHARED_FIELDS if hasattr(old, name)}
    name = type(dense).__name__
    if name in ("LlamaForCausalLM", "MistralForCausalLM"):
        if getattr(old, "attention_bias", False) or getattr(old, "mlp_bias", False):
            raise UpcycleError(f"{name} with biases has no mixture with the same attention")
        mixtral = transformers.MixtralConfig(
            **shared,
            intermediate_size=old.intermediate_size,
            num_local_experts=config.experts,
            num_experts_per_tok=config.top_k,
            sliding_window=getattr(old, "sliding_window", None),
        )
        return transformers.MixtralForCausalLM, mixtral
    if name == "Qwen3ForCausalLM":
        made = transformers.Qwen3MoeConfig(
            **shared,
            attention_bias=old.attention_bias,
            intermediate_size=old.intermediate_size,
            moe_intermediate_size=old.intermediate_size,
            num_experts=config.experts,
            num_experts_per_tok=config.top_k,
            norm_topk_prob=True,
        )
        return transformers.Qwen3MoeForCausalLM, made
    raise UpcycleError(
        f"{name} cannot be up-cycled; known are LlamaForCausalLM, MistralForCausalLM, "
        "Qwen3ForCausalLM"
    )


@torch.no_grad()
def upcycle(dense: Any, config: UpcycleConfig) -> Any:
    """A new mixture-of-experts model with the dense model's weights, in float32 on the CPU.

    The router starts small and random from `config.seed`. Raises UpcycleError.
    """
    architecture, made = _target(dense, config)
    generator = torch.Generator().manual_seed(config.seed)
    model = architecture._from_config(made, dtype=torch.float32, attn_implementation="eager")
    weights = dict(dense.named_parameters())
    for name, target in model.named_parameters():
        if ".mlp." not in name:
            target.copy_(weights[name])
        elif name.endswith("gate.weight"):
            target.normal_(0.0, made.initializer_range, generator=generator)
        else:
            target.copy_(_expert_weights(name, weights))
            if config.noise > 0:
                noise = torch.empty_like(target).normal_(0.0, 1.0, generator=generator)
                target.add_(noise, alpha=config.noise * float(target.std()))
    return model


def _expert_weights(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The dense MLP's matrix for an expert tensor `[experts, out, in]`, to be broadcast."""
    place, _, which = name.partition(".experts.")
    if which == "down_proj":
        return weights[f"{place}.down_proj.weight"]
    assert which == "gate_up_proj", name
    return torch.cat([weights[f"{place}.gate_proj.weight"], weights[f"{place}.up_proj.weight"]])
