"""The warm-up teaches, looks at held-out examples, and is done once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.model.families import COMMON, FAMILIES
from trainer.errors import ConfigError
from trainer.model.config import ModelConfig, WarmupConfig
from trainer.model.models import build_model
from trainer.model.warmup import accuracy, warm_up

CONFIG = WarmupConfig(
    steps_max=120, batch=64, eval_every=10, eval_prompts=64, target=0.9, answer_tokens_max=4
)


def _pairs(index: int) -> tuple[str, str]:
    """Repeat the digit: learnt in a few steps."""
    digit = str(index % 10)
    return digit + "<", digit * 2


def _model(seed: int = 0) -> tuple[Any, Any]:
    return build_model(
        ModelConfig(config={**COMMON, **FAMILIES["qwen3_moe"]}, tokenizer="char", init_seed=seed)
    )


def test_the_model_learns_and_the_second_time_it_is_read_from_the_cache(tmp_path: Path) -> None:
    model, tokenizer = _model()
    assert accuracy(model, tokenizer, CONFIG, _pairs) < 0.2
    steps: list[int] = []
    result = warm_up(
        model, tokenizer, CONFIG, _pairs, tmp_path, progress=lambda step, *_: steps.append(step)
    )
    assert result["cached"] == 0.0
    assert result["accuracy"] >= 0.9
    assert result["accuracy"] == accuracy(model, tokenizer, CONFIG, _pairs)
    assert steps == list(range(1, int(result["steps"]) + 1))

    def nobody_asks(index: int) -> tuple[str, str]:
        raise AssertionError("a cached warm-up needs no examples")

    again, _ = _model()
    assert warm_up(again, tokenizer, CONFIG, nobody_asks, tmp_path) == {**result, "cached": 1.0}
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert len(list(tmp_path.iterdir())) == 1


def test_other_weights_other_settings_and_other_pairs_are_other_warm_ups(tmp_path: Path) -> None:
    short = WarmupConfig(steps_max=1, batch=4, eval_prompts=1, eval_every=1, target=1.0)
    for seed, config, key in (
        (0, short, "a"),
        (1, short, "a"),
        (0, WarmupConfig(steps_max=1, batch=5, eval_prompts=1, eval_every=1, target=1.0), "a"),
        (0, short, "b"),
        (0, short, "a"),
    ):
        model, tokenizer = _model(seed)
        last = warm_up(model, tokenizer, config, _pairs, tmp_path, key=key)
    assert len(list(tmp_path.iterdir())) == 4
    assert last["cached"] == 1.0


def test_no_steps_change_nothing(tmp_path: Path) -> None:
    model, tokenizer = _model()
    before = [value.detach().clone() for value in model.parameters()]
    assert warm_up(model, tokenizer, WarmupConfig(steps_max=0), _pairs, tmp_path)["steps"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not list(tmp_path.iterdir())


def test_an_empty_answer_is_an_error() -> None:
    model, tokenizer = _model()
    with pytest.raises(ConfigError, match="a prompt and an answer"):
        warm_up(model, tokenizer, CONFIG, lambda index: ("1<", ""))
