"""Turns a YAML mapping into frozen dataclasses and reports every mistake at once.

Owns: reading the file with line numbers, `--set a.b=c` overrides, type checks driven by the
dataclasses' annotations, their `metadata` (`doc`, `ge`, `gt`, `le`, `unit`) and their
`problems()`. It knows no field of ours by name: the fields are in `trainer.config` and
`trainer.model.config`, the rules between fields in `trainer.config.checks`.

Promises: nothing is coerced silently except 3 → 3.0, 1e3 → 1000 and, where the unit says bytes,
"4GiB" → int. Called from `trainer.config.load`, in the driver, before any process of a run starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, TrainerError

__all__ = [
    "ConfigMistakes",
    "Mistake",
    "Source",
    "build",
    "parse_bytes",
    "parse_override",
    "read_yaml",
]

_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*$", re.IGNORECASE)
_BYTES_OF = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES_OF |= {f"{p}i": 1 << (10 * n) for n, p in enumerate("kmgt", start=1)}
_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$")


class ConfigMistakes(ConfigError):
    """The configuration cannot be run. `mistakes` holds all of them, in the order of the file."""

    def __init__(self, origin: str, mistakes: Sequence[Mistake]) -> None:
        self.origin = origin
        self.mistakes = tuple(sorted(mistakes, key=lambda m: m.line or sys.maxsize))
        count = f"{len(mistakes)} mistake" + ("s" if len(mistakes) > 1 else "")
        super().__init__("\n".join([f"{origin}: {count}", *(f"  {m}" for m in mistakes)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.origin, self.mistakes))


@dataclass(frozen=True)
class Mistake:
    """One thing that the user has to change. `path` is dotted, as in `learner.lr` or
    `tasks[0].judge`.
    """

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.path} (line {self.line})" if self.line else self.path
        return f"{where}: {self.message}"


@dataclass
class Source:
    """Raw values with the line of each path, for messages."""

    origin: str
    values: dict[str, Any]
    lines: dict[str, int] = dataclasses.field(default_factory=dict)
    mistakes: list[Mistake] = dataclasses.field(default_factory=list)
    shorthands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Section → the field that a plain string in its place stands for."""
    keeping: frozenset[str] = frozenset()
    """Sections of which an override by such a string keeps the other fields."""

    def mistake(self, path: str, message: str) -> None:
        self.mistakes.append(Mistake(path, message, self._line(path)))

    def add(self, path: str, message: str) -> None:
        """Like `mistake`, unless this field or something inside it is known to be wrong already."""
        if not self.is_wrong(path):
            self.mistake(path, message)

    def is_wrong(self, path: str) -> bool:
        """Whether there is a mistake at `path` or inside it."""
        inside = (f"{path}.", f"{path}[")
        return any(m.path == path or m.path.startswith(inside) for m in self.mistakes)

    def _line(self, path: str) -> int | None:
        while path:
            if path in self.lines:
                return self.lines[path]
            cut = max(path.rfind("."), path.rfind("["))
            path = path[:cut] if cut > 0 else ""
        return None


# -------------------------------------------------------------------------------------------
# reading


def read_yaml(path: Path) -> Source:
    """Reads one YAML mapping. Raises ConfigMistakes when the file is absent, unreadable or no
    mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {error} (from {Path.cwd()})"
        raise ConfigMistakes(str(path), [Mistake("(file)", why)]) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, origin: str) -> Source:
    """Like `read_yaml`, from text."""
    yaml = _yaml()
    source = Source(origin, {})
    try:
        values = _construct(text, "", source, yaml)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        raise ConfigMistakes(origin, [Mistake("(file)", f"is not YAML: {error}", line)]) from error
    if not isinstance(values, dict | None):
        raise ConfigMistakes(origin, [Mistake("(file)", "must be a mapping of sections", 1)])
    source.values = values or {}
    return source


def _construct(text: str, path: str, source: Source, yaml: Any) -> Any:
    """The value of `text`, which stands at `path`; `source` gets the lines, and what is wrong with
    its keys. Raises YAMLError and RecursionError.
    """
    loader = _loader_class(yaml)(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _note_lines(node, path, source, yaml, {})
    return loader.construct_document(node)


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise TrainerError(
            "reading a config needs pyyaml, which is part of the `train` extra: "
            "pip install 'shmrl[train]'"
        ) from error
    return yaml


def _loader_class(yaml: Any) -> Any:
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML 1.1 takes `2e-4` for a string; people who write learning rates do not. A scalar
        that is none of its kind (`2024-13-45`) is told with its place.
        """

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, AttributeError) as error:  # an AttributeError: `!!timestamp x`
                kind = node.tag.rpartition(":")[2]
                problem = f"{_show(node.value)} cannot be read as {kind}: {error}"
                raise yaml.constructor.ConstructorError(
                    None, None, problem, node.start_mark
                ) from error

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return Loader


