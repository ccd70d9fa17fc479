"""Records: values that cannot be wiped, without references, encodable without pickle."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import Group, Prompt, Rollout, Status
from trainer.engine.protocol import GenerateRequest, SamplingParams
from trainer.errors import BadGroup
from trainer.rollout import FinishReason

_ORDER = [Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED]


@given(st.lists(st.sampled_from(list(Status)), min_size=1, max_size=6))
def test_status_of_a_group_is_the_first_of_four_that_any_member_has(statuses: list[Status]) -> None:
    group = Group(rollouts=[Rollout(f"s{i}", status=s) for i, s in enumerate(statuses)])
    wanted = [status for status in _ORDER if status in statuses]
    assert group.status is (wanted[0] if wanted else Status.COMPLETED)


def test_L09_a_status_that_was_read_cannot_be_wiped_afterwards() -> None:
    rollout = Rollout("s", status=Status.FAILED)
    group = Group(rollouts=[rollout])
    with pytest.raises(AttributeError, match="immutable"):
        rollout.status = Status.INIT  # type: ignore[misc]
    rollout.cut_to_prompt(Status.ABORTED)
    assert group.status is Status.FAILED


def test_L09_what_a_group_says_of_its_members_goes_with_them() -> None:
    fresh, old = (
        Rollout(f"s{step}", status=Status.COMPLETED, model_step_min=step) for step in (7, 3)
    )
    group = Group(rollouts=[fresh])
    for same in (group, group.evolve(nbytes=5)):
        assert (same.status, same.session_ids) == (Status.COMPLETED, ("s7",))
        assert same.model_step_min == 7
    other = group.with_rollouts([old.cut_to_prompt(Status.EXPIRED)])
    assert (other.status, other.session_ids) == (Status.EXPIRED, ("s3",))
    assert other.model_step_min is None
    assert group.evolve(nbytes=0) == group == Group(rollouts=[fresh])


def test_L05_a_rollout_carries_a_session_id_and_positions_but_no_reference() -> None:
    allowed = (str, int, float, tuple, type(None), Status, FinishReason, dict)
    rollout = Rollout("s", leaves=(1, 2), metrics={"a": 1.0})
    for field in msgspec.structs.fields(rollout):
        assert isinstance(getattr(rollout, field.name), allowed), field.name


def test_L25_records_travel_as_json_and_come_back_equal() -> None:
    prompt = Prompt("p", "math", messages=({"role": "user", "content": "1+1"},), answer=[2, "two"])
    member = Rollout(
        "s", status=Status.COMPLETED, finish_reason=FinishReason.STOP, metrics={"kl": 0.5}
    )
    group = Group("g", "math", prompt, (member,), nbytes=7)
    assert msgspec.json.decode(msgspec.json.encode(group), type=Group) == group


def test_a_group_without_rollouts_or_with_anything_else_is_refused() -> None:
    with pytest.raises(BadGroup, match="no rollouts"):
        Group(uid="g")
    with pytest.raises(BadGroup, match="are Rollouts, not 's-1'"):
        Group(rollouts=["s-1"])  # type: ignore[list-item]


def test_L09_a_status_that_is_a_text_is_refused_and_never_taken_for_completed() -> None:
    for make in (Rollout, Rollout("s").evolve):
        with pytest.raises(BadGroup, match="status of rollout 's' is 'failed'; give a member of"):
            make(session_id="s", status="failed")


@pytest.mark.parametrize("uid", [np.array(["a", "b"]), np.zeros(0), 7, ["g"]])
def test_a_uid_that_is_no_text_is_refused(uid: Any) -> None:
    for make in (Rollout, lambda *sessions, uid: Group(uid, rollouts=(Rollout(*sessions),))):
        with pytest.raises(BadGroup, match=r"(rollout|group) .*: its uid is .*; text is needed"):
            make("s", uid=uid)


def test_parts_of_a_request_are_replaced_by_evolve() -> None:
    request = GenerateRequest("r", "s", np.arange(3, dtype=np.int32), SamplingParams())
    again = request.evolve(request_id="again")
    assert (again.request_id, again.session_id, request.request_id) == ("again", "s", "r")
