"""What a Hugging Face model class takes as its configuration, without importing it.

Importing a config class of transformers imports torch: two seconds and hundreds of megabytes in a
driver that has no use for it. Its fields, their types and defaults are plain annotations in the
source, and the name of the class leads to the file; so they are read there, and nothing is run.

Owns that reading. Promises: no import of transformers or torch; None where a file does not look as
expected, so that whoever asks leaves the verdict to the class itself. Called by
`trainer.config.model_checks`, in the driver.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["HFFields", "architectures", "fields_of", "kinds_text"]

_CAUSAL = re.compile(r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\s*\[(.*?)\n    \]", re.S)
_PAIR = re.compile(r'\("([\w-]+)", "(\w+)"\)')
_KINDS: Mapping[str, type] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "None": type(None),
    "list": list,
    "dict": dict,
}
_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    list: "a list",
    dict: "a mapping",
}


@dataclass(frozen=True)
class HFFields:
    """Fields of one model class. `kinds[name]` empty: any value; `defaults` has those that are
    literals; `aliases` are other names of a field.
    """

    kinds: Mapping[str, frozenset[type]]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]

    def takes(self, name: str, value: object) -> bool:
        """Whether the type of `value` is one that the field is declared with."""
        kinds = self.kinds.get(name, frozenset())
        if not kinds:
            return True
        if isinstance(value, bool):
            return bool in kinds
        return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))

    def value(self, given: Mapping[str, Any], name: str) -> Any:
        """What the model will see: given under this or another name of it, or the default."""
        same = {name, self.aliases.get(name, name)}
        same |= {alias for alias, field in self.aliases.items() if field in same}
        for spelling in (name, *sorted(same - {name})):
            if spelling in given:
                return given[spelling]
        return next((self.defaults[s] for s in sorted(same) if s in self.defaults), None)


def kinds_text(kinds: frozenset[type]) -> str:
    """`a whole number or null`."""
    return " or ".join(words for kind, words in _WORDS.items() if kind in kinds)


@functools.cache
def architectures() -> Mapping[str, str]:
    """Class name of each causal language model → its `model_type`, as `llama`, `xlm-roberta`."""
    source = _read("models", "auto", "modeling_auto")
    found = _CAUSAL.search(source or "")
    return {} if found is None else {name: kind for kind, name in _PAIR.findall(found.group(1))}


@functools.cache
def fields_of(architecture: str) -> HFFields | None:
    """The fields of a causal language model, or None when its source does not tell them."""
    kind = architectures().get(architecture)
    place = (kind or "").replace("-", "_")
    own = None if kind is None else _read("models", place, f"configuration_{place}")
    base = _read("configuration_utils")
    if own is None or base is None:
        return None
    classes, bases = _classes(own), _classes(base)
    chosen = next((c for c in classes.values() if _literal(c, "model_type") == kind), None)
    shared = bases.get("PreTrainedConfig")
    if chosen is None or shared is None:
        return None
    parents = [classes[b.id] for b in chosen.bases if isinstance(b, ast.Name) and b.id in classes]
    kinds: dict[str, frozenset[type]] = {}
    defaults: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for source in (shared, *parents, chosen):
        aliases.update(_literal(source, "attribute_map") or {})
        for node in source.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _note(node.target.id, node, kinds, defaults)
    return HFFields(kinds, defaults, aliases) if "hidden_size" in kinds else None


def _note(
    name: str, node: ast.AnnAssign, kinds: dict[str, frozenset[type]], defaults: dict[str, Any]
) -> None:
    text = ast.unparse(node.annotation)
    if text.startswith("ClassVar"):
        return
    parts = [part.partition("[")[0].strip() for part in text.split("|")]
    known = all(part in _KINDS for part in parts)
    kinds[name] = frozenset(_KINDS[part] for part in parts) if known else frozenset()
    try:
        defaults[name] = None if node.value is None else ast.literal_eval(node.value)
    except ValueError:
        defaults.pop(name, None)  # computed, as `4096 * 32`: nothing is known of it


def _classes(source: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _literal(source: ast.ClassDef, name: str) -> Any:
    """The value of a class attribute that is written as a literal; None without one."""
    for node in source.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                return None
    return None


def _read(*module: str) -> str | None:
    """The source of a module of transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent.joinpath(*module).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.is_file() else None
