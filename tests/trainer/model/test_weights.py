"""Weights travel as one object, exactly, and never half into a model that they do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shmstore import ObjectFreed, SessionReleased, Store
from tests.shmstore.slow_device import settle, slow_device
from tests.trainer.model.families import family, request
from trainer.engine.protocol import WeightsVersion
from trainer.engine.router import EngineRouter
from trainer.engine.torch_engine import TorchEngine
from trainer.errors import EngineError
from trainer.model.config import EngineConfig, ModelConfig
from trainer.model.models import build_model, export_hf
from trainer.weights import ParametersChanged, WeightsMismatch, WeightsReader, WeightsWriter


def _changed(model: Any) -> Any:
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value))
    return model


def _published(
    model: Any, store: Store, step: int = 3, dtype: torch.dtype | None = None
) -> WeightsVersion:
    store.sessions.open(f"weights-{step}", owner="weights")
    return WeightsWriter(model, store, dtype).publish(step, session=f"weights-{step}")


def test_every_parameter_arrives_bit_for_bit_and_tied_ones_travel_once(store: Store) -> None:
    source, target = _changed(family("qwen3_moe")[0]), family("qwen3_moe")[0]
    version = _published(source, store)
    WeightsReader(target, store).load(version)
    for one, two in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, two)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    size = sum(value.nbytes for value in source.parameters())
    assert size <= version.nbytes < size + 20_000
    assert version.model_step == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_converted_on_the_way_out_and_on_the_way_in(
    store: Store, dtype: torch.dtype
) -> None:
    source = family("llama")[0]
    half = family("llama")[0].to(dtype)
    WeightsReader(half, store).load(_published(source, store, 1))
    narrow = _published(source, store, 2, dtype=dtype)
    wide = family("llama")[0]
    WeightsReader(wide, store).load(narrow)
    for one, two, three in zip(
        source.parameters(), half.parameters(), wide.parameters(), strict=True
    ):
        assert torch.equal(one.to(dtype), two)
        assert torch.equal(one.to(dtype).float(), three)


def test_a_reader_follows_when_the_object_is_laid_out_in_another_way(store: Store) -> None:
    """What it remembers is of the object before: of other types, or of another model, it is not."""
    source, target = family("llama")[0], family("llama")[0]
    reader = WeightsReader(target, store)
    exact, narrow = WeightsWriter(source, store), WeightsWriter(source, store, torch.bfloat16)
    for step, writer in enumerate([exact, exact, narrow, exact, narrow], start=1):
        _changed(source)
        store.sessions.open(f"weights-{step}", owner="weights")
        version = writer.publish(step, session=f"weights-{step}")
        reader.load(version)
        for one, two in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(one.bfloat16().float() if writer is narrow else one, two)
    with pytest.raises(WeightsMismatch, match="another model"):
        reader.load(_published(family("qwen3_moe")[0], store, 9))
    reader.load(version)


def test_an_object_that_begins_otherwise_than_the_writers_is_read_anew(store: Store) -> None:
    """In it entries may stand where a writer's objects differ in nothing but the step."""
    target = torch.nn.ParameterList([torch.zeros(4), torch.zeros(4)])
    reader = WeightsReader(target, store)
    store.sessions.open("weights", owner="weights")
    for first, second in ((0, 16), (16, 0)):
        entries = {
            str(k): {"dtype": "F32", "shape": [4], "data_offsets": [start, start + 16]}
            for k, start in enumerate((first, second))
        }
        header = json.dumps(entries, separators=(",", ":")).encode().ljust(116)
        blob = len(header).to_bytes(8, "little") + header + torch.arange(8.0).numpy().tobytes()
        ref = store.put(torch.frombuffer(bytearray(blob), dtype=torch.uint8), session="weights")
        reader.load(WeightsVersion(ref=bytes(ref), model_step=1, nbytes=len(blob)))
        assert [value[0].item() for value in target] == [first / 4, second / 4]


