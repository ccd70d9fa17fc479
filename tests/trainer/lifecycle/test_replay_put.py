"""What becomes of a group that is handed to the replay buffer: L04, L09, L10, L25."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import NotOwner, Store
from tests.trainer.lifecycle.kit import put
from trainer.errors import (
    BadGroup,
    ConfigError,
    ReplayError,
)
from trainer.expiry import Expiry
from trainer.prompts import PromptSampler, SequenceSource
from trainer.replay import ReplayBuffer
from trainer.rollout import Group, Prompt, Rollout, Status
from trainer.testing import make_segment, store_group
from trainer.trace import TraceStore

P, L = "producer-0", "learner"


@pytest.mark.parametrize("status", [Status.FAILED, Status.FILTERED])
async def test_L09_tokens_of_useless_groups_count_also_when_their_producer_counts_nothing(
    traces: TraceStore, status: Status, buffer: ReplayBuffer
) -> None:
    for uid in ("bad", "good"):
        group = store_group(traces, uid)
        members = [
            Rollout(r.session_id, status=status if uid == "bad" else Status.COMPLETED, reward=1.0)
            for r in group.rollouts
        ]
        await buffer.put(Group(uid, "math", None, tuple(members)), owner=P)
    batch = await buffer.take({"math": 1, "code": 0}, train_step=1, owner=L, timeout=1)
    assert batch.report.total.produced_tokens == 2 * 2 * 6
    traces.release(batch.session_ids, owner=L)


@pytest.mark.parametrize("status", [Status.FAILED, Status.COMPLETED])
async def test_L04_a_group_whose_sessions_are_somebody_elses_is_refused_and_nothing_changes(
    store: Store, traces: TraceStore, status: Status, buffer: ReplayBuffer
) -> None:
    group = store_group(traces, "a", owner="other", status=status)
    with pytest.raises(NotOwner, match="'a-0'"):
        await buffer.put(group, owner=P)
    assert store.sessions.list("other") == ["a-0", "a-1"]
    assert buffer.accounts.ledger.total.produced == 0
    traces.release(["a-0"], owner="other")
    if status is Status.FAILED:  # what is gone cannot leak any more
        traces.release(["a-1"], owner="other")
        assert await buffer.put(group, owner=P) is Status.FAILED
    buffer.check_books()
    traces.release(["a-1"], owner="other")


class _Thing:
    pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answer": {"a": [1, _Thing()]}}, r"prompt.answer\['a'\]\[1\] is a _Thing"),
        ({"answer": lambda: 1}, "prompt.answer is a function"),
        ({"answer": float("nan")}, "prompt.answer is nan"),
        ({"answer": 1 << 64}, "prompt.answer is a whole number of more than 64 bits"),
        ({"answer": b"x"}, "prompt.answer is a bytes"),
        ({"metadata": {"n": np.int64(3)}}, r"prompt.metadata\['n'\] is a int64"),
        ({"metadata": {"by": {1: "x"}}}, r"prompt.metadata\['by'\] has the key 1 of type int"),
        ({"metadata": {"t": "\ud800"}}, r"prompt.metadata\['t'\] is text that is no UTF-8"),
        ({"messages": ({"role": "user", "image": {2}},)}, r"messages\[0\]\['image'\] is a set"),
        ({"metadata": {"a": {"\ud800": 1}}}, r"metadata\['a'\] has the key '.ud800', which is no"),
        ({"messages": "hello"}, "prompt.messages is a str; a tuple of dicts is needed"),
        (
            {"messages": ("hello",)},
            r"prompt.messages\[0\] is 'hello' of type str; a dict is needed",
        ),
        ({"metadata": None}, "prompt.metadata is None of type NoneType; a dict is needed"),
        ({"text": 5}, "prompt.text is 5 of type int; text is needed"),
        ({"text": "a\udfff"}, "prompt.text is text that is no UTF-8"),
        ({"token_ids": np.arange(3)}, "prompt.token_ids is a ndarray; a tuple of whole numbers"),
        ({"token_ids": (1, np.int32(2))}, r"prompt.token_ids\[1\] is .*2.* of type int32"),
        ({"token_ids": (1, 2, -1)}, r"prompt.token_ids\[2\] is -1 of type int; an int of 0 to"),
        ({"token_ids": (1 << 31,)}, r"prompt.token_ids\[0\] is 2147483648 of type int"),
        ({"token_ids": (True,)}, r"prompt.token_ids\[0\] is True of type bool"),
        ({"uid": 7}, "prompt.uid is 7 of type int; text is needed"),
        ({"uid": "\ud800"}, "prompt.uid is text that is no UTF-8"),
        ({"task": np.str_("math")}, r"prompt.task is .*'math'\)? of type str_"),
    ],
)
async def test_L25_what_a_snapshot_could_not_keep_is_refused_at_put_with_its_path(
    store: Store, traces: TraceStore, changes: dict[str, Any], said: str, buffer: ReplayBuffer
) -> None:
    group = store_group(traces, "a")
    prompt = Prompt(**{"uid": "p", "task": "math", **changes})
    bad = group.evolve(prompt=prompt)
    with pytest.raises(BadGroup, match=said):
        await buffer.put(bad, owner=P)
    assert store.sessions.list(P) == ["a-0", "a-1"], "its producer still has it"
    assert await buffer.put(group, owner=P) is Status.COMPLETED
    sampler = PromptSampler({"math": SequenceSource((prompt,))})
    with pytest.raises(ConfigError, match=said):
        sampler.draw("math", P)
    assert (sampler.outstanding("math"), sampler.to_json()["tasks"]["math"]["position"]) == (0, 0)
    buffer.close()


async def test_numbers_of_numpy_are_filed_as_plain_ones_and_others_refused(
    store: Store, traces: TraceStore, tmp_path: Path, buffer: ReplayBuffer
) -> None:
    group = store_group(traces, "a")
    first, second = group.rollouts
    odd = first.evolve(reward=np.float32(0.5), leaves=(np.int64(1),), metrics={"kl": np.float64(2)})
    for wrong, said in (
        ({"reward": float("inf")}, "reward is inf"),
        ({"reward": "high"}, "reward is 'high': Expected `float | null`, got `str`"),
        ({"reward": True}, "reward is True"),
        ({"metrics": {"kl": float("nan")}}, "metrics['kl'] is nan"),
        ({"metrics": {"kl": None}}, "metrics is {'kl': None}"),  # a resume would find it damaged
        ({"metrics": {"\ud800": 1.0}}, "metrics has the key '\\ud800', which is no"),
        ({"metrics": {"kl": np.float32("nan")}}, "metrics['kl'] is nan"),
        ({"metrics": None}, "metrics is None"),
        ({"error_msg": _Thing()}, "error_msg is a _Thing"),
        ({"error_msg": 5}, "error_msg is 5: Expected `str | null`, got `int`"),
        ({"error_msg": "\ud800"}, "error_msg is text that is no UTF-8"),
        ({"error_msg": b"bytes"}, "error_msg is a bytes"),
        ({"session_id": "\ud800"}, "session_id is text that is no UTF-8"),
        ({"prompt_uid": 3}, "prompt_uid is 3: Expected `str`, got `int`"),
        ({"attempt": "x"}, "attempt is 'x'"),
        ({"attempt": 1 << 64}, "attempt is a whole number of more than 64 bits"),
        ({"attempt": -1}, "attempt is -1: Expected `int` >= 0"),
        ({"n_prompt_nodes": 1 << 31}, "n_prompt_nodes is 2147483648: Expected `int` <= 2147483647"),
        ({"model_step_min": "3"}, "model_step_min is '3'"),
        ({"model_step_max": 1 << 40}, "model_step_max is 1099511627776: Expected `int` <="),
        ({"leaves": "ab"}, "leaves is 'ab'"),
        ({"leaves": (-1,)}, "leaves is [-1]: Expected `int` >= 0"),
        ({"generation_time_s": float("nan")}, "generation_time_s is nan"),
        ({"finish_reason": 5}, "finish_reason is 5"),
    ):
        bad = group.with_rollouts([odd.evolve(**wrong), second])
        where = re.escape(f"group 'a': rollout {bad.rollouts[0].uid!r}: {said}")
        with pytest.raises(BadGroup, match=where):
            await buffer.put(bad, owner=P)
        with pytest.raises(BadGroup, match=where):  # in a message as well, at one of its ends
            pickle.loads(pickle.dumps(bad))
    assert store.sessions.list(P) == ["a-0", "a-1"], "its producer still has it"
    await buffer.put(group.with_rollouts([odd, second]), owner=P)
    (entry,) = buffer._index
    kept = entry.group.rollouts[0]
    assert (kept.reward, kept.leaves, kept.metrics) == (0.5, (1,), {"kl": 2.0})
    assert type(kept.reward) is type(kept.metrics["kl"]) is float
    assert type(kept.leaves[0]) is int
    sent = pickle.loads(pickle.dumps(group.with_rollouts([odd, second])))
    assert (sent.rollouts[0], type(sent.rollouts[0].reward)) == (kept, float)
    await buffer.snapshot(tmp_path)
    buffer.close()


async def test_a_group_of_no_task_is_refused(store: Store, traces: TraceStore) -> None:
    buffer = ReplayBuffer(store, max_bytes="1MiB")
    assert buffer.max_bytes == 1 << 20
    group = store_group(traces, "a", task="")
    with pytest.raises(BadGroup, match="'a' is of no task; say which with task="):
        await buffer.put(group, owner=P)
    assert await buffer.put(group, task="math", owner=P) is Status.COMPLETED
    buffer.close()


@pytest.mark.parametrize("status", [Status.FAILED, Status.FILTERED])
async def test_L09_useless_groups_are_counted_and_released_and_never_filed(
    store: Store, traces: TraceStore, status: Status, buffer: ReplayBuffer
) -> None:
    group = store_group(traces, "bad", status=status, reward=0.25)
    assert await buffer.put(group, owner=P, train_step=1) is status
    assert group.status is status  # reading it later says the same
    assert len(buffer) == 0
    assert store.stats().sessions == store.stats().objects == 0
    books = buffer.accounts.ledger.task("math")
    assert (books.produced, getattr(books, status.value)) == (2, 2)
    await put(buffer, traces, "good", reward=0.75)
    report = (await buffer.take({"math": 1}, train_step=1, owner=L)).report.total
    assert report.produced_samples == 4
    assert report.produced_tokens == 24
    assert getattr(report, f"{status.value}_samples") == 2
    assert report.raw_reward_mean == 0.5


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.ABORTED, Status.EXPIRED])
async def test_L10_filed_groups_and_their_sessions_belong_to_the_buffer(
    store: Store, traces: TraceStore, status: Status, buffer: ReplayBuffer
) -> None:
    assert await put(buffer, traces, "a", status=status) is status
    assert buffer.count("math", status) == 1
    assert store.sessions.list("replay") == ["a-0", "a-1"]


async def test_L10_a_group_whose_sessions_are_not_the_producers_is_refused_whole(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    group = store_group(traces, "a", owner="somebody")
    with pytest.raises(NotOwner):
        await buffer.put(group, owner=P, train_step=1)
    assert len(buffer) == 0
    assert store.sessions.list("somebody") == ["a-0", "a-1"]
    buffer.check_books()


async def test_groups_that_cannot_be_filed_are_refused_with_the_reason(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    unfinished = Group("i", "math", None, (Rollout("i-0", status=Status.INIT),))
    with pytest.raises(BadGroup, match=r"\['i-0'\] of group 'i' are still INIT"):
        await buffer.put(unfinished, owner=P)
    await put(buffer, traces, "a")
    again = Group("a", "math", None, (Rollout("a-0", status=Status.COMPLETED),))
    with pytest.raises(BadGroup, match="'a' is in the buffer already"):
        await buffer.put(again, owner=P)
    for wrong in ({"math": 0}, {"math": 1.5}, {}, {5: 1}, {"math": 1, "code": -1}):
        with pytest.raises(ReplayError, match="at least one in all, not"):
            await buffer.take(wrong, train_step=1, owner=L)  # type: ignore[arg-type]
    for nothing in (None, [("math", 1)]):
        with pytest.raises(ReplayError, match="a mapping of task"):
            await buffer.take(nothing, train_step=1, owner=L)  # type: ignore[arg-type]
    with pytest.raises(BadGroup, match="takes a Group, not 5"):
        await buffer.put(5, owner=P)  # type: ignore[arg-type]
    odd = store_group(traces, "odd")
    for changes, said in (
        ({"uid": 7}, "its uid is 7 of type int; text is needed"),
        ({"uid": "\udc00"}, "its uid is text that is no UTF-8"),
        ({"task": 7}, "its task is 7 of type int"),
        ({"task": "\udc00"}, "its task is text that is no UTF-8"),
        ({"prompt": "1+1"}, r"'1\+1' is a str; a Prompt itself is needed"),
    ):
        with pytest.raises(BadGroup, match=said):
            await buffer.put(odd.evolve(**changes), owner=P)
    for step in ("3", 2.5):
        with pytest.raises(ReplayError, match=f"the step is {step!r}; a whole number is needed"):
            await buffer.put(odd, owner=P, train_step=step)  # type: ignore[arg-type]
    assert set(store.sessions.list(P)) == {"odd-0", "odd-1"}
    with pytest.raises(ReplayError, match="max_bytes 'x' is not understood"):
        ReplayBuffer(store, max_bytes="x")  # type: ignore[arg-type]


async def test_a_group_without_counters_is_filed_with_what_its_traces_say(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(max_staleness=0))
    traces.open("s", owner=P)
    traces.insert("s", make_segment(3, model_step=None))
    traces.insert("s", make_segment(4, model_step=2), parent=0)
    group = Group(rollouts=[Rollout("s", status=Status.COMPLETED)])
    assert await buffer.put(group, task="math", owner=P, train_step=3) is Status.COMPLETED
    assert (await buffer.refresh(train_step=4)).retry == 1
    assert traces.length("s") == 1


async def test_L25_whole_numbers_of_numpy_do_not_stand_in_the_way_of_a_snapshot(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    step = np.int64(3)
    buffer = ReplayBuffer(store, expiry=Expiry(max_staleness=np.int32(2)))  # type: ignore[arg-type]
    await buffer.put(store_group(traces, "a"), owner=P, train_step=step)  # type: ignore[arg-type]
    await buffer.refresh(step)  # type: ignore[arg-type]
    await buffer.snapshot(tmp_path)
    buffer.close()
    resumed = await ReplayBuffer.resume(tmp_path, store)
    assert (resumed.train_step, resumed.expiry.max_staleness, len(resumed)) == (3, 2, 1)
    resumed.close()


def test_a_prompt_travels_in_its_group_as_it_is(traces: TraceStore) -> None:
    """So that the buffer of another process refuses what one of this process would."""
    prompt = Prompt("p", "math", answer={1, 2}, token_ids=(1, 2))
    group = store_group(traces, "a").evolve(prompt=prompt)
    assert pickle.loads(pickle.dumps(group)) == group
    traces.release(group.session_ids, owner=P)
