"""The configuration of a run: its sections and fields (`schema`), how a file becomes one
(`parsing`), and what is refused before any process starts (`checks` and its neighbours).
"""

from trainer.config.schema import (
    CheckpointConfig,
    Config,
    ConfigMistakes,
    EnvironmentConfig,
    EvalConfig,
    FaultsConfig,
    JudgeConfig,
    MetricsConfig,
    Mistake,
    ReplayConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    StoreConfig,
    TaskConfig,
    load,
    resolved,
    resolved_section,
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