def _note_lines(node: Any, path: str, source: Source, yaml: Any, met: dict[int, bool]) -> None:
    """Notes the lines of what is in `node`. `met`: the nodes before, and whether this is in them;
    what an alias (`*a`) repeats has the line of the alias.
    """
    if isinstance(node, yaml.ScalarNode):
        return
    if id(node) in met:
        if met[id(node)]:
            raise yaml.composer.ComposerError(
                None, None, "found a value that contains itself", node.start_mark
            )
        return
    met[id(node)] = True
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            inner = f"{path}.{name}" if path else name
            source.lines[inner] = key.start_mark.line + 1
            if name in seen:
                source.mistake(inner, "is given twice")
            seen.add(name)
            _note_lines(value, inner, source, yaml, met)
    else:
        for index, value in enumerate(node.value):
            inner = f"{path}[{index}]"
            source.lines[inner] = value.start_mark.line + 1
            _note_lines(value, inner, source, yaml, met)
    met[id(node)] = False


def parse_override(source: Source, text: str) -> None:
    """Applies one `--set a.b=c`; the value is YAML. `tasks[0].weight=2` reaches into lists."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        source.mistake(f"--set {text}", "must look like section.field=value")
        return
    yaml = _yaml()
    there = Source("--set", {})  # its lines are not those of the file
    try:
        parsed = _construct(value, path, there, yaml)
    except (yaml.YAMLError, RecursionError) as error:
        source.mistake(path, f"--set value {_show(value)} is not YAML: {error}")
        return
    for wrong in there.mistakes:
        source.mistake(wrong.path, f"--set: {wrong.message}")
    keys = re.findall(r"[^.\[\]]+|\[\d+\]", path)
    at: Any = source.values
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if key.startswith("["):
            index = int(key[1:-1])
            if not isinstance(at, list) or index >= len(at):
                source.mistake(path, f"--set: there is no item {key} to set")
                return
            if last:
                at[index] = parsed
            else:
                at = at[index]
        elif not isinstance(at, dict):
            up_to = ".".join(keys[:depth]).replace(".[", "[")
            what = (
                "a list: name the item," if isinstance(at, list) else "a plain value, not a section"
            )
            example = f" as in {up_to}[0]" if isinstance(at, list) else ""
            source.mistake(path, f"--set: {up_to} is {what}{example}")
            return
        elif (
            last
            and key in source.keeping
            and isinstance(at.get(key), dict)
            and isinstance(parsed, str)
        ):
            # `schedule=sync` on a section that is written out changes its name and no more.
            at[key] = {**at[key], source.shorthands[key]: parsed}
        elif last:
            at[key] = parsed
        else:
            if at.get(key) is None:
                at[key] = {}
            elif depth == 0 and isinstance(at[key], str) and key in source.shorthands:
                at[key] = {source.shorthands[key]: at[key]}
            at = at[key]


def parse_bytes(text: str | int) -> int:
    """ "4GiB", "512 MiB", "1e9" are not all sizes: units are B, KB..TB (powers of ten),
    KiB..TiB.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _BYTES.match(str(text))
    if match is None:
        raise ValueError(f"{_show(text)} is no size; write 512MiB, 4GiB or a number of bytes")
    unit = match.group(2).lower()
    unit = unit[:-1] if unit.endswith("b") and unit != "b" else unit
    if unit not in _BYTES_OF:
        raise ValueError(f"{text!r} has no unit that is known; use KiB, MiB, GiB, TiB")
    size = float(match.group(1)) * _BYTES_OF[unit]
    if math.isinf(size):
        raise ValueError(f"{_show(text)} is larger than any size")
    return int(size)


# ------------------------------------------------------------------------------------------
# building


