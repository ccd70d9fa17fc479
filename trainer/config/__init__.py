"""The configuration of a run: its sections and fields (`schema`), how a file becomes one
(`loading`, `parsing`), and what is refused before any process starts (`checks` and its neighbours).
"""

from trainer.config.loading import load, resolved, resolved_section
from trainer.config.parsing import ConfigMistakes, Mistake
from trainer.config.schema import (
    CheckpointConfig,
    Config,
    EnvironmentConfig,
    EvalConfig,
    FaultsConfig,
    JudgeConfig,
    MetricsConfig,
    ReplayConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    StoreConfig,
    TaskConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigMistakes",
    "EnvironmentConfig",
    "EvalConfig",
    "FaultsConfig",
    "JudgeConfig",
    "MetricsConfig",
    "Mistake",
    "ReplayConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "StoreConfig",
    "TaskConfig",
    "load",
    "resolved",
    "resolved_section",
]
