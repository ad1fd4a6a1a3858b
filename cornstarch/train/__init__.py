"""The loop and what surrounds it: the run's description, data, checkpoints, metrics."""

from typing import TYPE_CHECKING

from cornstarch.lazily import lazy_attributes

if TYPE_CHECKING:
    from cornstarch.config import RunConfig
    from cornstarch.config.config_file import config_difference, dump_config, load_config
    from cornstarch.metrics.metrics import RunResult, StepResult
    from cornstarch.trainer.checkpointer import export_run, load_run
    from cornstarch.trainer.trainer import Trainer

__all__ = [
    "RunConfig", "RunResult", "StepResult", "Trainer", "config_difference", "dump_config", "export_run", "load_config",
    "load_run",
]  # fmt: skip

# Looked up when first asked for (PEP 562): the command line reads configs and must not wait for torch.
_MODULES = {
    "RunConfig": "cornstarch.config",
    "RunResult": "cornstarch.metrics.metrics",
    "StepResult": "cornstarch.metrics.metrics",
    "Trainer": "cornstarch.trainer.trainer",
    "export_run": "cornstarch.trainer.checkpointer",
    "load_run": "cornstarch.trainer.checkpointer",
    "config_difference": "cornstarch.config.config_file",
    "dump_config": "cornstarch.config.config_file",
    "load_config": "cornstarch.config.config_file",
}

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
