"""The config of a run: plain data, no torch.

The same names are used in YAML, on the command line (`optimizer.learning_rate=1e-4`) and in Python.
"""

from cornstarch.config.fields import Section, TrainMode, format_size, parse_size
from cornstarch.config.run import ParallelConfig, RunConfig
from cornstarch.plan.data_options import Precision

from cornstarch.config.run_sections import (  # isort: skip
    CheckpointConfig, FeaturesConfig, LaunchConfig, LoggingConfig,
)  # fmt: skip
from cornstarch.config.sections import (  # isort: skip
    DataConfig, DataFormat, EarlyStoppingConfig, EncoderConfig, FactoryConfig, LanguageModelConfig, LoopConfig,
    LoraConfig, ModelConfig, OptimizerConfig, PartConfig, ScheduleConfig, SourceConfig, WholeModelConfig,
)  # fmt: skip

__all__ = [
    "CheckpointConfig", "DataConfig", "DataFormat", "EarlyStoppingConfig", "EncoderConfig", "FactoryConfig",
    "FeaturesConfig", "LanguageModelConfig", "LaunchConfig", "LoggingConfig", "LoopConfig", "LoraConfig", "ModelConfig",
    "OptimizerConfig", "ParallelConfig", "PartConfig", "Precision", "RunConfig", "ScheduleConfig", "Section",
    "SourceConfig", "TrainMode", "WholeModelConfig", "format_size", "parse_size",
]  # fmt: skip
