"""A model, its optimizer and its data made ready for several processes, as a plugin says.

booster = Booster(plugin=plugin)
model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
    model, optimizer, criterion, dataloader, lr_scheduler)
batches = iter(dataloader)
result = booster.execute_pipeline(batches, model, criterion, optimizer, return_loss=True)
optimizer.step()
optimizer.zero_grad()
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.launch import current_world
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import OwnedParameters, processes, spread
from cornstarch.parallel.loss_scale import LossScale
from cornstarch.pipeline.apply import Pipeline
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.plugin.boosted import Asked, BoostedModel, Criterion
from cornstarch.plugin.loaders import dealt_out
from cornstarch.plugin.microbatches import BatchCutter
from cornstarch.plugin.multimodal_parallel_plugin import MultimodalParallelPlugin, StageManager
from cornstarch.plugin.optimizers import GroupedParameters, Stepping
from cornstarch.plugin.weighing import TokenCount
from cornstarch.train.boosted_state import (
    load_optimizer_state,
    load_values,
    load_weights,
    save_optimizer_state,
    save_values,
    save_weights,
)
from cornstarch.train.holdings import named_parameters
from cornstarch.train.loss_check import check_loss
from cornstarch.train.optimizer_check import refuse_pieces
from cornstarch.train.precision import Placement
from cornstarch.train.recompute import recompute_planned
from cornstarch.train.start_check import untested_cuts

PathLike = str | os.PathLike[str]


class Booster:
    """Makes a model parallel, and runs it.

    Nothing happens before `boost`.

    Args:
        plugin: How.
    """

    def __init__(self, plugin: MultimodalParallelPlugin) -> None:
        if not isinstance(plugin, MultimodalParallelPlugin):
            raise ConfigError(
                f"Booster(plugin=…) was given a {type(plugin).__name__}; expected a MultimodalParallelPlugin. One "
                "module is said how to be spread by a ModalParallelPlugin inside of it."
            )
        self.plugin = plugin
        self._scale: LossScale | None = None
        self._boosted: BoostedModel | None = None
        self._stepping: Stepping | None = None

    # -------------------------------------------------------------------------------------------- boosting

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[BoostedModel, Any, Criterion | None, Any, Any]:
        """Cut a model and what belongs to it; return the five, to be used from now on.

        All processes must call it, with the same weights. The model is changed in place: what other processes have is
        given up. The optimizer stays the same object, over the parameters of this process.

        Args:
            model: The whole model, with what is trained declared.
            optimizer: Made from the model's parameters; it has made no step.
            criterion: Takes the model's output and the microbatch; returns the mean loss. It is given back as it is.
            dataloader: Its `batch_size` is that of a replica. Samples are dealt out to replicas.
            lr_scheduler: Of this optimizer.
        """
        if self._boosted is not None:
            raise ConfigError("This booster has a model already. Make another Booster for another model.")
        self._check(model, optimizer, lr_scheduler)
        layout = self.plugin.layout()
        placement = self._placement(model)
        groups = None if optimizer is None else GroupedParameters(optimizer, named_parameters(model))
        if optimizer is not None:
            self._check_optimizer(optimizer, model, layout)
        loader = dataloader
        if dataloader is not None:
            loader = dealt_out(dataloader, layout.place(processes.rank()).dp, layout.dp)
        self._warn(model, layout)
        boosted = self._made(model, layout, placement)
        self._boosted, self._scale = boosted, self.plugin.loss_scale()
        if groups is not None:
            self._stepping = self._attached(groups, boosted)
        self.plugin.stage_manager = _stage_manager(boosted)
        return boosted, optimizer, criterion, loader, lr_scheduler

    def _check(self, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
        if isinstance(model, BoostedModel) or not isinstance(model, nn.Module):
            raise ConfigError(f"booster.boost was given a {type(model).__name__} as model; expected a torch.nn.Module.")
        if processes.is_alone() and (world := current_world()).size > 1:
            raise ConfigError(
                f"This is process {world.rank} of {world.size}, but they do not know one another. Boost inside `with "
                "cornstarch.launch.start_process_group(cornstarch.launch.current_world(), device):`, or call "
                "torch.distributed.init_process_group() first."
            )
        if not processes.is_alone() and "gloo" not in _backends():
            raise ConfigError(
                "The process group exchanges nothing that is on the CPU. Make it with "
                "torch.distributed.init_process_group(backend='cpu:gloo,cuda:nccl')."
            )
        attached = getattr(lr_scheduler, "optimizer", optimizer)
        if lr_scheduler is not None and attached is not optimizer:
            raise ConfigError("The lr_scheduler is of another optimizer than the one that is boosted.")
        self._check_encoders(model)
        if self.plugin.precision == "fp16" and any(
            parameter.dtype == torch.float16 for parameter in model.parameters() if parameter.requires_grad
        ):
            raise ConfigError("precision = fp16 needs trained weights in fp32: load the model in float32.")

    def _check_encoders(self, model: nn.Module) -> None:
        """Every encoder has a plugin, and every plugin an encoder."""
        there = list(model.encoder_names) if isinstance(model, MultimodalModel) else []
        given = list(self.plugin.encoder_plugins)
        for name in there:
            if name not in given:
                raise ConfigError(
                    f"The {name} encoder has no plugin: encoder_plugins has {', '.join(given) or 'none'}. Add "
                    f"encoder_plugins={{{name!r}: ModalParallelPlugin(…)}}."
                )
        for name in given:
            if name not in there:
                raise ConfigError(
                    f"encoder_plugins[{name!r}]: the model has no such encoder; it has {', '.join(there) or 'none'}."
                )

    def _placement(self, model: nn.Module) -> Placement:
        """Return where this process computes, and in what."""
        first = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError("The model is on the meta device, without weights. Load them before boost.")
        device = torch.device("cpu") if first is None else first.device
        if torch.cuda.is_available() and "nccl" in _backends():
            device = torch.device("cuda", torch.cuda.current_device())
        model.to(device)
        return Placement(device, self.plugin.precision or "fp32")

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module, layout: Layout) -> None:
        """Refuse an optimizer that would do something else on the pieces that ranks hold."""
        kind: Any = type(optimizer)
        taken = inspect.signature(kind).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in taken}
        trained = [name for name in layout.plan.modules if _is_trained(model, name)]
        try:
            refuse_pieces(lambda parameters: kind(parameters, **options), kind.__name__, layout, trained)
        except (TypeError, AttributeError, RuntimeError) as error:
            warnings.warn(
                f"Whether ranks can step parts of the parameters with {kind.__name__} could not be tried on a small "
                f"matrix ({type(error).__name__}: {error}). It must compute the step of each number by itself.",
                stacklevel=3,
            )

    def _warn(self, model: nn.Module, layout: Layout) -> None:
        if processes.rank() == 0:
            try:
                check_loss(model, layout)
            except ConfigError as error:
                warnings.warn(f"{str(error).partition('.')[0]}. Each replica computes its own.", stacklevel=3)
        untested = untested_cuts(model, layout) if layout.world > 1 else []
        if untested and processes.rank() == 0:
            warnings.warn(
                f"No test has cut these before: {', '.join(untested)}. `cornstarch verify` compares a tiny twin of a "
                "model, cut, with itself in one piece.",
                stacklevel=3,
            )

    def _made(self, model: nn.Module, layout: Layout, placement: Placement) -> BoostedModel:
        plugin, plan = self.plugin, layout.plan
        recompute_planned(model, layout)
        in_step = layout.dp > 1 or (plan.is_pipeline and layout.exchanges_in_passes)
        if plugin.processor is not None and isinstance(model, MultimodalModel) and in_step:
            model.keep_encoders_running(plugin.processor.stand_ins())
        # Both look at the whole model.
        cutter, tokens = BatchCutter(model, plugin.num_microbatches, plugin.microbatch_size), TokenCount(model)
        pipeline, wrapped = None, model
        if plan.is_pipeline:
            many = plugin.num_microbatches or 1
            pipeline = Pipeline(
                model, layout, placement.device, many, plugin.templates(), placement.computing, plugin.packed
            )
        elif layout.world > 1:
            wrapped = spread(model, layout, placement.device.type, packed=plugin.packed)
        return BoostedModel(
            model,
            layout,
            pipeline,
            wrapped,
            device=placement.device,
            cutter=cutter,
            tokens=tokens,
            moved=placement.moved,
            computing=placement.computing,
            weigh=plugin.loss_weight,
        )

    def _attached(self, groups: GroupedParameters, boosted: BoostedModel) -> Stepping:
        parameters = named_parameters(boosted.module)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        owned = None
        if boosted.layout.world > 1 and boosted.layout.plan.data.kind == "zero1":
            stepped = {name: parameter for name, parameter in trained.items() if name in set(groups.names)}
            group = None if boosted.pipeline is None else boosted.pipeline.data_group
            owned = OwnedParameters(stepped, group, is_stage=boosted.pipeline is not None)
        groups.take(parameters, None if owned is None else owned.names)
        share = None if owned is None else owned.share
        return Stepping(groups, list(trained.values()), boosted.clip, self.plugin.max_norm, self._scale, share)

    # -------------------------------------------------------------------------------------------- running

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        *,
        loss_everywhere: bool = False,
    ) -> dict[str, Any]:
        """Take the next batch, cut it into microbatches, and do forward and backward of all of them.

        Gradients are left in the parameters: `optimizer.step()` and `optimizer.zero_grad()` are yours. Under
        `torch.no_grad()` it is forward alone. All processes must call it.

        Args:
            data_iter: Yields batches; all processes of a replica are given the same.
            model: What `boost` returned.
            criterion: Called on the last stage with the model's output and the microbatch; returns its mean loss.
            optimizer: What `boost` returned.
            return_loss: Whether the loss is wanted.
            return_outputs: Whether the model's output is wanted, joined from those of the microbatches.
            loss_everywhere: Whether it is wanted in processes without the last stage, too.

        Returns:
            "loss", over the batches of all replicas, and "outputs", of this replica's batch. Both are None where there
            is no last stage, and where they are not wanted.
        """
        boosted = self._running(model)
        if optimizer is not None and (self._stepping is None or optimizer is not self._stepping.groups.optimizer):
            raise ConfigError("The optimizer is not the one that was boosted.")
        if not callable(criterion):
            raise ConfigError("execute_pipeline needs a criterion: a function of (outputs, inputs) to a loss.")
        if not hasattr(data_iter, "__next__"):
            raise ConfigError(f"data_iter is a {type(data_iter).__name__}; expected an iterator: iter(dataloader).")
        batch = next(data_iter)
        if boosted.pipeline is not None and not self.plugin.packed and "documents" in batch:
            raise ConfigError(
                "The batch has several samples in a row (documents), which this pipeline was not made for. Say "
                "MultimodalParallelPlugin(packed=True)."
            )
        trains = self._scale is not None and torch.is_grad_enabled()
        scale = self._scale.value if trains and self._scale is not None else 1.0
        return boosted.step(batch, Asked(criterion, scale, return_outputs, return_loss, loss_everywhere))

    def _running(self, model: Any) -> BoostedModel:
        if self._boosted is None or model not in (self._boosted, self._boosted.module):
            raise ConfigError("This model is not the one that booster.boost returned.")
        return self._boosted

    # -------------------------------------------------------------------------------------------- files

    def save_model(self, model: nn.Module, checkpoint: PathLike, shard: bool = True, **options: Any) -> Path:
        """Save a model's weights in a folder that any number of processes, however they are laid out, can load.

        All processes must call it. Safetensors and JSON; complete or not at all.

        Args:
            model: Boosted, or not.
            checkpoint: The folder.
            shard: Accepted: each process writes what it has, in any case.
            options: `prefix`, `size_per_shard`, `gather_dtensor`, `use_safetensors` of ColossalAI: accepted.
        """
        _check_options(options)
        return save_weights(_inner(model), checkpoint)

    def load_model(self, model: nn.Module, checkpoint: PathLike, strict: bool = True) -> nn.Module:
        """Fill a model, boosted or not, from what `save_model` saved; all processes must call it."""
        if not strict:
            raise ConfigError("load_model(strict=False): a model that does not fit is refused. Leave it out.")
        load_weights(_inner(model), checkpoint)
        return model

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, checkpoint: PathLike, shard: bool = True, **options: Any
    ) -> Path:
        """Save an optimizer's states in a folder, as `save_model` does with weights."""
        _check_options(options)
        boosted, stepping = self._of(optimizer)
        more = {} if self._scale is None else {"loss_scale": self._scale.value}
        with stepping.groups.working():
            return save_optimizer_state(boosted.module, optimizer, checkpoint, more)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, checkpoint: PathLike) -> torch.optim.Optimizer:
        """Bring a boosted optimizer into a saved state, in whatever layout it was saved."""
        boosted, stepping = self._of(optimizer)
        with stepping.groups.working():
            more = load_optimizer_state(boosted.module, optimizer, checkpoint)
        if self._scale is not None and "loss_scale" in more:
            self._scale.value = float(more["loss_scale"])
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: PathLike) -> Path:
        """Save the state of a learning-rate scheduler; all processes must call it."""
        return save_values(lr_scheduler.state_dict(), checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: PathLike) -> Any:
        """Bring a learning-rate scheduler into a saved state; all processes must call it."""
        lr_scheduler.load_state_dict(load_values(checkpoint))
        return lr_scheduler

    def _of(self, optimizer: Any) -> tuple[BoostedModel, Stepping]:
        if self._boosted is None or self._stepping is None or optimizer is not self._stepping.groups.optimizer:
            raise ConfigError("This optimizer is not the one that booster.boost returned.")
        return self._boosted, self._stepping