def test_parameters_of_one_type_become_one_piece_of_memory_and_stay_what_they_were(
    store: Store, tmp_path: Path
) -> None:
    model, tokenizer = family("qwen3_moe")
    crooked = model.model.layers[0].self_attn.o_proj.weight
    crooked.data = crooked.data.t().contiguous().t()
    model.model.norm.weight.data = model.model.norm.weight.data.bfloat16()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    writer = WeightsWriter(model, store)
    places = {name: value.data_ptr() for name, value in model.named_parameters()}
    WeightsReader(model, store)  # they lie there already
    after = dict(model.named_parameters())
    assert {name: value.data_ptr() for name, value in after.items()} == places
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert len({value.untyped_storage().data_ptr() for value in after.values()}) == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    target = family("qwen3_moe")[0]
    store.sessions.open("weights-1", owner="weights")
    WeightsReader(target, store).load(writer.publish(1, session="weights-1"))
    for name, value in target.named_parameters():
        assert torch.equal(before[name].float(), value)
    export_hf(model, tokenizer, tmp_path / "step-1")
    again, _ = build_model(ModelConfig(path=str(tmp_path / "step-1")))
    for name, value in again.named_parameters():
        assert torch.equal(before[name].float(), value)


def _two_layers() -> Any:
    return torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))


def _assign(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _wrap(model: Any) -> None:
    model[0] = torch.nn.Sequential(model[0])


def _adapt(model: Any) -> None:
    model[0].register_parameter("lora", torch.nn.Parameter(torch.ones(2)))


def _move(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.clone()


def _swap(model: Any) -> None:
    one, other = model.parameters()
    one.data, other.data = other.data, one.data


def _resize(model: Any) -> None:
    model[0].weight.data = model[0].weight.data[:2]


def _transpose(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.t()


def _tie(model: Any) -> None:
    model[1].weight = model[0].weight


def _remove(model: Any) -> None:
    del model[1].weight


MOVED = r"lies elsewhere in memory \(its .data was assigned\)"
SURGERY = {
    _assign: "0.weight was replaced; 1.weight was replaced",
    _wrap: "0.weight was removed; 0.0.weight was added",
    _adapt: "0.lora was added",
    _move: f"1.weight {MOVED}",
    _swap: f"0.weight {MOVED}; 1.weight {MOVED}",
    _resize: r"0.weight has the shape \[2, 4\], and had \[4, 4\]",
    _transpose: "0.weight lies in memory with gaps or in another order",
    _tie: "1.weight was tied to 0.weight",
    _remove: "1.weight was removed",
}


@pytest.mark.parametrize("change", SURGERY)
def test_a_model_whose_parameters_were_changed_needs_a_new_writer_and_reader(
    store: Store, change: Callable[[Any], None]
) -> None:
    """Nothing is written by the old ones: what is there may be another parameter's by now."""
    source, target = _two_layers(), _two_layers()
    writer, reader = WeightsWriter(source, store), WeightsReader(target, store)
    before = _published(source, store, 1)
    change(source)
    change(target)
    held = [value.detach().clone() for value in target.parameters()]
    store.sessions.open("weights-2", owner="weights")
    with pytest.raises(ParametersChanged, match=f"{SURGERY[change]}. .* a new WeightsWriter "):
        writer.publish(2, session="weights-2")
    assert store.sessions.objects("weights-2") == []
    with pytest.raises(ParametersChanged, match=f"{SURGERY[change]}. .* a new WeightsReader "):
        reader.load(before)
    assert all(map(torch.equal, held, target.parameters()))
    again = WeightsWriter(source, store).publish(2, session="weights-2")
    WeightsReader(target, store).load(again)
    assert all(map(torch.equal, source.parameters(), target.parameters()))


def test_of_many_changed_parameters_the_first_are_named(store: Store) -> None:
    model = family("llama")[0]
    writer = WeightsWriter(model, store)
    for value in model.parameters():
        value.data = value.data.clone()
    store.sessions.open("weights-1", owner="weights")
    n_names = len(dict(model.named_parameters(remove_duplicate=False)))
    with pytest.raises(ParametersChanged, match=f"; and {n_names - 3} more. Nothing"):
        writer.publish(1, session="weights-1")


def test_a_model_in_which_only_modules_are_others_is_published_and_loaded_as_before(
    store: Store,
) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.ReLU()])
    writer, reader = WeightsWriter(model, store), WeightsReader(model, store)
    model[1] = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.GELU())
    store.sessions.open("weights-1", owner="weights")
    reader.load(writer.publish(1, session="weights-1"))
    model[1][1].register_parameter("slope", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ParametersChanged, match=r"1.1.slope was added"):
        writer.publish(1, session="weights-1")


