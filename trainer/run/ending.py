"""How a run says what it came to: exit status, plot and summary, the last words.

Owns those words only; nothing of it may hide how the run ended. Called by `trainer.fit` and the
driver when the processes of the run have ended, or are about to.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shmstore import OutOfMemory, StoreError, StoreExists, StoreFull, TableFull
from trainer.ledger import ENDS
from trainer.run.folder import BadRunFolder, RunFolder
from trainer.run.plot import plot_rewards
from trainer.run.summary import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LEFTOVERS,
    EXIT_OK,
    Summary,
)

__all__ = [
    "ended_at_once",
    "exit_status",
    "failed",
    "last_words",
    "leave_pictures",
    "not_begun",
    "not_kept",
]


def exit_status(summary: Summary) -> int:
    """What the command ends with."""
    if not summary.arena.empty:
        return EXIT_LEFTOVERS
    if summary.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.error else EXIT_OK


def failed(folder: RunFolder, error: BaseException) -> str:
    """The error of a run that `error` ended; of a full disk or arena with what to do."""
    text = _named(error)
    remedy = _remedy(error)
    if remedy:
        text += f"\n  what to do: {remedy}; {_going_on(folder)}"
    return text


def not_begun(error: BaseException) -> str:
    """The error of a new run that `error` ended before anything of it was."""
    remedy = _remedy(error)
    return (
        f"{_named(error)}\n  {f'what to do: {remedy}; ' if remedy else ''}"
        "the run had not begun and left no folder: the same command begins it when that is mended"
    )


def _named(error: BaseException) -> str:
    """Class and text; a MemoryError has none."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _remedy(error: BaseException) -> str | None:
    """What to do about a full disk, machine or arena, or a name that is taken."""
    if isinstance(error, MemoryError) and not isinstance(error, StoreError):
        return "allow the processes of the run more memory (ulimit -v, the limit of the job)"
    if isinstance(error, StoreExists):
        return (
            "a run of that name is alive, here or in another folder (`shmrl top`): wait for it, or "
            "choose another name (--set run.name=... of a new run; a resumed one has its folder's)"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room there"
    if isinstance(error, OutOfMemory):
        return "enlarge it, or lower store.capacity (--set)"
    if isinstance(error, StoreFull) and not isinstance(error, TableFull):
        return (
            "raise store.capacity, or lower replay.max_bytes, rollout.prompts_per_step or "
            "schedule.max_staleness"
        )
    return None


def ended_at_once(folder: RunFolder) -> str:
    """The error of a run that was cancelled."""
    return f"ended at once, by a second Ctrl-C or a cancellation; {_going_on(folder)}"


def not_kept(folder: RunFolder, train_step: int, problems: Sequence[str]) -> str:
    """The error of a run whose last checkpoint or export is not on disk."""
    return "\n  ".join(
        (
            f"trained up to step {train_step}, but not kept:",
            *problems,
            f"what to do: make room there; {_going_on(folder)}",
        )
    )


def _going_on(folder: RunFolder) -> str:
    try:
        kept = folder.latest_checkpoint()
    except BadRunFolder as error:  # somebody removed it meanwhile
        return str(error)
    if kept is None:
        return f"there is no checkpoint, so `shmrl resume {folder.path}` begins again"
    return (
        f"the checkpoint of step {kept[0]} is whole, and `shmrl resume {folder.path}` goes on from "
        "it"
    )


def leave_pictures(summary: Summary, folder: RunFolder, *, plot: bool) -> Iterator[str]:
    """Writes summary and plot; yields what could not be written, and why."""
    try:
        folder.write_summary(summary.to_json())
    except OSError as error:
        yield f"{folder.summary_file} could not be written: {error}"
    try:
        if plot and folder.metrics_file.is_file():
            plot_rewards(folder.metrics_file, folder.plot_file, folder.name)
    except ModuleNotFoundError as error:
        yield f"no reward.png: {error}"
    except OSError as error:
        yield f"{folder.plot_file} could not be written: {error}"


def last_words(summary: Summary, folder: RunFolder, first_step: int) -> Iterator[str]:
    """What a person reads when it is over. `first_step`: that this process could train first."""
    for name, series, first, last in (
        ("reward of all rollouts", summary.rewards, summary.reward_first, summary.reward_last),
        ("reward on held-out prompts", summary.evals, summary.eval_first, summary.eval_last),
    ):
        if len(series) > 1:
            yield f"{name}: {first:.3f} -> {last:.3f}"
        elif series:
            yield f"{name}: {series[0]:.3f}, measured once"
    steps = f"{summary.steps} steps in {summary.wall_s:.1f} s"
    if 1 < first_step <= summary.steps:
        steps += f", of which steps {first_step}-{summary.steps} since it was resumed"
    yield f"{steps}; everything is in {folder.path}"
    if summary.interrupted and not summary.error:
        yield f"it was interrupted; `shmrl resume {folder.path}` goes on"
    elif first_step > summary.steps and not summary.error:
        yield (
            "no step was left to train, so the totals are those of the last checkpoint; "
            "`--set schedule.steps=N` gives it more steps"
        )
    arena = summary.arena
    left = f": left by {summary.left_by_owner}" if not arena.empty else ""
    yield f"arena: {arena.sessions} sessions, {arena.objects} objects{left}"
    if summary.ledger:
        yield _books(summary.ledger)


def _books(ledger: Mapping[str, Any]) -> str:
    """`books balance: produced 96 = trained 64 + ...`, in rollouts; only what there is."""
    ends = {end: ledger[end] for end in (*ENDS, "buffered") if ledger[end]}
    total = sum(ends.values())
    shown = " + ".join(f"{end} {count}" for end, count in ends.items()) or "0"
    if ledger["produced"] != total:
        return f"books do NOT balance: produced {ledger['produced']}, but {shown}"
    why = " (filtered: groups of equal rewards, which teach nothing)" if "filtered" in ends else ""
    return f"books balance: produced {total} = {shown} rollouts{why}"
