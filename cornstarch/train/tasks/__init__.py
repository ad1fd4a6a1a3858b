"""The kinds of training: each a model, how samples become its batches, its loss, its score and its folder."""

from cornstarch.train.tasks.build import build_task
from cornstarch.train.tasks.task import Measures, Task

__all__ = ["Measures", "Task", "build_task"]
