"""Short forms of reasoning-gym tasks that a model of a million parameters can learn in a minute.

Owns the text form only: numbers and answers come from reasoning-gym's own generators. No torch.
Used by the supervised warm-up and by the quickstart's environment, which must agree to the letter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["HELD_OUT_SEED", "WARMUP_SEED", "CompactExample", "Order", "number_sorting"]

HELD_OUT_SEED = 9_000_000
"""Items from this generator seed on are for evaluation only."""
WARMUP_SEED = 5_000_000
"""Items from this generator seed on are for the supervised warm-up."""
Order = Literal["both", "ascending"]
_DATASET_SIZE = 1 << 21
"""Items that one seed can name: the generator draws item `i` from `seed + i`."""


@dataclass(frozen=True)
class CompactExample:
    """One task: `prompt` such as `7204<` (sort upwards) and `answer` such as `0247`."""

    prompt: str
    answer: str


@functools.lru_cache(maxsize=16)
def _sorting_dataset(seed: int, min_numbers: int, max_numbers: int) -> Any:
    import reasoning_gym  # the quickstart's optional dependency, slow to import

    return reasoning_gym.create_dataset(
        "number_sorting",
        seed=seed,
        size=_DATASET_SIZE,
        min_numbers=min_numbers,
        max_numbers=max_numbers,
        min_decimals=0,
        max_decimals=0,
        min_value=0.0,
        max_value=9.0,
    )


def number_sorting(
    index: int,
    *,
    seed: int = 0,
    min_numbers: int = 4,
    max_numbers: int = 6,
    order: Order = "both",
) -> CompactExample:
    """Item `index` (0 … 2,097,151) of reasoning-gym's number_sorting with single digits.

    `<` after the digits asks for ascending order, `>` for descending. `order="ascending"` asks for
    the digits of every item in ascending order: half the task, and learnt about twice as fast.
    """
    item = _sorting_dataset(seed, min_numbers, max_numbers)[index]["metadata"]
    digits = "".join(str(int(float(number))) for number in item["original_numbers"])
    answer = "".join(str(int(float(number))) for number in item["sorted_numbers"])
    if order == "both" and item["direction"] == "descending":
        return CompactExample(digits + ">", answer)
    return CompactExample(digits + "<", "".join(sorted(answer)))
