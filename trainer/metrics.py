"""What a run writes down about itself: `metrics.jsonl` and TensorBoard events.

Owns the catalog of metric names with unit and meaning (docs/metrics.md is made from it) and the two
files. Promises: one JSON object a train step, flushed as it is written; numbers only, NaN and
infinity are left out and counted in `nonfinite`; nothing here imports torch. Written by the
driver only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

__all__ = ["CATALOG", "Metric", "MetricsWriter", "describe", "read_metrics"]


@dataclass(frozen=True)
class Metric:
    """Unit and meaning of one name. A name that ends in `*` stands for a family."""

    unit: str
    meaning: str


CATALOG: Mapping[str, Metric] = {
    "train_step": Metric(
        "step", "The train step, from 1; a line of step 0 has the evaluation before the first."
    ),
    "time_s": Metric("s", "Seconds since the run (or its resumption) began."),
    "nonfinite": Metric("count", "Values of this step that were NaN or infinite and left out."),
    "reward": Metric(
        "reward", "Mean reward of all rollouts scored since the last batch, filtered ones too."
    ),
    "reward_batch": Metric(
        "reward",
        "Mean reward of the trained batch; without groups of equal rewards it drifts to 0.5.",
    ),
    "rollouts": Metric("count", "Rollouts in the batch."),
    "loss": Metric("", "Value of the loss."),
    "lr": Metric("", "Learning rate of the step."),
    "kl_engine": Metric(
        "nat", "k3 estimate of KL(engine ‖ learner) on sampled tokens, before the update."
    ),
    "grad_norm": Metric("", "Norm of the gradient before clipping."),
    "learner/*": Metric(
        "",
        "Everything else that the learner reports; docs/losses.md explains it. `learner/read_s`: "
        "reading the traces; `learner/keep_s`: copying its state for a successor; "
        "`learner/train_step`: its own count.",
    ),
    "staleness_mean": Metric(
        "step", "Mean staleness of the batch's rollouts, by their oldest token."
    ),
    "staleness_max": Metric("step", "Largest of them."),
    "response_tokens_mean": Metric(
        "token",
        "Mean length of a response: what the model sampled, and what tools and the environment "
        "said after it.",
    ),
    "step_s": Metric(
        "s", "From the end of training in the last step to its end in this one, evaluation apart."
    ),
    "train_s": Metric(
        "s", "The learner's own time in the step: reading, forward, backward, update."
    ),
    "learn_s": Metric("s", "Of that, arithmetic: forward, backward, update."),
    "wait_s": Metric(
        "s", "Time in which the learner waited: for a batch, and for weights that must come first."
    ),
    "sync_s": Metric("s", "From the end of training until every engine has the new weights."),
    "overhead_s": Metric(
        "s",
        "step_s without the longest chain of arithmetic: engines and learner one after the other, "
        "or in the schedule `async` the busier of the two.",
    ),
    "cpu/*": Metric(
        "s",
        "CPU time of the step: `cpu/learner_arithmetic`, `cpu/engine_arithmetic`, the rest of "
        "these processes (`cpu/learner`; `cpu/producer`, with engines that are processes of their "
        "own), and `cpu/driver`. With more than one thread a process, arithmetic "
        "is what the first one computed.",
    ),
    "tokens_generated": Metric(
        "token", "Tokens that the model sampled, of rollouts since the last step."
    ),
    "tokens_trained": Metric(
        "token", "Tokens in the loss of the batch: sampled by the model, and not too old."
    ),
    "tokens_per_s": Metric("token/s", "`tokens_generated` a second."),
    "trained_tokens_per_s": Metric("token/s", "`tokens_trained` a second."),
    "engine_busy": Metric("share", "Share of the step in which the engines computed."),
    "learner_wait_share": Metric("share", "wait_s / step_s."),
    "model_step": Metric("step", "Train step whose weights the engines use after the step."),
    "buffer_groups": Metric("count", "Groups in the replay buffer after the step."),
    "buffer_bytes": Metric("B", "Payload of these groups."),
    "arena_bytes": Metric("B", "Bytes used in the arena."),
    "arena_sessions": Metric("count", "Sessions in the arena."),
    "arena_objects": Metric("count", "Objects in the arena."),
    "owner/*": Metric("count", "Sessions of each owner (`owner/NAME`)."),
    "window/*": Metric(
        "",
        "What taking the batch reported (lifecycle L29), in total, since the batch before: "
        "`produced_samples`, `produced_tokens`, `failed_samples`, `filtered_samples` (groups of "
        "equal rewards), `expired_samples`, `cancelled_samples` in rollouts or tokens; "
        "`raw_reward_mean`; `group_time_mean_s`, `_p50_s`, `_p99_s` to generate a group; `pause_s` "
        "and `production_s` of the producer; `leftover_STATUS`: groups left in the buffer.",
    ),
    "task/*": Metric("", "The same per task: `task/NAME/COUNT`; `task/NAME/reward` in the batch."),
    "ledger/*": Metric("rollout", "The books after the step (lifecycle L26)."),
    "restarts": Metric("count", "Deaths of processes of the run so far."),
    "eval/reward": Metric("reward", "Mean reward on held-out prompts."),
    "eval/*": Metric(
        "",
        "Held-out evaluation: `eval/reward/TASK` of a mixture; `eval/rollouts` and, of these, "
        "`eval/failed`; `eval/response_tokens_mean`.",
    ),
}


def describe(name: str) -> Metric | None:
    """The catalog's entry for a name as it is written."""
    if name in CATALOG:
        return CATALOG[name]
    head = name.partition("/")[0]
    return CATALOG.get(f"{head}/*") if "/" in name else None