def test_parameters_that_share_memory_go_on_sharing_it(store: Store) -> None:
    models = [torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)) for _ in range(2)]
    for model in models:
        first, second = model
        second.weight.data, second.bias.data = first.weight.data, first.weight.data[1]
    source, target = models
    store.sessions.open("weights-1", owner="weights")
    writer, reader = WeightsWriter(source, store), WeightsReader(target, store)
    with torch.no_grad():
        source[0].weight += 1.0
    assert torch.equal(source[0].weight, source[1].weight)
    assert torch.equal(source[0].weight[1], source[1].bias)
    reader.load(writer.publish(1, session="weights-1"))
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)
    assert target[0].weight.data_ptr() == target[1].weight.data_ptr()


def test_an_empty_parameter_does_not_move_those_of_a_model_with_a_writer(store: Store) -> None:
    model = torch.nn.ParameterList([torch.ones(3), torch.empty(0, 4), torch.ones(5)])
    writer = WeightsWriter(model, store)
    WeightsReader(model, store)
    store.sessions.open("weights-1", owner="weights")
    writer.publish(1, session="weights-1")


def test_a_model_of_several_types_keeps_them(store: Store) -> None:
    source, target = family("llama")[0].bfloat16(), family("llama")[0].bfloat16()
    for model in (source, target):
        for name, value in model.named_parameters():
            if "norm" in name:
                value.data = value.data.float()
    _changed(source)
    WeightsReader(target, store).load(_published(source, store))
    for one, two in zip(source.parameters(), target.parameters(), strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    assert len({value.dtype for value in source.parameters()}) == 2


def test_the_object_is_a_safetensors_file(store: Store, tmp_path: Any) -> None:
    source = family("olmoe")[0]
    version = _published(source, store)
    blob = store.get(store.sessions.objects("weights-3")[0].ref)
    (tmp_path / "weights.safetensors").write_bytes(blob.numpy().tobytes())
    del blob
    with safe_open(str(tmp_path / "weights.safetensors"), framework="pt") as stored:
        assert stored.metadata() == {"model_step": "3"}
        for name, value in source.named_parameters():
            assert torch.equal(stored.get_tensor(name), value.detach())
    assert bytes(store.sessions.objects("weights-3")[0].ref) == version.ref


def test_weights_of_another_model_change_nothing(store: Store) -> None:
    version = _published(family("llama")[0], store)
    target = family("qwen3_moe")[0]
    before = [value.detach().clone() for value in target.parameters()]
    with pytest.raises(WeightsMismatch, match="another model"):
        WeightsReader(target, store).load(version)
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))


def _safetensors(record: dict[str, Any], data: bytes = b"\0" * 64) -> torch.Tensor:
    text = json.dumps(record).encode()
    return torch.frombuffer(
        bytearray(len(text).to_bytes(8, "little") + text + data), dtype=torch.uint8
    )


@pytest.mark.parametrize(
    "blob",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.full((64,), 255, dtype=torch.uint8),
        _safetensors({"a": {"dtype": "F32", "shape": [400], "data_offsets": [0, 1600]}}),
        _safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}),
        _safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}),
        _safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]}}),
        _safetensors({"a": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}}),
        _safetensors({"a": 5}),
    ],
)
def test_bytes_that_are_no_weights_are_an_error(store: Store, blob: torch.Tensor) -> None:
    ref = store.put(blob)
    version = WeightsVersion(bytes(ref), 1)
    with pytest.raises(WeightsMismatch):
        WeightsReader(family("llama")[0], store).load(version)
    del ref