def build(
    cls: type[Any], value: object, path: str, source: Source, shorthand: str | None = None
) -> Any:
    """Builds dataclass `cls` from a mapping and notes each mistake in `source`.

    A field with a mistake keeps its default, so that the rules between the other fields can still
    be checked and everything is reported at once; None when a required field is missing or wrong.
    `shorthand` (a field's metadata) names the field that a plain string stands for, so that
    `model: path/to/folder` means `model: {path: path/to/folder}`.
    """
    if isinstance(value, str) and shorthand:
        value = {shorthand: value}
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        source.mistake(path or "(file)", f"must be a section of fields, got {_show(value)}")
        return None
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    unknown = False
    given: dict[str, Any] = {}
    for key, raw in value.items():
        inner = f"{path}.{key}" if path else str(key)
        if key not in fields:
            source.mistake(inner, _unknown(str(key), fields))
            unknown = True
            continue
        meta: Mapping[str, Any] = fields[key].metadata
        if key.endswith("_bytes"):
            meta = {**meta, "unit": "bytes"}
        before = len(source.mistakes)
        made = _value(hints[key], raw, inner, meta, source)
        if len(source.mistakes) == before:
            given[key] = made
        elif dataclasses.is_dataclass(made):
            given[key] = made  # what was wrong inside it was left out
        elif isinstance(made, tuple) and made and dataclasses.is_dataclass(made[0]):
            # Sections up to one that is none, so that each keeps its number in messages.
            given[key] = tuple(itertools.takewhile(dataclasses.is_dataclass, made))
    missing = [n for n, f in fields.items() if n not in given and _is_required(f)]
    for name in missing:
        if name not in value:
            source.mistake(f"{path}.{name}" if path else name, "is required and missing")
    if missing:
        return None
    try:
        section = cls(**given)
    except (ValueError, TypeError, TrainerError) as error:
        source.mistake(path or "(file)", str(error))
        return None
    if isinstance(section, HasProblems) and not unknown:
        for name, message in section.problems():
            source.add(f"{path}.{name}" if path else name, message)
    return section


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@typing.runtime_checkable
class HasProblems(typing.Protocol):
    """A section that knows rules between its own fields."""

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong and what is allowed) of each."""
        ...


def _unknown(key: str, fields: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
    hint = f"did you mean `{near[0]}`?" if near else "known here: " + ", ".join(sorted(fields))
    return f"is unknown; {hint}"


def _value(hint: Any, raw: object, path: str, meta: Mapping[str, Any], source: Source) -> Any:
    """One value against one annotation; notes a mistake and returns None when they disagree."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return raw
    if origin in (typing.Union, types.UnionType):
        if raw is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        return _first_that_fits(options, raw, path, meta, source)
    if origin is typing.Literal:
        if raw not in args or isinstance(raw, bool) != any(isinstance(a, bool) for a in args):
            source.mistake(path, f"must be one of {', '.join(map(str, args))}; got {_show(raw)}")
        return raw
    if origin in (tuple, list, Sequence):
        return _sequence(origin, args, raw, path, meta, source)
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        if not isinstance(raw, Mapping):
            source.mistake(path, f"must be a mapping, got {_show(raw)}")
            return None
        inner = args[1] if len(args) == 2 else object
        return {str(k): _value(inner, v, f"{path}.{k}", {}, source) for k, v in raw.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum(hint, raw, path, source)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), raw, path, source, meta.get("shorthand"))
    return _scalar(hint, raw, path, meta, source)


def _first_that_fits(
    options: list[Any], raw: object, path: str, meta: Mapping[str, Any], source: Source
) -> Any:
    attempts: list[list[Mistake]] = []
    for option in options:
        trial = Source(source.origin, source.values, source.lines)
        value = _value(option, raw, path, meta, trial)
        if not trial.mistakes:
            return value
        attempts.append(trial.mistakes)
    source.mistakes.extend(max(attempts, key=lambda found: max(len(m.path) for m in found)))
    return None


def _sequence(
    origin: Any,
    args: tuple[Any, ...],
    raw: object,
    path: str,
    meta: Mapping[str, Any],
    source: Source,
) -> Any:
    if not isinstance(raw, list | tuple):
        source.mistake(path, f"must be a list, got {_show(raw)}")
        return None
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(raw):
            source.mistake(path, f"must have {len(args)} items, got {len(raw)}")
            return None
        kinds = list(args)
    else:
        kinds = [args[0] if args else object] * len(raw)
    items = [
        _value(kind, item, f"{path}[{i}]", meta, source)
        for i, (kind, item) in enumerate(zip(kinds, raw, strict=True))
    ]
    return items if origin is list else tuple(items)


def _enum(hint: type[enum.Enum], raw: object, path: str, source: Source) -> Any:
    by_name = {str(m.value).lower(): m for m in hint} | {m.name.lower(): m for m in hint}
    found = by_name.get(str(raw).lower())
    if found is None:
        allowed = ", ".join(dict.fromkeys(str(m.value) for m in hint))
        source.mistake(path, f"must be one of {allowed}; got {_show(raw)}")
    return found


def _scalar(hint: Any, raw: object, path: str, meta: Mapping[str, Any], source: Source) -> Any:
    if meta.get("unit") == "bytes" and isinstance(raw, str):
        try:
            raw = parse_bytes(raw)
        except ValueError as error:
            source.mistake(path, str(error))
            return None
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        try:
            raw = float(raw)
        except OverflowError:
            raw = math.inf
    if hint is int and isinstance(raw, float) and raw.is_integer():
        raw = int(raw)  # 1e3
    fits = isinstance(raw, hint) and not (isinstance(raw, bool) and hint is not bool)
    if not fits:
        source.mistake(path, f"must be {_TYPE_NAMES.get(hint, hint.__name__)}, got {_show(raw)}")
        return None
    if isinstance(raw, float) and not math.isfinite(raw):
        source.mistake(path, f"must be a finite number, got {_show(raw)}")
        return None
    for word, ok in _BOUNDS.items():
        bound = meta.get(word)
        if bound is not None and not ok(raw, bound):
            source.mistake(path, f"must be {_BOUND_WORDS[word]} {bound}, got {_show(raw)}")
    return raw


_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
}
_BOUNDS: dict[str, Any] = {
    "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
}
_BOUND_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no int of more than 4300 digits
        return f"a number of too many digits ({type(value).__name__})"
    return f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else text
