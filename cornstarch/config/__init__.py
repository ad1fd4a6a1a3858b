"""The config of a run: plain data, no torch.

The same names are used in YAML, on the command line (`optimizer.learning_rate=1e-4`) and in Python.
"""

from __future__ import annotations

from cornstarch.config.data import DataConfig, DataFormat, SourceConfig
from cornstarch.config.fields import Precision, Section, TrainMode, format_size, parse_size
from cornstarch.config.model import (
    EncoderConfig,
    FactoryConfig,
    LanguageModelConfig,
    LoraConfig,
    ModelConfig,
    PartConfig,
    WholeModelConfig,
)
from cornstarch.config.parallel import ParallelConfig
from cornstarch.config.run import RunConfig
from cornstarch.config.training import (
    CheckpointConfig,
    EarlyStoppingConfig,
    FeaturesConfig,
    LoggingConfig,
    LoopConfig,
    OptimizerConfig,
    ScheduleConfig,
)

__all__ = [
    "CheckpointConfig", "DataConfig", "DataFormat", "EarlyStoppingConfig", "EncoderConfig", "FactoryConfig",
    "FeaturesConfig", "LanguageModelConfig", "LoggingConfig", "LoopConfig", "LoraConfig", "ModelConfig",
    "OptimizerConfig", "ParallelConfig", "PartConfig", "Precision", "RunConfig", "ScheduleConfig", "Section",
    "SourceConfig", "TrainMode", "WholeModelConfig", "format_size", "parse_size",
]  # fmt: skip
