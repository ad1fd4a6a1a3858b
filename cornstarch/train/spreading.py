"""How the model of a run comes to its processes: what of it each of them reads, and how they share it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compat import move_present
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.takeover.undivided import UndividedModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.models.multimodal_language_model.whole_processing import WholeModelProcessor
from cornstarch.parallel import spread
from cornstarch.parallel.apply import TensorCut, tensor_cut, whole_reasons
from cornstarch.parallel.data import measured_bucket
from cornstarch.parallel.exchange import Exchange, exchange_of
from cornstarch.parallel.loading import note_whole
from cornstarch.parallel.loss_scale import LossScale
from cornstarch.parallel.mesh import Meshes
from cornstarch.pipeline.apply import Pipeline
from cornstarch.pipeline.staging import StageGroups, Staging, leave_elsewhere
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.pipeline.unready import must_be_whole
from cornstarch.plan.layout import Layout
from cornstarch.plan.options import APART
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.train.config import RunConfig
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.failure import is_out_of_memory, out_of_memory
from cornstarch.train.footprint import MemoryWatch
from cornstarch.train.loss_check import check_loss
from cornstarch.train.on_meta import model_on_meta
from cornstarch.train.part_cut import Cuts, PartCut
from cornstarch.train.parts import Part, keep_in_precision, parts_of
from cornstarch.train.precision import Placement
from cornstarch.train.recompute import recompute_activations, recompute_planned
from cornstarch.train.tasks.build import task_name
from cornstarch.train.tasks.conversation import ConversationTask
from cornstarch.train.tasks.task import Task
from cornstarch.train.weights import without_adapters

LossOf = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""Returns the loss of a portion, computed by what stands for the model."""


