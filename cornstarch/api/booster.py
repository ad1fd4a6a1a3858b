"""`Booster`: makes a model, its optimizer and its data loader parallel, as a plugin describes.

booster = Booster(plugin=plugin)
model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
    model, optimizer, criterion, dataloader, lr_scheduler)
batches = iter(dataloader)
result = booster.execute_pipeline(batches, model, criterion, optimizer, return_loss=True)
optimizer.step()
optimizer.zero_grad()
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.api.boosted_model import BoostedModel, BoostedOptimizer, Criterion, build_alike
from cornstarch.api.microbatches import MicrobatchSplitter, TokenCounter, distribute_loader
from cornstarch.api.plugin import MultimodalParallelPlugin, StageManager
from cornstarch.checkpoint import weights
from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.engine.context import DistributedContext, check_process_group
from cornstarch.engine.parallelize import ParallelizeOptions, parallelize
from cornstarch.engine.plan_requirements import check_loss, needs_whole_parameters, refuse_pieces
from cornstarch.engine.train_step import TrainStep
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import distributed
from cornstarch.parallel.device import DevicePlacement
from cornstarch.parallel.gradients import LossScale
from cornstarch.pipeline.stage_program import get_device
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.verify.twin_trial import find_untested_modules

PathLike = str | os.PathLike[str]


class Booster:
    """Makes a model parallel, as `plugin` describes, and runs it. Nothing happens before `boost`."""

    def __init__(self, plugin: MultimodalParallelPlugin) -> None:
        if not isinstance(plugin, MultimodalParallelPlugin):
            raise ConfigError(
                f"Booster(plugin=…) was given a {type(plugin).__name__}; expected a MultimodalParallelPlugin, "
                "which has a ModalParallelPlugin for each module."
            )
        self.plugin = plugin
        self.loss_scale: LossScale | None = None  # the loss scale of fp16, once the model is boosted
        self._boosted: BoostedModel | None = None
        self._optimizer: BoostedOptimizer | None = None

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[BoostedModel, Any, Criterion | None, Any, Any]:
        """Parallelize a model and what belongs to it; return the five objects to be used from now on.

        All processes must call it, with the same weights. The model is changed in place: the parts of other processes
        are freed. The optimizer stays the same object, over the parameters of this process.

        Args:
            model: The whole model; `requires_grad` says which parameters are trained.
            optimizer: Made from the model's parameters; it has made no step.
            criterion: Takes the model's output and the microbatch; returns the mean loss. It is returned unchanged.
            dataloader: Its `batch_size` is that of a replica. Samples are distributed over replicas.
            lr_scheduler: A scheduler of this optimizer.
        """
        if self._boosted is not None:
            raise ConfigError("This booster has a model already. Make another Booster for another model.")
        self._check(model, optimizer, lr_scheduler)
        layout = self.plugin.layout()
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError("The model is on the meta device, without weights. Load them before boost.")
        device = get_device(model)
        has_gpu = torch.cuda.is_available() and dist.is_initialized()
        if has_gpu and distributed.get_device_backend(None, "cuda") == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        model.to(device)
        if optimizer is not None:
            self._optimizer = BoostedOptimizer(optimizer, named_parameters(model))
            self._check_optimizer(optimizer, model, layout)
        here = layout.place(distributed.rank())
        loader = None if dataloader is None else distribute_loader(dataloader, here.dp, layout.dp)
        self._warn(model, layout)
        boosted = self._boosted = self._build_model(model, layout, device)
        self.loss_scale = self.plugin.loss_scale()
        if self._optimizer is not None:
            self._attach_optimizer(self._optimizer, boosted)
        stages = layout.span(here.modules[-1]).stages_of(here.modules[-1])
        self.plugin.stage_manager = StageManager(here.stage, stages, boosted.has_loss)
        return boosted, optimizer, criterion, loader, lr_scheduler

    def _check(self, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
        if isinstance(model, BoostedModel) or not isinstance(model, nn.Module):
            raise ConfigError(f"booster.boost was given a {type(model).__name__} as model; expected a torch.nn.Module.")
        check_process_group("Boost", "call torch.distributed.init_process_group() first")
        if not distributed.is_single_process() and distributed.get_device_backend(None, "cpu") != "gloo":
            raise ConfigError(
                "The process group exchanges nothing that is on the CPU. Make it with "
                "torch.distributed.init_process_group(backend='cpu:gloo,cuda:nccl')."
            )
        attached = getattr(lr_scheduler, "optimizer", optimizer)
        if lr_scheduler is not None and attached is not optimizer:
            raise ConfigError("The lr_scheduler is of another optimizer than the one that is boosted.")
        there = list(model.encoder_names) if isinstance(model, MultimodalModel) else []
        given = list(self.plugin.encoder_plugins)
        if missing := [name for name in there if name not in given]:
            raise ConfigError(
                f"The {missing[0]} encoder has no plugin: encoder_plugins has {', '.join(given) or 'none'}. Add "
                f"encoder_plugins={{{missing[0]!r}: ModalParallelPlugin(…)}}."
            )
        if unknown := [name for name in given if name not in there]:
            raise ConfigError(
                f"encoder_plugins[{unknown[0]!r}]: the model has no such encoder; it has {', '.join(there) or 'none'}."
            )
        trained = (parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
        if self.plugin.precision == "fp16" and torch.float16 in trained:
            raise ConfigError("precision = fp16 needs trained weights in fp32: load the model in float32.")

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module, layout: Layout) -> None:
        """Refuse an optimizer whose step on a shard differs from that on the whole parameter."""
        kind = type(optimizer)
        modules = {name: model for name in layout.plan.modules}
        if isinstance(model, MultimodalModel):
            # Without the projectors of encoders, which are never sharded.
            encoders = {name: encoder.module for name, encoder in model.encoders.items()}
            modules |= {**encoders, LANGUAGE_MODEL: model.language_model}
        trained = [name for name, module in modules.items() if any(p.requires_grad for p in module.parameters())]
        try:
            refuse_pieces(partial(build_alike, optimizer), kind.__name__, layout, trained)
        except (TypeError, AttributeError, RuntimeError) as error:
            warnings.warn(
                f"Whether {kind.__name__} can step shards of parameters could not be tried on a small matrix "
                f"({type(error).__name__}: {error}). It must update each value independently.",
                stacklevel=3,
            )

    def _warn(self, model: nn.Module, layout: Layout) -> None:
        if distributed.rank() == 0:
            try:
                check_loss(model, layout)
            except ConfigError as error:
                warnings.warn(f"{str(error).partition('.')[0]}. Each replica computes its own.", stacklevel=3)
        # On all ranks: what cannot be cut is refused.
        untested = find_untested_modules(model, layout) if layout.world > 1 else []
        if untested and distributed.rank() == 0:
            warnings.warn(
                f"No test has cut these before: {', '.join(untested)}. `cornstarch verify` compares a tiny parallel "
                "twin of a model with the same twin in one process.",
                stacklevel=3,
            )

    def _build_model(self, model: nn.Module, layout: Layout, device: torch.device) -> BoostedModel:
        plugin = self.plugin
        context = DistributedContext(layout, DevicePlacement(device, plugin.precision or "fp32"))

        def set_stand_ins(model: nn.Module) -> None:
            if plugin.processor is not None and isinstance(model, MultimodalModel):
                model.keep_encoders_running(plugin.processor.stand_ins())

        # Both need the whole model, so they are built before it is split.
        splitter = MicrobatchSplitter(model, plugin.num_microbatches, plugin.microbatch_size)
        tokens = TokenCounter(model)
        options = ParallelizeOptions(
            microbatches=plugin.num_microbatches or 1,
            packed=plugin.packed,
            templates=plugin.templates(),
            stand_ins=set_stand_ins,
        )
        parallel = parallelize(model, context, options)
        return BoostedModel(parallel, context, splitter=splitter, tokens=tokens, weigh=plugin.loss_weight)

    def _attach_optimizer(self, optimizer: BoostedOptimizer, boosted: BoostedModel) -> None:
        parameters = named_parameters(boosted.module)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in parameters.items() if name not in trained}
        is_zero1 = boosted.layout.plan.data.kind == "zero1"
        needs_whole = is_zero1 and needs_whole_parameters(partial(build_alike, optimizer.optimizer))
        stepped = boosted.parallel.shard_states(trained, boosted.distributed_context, needs_whole)
        optimizer.replace_parameters({**frozen, **stepped})
        limits: dict[str, Any] = {"max_grad_norm": self.plugin.max_norm or None, "loss_scale": self.loss_scale}
        optimizer.attach(TrainStep(boosted.parallel, list(stepped.values()), **limits))

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
        """Run forward and backward on the next batch, split into microbatches.

        Gradients are left in the parameters: call `optimizer.step()` and `optimizer.zero_grad()` yourself. Under
        `torch.no_grad()` only forward runs. All processes must call it.

        Args:
            data_iter: Yields batches, the same for all processes of a replica.
            model: The model that `boost` returned.
            criterion: Called on the last stage with the model's output and the microbatch; returns its mean loss.
            optimizer: The optimizer that `boost` returned.
            return_loss: Return the loss.
            return_outputs: Return the model's output, joined from those of the microbatches.
            loss_everywhere: Return the loss in processes without the last stage, too.

        Returns:
            "loss", over the batches of all replicas, and "outputs", of this replica's batch. Both are None without the
            last stage, or if they are not asked for.
        """
        boosted = self._boosted
        if boosted is None or model not in (boosted, boosted.module):
            raise ConfigError("This model is not the one that booster.boost returned.")
        if optimizer is not None and (self._optimizer is None or optimizer is not self._optimizer.optimizer):
            raise ConfigError("The optimizer is not the one that was boosted.")
        if not callable(criterion):
            raise ConfigError("execute_pipeline needs a criterion: a function of (outputs, inputs) to a loss.")
        if not hasattr(data_iter, "__next__"):
            raise ConfigError(f"data_iter is a {type(data_iter).__name__}; expected an iterator: iter(dataloader).")
        batch = next(data_iter)
        if boosted.pipeline is not None and not self.plugin.packed and "documents" in batch:
            raise ConfigError(
                "The batch has several samples in a row (documents), which this pipeline was not built for. Use "
                "MultimodalParallelPlugin(packed=True)."
            )
        scale = self.loss_scale.value if self.loss_scale is not None and torch.is_grad_enabled() else 1.0
        return boosted.step(
            batch, criterion, scale=scale, loss=return_loss, outputs=return_outputs, everywhere=loss_everywhere
        )

    def save_model(self, model: nn.Module, checkpoint: PathLike, shard: bool = True, **options: Any) -> Path:
        """Save a model's weights in a folder that any parallel layout can load; all processes must call it.

        The files are safetensors and JSON; they are complete or not there.

        Args:
            model: A model, boosted or not.
            checkpoint: The folder.
            shard: Accepted without effect: each process writes its shards.
            options: `prefix`, `size_per_shard`, `gather_dtensor`, `use_safetensors` of ColossalAI: accepted.
        """
        _check_options(options)
        return weights.save_weights(_inner(model), checkpoint)

    def load_model(self, model: nn.Module, checkpoint: PathLike, strict: bool = True) -> nn.Module:
        """Load weights of `save_model` into a model, boosted or not; all processes must call it."""
        if not strict:
            raise ConfigError("load_model(strict=False): a model that does not fit is refused. Leave it out.")
        weights.load_weights(_inner(model), checkpoint)
        return model

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, checkpoint: PathLike, shard: bool = True, **options: Any
    ) -> Path:
        """Save an optimizer's state in a folder, as `save_model` saves weights."""
        _check_options(options)
        boosted, own = self._require_optimizer(optimizer)
        more = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.value}
        with own.use_step_groups():
            return weights.save_optimizer_state(boosted.module, optimizer, checkpoint, more)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, checkpoint: PathLike) -> torch.optim.Optimizer:
        """Load a saved state, of any layout, into a boosted optimizer; all processes must call it."""
        boosted, own = self._require_optimizer(optimizer)
        with own.use_step_groups():
            more = weights.load_optimizer_state(boosted.module, optimizer, checkpoint)
        if self.loss_scale is not None and "loss_scale" in more:
            self.loss_scale.value = float(more["loss_scale"])
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: PathLike) -> Path:
        """Save the state of a learning-rate scheduler; all processes must call it."""
        return weights.save_values(lr_scheduler.state_dict(), checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: PathLike) -> Any:
        """Load the state of a learning-rate scheduler; all processes must call it."""
        lr_scheduler.load_state_dict(weights.load_values(checkpoint))
        return lr_scheduler

    def _require_optimizer(self, optimizer: Any) -> tuple[BoostedModel, BoostedOptimizer]:
        if self._boosted is None or self._optimizer is None or optimizer is not self._optimizer.optimizer:
            raise ConfigError("This optimizer is not the one that booster.boost returned.")
        return self._boosted, self._optimizer


def _inner(model: nn.Module) -> nn.Module:
    """Return the module in which parameters have the names of the model."""
    if not isinstance(model, BoostedModel):
        return model
    return model.module if model.pipeline is not None else model.wrapped


def _check_options(options: dict[str, Any]) -> None:
    known = {"prefix", "size_per_shard", "gather_dtensor", "use_safetensors", "use_async"}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"{unknown[0]} is no option here; expected some of {', '.join(sorted(known))}.")
