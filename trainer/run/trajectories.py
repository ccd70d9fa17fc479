"""Writes what was said in a trained batch: one Parquet file a step, a row a rollout.

Owns the columns. Reads texts from the arena while the learner still has to begin, in a thread of
the driver. Called by the driver when `metrics.trajectories_every` asks for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from trainer.rollout import Batch, Group, Rollout
from trainer.run.folder import RunFolder
from trainer.trace import TraceStore

if TYPE_CHECKING:
    from shmstore import Store

__all__ = ["write_trajectories"]


async def write_trajectories(
    folder: RunFolder, train_step: int, batch: Batch, store: Store
) -> None:
    """Writes `trajectories/step-N.parquet`."""
    await asyncio.to_thread(_write, folder, train_step, batch, TraceStore(store))


def _write(folder: RunFolder, train_step: int, batch: Batch, traces: TraceStore) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = [_row(group, rollout, traces) for group in batch.groups for rollout in group.rollouts]
    folder.trajectories.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder.trajectories / f"step-{train_step}.parquet")


def _row(group: Group, rollout: Rollout, traces: TraceStore) -> dict[str, Any]:
    leaf = rollout.leaves[0] if rollout.leaves else None
    nodes = traces.export(rollout.session_id, node=leaf).nodes if leaf is not None else ()
    texts = [traces.segment(rollout.session_id, node).text for node in nodes]
    return {
        "task": group.task,
        "prompt_uid": group.prompt.uid if group.prompt is not None else "",
        "session_id": rollout.session_id,
        "prompt": texts[0] if texts else "",
        "response": "".join(texts[1:]),
        "answer": str(group.prompt.answer) if group.prompt is not None else "",
        "reward": rollout.reward,
        "response_tokens": rollout.n_response_tokens,
        "sampled_tokens": rollout.n_sampled,
        "model_step_min": rollout.model_step_min,
        "model_step_max": rollout.model_step_max,
    }
