"""The fields of a configuration: every one that a user can set, typed, frozen.

Owns the sections below; those of the model, engine, learner and warm-up are in
`trainer.model.config`. Promises: records only, and nothing here imports torch or starts a process.
Everybody is handed a `Config` or one of its sections; `trainer.config.loading` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.model.config import EngineConfig, LearnerConfig, ModelConfig, WarmupConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "EnvironmentConfig",
    "EvalConfig",
    "FaultsConfig",
    "JudgeConfig",
    "MetricsConfig",
    "ReplayConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "StoreConfig",
    "TaskConfig",
]


def _opt(default: Any, doc: str, **bounds: Any) -> Any:
    """A field with its documentation and bounds (`ge`, `gt`, `le`, `lt`, `unit`);
    `required`: the default is no value, `problems` refuses it.
    """
    return field(default=default, metadata={"doc": doc, **bounds})


def _opt_of(factory: Any, doc: str, **more: Any) -> Any:
    return field(default_factory=factory, metadata={"doc": doc, **more})


@dataclass(frozen=True)
class RunConfig:
    """What the run is called and where it leaves its files."""

    name: str | None = _opt(None, "Name of the run and of its arena; default: file name and time.")
    folder: str = _opt("runs", "Folder that holds the run folders.")
    seed: int = _opt(0, "Seed of prompts, sampling and initial weights.", ge=0, lt=1 << 31)
    pin: bool = _opt(
        True, "Bind each computing process to cores of its own, where there are enough."
    )
    deterministic: bool = _opt(
        False,
        "Bit-identical repeats on the CPU; needs the sync schedule and torch's deterministic mode. "
        "Engines then compute one sequence at a time: generation takes several times as long.",
    )


@dataclass(frozen=True)
class SourceConfig:
    """Where a task's prompts come from."""

    kind: Literal["reasoning_gym", "jsonl"] = _opt("reasoning_gym", "Kind of prompt source.")
    dataset: str | None = _opt(None, "reasoning_gym: name of the data set, such as number_sorting.")
    params: Mapping[str, object] = _opt_of(dict, "reasoning_gym: parameters of the data set.")
    render: Literal["text", "compact_sorting", "compact_ascending"] = _opt(
        "text",
        "How an item becomes a prompt: its own text, or `7204<` for number_sorting of digits "
        "(`7204>` where the item sorts downwards; with compact_ascending all are sorted upwards, "
        "which is learnt in half the steps).",
    )
    path: str | None = _opt(None, "jsonl: file with one {prompt, answer} object a line.")
    prompt_field: str = _opt("prompt", "jsonl: field of the prompt (text, or a list of messages).")
    answer_field: str = _opt("answer", "jsonl: field of the answer that the judge sees.")
    system: str | None = _opt(None, "System message put before the prompt (needs a chat template).")
    chat: bool = _opt(False, "Wrap the prompt in the tokenizer's chat template.")
    repeat: bool = _opt(True, "jsonl: start over, in another order, when the file ends.")
    holdout: float = _opt(
        0.1, "Share of the distinct prompts kept for evaluation and never trained.", ge=0.0, lt=1.0
    )


@dataclass(frozen=True)
class EnvironmentConfig:
    """How a rollout runs."""

    kind: Literal["single_turn", "tools", "class"] = _opt(
        "single_turn", "One answer, a loop with tools, or a class of yours."
    )
    target: str | None = _opt(
        None, "class: `module:Class` (or `file.py:Class`) with `async def run(session, prompt)`."
    )
    params: Mapping[str, object] = _opt_of(dict, "class: keyword arguments of its constructor.")
    tools: tuple[str, ...] = _opt((), "tools: functions as `module:function`, called by name.")
    max_turns: int = _opt(4, "tools: model turns after which the rollout ends.", ge=1, le=1000)
    tool_timeout_s: float = _opt(
        10.0, "Limit for one tool call; beyond it the rollout fails.", gt=0
    )
    timeout_s: float = _opt(
        600.0, "Limit for one whole rollout; beyond it the rollout fails.", gt=0
    )


