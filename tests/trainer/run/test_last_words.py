"""The last words of a run: what ended it, what to do about it, what it came to."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from actors.codec import make_remote_error
from shmstore import OutOfMemory, Store, StoreExists, StoreFull, TableFull
from shmstore.testing import unique_name
from tests.trainer.run import runs
from trainer.config import load
from trainer.errors import ConfigError
from trainer.ledger import ENDS
from trainer.run.ending import failed
from trainer.run.ending import last_words as said_last
from trainer.run.folder import RunFolder
from trainer.run.learner_actor import LearnerReady
from trainer.run.opening import check_capacity
from trainer.run.summary import Summary


def test_a_run_that_a_full_disk_ended_says_where_and_what_to_do(folder: RunFolder) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(folder.metrics_file))
    first, second = failed(folder, error).splitlines()
    assert first.endswith(f"No space left on device: '{folder.metrics_file}'")
    assert second == (
        "  what to do: make room there; there is no checkpoint, so "
        f"`shmrl resume {folder.path}` begins again"
    )
    assert failed(folder, ValueError("x")) == "ValueError: x"


def test_a_run_that_a_full_arena_ended_says_what_to_raise(folder: RunFolder) -> None:
    """Also out of a process of the run, where it is a RemoteError, too."""
    full = StoreFull("no room for 9 bytes", needed=9)
    remote = make_remote_error(full, "shmstore.errors.StoreFull", str(full), "trace")
    for error in (full, remote):
        first, second = failed(folder, error).splitlines()
        assert first == "StoreFull: no room for 9 bytes"
        assert second.startswith("  what to do: raise store.capacity, or")
    assert "capacity" not in failed(folder, TableFull("no row"))


def test_a_run_whose_arena_the_machine_cannot_hold_says_what_to_lower(folder: RunFolder) -> None:
    with pytest.raises(OutOfMemory) as caught:
        Store.create(unique_name(), capacity="8TiB")
    first, second = failed(folder, caught.value).splitlines()
    assert first.startswith("OutOfMemory: /dev/shm has")
    assert "lower store.capacity" in second
    assert second.endswith("begins again")


def test_a_run_whose_name_is_taken_says_so_in_the_words_of_the_command(folder: RunFolder) -> None:
    error = StoreExists('arena "r" is in use by 3 process(es); attach to it, or choose another')
    assert "choose another name (--set run.name=" in failed(folder, error).splitlines()[1]


def test_a_run_that_may_use_no_more_memory_says_so(folder: RunFolder) -> None:
    first, second = failed(folder, MemoryError()).splitlines()
    assert first == "MemoryError"
    assert second.startswith("  what to do: allow the processes of the run more memory")


@pytest.mark.parametrize(
    ("settings", "left", "least"),
    [
        ((), 4, 28_000_000),  # two states and the weights
        ((), 1, 20_000_000),  # one state and the weights twice
        (("model.dtype=bfloat16",), 4, 26_000_000),
        (("checkpoint.recovery=checkpoint",), 4, 8_000_000),
    ],
)
def test_an_arena_that_can_never_hold_the_model_is_refused_before_the_first_rollout(
    settings: tuple[str, ...], left: int, least: int
) -> None:
    ready = LearnerReady(train_step=6, parameters=1_000_000, warmup={}, source="start")

    def check(capacity: int) -> None:
        sizes = (f"store.capacity={capacity}", f"schedule.steps={6 + left}", "replay.max_bytes=1e6")
        check_capacity(load(runs.TINY, (*settings, *sizes)), ready)

    check(least + 1)
    with pytest.raises(ConfigError, match="1,000,000 parameters needs more than") as refused:
        check(least)
    proposed = "checkpoint.recovery: checkpoint" in str(refused.value)
    assert proposed == ("checkpoint.recovery=checkpoint" not in settings)


def test_a_resumed_run_with_no_step_to_train_needs_no_room_for_a_state() -> None:
    ready = LearnerReady(train_step=4, parameters=1 << 30, warmup={}, source="checkpoint")
    check_capacity(load(runs.TINY, ("schedule.steps=4",)), ready)


def last_words(first_step: int = 1, **known: object) -> list[str]:
    summary = Summary("r")
    for name, value in known.items():
        setattr(summary, name, value)
    summary.settle()
    summary.wall_s = 3.0
    return list(said_last(summary, RunFolder(Path("runs/r")), first_step))


def test_the_last_words_compare_only_what_was_measured_twice_and_end_with_the_books() -> None:
    ledger = {**dict.fromkeys((*ENDS, "buffered"), 0), "produced": 12, "trained": 8, "filtered": 4}
    words = last_words(steps=2, rewards=[0.1, 0.3], evals=[0.165], ledger=ledger)
    assert words[:2] == [
        "reward of all rollouts: 0.100 -> 0.300",
        "reward on held-out prompts: 0.165, measured once",
    ]
    assert words[-1].startswith("books balance: produced 12 = trained 8 + filtered 4 rollouts (")
    assert last_words()[0].startswith("0 steps in 3.0 s")
    words = last_words(ledger={**ledger, "trained": 7})
    assert words[-1].startswith("books do NOT balance: produced 12, but trained 7")


def test_the_last_words_of_a_resumed_run_say_which_steps_are_new() -> None:
    assert "40 steps in 3.0 s, of which steps 12-40 since" in last_words(12, steps=40)[0]


def test_the_time_of_a_resumed_run_goes_on_from_its_checkpoint() -> None:
    first = Summary("r")
    first.began -= 100.0
    again = Summary("r")
    again.began -= 50.0  # it started before it read the checkpoint
    again.restore(first.totals())
    again.settle()
    assert 150.0 <= again.to_json()["wall_s"] < 200.0
