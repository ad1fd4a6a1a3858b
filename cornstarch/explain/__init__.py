"""Explanations of collectives, data, tensor and context parallelism and schedules, drawn from the code that runs."""

from cornstarch.explain.story import Story
from cornstarch.explain.topics import TOPICS, explain

__all__ = ["TOPICS", "Story", "explain"]
