"""Environments, prompt sources and tools that a configuration can name.

Imports no torch. `build_environment` and `build_source` are what the run calls; the classes are for
people who compose their own.
"""

from trainer.environments.build import ByTask, build_environment
from trainer.environments.single_turn import SingleTurn
from trainer.environments.sources import (
    BadPrompts,
    JsonlSource,
    PromptSource,
    ReasoningGymSource,
    build_source,
)
from trainer.environments.tools import ToolLoop

__all__ = [
    "BadPrompts",
    "ByTask",
    "JsonlSource",
    "PromptSource",
    "ReasoningGymSource",
    "SingleTurn",
    "ToolLoop",
    "build_environment",
    "build_source",
]