def _inner(model: nn.Module) -> nn.Module:
    """Return what has the parameters under the names that they have in the model."""
    if not isinstance(model, BoostedModel):
        return model
    return model.module if model.pipeline is not None else model.wrapped


def _check_options(options: dict[str, Any]) -> None:
    known = {"prefix", "size_per_shard", "gather_dtensor", "use_safetensors", "use_async"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"{unknown[0]} is no option here; expected some of {', '.join(sorted(known))}.")


def _is_trained(model: nn.Module, name: str) -> bool:
    """Whether parameters of a module of the plan are trained; those of an encoder's projector are never cut."""
    module = model
    if isinstance(model, MultimodalModel) and name in model.encoders:
        module = model.encoders[name].module
    elif isinstance(model, MultimodalModel) and name == LANGUAGE_MODEL:
        module = model.language_model
    return any(parameter.requires_grad for parameter in module.parameters())


def _backends() -> str:
    if processes.is_alone() and not dist.is_initialized():
        return ""
    with suppress(AttributeError):
        return str(dist.get_backend_config())
    return str(dist.get_backend())


def _stage_manager(boosted: BoostedModel) -> StageManager:
    place = boosted.layout.place(processes.rank())
    name = place.modules[-1]
    return StageManager(place.stage, boosted.layout.span(name).stages_of(name), boosted.has_loss)


__all__ = ["Booster"]
