"""What a run trains: made or taken over, spread over its processes, and made quick."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel.lending import lends
from cornstarch.pipeline.apply import Pipeline
from cornstarch.train.budget import Recomputation, fit_activations
from cornstarch.train.config import RunConfig
from cornstarch.train.data.collate import ChatCollator
from cornstarch.train.data.formats import JoinedSources
from cornstarch.train.features.ahead import EncodedAhead, encoded_ahead
from cornstarch.train.features.keeping import KeptFeatures, kept_features
from cornstarch.train.flops import RunFlops
from cornstarch.train.footprint import MemoryWatch
from cornstarch.train.parts import Part
from cornstarch.train.setup.start import Start
from cornstarch.train.speed import Speed, not_compiled, speed_up
from cornstarch.train.state import seed_all
from cornstarch.train.stepping import PortionLoss
from cornstarch.train.surveying import survey_own_module
from cornstarch.train.tasks import build_task
from cornstarch.train.tasks.task import Task


@dataclass(frozen=True)
class ReadyModel:
    """A model that can be trained."""

    task: Task
    loss: PortionLoss
    pipeline: Pipeline | None
    """This process's stages, where the model is cut into such."""
    parts: list[Part]
    """What this process has of the parts of the model."""
    all_parts: list[Part]
    """Those of the whole model, to be told of."""
    buckets: str | None
    """What gradients travel in, if that was chosen for the link."""
    recomputation: Recomputation | None
    """Which layers compute their activations again, if there is a budget for them."""
    flops: RunFlops
    features: KeptFeatures | None
    """What frozen encoders made of items, if that is kept."""
    ahead: EncodedAhead | None
    """Encodes the items of several portions at once, where it can."""
    speed: Speed
    memory: MemoryWatch

    @property
    def module(self) -> nn.Module:
        """The model itself, without what it is wrapped in."""
        return self.task.model


def check_given(config: RunConfig, task: Task | None) -> None:
    """Refuse a task that the config describes, too, and a config that describes none where none is given."""
    if (task is None) == (config.model.given is not None):
        raise ConfigError(
            f"model.given = {config.model.given}, and {'no' if task is None else 'a'} task was handed over. "
            "A model made in Python goes through Trainer.from_objects, or Trainer(config, task=…)."
        )


def described_task(start: Start) -> Task:
    """Return what the config describes; of its weights, what this process will need."""
    data = start.data
    evaluation = JoinedSources(list(data.evaluation.values()))
    return build_task(start.config, data.train, evaluation, start.spreading.cuts(data.train))


def ready_model(start: Start, task: Task, verify: Callable[[], None], held: ExitStack) -> ReadyModel:
    """Bring a task's model to its device and its processes; all of them must call it.

    Args:
        start: The run.
        task: What is trained.
        verify: Refuses a plan that computes something else; called before a model is cut over processes.
        held: Takes what must be closed when the run ends.
    """
    config, placement, standing, spreading = start.config, start.placement, start.standing, start.spreading
    loss = PortionLoss(task, placement)
    if standing.ranks > 1:
        survey_own_module(task.model, standing.layout.plan, partial(start.data.some_batch, task.collator))
    spreading.take(task)
    recomputation = fit_activations(task.model, config, placement, start.data.train, standing.replica.count, start.note)
    flops = RunFlops(task, config, start.note)  # of the whole model, before it is cut
    features = held.enter_context(kept_features(task, config, placement))
    if standing.ranks > 1:
        spreading.tell()
        verify()
        spreading.spread(loss.computed_by)
        # Each process drops out other values, but those that compute the same.
        seed_all(config.seed + standing.replica.share)
    speed = _quickened(start, task)
    return ReadyModel(
        task,
        loss,
        spreading.pipeline,
        spreading.parts,
        spreading.all_parts,
        spreading.buckets,
        recomputation,
        flops,
        features,
        # Encoders that lend items are called once for each portion, in every replica.
        None if lends(task.model) else encoded_ahead(task, config, placement),
        speed,
        spreading.memory,
    )


def _quickened(start: Start, task: Task) -> Speed:
    """Let a model that is spread compute quickly, and tell its parts that they stay as they are."""
    config, standing = start.config, start.standing
    speed = speed_up(
        task.model,
        start.placement.device,
        config.compile,
        config.loop.activation_share,
        not_compiled(standing.layout.plan, standing.ranks),
        start.note,
        config.fp8,
    )
    if start.spreading.pipeline is None and isinstance(task.model, MultimodalModel):
        for encoder in task.model.encoders.values():
            encoder.settle()
    if speed.compiled and isinstance(task.collator, ChatCollator):
        task.collator.expect_compiled()
    return speed


__all__ = ["ReadyModel", "check_given", "described_task", "ready_model"]