@pytest.mark.parametrize("value", [b"weights", {"a": 1}, torch.ones(9, dtype=torch.bfloat16)])
def test_an_object_that_is_no_tensor_of_bytes_is_an_error(store: Store, value: Any) -> None:
    store.sessions.open("other", owner="weights")
    version = WeightsVersion(bytes(store.put(value, session="other")), 1, 0)
    with pytest.raises(WeightsMismatch, match="published weights"):
        WeightsReader(family("llama")[0], store).load(version)
    store.sessions.release(["other"], owner="weights")


def test_a_version_that_is_gone_is_an_error_and_so_is_a_session_that_is_gone(store: Store) -> None:
    model = family("llama")[0]
    version = _published(model, store)
    store.sessions.release(["weights-3"], owner="weights")
    with pytest.raises(ObjectFreed):
        WeightsReader(model, store).load(version)
    with pytest.raises(SessionReleased):
        WeightsWriter(model, store).publish(4, session="weights-3")


def test_an_engine_goes_on_with_published_weights_and_frees_nothing_of_them(store: Store) -> None:
    learner_model = _changed(family("qwen3_moe")[0])
    version = _published(learner_model, store, 5)
    model, tokenizer = family("qwen3_moe")

    async def run() -> None:
        engine = TorchEngine(
            model,
            tokenizer,
            EngineConfig(),
            load_weights=lambda m, v: WeightsReader(m, store).load(v),
        )
        try:
            await engine.load_weights(version, "in_flight")
            made = await engine.generate(request("r", [4, 5, 6]))
            assert set(made.model_steps.tolist()) == {5}
            with pytest.raises(EngineError, match="weights of step 6"):
                await engine.load_weights(replace(version, ref=b"\0" * 24, model_step=6))
            assert engine.model_step == 5
        finally:
            await engine.aclose()

    asyncio.run(run())
    for one, two in zip(learner_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert "weights-5" in store.sessions


def test_an_engine_that_is_told_of_a_retired_version_takes_the_newer_one(store: Store) -> None:
    """Retired while it was on its way: the engine says so by name, and the router asks again."""
    source = _changed(family("llama")[0])
    old, new = _published(source, store, 1), _published(_changed(source), store, 2)
    store.sessions.release(["weights-1"], owner="weights")
    model, tokenizer = family("llama")

    async def run() -> None:
        engine = TorchEngine(
            model,
            tokenizer,
            EngineConfig(),
            load_weights=lambda m, v: WeightsReader(m, store).load(v),
        )
        router = EngineRouter({"engine-0": engine}, engine.info, ())
        try:
            with pytest.raises(ObjectFreed):
                await engine.load_weights(old)
            comes_up = asyncio.create_task(router.up("engine-0", old))
            await asyncio.sleep(0)  # it has been sent the old version
            await router.load_weights(new)
            await comes_up
            assert set((await router.generate(request("r", [4, 5, 6]))).model_steps.tolist()) == {2}
        finally:
            await engine.aclose()

    asyncio.run(run())
    for one, two in zip(source.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_weights_cross_to_a_device_and_back_without_a_copy_on_the_way(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose copies end late: the object outlives its session until they have ended."""
    source, target = _changed(family("qwen3_moe")[0]), family("qwen3_moe")[0]
    half = family("qwen3_moe")[0].bfloat16()
    # With a handle of its own: what it registered is given back when it closes.
    with slow_device(monkeypatch) as double, Store.attach(store.name) as other:
        version = _published(source, other, dtype=torch.bfloat16)
        double.goes_on.clear()
        WeightsReader(target, other).load(version)
        WeightsReader(half, other).load(version)
        assert not torch.equal(target.lm_head.weight, source.lm_head.weight.bfloat16().float())
        store.sessions.release(["weights-3"], owner="weights")
        assert store.stats().pinned == 1
        double.goes_on.set()
        settle()
        assert store.stats().pinned == 0
        for one, two, three in zip(
            source.parameters(), target.parameters(), half.parameters(), strict=True
        ):
            assert torch.equal(one.bfloat16().float(), two)
            assert torch.equal(one.bfloat16(), three)
        assert double.registered
