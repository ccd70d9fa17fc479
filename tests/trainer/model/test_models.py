"""Where models come from, and that what leaves loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainer.model.families import COMMON, FAMILIES, family
from trainer.model.config import ModelConfig, UpcycleConfig
from trainer.model.models import ModelError, build_model, context_max, export_hf, find_gguf
from trainer.model.tokenizer import CharTokenizer, HFTokenizer, TokenizerError, load_tokenizer
from trainer.model.upcycle import UpcycleError
from trainer.packing import PackedLayout
from trainer.routing import RouterInfo, UnsupportedRouter, router_modules


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    layout = PackedLayout([len(ids)])
    with torch.no_grad():
        made = model(
            input_ids=torch.tensor([ids]),
            position_ids=layout.position_ids,
            layout=layout,
            use_cache=False,
        )
    return torch.as_tensor(made.logits[0])


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_an_exported_model_loads_with_from_pretrained_and_with_path(
    name: str, tmp_path: Path
) -> None:
    model, tokenizer = family(name)
    export_hf(model, tokenizer, tmp_path / "step-1")
    export_hf(model, tokenizer, tmp_path / "step-1")  # once more, over the first
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "step-1"))
    again, its_tokenizer = build_model(ModelConfig(path=str(tmp_path / "step-1")))
    ids = [5, 9, 30, 2]
    with torch.no_grad():
        outside = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(outside, _logits(model, ids), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(_logits(again, ids), _logits(model, ids))
    assert its_tokenizer.encode("12<") == tokenizer.encode("12<")
    outsiders = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "step-1"))
    text = "7204<\n zZ"
    assert outsiders.encode(text) == tokenizer.encode(text)
    assert outsiders.decode([*outsiders.encode(text), 1], skip_special_tokens=True) == text
    assert (outsiders.pad_token_id, outsiders.eos_token_id) == (0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_the_same_config_gives_the_same_weights_and_leaves_the_random_state_alone() -> None:
    config = ModelConfig(config={**COMMON, **FAMILIES["olmoe"]}, tokenizer="char", init_seed=3)
    state = torch.get_rng_state()
    one, two = build_model(config)[0], build_model(config)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert context_max(one) == 128


def test_a_model_from_scratch_takes_what_its_config_leaves_open_from_the_tokenizer() -> None:
    config = {**COMMON, **FAMILIES["llama"]}
    del config["vocab_size"]
    model, tokenizer = build_model(ModelConfig(config=config, tokenizer="char", alphabet="01<"))
    assert model.config.vocab_size == tokenizer.vocab_size == 5
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


def test_a_folder_that_another_process_wrote_meanwhile_is_kept_as_it_may_be_read(
    tmp_path: Path,
) -> None:
    """Two processes convert the same GGUF file at once; the slower one pulled the folder away from
    the faster one, which was loading it.
    """
    model, tokenizer = family("llama")
    export_hf(model, tokenizer, tmp_path / "cached")
    read = (tmp_path / "cached" / "model.safetensors").stat().st_ino
    export_hf(model, tokenizer, tmp_path / "cached", replace=False)
    assert (tmp_path / "cached" / "model.safetensors").stat().st_ino == read
    assert [path.name for path in tmp_path.iterdir()] == ["cached"]


@pytest.mark.parametrize(
    ("dense", "top_k"),
    [("llama", 1), ("llama", 2), ("qwen3", 2)],
)
def test_an_upcycled_model_without_noise_is_the_dense_one(
    dense: str, top_k: int, tmp_path: Path
) -> None:
    model, tokenizer = family(dense)
    export_hf(model, tokenizer, tmp_path / "dense")
    config = ModelConfig(
        path=str(tmp_path / "dense"), upcycle=UpcycleConfig(experts=4, top_k=top_k, noise=0.0)
    )
    mixture, _ = build_model(config)
    info = RouterInfo(mixture)
    assert (info.layers, info.experts, info.top_k) == (3, 4, top_k)
    ids = [4, 8, 15, 16, 23, 42]
    torch.testing.assert_close(_logits(mixture, ids), _logits(model, ids), rtol=1e-4, atol=1e-4)
    noisy, _ = build_model(ModelConfig(path=str(tmp_path / "dense"), upcycle=UpcycleConfig()))
    assert not torch.allclose(_logits(noisy, ids), _logits(model, ids), atol=1e-4)
    experts = noisy.model.layers[0].mlp.experts.down_proj
    assert not torch.equal(experts[0], experts[1])


def test_a_mixture_cannot_be_upcycled(tmp_path: Path) -> None:
    model, tokenizer = family("olmoe")
    export_hf(model, tokenizer, tmp_path / "m")
    with pytest.raises(UpcycleError, match="known are Llama"):
        build_model(ModelConfig(path=str(tmp_path / "m"), upcycle=UpcycleConfig()))


def test_a_router_that_is_not_known_is_refused() -> None:
    class StrangeTopKRouter(torch.nn.Module):
        top_k, num_experts = 2, 4

    with pytest.raises(UnsupportedRouter, match="StrangeTopKRouter is not known"):
        router_modules(torch.nn.Sequential(StrangeTopKRouter()))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ModelConfig(), "exactly one of"),
        (ModelConfig(path="/nowhere"), "no config.json"),
        (ModelConfig(gguf="no_such_package"), "neither a .gguf file nor"),
        (ModelConfig(gguf="/nowhere/a.gguf"), "there is no file"),
        (ModelConfig(config={"architecture": "GPT9ForCausalLM"}, tokenizer="char"), "GPT9"),
        (ModelConfig(config={"hidden_size": 8}, tokenizer="char"), "architecture"),
        (
            ModelConfig(config={**COMMON, **FAMILIES["llama"], "hiden": 1}, tokenizer="char"),
            "no field hiden",
        ),
        (
            ModelConfig(config={**COMMON, **FAMILIES["llama"], "vocab_size": 20}, tokenizer="char"),
            "vocab_size is 20",
        ),
        (ModelConfig(config={**COMMON, **FAMILIES["llama"]}), "say `char` or a folder"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(config: ModelConfig, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        build_model(config)


def test_a_package_with_one_gguf_file_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "weights.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_gguf("some_model") == package / "weights.gguf"
    (package / "more.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files"):
        find_gguf("some_model")


def test_the_character_tokenizer_goes_there_and_back(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("ab<é")
    ids = tokenizer.encode("aé<b")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == "aé<b"
    assert tokenizer.decode([99]) == "\ufffd"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a<"}]) == ids[:1] + ids[2:3]
    with pytest.raises(TokenizerError, match="'x' is not in the alphabet"):
        tokenizer.encode("x")
    with pytest.raises(TokenizerError, match="each character once"):
        CharTokenizer("aa")
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode("aé<b") == ids
    assert again.vocab_size == 6
    (tmp_path / "char_tokenizer.json").write_text(json.dumps({"format": "later"}))
    with pytest.raises(TokenizerError, match="later"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no tokenizer could be read"):
        load_tokenizer(tmp_path / "empty")


def test_a_hugging_face_tokenizer_comes_with_its_chat_template(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1, "user": 2, ":": 3, "hello": 4, "world": 5, "assistant": 6}
    inner = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    made.chat_template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    HFTokenizer(made).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello world"}]) == [
        2,
        3,
        4,
        5,
        6,
        3,
    ]
    assert tokenizer.encode("hello") == [4]
    assert tokenizer.decode([4, 5, 1]) == "hello world"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1