class Spreading:
    """The way of a model to the processes of a run: `cuts` while it is built, `take`, `spread` if there are several.

    Args:
        config: The run.
        layout: Who holds what.
        placement: Where this process computes, and in what.
        note: Tells the user something.
    """

    def __init__(self, config: RunConfig, layout: Layout, placement: Placement, note: Callable[[str], None]) -> None:
        self._config, self._layout, self._placement, self._note = config, layout, placement, note
        self._is_pipeline = layout.plan.is_pipeline and layout.world > 1
        self._meshes: Meshes | None = None
        self._groups: StageGroups | None = None
        self._templates: Mapping[str, PipelineTemplate | None] = {}
        self._kept_whole: dict[str, str] = {}
        self.pipeline: Pipeline | None = None
        """This process's stages, where the model is cut into such."""
        self.parts: list[Part] = []
        """What this process has of the parts of the model."""
        self.all_parts: list[Part] = []
        """The parts of the whole model, to be told of."""
        self.buckets: str | None = None
        """What gradients travel in, if that was chosen for the link."""

    # ------------------------------------------------------------------ reading

    def cuts(self, train: SampleSource) -> Cuts | None:
        """Return what of each part this process reads, if it is not all of it.

        Args:
            train: The training data; it may say which kind of model there is.
        """
        if self._is_pipeline:
            return self._stage_cuts(train) if self._is_read_by_part(train) else None
        if all(plan.tp == 1 for plan in self._layout.plan.modules.values()):
            return None
        self._meshes = meshes = Meshes(self._layout, self._placement.device.type)
        return tensor_cuts(self._layout, meshes)

    def _is_read_by_part(self, train: SampleSource) -> bool:
        """Whether the parts of the model are read one by one, so that each can be read by stages."""
        model = self._config.model
        if model.start_from is not None or (model.language_model is None and model.whole is None):
            return False
        return model.whole is None or task_name(self._config, model.whole, train) == "causal-lm"

    def _stage_cuts(self, train: SampleSource) -> Cuts:
        """Fix the stages on a model without weights; return what of each part this process's have."""
        with torch.random.fork_rng(devices=[]):
            bare = model_on_meta(self._config, train)
        assert isinstance(bare, MultimodalModel)
        if self._config.parallel.verify != "never":
            check_loss(bare, self._layout)  # before stages are: why there can be none would not be said
        staging = Staging(bare, self._layout)
        self._templates = staging.templates
        self._kept_whole = self._must_be_whole(staging)
        held, here = staging.held(), {name: plan for name, _, plan in staging.here()}
        modules: dict[str, nn.Module] = {name: encoder.module for name, encoder in bare.encoders.items()}
        names = {
            name: _names(module, held) for name, module in {**modules, LANGUAGE_MODEL: bare.language_model}.items()
        }
        if any(plan.tp > 1 for plan in self._layout.plan.modules.values()):
            self._groups = StageGroups(self._layout, self._placement.device)

        def of(name: str, is_encoder: bool) -> PartCut | None:
            if name in self._kept_whole:
                return None
            tensors = None
            if name in here and here[name].tp > 1:
                assert self._groups is not None
                tensors = TensorCut(here[name], self._groups.meshes, is_encoder)
            return PartCut(tensors, names[name])

        return of

    def _must_be_whole(self, staging: Staging) -> dict[str, str]:
        """Return the modules that must be whole in this process until they are cut, by name, and why."""
        found = must_be_whole(staging, self._config.data.packing)
        if self._config.features.cache and isinstance(staging.model, MultimodalModel):
            found |= dict.fromkeys(staging.model.encoders, "its features are kept, under a name made of its weights")
        return found

    # ------------------------------------------------------------------ taking it over

    def take(self, task: Task) -> None:
        """Bring a task's model, or what of it this process will need, into its precision and to its device."""
        self.task, self.model = task, task.model
        if isinstance(self.model, UndividedModel):
            _check_undivided(self.model, self._layout, self._is_pipeline)
        if self._is_pipeline:
            self._give_up()
        self.parts = self.all_parts = parts_of(self.model, self._config.model, self._config.optimizer)
        keep_in_precision(self.parts, self._placement.dtype)
        if self._config.loop.activation_checkpointing:
            recompute_activations(self.model)
        else:
            recompute_planned(self.model, self._layout)
        try:
            if self._is_pipeline:
                move_present(self.model, self._placement.device)
            else:
                self.model.to(self._placement.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, self.model, self.parts, self._config, self._placement) from None
        self.memory = MemoryWatch(self.model, self._config, self._layout.replicate)

    def _give_up(self) -> None:
        """Give up the memory of what other stages own, of a model or of parts that were made whole."""
        staging = Staging(self.model, self._layout, self._templates)
        self._templates = staging.templates
        self._kept_whole |= self._must_be_whole(staging)
        held = staging.held()
        for name, reason in self._kept_whole.items():
            part = _part_of(self.model, name)
            held.update(map(id, part.parameters()))
            note_whole(part.module if isinstance(part, ModalEncoderModule) else part, reason)
        leave_elsewhere(self.model, held)

    # ------------------------------------------------------------------ sharing it out

    def tell(self) -> None:
        """Tell of what is not as one might expect."""
        for warning in self._layout.warnings:
            self._note(warning)
        if isinstance(self.model, UndividedModel):
            self._note(f"The model is trained in one piece, by its own forward. {self.model.reason}")
        for name, reason in whole_reasons(self.model, self._layout).items():
            self._note(f"{name} was read whole by every process before it was cut: {reason}.")

    def spread(self, loss_of: LossOf) -> None:
        """Let the processes train the model together; all of them must call it.

        Args:
            loss_of: What a pipeline is run for.
        """
        layout, config = self._layout, self._config
        # Stages whose parameters are whole need not be in step: their gradients meet after all passes.
        in_step = not self._is_pipeline or layout.exchanges_in_passes
        in_step = in_step and layout.plan.data.kind not in APART
        if in_step and isinstance(self.task, ConversationTask):
            processor = self.task.collator.processor
            if isinstance(self.model, UndividedModel) and isinstance(processor, WholeModelProcessor):
                self.model.keep_encoders_running(processor.stand_in_rows())
            elif self.task.model.encoders:
                self.task.model.keep_encoders_running(processor.stand_ins())
        shapes = {name: parameter.shape for part in self.parts for name, parameter in part.parameters.items()}
        self.all_parts = [part.described() for part in self.parts]
        if self._is_pipeline:
            self.pipeline = Pipeline(
                self.model,
                layout,
                self._placement.device,
                config.loop.accumulation,
                self._templates,
                computing=self._placement.computing,
                packed=config.data.packing,
                groups=self._groups,
            )
            self.pipeline.set_call(loss_of)
        else:
            self._meshes = self._meshes or Meshes(layout, self._placement.device.type)
            lend = self._lends()
            self.task.wrapped = spread(
                self.model, layout, self._placement.device.type, self._meshes, lend, config.data.packing
            )
            if (measured := measured_bucket(self.task.wrapped)) is not None:
                self.buckets = measured.line
                self._note(f"gradients travel in {measured.line}.")
        # Sharded parameters are new objects, and with FSDP 1 of other shapes.
        parts = parts_of(self.model, config.model, config.optimizer, is_stage=self._is_pipeline)
        self.parts = [replace(part, shapes=shapes) for part in parts]

    def _lends(self) -> bool:
        """Whether replicas lend items to one another; say so."""
        if not self._config.data.split_images:
            return False
        if not isinstance(self.task, ConversationTask) or not self.task.model.encoders:
            raise ConfigError(
                "data.split_images = true: replicas lend the images and sounds of conversations to one another, which "
                "encoders read; this model has no encoder, or another task.\n  Leave it out."
            )
        if self._layout.dp > 1:
            self._note("Replicas lend images to one another where one has more than its share (data.split_images).")
        return self._layout.dp > 1

    def exchange(self, optimizer: torch.optim.Optimizer, scaler: LossScale | None) -> Exchange | None:
        """Return how replicas keep together, if torch does not see to it alone; all processes must ask."""
        if self._meshes is None or self.task.wrapped is None:
            return None
        plan = self._layout.plan.data
        return exchange_of(self.model, self.task.wrapped, self._meshes.data, plan, optimizer, scaler)


def tensor_cuts(layout: Layout, meshes: Meshes) -> Cuts:
    """Return how the matrices of parts are cut while they are read, where all modules share their ranks."""

    def of(name: str, is_encoder: bool) -> PartCut | None:
        cut = tensor_cut(layout, meshes, name, is_encoder)
        return None if cut is None else PartCut(cut)

    return of


def _names(module: nn.Module, held: set[int]) -> frozenset[str]:
    """Return the names that the held parameters of a part have in its folder, where there are no adapters."""
    named = unwrap(module).named_parameters(remove_duplicate=False)
    return frozenset(without_adapters(name) for name, parameter in named if id(parameter) in held)


def _part_of(model: nn.Module, name: str) -> nn.Module:
    if not isinstance(model, MultimodalModel):
        return model
    return model.language_model if name == LANGUAGE_MODEL else model.encoders[name]


def _check_undivided(model: UndividedModel, layout: Layout, is_pipeline: bool) -> None:
    """Refuse a plan that cuts a model which is trained in one piece."""
    plans = layout.plan.modules.values()
    if is_pipeline or any(plan.tp > 1 or plan.cp > 1 for plan in plans):
        raise ConfigError(
            f"parallel: {type(unwrap(model.language_model)).__name__} is trained in one piece: it has no stages, and "
            f"neither its matrices nor its tokens are cut, so tp, cp and stages must be 1. {model.reason}"
        )


__all__ = ["LossOf", "Spreading", "tensor_cuts"]
