"""The description of a run, and nothing but the description: plain data, no torch.

The same names are used in YAML, on the command line (`optimizer.learning_rate=1e-4`) and in Python.
"""

from __future__ import annotations

from cornstarch.train.config.data import DataConfig, DataFormat, SourceConfig
from cornstarch.train.config.model import (
    EncoderConfig,
    FactoryConfig,
    LanguageModelConfig,
    LoraConfig,
    ModelConfig,
    PartConfig,
    WholeModelConfig,
)
from cornstarch.train.config.parallel import (
    AsynchronousConfig,
    CompressionConfig,
    DataParallelConfig,
    GossipConfig,
    LocalConfig,
    ModuleParallelConfig,
    ParallelConfig,
)
from cornstarch.train.config.run import RunConfig
from cornstarch.train.config.training import (
    CheckpointConfig,
    EarlyStoppingConfig,
    FeaturesConfig,
    LoggingConfig,
    LoopConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from cornstarch.train.config.values import (
    AboveZero,
    NotNegative,
    Positive,
    Precision,
    Rate,
    Section,
    Share,
    Size,
    TrainMode,
    size_in_bytes,
    size_of_bytes,
)

__all__ = [
    "AboveZero",
    "AsynchronousConfig",
    "CheckpointConfig",
    "CompressionConfig",
    "DataConfig",
    "DataFormat",
    "DataParallelConfig",
    "EarlyStoppingConfig",
    "EncoderConfig",
    "FactoryConfig",
    "FeaturesConfig",
    "GossipConfig",
    "LanguageModelConfig",
    "LocalConfig",
    "LoggingConfig",
    "LoopConfig",
    "LoraConfig",
    "ModelConfig",
    "ModuleParallelConfig",
    "NotNegative",
    "OptimizerConfig",
    "ParallelConfig",
    "PartConfig",
    "Positive",
    "Precision",
    "Rate",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "Share",
    "Size",
    "SourceConfig",
    "TrainMode",
    "WholeModelConfig",
    "size_in_bytes",
    "size_of_bytes",
]
