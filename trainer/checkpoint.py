"""A checkpoint of a whole run: the learner's files, the buffer's, and the driver's counters.

    checkpoints/step-N/
      learner/       model, optimizer, random state (safetensors; written by the learner's process)
      buffer/        groups with payloads, ledger, prompts position (Arrow IPC, JSON)
      driver.json    format, step, totals of the summary

Owns the composition and its format version. Promises (lifecycle L24, L25): everything is of one
moment, the end of a train step; the producer goes on meanwhile; the folder is whole or absent,
and `latest` names it last (`trainer.run.folder`). The buffer's part is `trainer.snapshot`'s.
Written by the driver between two steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import snapshot
from trainer.errors import SnapshotError, SnapshotVersion, TrainerError
from trainer.run.folder import RunFolder
from trainer.run.summary import Summary

if TYPE_CHECKING:
    from trainer.dispatch import Dispatcher
    from trainer.run.learner_link import LearnerLink

__all__ = ["Checkpoint", "CheckpointFailed", "read_checkpoint", "write_checkpoint"]

_FORMAT = 2


class CheckpointFailed(TrainerError):
    """A checkpoint could not be written (disk full, say); the one before is untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    train_step: int
    learner: Path
    buffer: Path
    totals: dict[str, Any]


async def write_checkpoint(
    folder: RunFolder,
    train_step: int,
    learner: LearnerLink,
    dispatcher: Dispatcher,
    totals: dict[str, Any],
) -> Path:
    """Writes the state after `train_step`. Raises CheckpointFailed; the run may go on without
    it.
    """
    frozen = dispatcher.freeze()  # this moment; the payloads are pinned, not copied
    written = False
    try:
        async with folder.new_checkpoint(train_step) as draft:
            await learner.save(str(draft / "learner"), train_step)
            written = True  # from here on `write` thaws
            await snapshot.write(frozen, draft / "buffer")
            record = {"format": _FORMAT, "train_step": train_step, "totals": totals}
            (draft / "driver.json").write_text(json.dumps(record), encoding="utf-8")
    except (OSError, SnapshotError) as error:
        raise CheckpointFailed(
            f"the checkpoint of step {train_step} could not be written to {folder.checkpoints}: "
            f"{error}"
        ) from error
    finally:
        if not written:
            frozen.thaw()
    return folder.checkpoints / f"step-{train_step}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the driver's part. Raises SnapshotVersion for a format this version does not know,
    SnapshotError when the file is damaged or gone.
    """
    file = folder / "driver.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise SnapshotVersion(
                f"{folder} has checkpoint format {record['format']!r}; this version reads {_FORMAT}"
            )
        probe = Summary(folder.name)
        probe.restore(record["totals"])  # complains of one that is missing
        probe.settle()  # and here of one that does not add up
        step = int(record["train_step"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SnapshotError(
            f"{file} is damaged ({type(error).__name__}: {error}); to go on from an older "
            f"checkpoint, write its name into {folder.parent / 'latest'}"
        ) from error
    return Checkpoint(step, folder / "learner", folder / "buffer", record["totals"])
