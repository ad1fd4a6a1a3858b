"""Pipeline schedules: stages and microbatches in, a list of actions per place out; pure functions, no torch."""

from cornstarch.schedule.actions import Action, Kind, Schedule
from cornstarch.schedule.graph import StageGraph, StageNode
from cornstarch.schedule.policies import POLICIES, Policy, count_in_flight, make_schedule, register_schedule

__all__ = [
    "POLICIES", "Action", "Kind", "Policy", "Schedule", "StageGraph", "StageNode", "count_in_flight", "make_schedule",
    "register_schedule",
]  # fmt: skip
