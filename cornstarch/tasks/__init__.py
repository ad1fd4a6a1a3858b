"""The training tasks. Each has a model, a collator, a loss, measures and an export."""

from cornstarch.tasks.build import build_task
from cornstarch.tasks.task import Measures, Task, register_task

__all__ = ["Measures", "Task", "build_task", "register_task"]
