"""A sample of the simulated runs, and canaries: a trainer that is broken in one place must be
caught.

`python -m tests.simulation --seeds 5000` runs many more.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation import world
from trainer.conversation import Conversation
from trainer.dispatch import Dispatcher
from trainer.expiry import Expiry
from trainer.prompts import PromptSampler
from trainer.replay import buffer as replay
from trainer.rollout import Group
from trainer.stored_path import StoredPath
from trainer.trace import TraceStore

#: Seeds per test; each test is one slice so that a failure names few seeds.
SLICE = 12


@pytest.mark.parametrize("first", range(0, 5 * SLICE, SLICE))
def test_whole_runs_with_random_faults_keep_every_rule(first: int) -> None:
    for seed in range(first, first + SLICE):
        world.simulate(seed)


def test_the_same_seed_gives_the_same_history() -> None:
    seed = next(s for s in range(1000) if not world.Plan.from_seed(s).checkpoint_every)
    assert world.simulate(seed)["history"] == world.simulate(seed)["history"]


def _releases_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's old clean-up (scenario a)."""
    release = TraceStore.release

    def release_all(self: TraceStore, ids: Any, owner: str, strict: bool = False) -> list[str]:
        if owner == world.LEARNER:
            sessions = self._store.sessions
            sessions.release(sessions.list(), owner="*")
            return list(ids)
        return release(self, ids, owner, strict)

    monkeypatch.setattr(TraceStore, "release", release_all)


def _never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "rollout_deadline", lambda self, rollout: None)


def _forgets_the_batch_of_a_dead_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    owner_died = replay.ReplayBuffer.owner_died

    def forgetful(self: replay.ReplayBuffer, owner: str) -> tuple[int, list[Group]]:
        self._away.pop_taken(owner)
        return owner_died(self, owner)

    monkeypatch.setattr(replay.ReplayBuffer, "owner_died", forgetful)


def _books_a_lent_group_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    book = replay.ReplayBuffer._book_put

    def doubled(self: replay.ReplayBuffer, group: Group, lent: Any) -> None:
        book(self, group, None)

    monkeypatch.setattr(replay.ReplayBuffer, "_book_put", doubled)


def _hands_settled_prompts_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptSampler, "settle", lambda self, ticket: True)


def _goes_on_from_its_tokens_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = StoredPath._advance

    def wrong(self: StoredPath, node: int, token_ids: Any, *rest: Any) -> None:
        advance(self, node, token_ids[::-1], *rest)

    monkeypatch.setattr(StoredPath, "_advance", wrong)


def _keeps_the_old_response_on_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "cut_stale", lambda self, group, train_step: (group, ()))


def _leaves_a_dead_producers_prompts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Dispatcher, owner: str) -> int:
        self.buffer.owner_died(owner)
        return 0

    monkeypatch.setattr(Dispatcher, "owner_died", forget)


def _leaves_sessions_to_what_it_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "close", lambda self: None)


@pytest.mark.parametrize(
    "break_it",
    [
        _releases_everything,
        _never_expires,
        _forgets_the_batch_of_a_dead_learner,
        _books_a_lent_group_twice,
        _hands_settled_prompts_out_again,
        _goes_on_from_its_tokens_in_reverse,
        _keeps_the_old_response_on_retry,
        _leaves_a_dead_producers_prompts_out,
        _leaves_sessions_to_what_it_left_behind,
    ],
)
def test_a_broken_trainer_is_caught(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    for seed in range(60):
        try:
            world.simulate(seed)
        except Exception:  # whatever the break leads to: the run did not pass unnoticed
            return
    pytest.fail("60 seeds and the break went unnoticed")
