"""The loop and what surrounds it: the run's description, data, checkpoints, metrics."""

from typing import TYPE_CHECKING

from cornstarch.lazily import names_of

if TYPE_CHECKING:
    from cornstarch.train.config import RunConfig
    from cornstarch.train.results import RunResult, StepResult
    from cornstarch.train.source import config_difference, dump_config, load_config
    from cornstarch.train.trainer import Trainer
    from cornstarch.train.using import export_run, load_run

__all__ = [
    "RunConfig", "RunResult", "StepResult", "Trainer", "config_difference", "dump_config", "export_run", "load_config",
    "load_run",
]  # fmt: skip

# Looked up when first asked for (PEP 562): the command line reads configs and must not wait for torch.
_MODULES = {
    "RunConfig": "cornstarch.train.config",
    "RunResult": "cornstarch.train.results",
    "StepResult": "cornstarch.train.results",
    "Trainer": "cornstarch.train.trainer",
    "export_run": "cornstarch.train.using",
    "load_run": "cornstarch.train.using",
    "config_difference": "cornstarch.train.source",
    "dump_config": "cornstarch.train.source",
    "load_config": "cornstarch.train.source",
}

__getattr__, __dir__ = names_of(__name__, _MODULES)
