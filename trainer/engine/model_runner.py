"""The forward passes of the engine: context tokens in, next-token logits out.

Owns the cache's contents: each pass writes keys, values and routing of the tokens it computes.
Knows nothing of requests. The engine's worker thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.engine.kv_cache import CacheShape, DecodeLayout, ExtendLayout, Extension, SlotCache
from trainer.model.config import EngineConfig
from trainer.routing import Routing, stack_recorded, storage_dtype

__all__ = ["ModelRunner"]


class ModelRunner:
    """A model with its cache. `close` takes the routing hooks off the model again."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.routing = Routing(model)
        self.cache = SlotCache(_shape(model, self.routing), config.max_batch, config.kv_bytes)

    def close(self) -> None:
        self.routing.remove()

    def extend(
        self, parts: Sequence[Extension], tokens: Sequence[NDArray[np.int32]]
    ) -> torch.Tensor:
        """Computes `tokens[i]` for `parts[i]`; → float32 `[len(parts), V]` after each part."""
        layout = ExtendLayout(self.cache, parts)
        ids = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(self.device)
        ends = np.cumsum([part.count for part in parts]) - 1
        return self._forward(ids, layout, torch.from_numpy(ends).to(self.device))

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """The last token of each running sequence, at its position; → float32 `[n, V]`."""
        place = torch.from_numpy(positions).to(self.device)
        layout = DecodeLayout(self.cache, place, int(positions.max()) + 1)
        return self._forward(torch.from_numpy(tokens).to(self.device), layout, None)

    def _forward(
        self, ids: torch.Tensor, layout: ExtendLayout | DecodeLayout, last: torch.Tensor | None
    ) -> torch.Tensor:
        with self.routing.record() as recorded:
            hidden = self.model.model(
                input_ids=ids.unsqueeze(0),
                position_ids=layout.position_ids,
                layout=layout,
                use_cache=False,
            ).last_hidden_state[0]
        if recorded:
            kind = self.cache.shape.routing_dtype
            self.cache.store_routing(layout.rows, stack_recorded(recorded, kind))
        if last is not None:
            hidden = hidden.index_select(0, last)
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits.float()


def _shape(model: Any, routing: Routing) -> CacheShape:
    config = model.config
    heads = config.num_attention_heads
    info = routing.info
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=model.device,
        routers=info.layers,
        top_k=info.top_k,
        routing_dtype=storage_dtype(info.dtype) if info.layers else torch.uint8,
    )