@dataclass(frozen=True)
class JudgeConfig:
    """How a rollout is scored."""

    kind: Literal["exact", "numeric", "math_verify", "reasoning_gym", "callable"] = _opt(
        "exact", "Kind of judge."
    )
    target: str | None = _opt(
        None,
        "callable: `module:function` (or `file.py:function`) of (prompt, text), returns a number.",
    )
    tolerance: float = _opt(1e-6, "numeric: largest relative error of a right answer.", ge=0)
    timeout_s: float = _opt(
        5.0, "Limit for one verdict; a judge that hangs is ended and its rollout fails.", gt=0
    )
    processes: int = _opt(1, "Processes that run judges which may hang.", ge=1, le=64)


@dataclass(frozen=True)
class TaskConfig:
    """One task of the mixture."""

    name: str = _opt("", "Name of the task in metrics and in the ledger.", required=True)
    weight: float = _opt(1.0, "Share of the batch, relative to the other tasks' weights.", gt=0)
    source: SourceConfig = _opt_of(SourceConfig, "Where its prompts come from.")
    environment: EnvironmentConfig = _opt_of(EnvironmentConfig, "How a rollout runs.")
    judge: JudgeConfig = _opt_of(JudgeConfig, "How a rollout is scored.", shorthand="kind")
    format_reward: float = _opt(
        0.0,
        "Reward of a wrong answer that has the form of a right one (compact_*).",
        ge=0,
        le=1,
    )

    def problems(self) -> list[tuple[str, str]]:
        """A task without a name stays a task, so that its other mistakes are told as well."""
        return [] if self.name else [("name", "is required and missing")]


@dataclass(frozen=True)
class RolloutConfig:
    """Size and sampling of the groups."""

    prompts_per_step: int = _opt(32, "Groups in one train step.", ge=1, le=1 << 16)
    rollouts_per_prompt: int = _opt(8, "Rollouts of a group (K).", ge=1, le=1 << 12)
    max_new_tokens: int = _opt(16, "Longest response, in tokens, of one model turn.", ge=1)
    temperature: float = _opt(1.0, "Sampling temperature; the loss uses the same.", gt=0)
    top_p: float = _opt(1.0, "Nucleus sampling.", gt=0, le=1)
    top_k: int = _opt(0, "Sample from the k likeliest tokens; 0 is off.", ge=0)
    stop: tuple[str, ...] = _opt((), "Strings that end a response.")


@dataclass(frozen=True)
class ScheduleConfig:
    """Who waits for whom."""

    name: Literal["async", "sync", "colocated"] = _opt(
        "async",
        "async: produce and train at once; sync: one after the other; colocated: take turns.",
    )
    steps: int = _opt(100, "Train steps of the run.", ge=1)
    sync_every: int = _opt(1, "Train steps between two weight syncs (s of the life cycle).", ge=1)
    weight_sync: Literal["in_flight", "pause"] = _opt(
        "in_flight", "Swap weights between two decode steps, or stop production to swap."
    )
    pause_timeout_s: float = _opt(
        30.0, "pause: time for pending rollouts to end before they are cancelled.", gt=0
    )
    max_staleness: int = _opt(1, "Oldest usable rollout, in sync periods (m).", ge=0)
    max_token_staleness: int | None = _opt(
        None, "Tokens older than this many train steps are masked out of the loss.", ge=0
    )
    partial_rollout: bool = _opt(True, "Aborted rollouts go on from where they stopped.")
    oversample: float = _opt(1.0, "Groups started per group needed.", ge=1.0, le=8.0)
    batch_timeout_s: float = _opt(
        600.0, "Time without any event after which a run that waits for a batch is an error.", gt=0
    )


