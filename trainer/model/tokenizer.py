"""Text to tokens and back: the protocol, a character tokenizer, and Hugging Face's own.

Owns nothing but the mapping; both classes are immutable and may be shared by threads. Imports
transformers only when a Hugging Face tokenizer is read or written, and never torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from trainer.engine.protocol import Tokenizer
from trainer.errors import ConfigError
from trainer.model.config import CHAR_ALPHABET

__all__ = ["CharTokenizer", "HFTokenizer", "ModelTokenizer", "TokenizerError", "load_tokenizer"]

_CHAR_FILE = "char_tokenizer.json"
_CHAR_FORMAT = "shmrl-char-1"


class TokenizerError(ConfigError):
    """Text that the tokenizer cannot say, or a tokenizer folder that cannot be read."""


class ModelTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows its size and can be written beside a model."""

    @property
    def vocab_size(self) -> int: ...

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` reads."""
        ...


class CharTokenizer:
    """One token a character; 0 pads, 1 ends. A conversation is its contents, one after another."""

    pad_token_id = 0
    eos_token_id = 1

    def __init__(self, alphabet: str = CHAR_ALPHABET) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise TokenizerError("the alphabet must hold each character once, and at least one")
        self.alphabet = alphabet
        self._id_of = {char: index + 2 for index, char in enumerate(alphabet)}
        self._text_of = ["", "", *alphabet]

    @property
    def vocab_size(self) -> int:
        return len(self._text_of)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._id_of[char] for char in text]
        except KeyError as error:
            raise TokenizerError(
                f"character {error.args[0]!r} is not in the alphabet {self.alphabet!r}; "
                "add it to model.alphabet"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        table, size = self._text_of, len(self._text_of)
        # A model may have more outputs than the alphabet has characters, and may sample them.
        return "".join([table[index] if index < size else "\ufffd" for index in token_ids])

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        if tools:
            raise TokenizerError("the character tokenizer has no way to describe tools")
        return self.encode("".join(str(message["content"]) for message in messages))

    def save(self, folder: Path) -> None:
        """Writes what `load_tokenizer` reads, and the same tokenizer for transformers beside it, so
        that a model exported with it is whole for others.
        """
        record = {"format": _CHAR_FORMAT, "alphabet": self.alphabet}
        (folder / _CHAR_FILE).write_text(json.dumps(record), encoding="utf-8")
        self._as_transformers().save_pretrained(str(folder))

    def _as_transformers(self) -> Any:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast
        from transformers import PreTrainedTokenizerFast

        pad, eos = (AddedToken(name, special=True) for name in ("<pad>", "<eos>"))
        ids = {"<pad>": self.pad_token_id, "<eos>": self.eos_token_id, **self._id_of}
        fast = Fast(models.WordLevel(ids, unk_token="<pad>"))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=fast, pad_token=pad, eos_token=eos
        )


class HFTokenizer:
    """A tokenizer of transformers, with its chat template."""

    def __init__(self, inner: Any) -> None:
        if inner.eos_token_id is None:
            raise TokenizerError(
                "the tokenizer names no end-of-sequence token; generation needs one"
            )
        self.inner = inner

    @property
    def eos_token_id(self) -> int:
        return int(self.inner.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        pad = self.inner.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        return cast(list[int], self.inner.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.inner.decode([int(i) for i in token_ids], skip_special_tokens=True))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        if self.inner.chat_template is None:
            raise TokenizerError("the tokenizer has no chat template; give the prompt as text")
        ids = self.inner.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else list(tools),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return [int(i) for i in ids]

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(str(folder))


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer in `folder`: what `save` wrote, or any Hugging Face tokenizer.

    Raises TokenizerError when there is none.
    """
    char_file = folder / _CHAR_FILE
    if char_file.exists():
        record = json.loads(char_file.read_text(encoding="utf-8"))
        if record.get("format") != _CHAR_FORMAT:
            raise TokenizerError(
                f"{char_file} has format {record.get('format')!r}, not {_CHAR_FORMAT}"
            )
        return CharTokenizer(record["alphabet"])
    from transformers import AutoTokenizer  # slow to import, not needed for characters

    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"no tokenizer could be read from {folder}: {error}") from error
