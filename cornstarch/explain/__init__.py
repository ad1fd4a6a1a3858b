"""Explanations for learners, drawn from the code that runs: collectives, shared parameters, cut tensors, schedules."""

from cornstarch.explain.story import Story
from cornstarch.explain.topics import TOPICS, explain

__all__ = ["TOPICS", "Story", "explain"]