@dataclass(frozen=True)
class ReplayConfig:
    """The buffer between producer and learner."""

    order: Literal["staleness", "fifo"] = _opt(
        "staleness", "Oldest staleness first, or plain FIFO."
    )
    max_bytes: int | None = _opt(
        None,
        "Payload bytes that buffer and producer may hold; default: half of store.capacity.",
        gt=0,
        unit="bytes",
    )
    expiry: Literal["retry", "drop"] = _opt(
        "retry", "What happens to a group that became too stale."
    )
    tail_batch: int = _opt(
        0, "-1: never retry expired groups; 0: at once; N: when N have gathered.", ge=-1
    )
    filter_equal_rewards: bool = _opt(
        True, "Groups whose rewards are all equal teach nothing: count them and drop them."
    )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    every: int = _opt(0, "Train steps between evaluations; 0: only first and last.", ge=0)
    prompts: int = _opt(
        64,
        "Held-out prompts, over all tasks with a source.holdout; 0 turns evaluation off.",
        ge=0,
        le=1 << 20,
    )
    rollouts_per_prompt: int = _opt(1, "Rollouts of each.", ge=1)
    temperature: float = _opt(1.0, "Sampling temperature; 0 is greedy.", ge=0)
    timeout_s: float = _opt(600.0, "Limit for one evaluation.", gt=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """What survives the death of the whole run, and of a learner."""

    every: int = _opt(0, "Train steps between checkpoints; 0: only when the run ends.", ge=0)
    keep: int = _opt(2, "Newest checkpoints that are kept.", ge=1)
    hf_every: int = _opt(
        0, "Train steps between exports for from_pretrained; 0: only at the end.", ge=0
    )
    final: bool = _opt(True, "Write a checkpoint and an export when the run ends.")
    recovery: Literal["arena", "checkpoint"] = _opt(
        "arena",
        "A killed learner goes on from its state in the arena (kept after every step: three times "
        "the weights, twice), or the whole run goes back to its last checkpoint.",
    )


@dataclass(frozen=True)
class StoreConfig:
    """The arena of the run."""

    capacity: int = _opt(
        1 << 30,
        "Bytes of shared memory, reserved as they are used.",
        ge=1 << 20,
        le=1 << 43,
        unit="bytes",
    )
    max_objects: int = _opt(1 << 17, "Objects alive at once.", ge=1024)
    max_sessions: int = _opt(1 << 14, "Sessions alive at once.", ge=64)


@dataclass(frozen=True)
class FaultsConfig:
    """How much may go wrong before the run gives up."""

    restarts_max: int = _opt(5, "Restarts of one process within the window below.", ge=0)
    restarts_within_s: float = _opt(60.0, "The window.", gt=0)
    no_progress_s: float = _opt(
        900.0,
        "Time without any progress after which the run ends with what everybody waits for.",
        gt=0,
    )
    useless_groups_max: int = _opt(
        512, "Failed or filtered groups in a row after which the run ends with the reason.", ge=1
    )


@dataclass(frozen=True)
class MetricsConfig:
    """What is written down."""

    tensorboard: bool = _opt(True, "Write TensorBoard events (needs the tensorboard package).")
    plot: bool = _opt(True, "Write reward.png at the end (needs matplotlib).")
    trajectories_every: int = _opt(
        0, "Train steps between trajectory files (Parquet of texts and rewards); 0: none.", ge=0
    )
    table_rows: int = _opt(8, "Train steps shown in the live table.", ge=1)


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    run: RunConfig = _opt_of(RunConfig, "Name, folder, seed.")
    model: ModelConfig = _opt_of(ModelConfig, "The policy.", shorthand="path")
    warmup: WarmupConfig | None = _opt(None, "Supervised warm-up before RL; absent: none.")
    tasks: tuple[TaskConfig, ...] = _opt((), "The tasks and their weights.")
    rollout: RolloutConfig = _opt_of(RolloutConfig, "Groups and sampling.")
    engine: EngineConfig = _opt_of(EngineConfig, "The model that generates.")
    learner: LearnerConfig = _opt_of(LearnerConfig, "The model that trains.")
    schedule: ScheduleConfig = _opt_of(
        ScheduleConfig, "Who waits for whom.", shorthand="name", keeps=True
    )
    replay: ReplayConfig = _opt_of(ReplayConfig, "The buffer.")
    eval: EvalConfig = _opt_of(EvalConfig, "Held-out evaluation.")
    checkpoint: CheckpointConfig = _opt_of(CheckpointConfig, "Checkpoints and exports.")
    store: StoreConfig = _opt_of(StoreConfig, "The arena.")
    faults: FaultsConfig = _opt_of(FaultsConfig, "Limits of what may go wrong.")
    metrics: MetricsConfig = _opt_of(MetricsConfig, "What is written down.")
