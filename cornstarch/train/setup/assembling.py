"""Everything that the steps of a run need, made in one order: what is below is made from what is above."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from cornstarch.train.attribution import COUNTING
from cornstarch.train.clock import StepClock
from cornstarch.train.counting import Counter, OwnCounter
from cornstarch.train.data.balancing import Balancer, balancer_of, told_gain
from cornstarch.train.data.feeding import Feed
from cornstarch.train.evaluation import Evaluator
from cornstarch.train.exchanging import Exchanging
from cornstarch.train.failure import LossWatch
from cornstarch.train.optim import LearningRate, highest_rate
from cornstarch.train.profiling import as_range
from cornstarch.train.setup.model import ReadyModel, ready_model
from cornstarch.train.setup.start import Start
from cornstarch.train.stepping import Passes
from cornstarch.train.stopping import Stopping
from cornstarch.train.tasks.task import Task
from cornstarch.train.updating import WeightUpdate


@dataclass(frozen=True)
class RunSetup:
    """A run that is ready for its first step."""

    start: Start
    model: ReadyModel
    counter: Counter
    """Adds up what a step has in all processes."""
    update: WeightUpdate
    total_steps: int
    rates: LearningRate
    exchange: Exchanging
    """How replicas keep together, where torch does not see to it alone."""
    balancer: Balancer | None
    """Deals out samples by what they cost, if the run asks for it."""
    evaluator: Evaluator
    watch: LossWatch
    feed: Feed
    clock: StepClock
    passes: Passes


def assemble(start: Start, task: Task, verify: Callable[[], None], stopping: Stopping, held: ExitStack) -> RunSetup:
    """Make all of it; all processes must call it.

    Args:
        start: The run.
        task: What is trained.
        verify: Refuses a plan that computes something else; called before a model is cut over processes.
        stopping: Tells whether this process was told to end.
        held: Takes what must be closed when the run ends.
    """
    config, placement, replica = start.config, start.placement, start.standing.replica
    model = ready_model(start, task, verify, held)
    counter = counter_of(start, model, stopping)
    shares = shares_of(start)
    update = WeightUpdate(config, model.parts, placement, model.pipeline, replica.count, shares)
    total_steps = start.data.total_steps()
    highest = highest_rate(config.optimizer, model.all_parts, replica.count)
    rates = LearningRate(update.optimizer, config.schedule, total_steps, highest)
    exchange = exchanging_of(start, model, update)
    balancer = told_balancer(start, model)
    evaluator = Evaluator(task, config, start.data.evaluation, placement, replica, model.pipeline)
    watch = LossWatch(config, placement)
    feed = Feed(placement)
    clock = StepClock.of(placement.device)
    passes = Passes(model.loss, feed, model.pipeline, model.ahead, update.scaler, shares)
    return RunSetup(
        start, model, counter, update, total_steps, rates, exchange, balancer, evaluator, watch, feed, clock, passes
    )


def counter_of(start: Start, model: ReadyModel, stopping: Stopping) -> Counter:
    """Return what adds up what a step has in all processes; all of them must ask."""
    kind = OwnCounter if start.standing.is_apart else Counter
    modalities = list(model.task.modalities())
    flops = as_range(COUNTING, model.flops.total)
    return kind(modalities, start.standing.replica.size, lambda: stopping.asked, flops)


def shares_of(start: Start) -> int:
    """Return over how many processes the loss of a step is shared out."""
    # Where each process trains by itself, the loss of its own batch is all that it knows.
    return 1 if start.standing.is_apart else start.standing.replica.shares


def exchanging_of(start: Start, model: ReadyModel, update: WeightUpdate) -> Exchanging:
    """Return how replicas keep together; all processes must ask."""
    several = start.standing.ranks > 1
    exchange = start.spreading.exchange(update.optimizer, update.scaler) if several else None
    plan = start.standing.layout.plan.data
    return Exchanging(exchange, plan, update.trained, model.module, update.optimizer)


def told_balancer(start: Start, model: ReadyModel) -> Balancer | None:
    """Return what deals out samples by cost, and tell what that gains; None if the run does not ask for it."""
    config, data, standing = start.config, start.data, start.standing
    collator = model.task.collator
    found = balancer_of(config, collator, data.train, model.flops.step, standing.layout, start.folder)
    if found is not None:
        start.note(told_gain(found, data.order, config, standing.replica.count))
    return found


__all__ = ["RunSetup", "assemble", "counter_of", "exchanging_of", "shares_of", "told_balancer"]