_ENCODER = msgspec.json.Encoder()


class _EventSink(Protocol):
    def scalar(self, name: str, value: float, step: int) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Appends to metrics.jsonl, and to TensorBoard events when `tensorboard` names a folder.

    first_step: what comes is of this step or later; events that a run which goes back has written
    of these steps before count no more. (metrics.jsonl is cut by `RunFolder`.) `warn` is told when
    no more events can be written, which is no reason to end; without metrics.jsonl a run ends.
    """

    def __init__(
        self,
        file: Path,
        tensorboard: Path | None,
        first_step: int = 0,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._warn = warn
        self._file = file.open("ab")
        self._events: _EventSink | None = _Events(tensorboard, first_step) if tensorboard else None
        self._began = time.monotonic()

    def write(self, train_step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Writes one step and returns what was written."""
        finite = {
            k: v if isinstance(v, int) else float(v)  # a count is written as one
            for k, v in values.items()
            if math.isfinite(v)
        }
        record = {
            "train_step": train_step,
            "time_s": round(time.monotonic() - self._began, 4),
            **finite,
        }
        lost = len(values) - len(finite)
        if lost:
            record["nonfinite"] = lost
        try:
            self._file.write(_ENCODER.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(
                errno.ENOENT, "the folder of the run was removed while it ran", self._file.name
            )
        if self._events is not None:
            with self._no_harm():
                for name, value in finite.items():
                    self._events.scalar(name, value, train_step)
        return record

    @contextlib.contextmanager
    def _no_harm(self) -> Iterator[None]:
        """What goes wrong with the events is told, and there are none from then on."""
        try:
            yield
        except OSError as error:
            self._events = None
            self._warn(
                f"no more TensorBoard events can be written ({error}); metrics.jsonl goes on"
            )

    def close(self) -> None:
        """Flushes both. Idempotent."""
        with contextlib.suppress(OSError):  # a full disk; `write` has told it
            self._file.close()
        events, self._events = self._events, None
        if events is not None:
            with self._no_harm():
                events.close()


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, without a torn last line."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


class _Events:
    """TensorBoard's own writer: it needs no torch."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        # Readers drop what they have of this step and later ones. They look into the file's version
        # first, which the writer has put there.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def scalar(self, name: str, value: float, step: int) -> None:
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value)])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def tensorboard_missing() -> str | None:
    """Why events cannot be written, or None when they can."""
    import importlib.util

    if importlib.util.find_spec("tensorboard") is None:
        return "tensorboard is not installed: no event files (pip install tensorboard)"
    return None
