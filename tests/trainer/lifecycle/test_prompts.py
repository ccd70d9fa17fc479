"""Prompts that are never skipped or doubled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.lifecycle.kit import Questions
from trainer.errors import ConfigError
from trainer.pending import session_id
from trainer.prompts import DrawnPrompt, PromptSampler
from trainer.rollout import Prompt


def _drain(sampler: PromptSampler, task: str = "math") -> list[str]:
    uids = []
    while (drawn := sampler.draw(task, "p")) is not None:
        uids.append(drawn.prompt.uid)
        sampler.settle(drawn.ticket)
    return uids


def test_L12_prompts_of_a_dead_producer_are_handed_out_again_before_new_ones() -> None:
    sampler = PromptSampler({"math": Questions(size=5)}, seed=None, epochs=1)
    first = [sampler.draw("math", owner) for owner in ("p0", "p1", "p0")]
    assert all(first)
    assert sampler.give_back_all("p0") == 2
    again = [sampler.draw("math", "p2") for _ in range(2)]
    assert [d.prompt.uid for d in again if d] == ["math/0", "math/2"]
    assert [d.attempt for d in again if d] == [1, 1]
    assert _drain(sampler) == ["math/3", "math/4"]


def test_L31_a_task_without_repetition_ends_and_the_others_begin_anew() -> None:
    sources = {"ends": Questions("ends", size=2), "goes on": Questions("goes on", size=2)}
    sampler = PromptSampler(sources, seed=None, epochs={"ends": 1, "goes on": None})
    assert [sampler.draw("ends", "p") is None for _ in range(4)] == [False, False, True, True]
    assert all(sampler.draw("goes on", "p") for _ in range(9))
    assert (sampler.remaining("ends"), sampler.remaining("goes on")) == (0, None)


def test_settling_twice_or_giving_back_what_is_settled_changes_nothing() -> None:
    sampler = PromptSampler({"math": Questions(size=1)}, seed=None, epochs=1)
    drawn = sampler.draw("math", "p")
    assert drawn is not None
    assert sampler.settle(drawn.ticket)
    assert not sampler.settle(drawn.ticket)
    assert not sampler.give_back(drawn.ticket)
    assert sampler.draw("math", "p") is None


def test_L25_prompts_that_are_made_ahead_are_not_drawn_by_that_and_each_is_made_once() -> None:
    made: list[int] = []

    class Counted(Questions):
        def prompt(self, index: int) -> Prompt:
            made.append(index)
            return super().prompt(index)

    sampler = PromptSampler({"math": Counted(size=3)}, seed=None, epochs=1)
    before = sampler.to_json()
    sampler.prepare("math", 2)
    sampler.prepare("math", 8)
    assert (made, sampler.to_json(), sampler.remaining("math")) == ([0, 1, 2], before, 3)
    assert _drain(sampler) == ["math/0", "math/1", "math/2"]
    assert made == [0, 1, 2]


def test_a_prompt_that_cannot_be_made_ahead_is_told_to_whoever_draws_it() -> None:
    class Broken(Questions):
        def prompt(self, index: int) -> Prompt:
            if index == 1:
                raise OSError("the disk is gone")
            return super().prompt(index)

    sampler = PromptSampler({"math": Broken(size=3)}, seed=None, epochs=1)
    sampler.prepare("math", 3)
    assert sampler.draw("math", "p") is not None
    with pytest.raises(OSError, match="the disk is gone"):
        sampler.draw("math", "p")


def test_epochs_are_shuffled_differently_and_each_holds_every_prompt() -> None:
    sampler = PromptSampler({"math": Questions(size=20)}, seed=3, epochs=2)
    uids = _drain(sampler)
    assert sorted(uids[:20]) == sorted(uids[20:]) == sorted(f"math/{i}" for i in range(20))
    assert uids[:20] != uids[20:]


@given(st.integers(0, 1000), st.integers(0, 60))
def test_L25_a_resumed_sampler_hands_out_every_unfinished_prompt_exactly_once(
    seed: int, moves: int
) -> None:
    rng = random.Random(seed)
    sources = {"math": Questions(size=12), "code": Questions("code", size=7)}
    sampler = PromptSampler(sources, seed=1, epochs=2)
    done: list[str] = []
    out: list[DrawnPrompt] = []
    for _ in range(moves):
        action = rng.random()
        if action < 0.5:
            drawn = sampler.draw(rng.choice(["math", "code"]), "p")
            if drawn:
                out.append(drawn)
        elif out:
            drawn = out.pop(rng.randrange(len(out)))
            if action < 0.8:
                sampler.settle(drawn.ticket)
                done.append(drawn.prompt.uid)
            else:
                sampler.give_back(drawn.ticket)
    resumed = PromptSampler(sources, seed=1, epochs=2)
    resumed.load_json(sampler.to_json())
    rest = _drain(resumed, "math") + _drain(resumed, "code")
    every = [f"math/{i}" for i in range(12)] + [f"code/{i}" for i in range(7)]
    assert sorted(done + rest) == sorted(2 * every)


@pytest.mark.parametrize("same", [True, False])
def test_L25_prompts_that_were_under_way_come_first_after_a_resume_in_their_order_and_attempt(
    same: bool,
) -> None:
    """Its sessions are named by the attempt: another one where those of the first may live."""
    sampler = PromptSampler({"math": Questions(size=5)}, seed=None)
    drawn = [sampler.draw("math", "p") for _ in range(4)]
    for n in (3, 1):
        sampler.give_back(drawn[n].ticket)  # type: ignore[union-attr]
    assert sampler.draw("math", "p").ticket == "math-3"  # type: ignore[union-attr]
    resumed = PromptSampler({"math": Questions(size=5)}, seed=None)
    resumed.load_json(sampler.to_json(), same_attempts=same)
    again = [resumed.draw("math", "p") for _ in range(5)]
    assert [(d.ticket, d.attempt + same) for d in again if d is not None] == [
        ("math-0", 1),
        ("math-2", 1),
        ("math-3", 2),
        ("math-1", 2),
        ("math-4", same),
    ]


def test_L25_another_seed_or_a_missing_task_is_refused_on_resume() -> None:
    saved = PromptSampler({"math": Questions(size=3)}, seed=1).to_json()
    with pytest.raises(ConfigError, match="prompt seed 1, this run has 2"):
        PromptSampler({"math": Questions(size=3)}, seed=2).load_json(saved)
    with pytest.raises(ConfigError, match=r"tasks \['math'\]"):
        PromptSampler({"code": Questions("code", size=3)}, seed=1).load_json(saved)


@pytest.mark.parametrize(
    ("task", "seed", "said"),
    [
        (5, 0, "the name of a task is 5 of type int; text is needed"),
        ("\ud800", 0, "the name of a task is text that is no UTF-8"),
        ("", 0, "names of tasks have 1 to 55 bytes"),
        ("t" * 56, 0, "names of tasks have 1 to 55 bytes"),
        ("math", {1}, r"seed is \{1\}; an int of 64 bits is needed"),
        ("math", 1 << 64, "seed is 18446744073709551616; an int of 64 bits"),
    ],
)
def test_what_a_ticket_or_a_snapshot_could_not_carry_is_refused_at_once(
    task: str, seed: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        PromptSampler({task: Questions()}, seed=seed)
    assert session_id("r", f"{'t' * 55}-0", 0, 0), "the longest name has room"
