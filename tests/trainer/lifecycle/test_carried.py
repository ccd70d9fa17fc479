"""Whatever the buffer or the sampler lets in comes back from a message and from a snapshot as it
is, and whatever they refuse is an error of ours (L25): for values that nobody thought of.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import BadGroup, ConfigError, TrainerError
from trainer.prompts import PromptSampler, SequenceSource
from trainer.replay.checks import checked_group
from trainer.rollout import FinishReason, Group, Prompt, Rollout, Status

_TEXT = st.text(max_size=4) | st.sampled_from(["\ud800", "a\udfff", "\u2028", "\0"])
_NUMBERS = (
    st.integers()
    | st.integers(-(1 << 70), 1 << 70)
    | st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 31])
    | st.floats()
    | st.sampled_from([np.int64(3), np.float32(0.5), np.float64("nan"), np.bool_(True), 1j])
)
_PLAIN = st.none() | st.booleans() | _NUMBERS | _TEXT | st.binary(max_size=3)
_ODD = st.sampled_from(
    [Status.FAILED, FinishReason.STOP, object(), len, {1, 2}, np.str_("a"), range(3)]
)
_VALUES = st.recursive(
    _PLAIN | _ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_TEXT | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=6,
)
_JSON = msgspec.json.Decoder(list[Group])


def _changed(fields: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(fields), _VALUES, max_size=3)


_PROMPT_FIELDS = [field.name for field in dataclasses.fields(Prompt)]
_ROLLOUT_FIELDS = [name for name in Rollout.__struct_fields__ if name != "status"]


def _prompt(changes: dict[str, Any]) -> Prompt:
    return Prompt(**{"uid": "p", "task": "math", "text": "1+1", **changes})


@settings(max_examples=200, deadline=None)
@given(
    _changed(["uid", "task", "nbytes"]),
    st.none() | _changed(_PROMPT_FIELDS).map(_prompt),
    _changed(_ROLLOUT_FIELDS),
)
def test_what_is_filed_comes_back_from_a_message_and_a_snapshot(
    group: dict[str, Any], prompt: Prompt | None, rollout: dict[str, Any]
) -> None:
    try:
        member = Rollout("s", status=Status.COMPLETED).evolve(**rollout)
        given_group = Group("g", "math", prompt, (member,)).evolve(**group)
    except BadGroup:
        return
    try:
        filed = checked_group(given_group, None)
    except BadGroup:
        with _only_errors_of_ours():
            pickle.loads(pickle.dumps(given_group))
        return
    filed = filed.evolve(nbytes=0)  # it is measured when it is filed
    assert pickle.loads(pickle.dumps(filed)) == filed
    raw = msgspec.json.encode([filed])
    (resumed,) = _JSON.decode(raw)
    assert resumed.rollouts == filed.rollouts
    assert msgspec.json.encode([resumed]) == raw
    assert checked_group(resumed, None) == resumed, "and is let in again"


class _only_errors_of_ours:
    """A message with it is refused by us, or carries it to one who refuses it; objects that no
    pickle knows are for the actors to refuse.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, (BadGroup, pickle.PicklingError))


@settings(max_examples=200, deadline=None)
@given(_changed(_PROMPT_FIELDS))
def test_what_is_drawn_comes_back_from_a_snapshot(changes: dict[str, Any]) -> None:
    prompt = _prompt(changes)
    sampler = PromptSampler({"math": SequenceSource((prompt,))})
    try:
        drawn = sampler.draw("math", "producer-0")
    except ConfigError:
        assert sampler.outstanding("math") == 0
        return
    assert drawn is not None
    raw = msgspec.json.encode(drawn.prompt)
    resumed = msgspec.json.decode(raw, type=Prompt)
    assert msgspec.json.encode(resumed) == raw
    assert _as_python_has_it(resumed) == _as_python_has_it(prompt)


def _as_python_has_it(prompt: Prompt) -> str:
    return json.dumps(dataclasses.asdict(prompt), allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(_VALUES, min_size=1, max_size=2), _VALUES)
def test_any_names_and_seed_are_taken_or_refused_as_ours(names: list[Any], seed: Any) -> None:
    try:
        sources = {name: SequenceSource((_prompt({}),)) for name in names}
    except TypeError:
        return  # no keys
    try:
        sampler = PromptSampler(sources, seed=seed)
    except TrainerError:
        return
    raw = msgspec.json.encode(sampler.to_json())
    PromptSampler(sources, seed=seed).load_json(msgspec.json.decode(raw))


def test_an_error_names_what_it_cannot_print() -> None:
    with pytest.raises(BadGroup, match=r"uid is text that is no UTF-8"):
        checked_group(Group("\ud800", "math", None, (Rollout("s", status=Status.FAILED),)), None)
