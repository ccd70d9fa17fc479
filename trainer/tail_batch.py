"""When expired groups are produced again (lifecycle L19).

Retrying each at once mixes a few old prompts into every batch; gathering N of them and then
producing only what is missing makes one batch of them, with no over-sampling to throw away. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import ConfigError

__all__ = ["NEVER", "TailBatch"]

#: Expired groups are never retried.
NEVER = -1


@dataclass(frozen=True, slots=True)
class TailBatch:
    """The rule: `size` -1 never, 0 at once, N from N gathered groups on until none is left."""

    size: int

    def __post_init__(self) -> None:
        if self.size < NEVER:
            raise ConfigError(f"tail_batch is {self.size}; allowed are -1, 0 and above")

    def active(self, n_expired: int, was_active: bool, fresh_exhausted: bool) -> bool:
        """Whether production is confined to expired groups now.

        Once begun it goes on until the pool is empty. When no fresh prompt is left nothing more can
        gather, so fewer than N are taken as well: waiting for them would be for ever.
        """
        if self.size <= 0 or n_expired == 0:
            return False
        return was_active or n_expired >= self.size or fresh_exhausted

    def may_retry(self, active: bool) -> bool:
        """Whether an expired group may be handed out now."""
        return self.size == 0 or active
