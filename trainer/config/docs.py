"""Writes docs/config.md and docs/metrics.md from the types, so that they cannot go stale.

`python -m trainer.config.docs` rewrites the files; `--check` exits with 1 when one differs, which
a test does. A field's text is its `doc` metadata, or the docstring under it in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.config.loading import resolved
from trainer.config.schema import Config
from trainer.metrics import CATALOG

__all__ = ["config_page", "main", "metrics_page"]

_HEADER = """# {title}

Made from the types by `python -m trainer.config.docs`; a test compares.

"""


_CONFIG_INTRO = """\
A configuration is one YAML file. `shmrl train FILE --set section.field=value` overrides single
fields (the value is YAML; `tasks[0].weight=2` reaches into lists). All mistakes are reported at
once, before any process starts. Sizes may be written as `512MiB`. `model`, `schedule` and a task's
`judge` may be a plain string, which stands for `path`, `name` and `kind`. The complete, resolved
configuration of a run is its `config.yaml`.
"""

_METRICS_INTRO = """\
`metrics.jsonl` holds one JSON object a train step; TensorBoard has the same names. A name that
ends in `*` stands for a family. Values that are not finite are left out and counted in
`nonfinite`.
"""


def config_page() -> str:
    """Every field of a configuration: name, type, default, meaning."""
    body = "\n".join(_section(cls, path) for path, cls in _sections(Config, ""))
    return _HEADER.format(title="Configuration") + _CONFIG_INTRO + "\n" + body


def metrics_page() -> str:
    """Every metric: name, unit, meaning."""
    rows = ["| name | unit | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | {m.unit or '–'} | {m.meaning} |" for name, m in CATALOG.items()]
    return _HEADER.format(title="Metrics") + _METRICS_INTRO + "\n" + "\n".join(rows) + "\n"


def _sections(cls: type[Any], path: str) -> Iterator[tuple[str, type[Any]]]:
    yield path, cls
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        for inner, suffix in _dataclasses_in(hints[f.name]):
            yield from _sections(inner, (f"{path}.{f.name}" if path else f.name) + suffix)


def _dataclasses_in(hint: Any) -> Iterator[tuple[type[Any], str]]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint, ""
    elif typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        suffix = "[]" if typing.get_origin(hint) is tuple else ""
        for arg in typing.get_args(hint):
            yield from ((inner, suffix) for inner, _ in _dataclasses_in(arg))


def _section(cls: type[Any], path: str) -> str:
    title = f"## `{path}`" if path else "## The file"
    lines = [
        title,
        "",
        _summary(cls),
        "",
        "| field | type | default | meaning |",
        "|---|---|---|---|",
    ]
    hints, texts = typing.get_type_hints(cls), _docstrings(cls)
    for f in dataclasses.fields(cls):
        meaning = f.metadata.get("doc") or texts.get(f.name, "")
        bounds = ", ".join(f"{_BOUNDS[k]} {f.metadata[k]}" for k in _BOUNDS if k in f.metadata)
        cells = (f"`{f.name}`", _type_name(hints[f.name]), _default(f), _joined(meaning, bounds))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _joined(meaning: str, bounds: str) -> str:
    text = " ".join(meaning.split())
    return f"{text} ({bounds})" if bounds else text


def _summary(cls: type[Any]) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _docstrings(cls: type[Any]) -> dict[str, str]:
    """Text under a field, as in `x: int = 1` followed by a string."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[node.target.id] = str(following.value.value)
    return found


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " · ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if a is type(None) else _type_name(a) for a in args)
    if origin is tuple:
        return "list of " + _type_name(args[0]) if args else "list"
    if dataclasses.is_dataclass(hint):
        return "section"
    return {int: "whole number", float: "number", str: "text", bool: "true/false"}.get(
        hint, "mapping"
    )


def _default(f: dataclasses.Field[Any]) -> str:
    if f.metadata.get("required"):
        return "required"
    if f.default is not dataclasses.MISSING:
        value = f.default
    elif f.default_factory is not dataclasses.MISSING:
        value = f.default_factory()
    else:
        return "required"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    text = json.dumps(value)  # which is YAML, too
    return f"`{text}`" if len(text) < 40 else "see source"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pages, or compares them with `--check`."""
    check = "--check" in (sys.argv[1:] if arguments is None else arguments)
    docs = Path(__file__).resolve().parents[2] / "docs"
    resolved(Config())  # every default must be plain YAML
    stale = 0
    for name, text in (("config.md", config_page()), ("metrics.md", metrics_page())):
        page = docs / name
        if check:
            stale += not page.is_file() or page.read_text(encoding="utf-8") != text
        else:
            page.write_text(text, encoding="utf-8")
    if stale:
        print("docs are older than the types: run python -m trainer.config.docs", file=sys.stderr)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
