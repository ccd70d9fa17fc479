"""The records that the run's config nests: every field explains itself, every limit is kept."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from trainer.devices import prepare_device
from trainer.errors import ConfigError
from trainer.model.config import (
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    UpcycleConfig,
    WarmupConfig,
)

RECORDS = (EngineConfig, LearnerConfig, ModelConfig, UpcycleConfig, WarmupConfig)


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_has_documentation_and_a_default_that_is_allowed(record: Any) -> None:
    for item in dataclasses.fields(record):
        assert item.metadata["doc"].endswith("."), item.name
    given = {"path": "/some/folder"} if record is ModelConfig else {}
    assert record(**given).problems() == []


@pytest.mark.parametrize("record", RECORDS)
def test_every_limit_that_a_field_states_is_checked(record: Any) -> None:
    for item in dataclasses.fields(record):
        for key, beyond in (("ge", -1), ("gt", 0), ("le", 1)):
            if key in item.metadata:
                value = item.metadata[key] + beyond
                found = dict(record(**{item.name: value}).problems())
                assert item.name in found, (item.name, key)
        if {"ge", "gt"} & item.metadata.keys():
            assert item.name in dict(record(**{item.name: float("nan")}).problems())


def test_all_mistakes_are_named_at_once() -> None:
    found = dict(
        LearnerConfig(loss="x", lr=-1.0, betas=(1.0, 0.5), ranks=2).problems()  # type: ignore[arg-type]
    )
    assert set(found) == {"loss", "lr", "betas", "ranks"}
    upcycle = UpcycleConfig(experts=2, top_k=3)
    assert dict(ModelConfig(path="x", upcycle=upcycle).problems()).keys() == {"upcycle.top_k"}


@pytest.mark.parametrize(
    ("config", "mixture"),
    [
        (ModelConfig(config={"architecture": "OlmoeForCausalLM"}), True),
        (ModelConfig(config={"architecture": "LlamaForCausalLM"}), False),
        (ModelConfig(path="x"), None),
        (ModelConfig(path="x", upcycle=UpcycleConfig()), True),
    ],
)
def test_whether_there_are_experts_is_told_as_far_as_the_config_knows(
    config: ModelConfig, mixture: bool | None
) -> None:
    assert config.is_mixture is mixture


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    assert prepare_device("cpu").type == "cpu"
    for name in ("cuda:99", "mps", "toaster"):
        with pytest.raises(ConfigError, match="cpu"):
            prepare_device(name)


def test_the_records_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import trainer.model.config, trainer.model.tokenizer, trainer.advantage"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
