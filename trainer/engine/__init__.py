"""Engines: what generates. `protocol` is the promise; `scripted` keeps it without a model.

Importing this package imports no torch; model-backed engines are modules of their own.
"""

from trainer.engine.protocol import (
    Engine,
    EngineInfo,
    GenerateRequest,
    Generation,
    SamplingParams,
    SyncMode,
    Tokenizer,
    WeightsVersion,
)

__all__ = [
    "Engine",
    "EngineInfo",
    "GenerateRequest",
    "Generation",
    "SamplingParams",
    "SyncMode",
    "Tokenizer",
    "WeightsVersion",
]
