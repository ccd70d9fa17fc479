"""From a YAML file to a checked `Config`, and back to plain values.

Promises: a `Config` that was returned has passed every check that can be made without torch and
without starting a process; `resolved(config)` written as YAML loads to an equal one. A
configuration that cannot run raises one `ConfigMistakes` that lists all mistakes. The rules between
fields are in `trainer.config.checks`. Called from `trainer.cli`, the run folder and tests.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.parsing import ConfigMistakes, build, parse_override, read_yaml
from trainer.config.schema import Config

__all__ = ["load", "resolved", "resolved_section"]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads, overrides, builds and checks a configuration.

    `overrides` are `section.field=value` texts. Raises `ConfigMistakes` with every mistake found.
    """
    from trainer.config.checks import check

    source = read_yaml(Path(path))
    source.shorthands = {
        f.name: f.metadata["shorthand"]
        for f in dataclasses.fields(Config)
        if "shorthand" in f.metadata
    }
    source.keeping = frozenset(f.name for f in dataclasses.fields(Config) if "keeps" in f.metadata)
    for text in overrides:
        parse_override(source, text)
    config: Config | None = build(Config, source.values, "", source)
    if config is not None:
        check(config, source)
    if config is None or source.mistakes:
        raise ConfigMistakes(source.origin, source.mistakes)
    return config


def resolved(config: Config) -> dict[str, Any]:
    """The complete configuration as plain YAML values, each default filled in."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def resolved_section(section: object) -> Any:
    """One section as plain YAML values."""
    return _plain(section)


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
