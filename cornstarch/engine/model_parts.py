"""The parts of a model as a run sees them: which parameters, trained how, at which rate, in which precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.config import ModelConfig, OptimizerConfig, PartConfig, Precision, RunConfig
from cornstarch.errors import ConfigError
from cornstarch.kernels.master_weights import round_to_weight
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.device import DTYPES


@dataclass(frozen=True)
class ModelPart:
    """Some of a model's parameters, and how they are trained."""

    name: str
    kind: str
    """The class."""
    module_names: tuple[str, ...]
    """Where it is in the model."""
    mode: str
    """The `train` of its config: full, lora, projector or frozen."""
    learning_rate: float
    weight_decay: float
    dtype: Precision | None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict, compare=False, repr=False)
    shapes: Mapping[str, torch.Size] = field(default_factory=dict, compare=False, repr=False)
    """The shapes of whole parameters, where their own differ: FSDP 1 flattens them and keeps a piece."""

    def shape(self, name: str) -> torch.Size:
        return self.shapes.get(name, self.parameters[name].shape)

    def is_vector(self, name: str) -> bool:
        """Whether a parameter is a bias or belongs to a norm, so that it is not decayed."""
        return len(self.shape(name)) <= 1

    def without_storage(self) -> ModelPart:
        """Return a copy without parameter storage, to describe a part whose parameters are on other ranks."""
        bare = {n: nn.Parameter(p.detach().to("meta"), p.requires_grad) for n, p in self.parameters.items()}
        return replace(self, parameters=bare)

    @property
    def train(self) -> str:
        """How it is trained: full, lora or frozen."""
        return self.mode if self.trained else "frozen"

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def count(self) -> int:
        return sum(self.shape(name).numel() for name in self.parameters)

    @property
    def trained_count(self) -> int:
        """The number of parameters that change."""
        return sum(self.shape(name).numel() for name in self.trained)

    @property
    def bytes(self) -> int:
        """Memory of the parameters themselves."""
        return sum(self.shape(name).numel() * parameter.itemsize for name, parameter in self.parameters.items())


def split_into_parts(
    model: nn.Module, config: ModelConfig, optimizer: OptimizerConfig, *, is_stage: bool = False
) -> list[ModelPart]:
    """Return the parts of a model; every parameter is in exactly one. A stage may have nothing to train."""
    parts = list(_iter_described_parts(model, config, optimizer))
    for name, parameter in named_parameters(model).items():
        longest = max(parts, key=lambda part: _match(name, part.module_names))
        if _match(name, longest.module_names) < 0:
            raise ConfigError(f"The parameter {name} belongs to no part of the model.")
        longest.parameters[name] = parameter
    parts = [part for part in parts if part.parameters]
    if not is_stage and not any(part.trained for part in parts):
        raise ConfigError(
            "Nothing is trained: every part is frozen. Set `train` of one to full, lora or (encoders) projector."
        )
    return parts


def _match(name: str, prefixes: tuple[str, ...]) -> int:
    """Return the length of the longest prefix of a name, or -1."""
    return max((len(p) for p in prefixes if not p or name == p or name.startswith(f"{p}.")), default=-1)


def _iter_described_parts(model: nn.Module, config: ModelConfig, optimizer: OptimizerConfig) -> Iterator[ModelPart]:
    def describe(
        name: str, module: nn.Module, places: tuple[str, ...], own: PartConfig | None, rate: float | None = None
    ) -> ModelPart:
        kind, train, dtype, decay = type(unwrap(module)).__name__, "full", None, None
        if own is not None:
            train, dtype, decay = own.train, own.dtype, own.weight_decay
            rate = own.learning_rate if rate is None else rate
        rate = optimizer.learning_rate if rate is None else rate
        return ModelPart(name, kind, places, train, rate, optimizer.weight_decay if decay is None else decay, dtype)

    if not isinstance(model, MultimodalModel):
        yield describe("model", model, ("",), config.whole)
        return
    for name, encoder in model.encoders.items():
        own, where = config.encoders.get(name, config.whole), f"{name}_encoder"
        yield describe(f"{name} encoder", encoder.module, (f"{where}.module",), own)
        assert encoder.projector is not None
        rate = getattr(own, "projector_learning_rate", None)
        projector = describe(f"{name} projector", encoder.projector, (f"{where}.projector", where), own, rate)
        yield replace(projector, mode="full")
    text = config.language_model or config.whole
    yield describe("language model", model.language_model, ("language_model", ""), text)


@dataclass(frozen=True)
class MasterPolicy:
    """Trained weights are kept in bf16, and the optimizer has float32 masters of them."""

    accumulates: bool
    """Whether gradients of several microbatches are added up, which needs float32."""


def choose_masters(config: RunConfig, device: str, computed_in: torch.dtype, world: int) -> MasterPolicy | None:
    """Return how a run on a kind of device keeps float32 masters, None if it does not; refuse what cannot work."""
    optimizer, wanted = config.optimizer, config.optimizer.master_weights
    if wanted is False:
        return None
    reason = None
    if computed_in != torch.bfloat16:
        name = str(computed_in).removeprefix("torch.")
        reason = f"The run computes in {name}; masters belong to weights in bf16. Set precision=bf16."
    elif optimizer.name.lower() != "adamw" or set(optimizer.arguments) - {"betas", "eps"}:
        reason = "Only `adamw` without further arguments has masters. Use it, or leave master_weights out."
    elif world > 1:
        reason = (
            f"{world} processes reduce gradients in the precision of weights, so theirs stay in float32. Leave "
            "master_weights out; sharded kinds (zero3) gather and compute in bf16 without it."
        )
    if reason is None and (wanted is True or device == "cuda"):
        return MasterPolicy(accumulates=config.loop.microbatches > 1)
    if reason is not None and wanted is True:
        raise ConfigError(f"optimizer.master_weights = true\n  {reason}")
    return None


def _find_rounded(part: ModelPart) -> set[str]:
    """Return the names of a part's trained parameters that are rounded to bf16."""
    trained = {name: one for name, one in part.trained.items() if one.is_floating_point()}
    kinds: Counter[torch.dtype] = Counter()
    for parameter in trained.values():
        kinds[parameter.dtype] += parameter.numel()
    # What a model stores in float32 among bf16 needs it, such as the decay rates of state space layers.
    is_mixed = kinds[torch.bfloat16] > kinds[torch.float32]
    return {name for name, one in trained.items() if not (is_mixed and one.dtype == torch.float32)}


@torch.no_grad()
def cast_parts(parts: list[ModelPart], computed_in: torch.dtype, masters: MasterPolicy | None = None) -> None:
    """Bring each part's weights into the precision in which they are kept; buffers need the one that they have."""
    # By default weights that change are kept in float32, because small changes would be lost in fewer bits: in the
    # optimizer, if it has masters, else as the weights themselves.
    for part in parts:
        rounded = set() if masters is None or part.dtype is not None else _find_rounded(part)
        for name, parameter in part.parameters.items():
            if not parameter.is_floating_point():
                continue
            if name in rounded:
                round_to_weight(parameter)
                if masters is not None and masters.accumulates:
                    parameter.grad_dtype = torch.float32
                continue
            default = torch.float32 if parameter.requires_grad else computed_in
            wanted = DTYPES[part.dtype] if part.dtype is not None else default
            if parameter.dtype == wanted:
                continue
            if isinstance(parameter, DTensor):  # `.data` would change its local tensor alone, which has a dtype too
                kept = nn.Parameter(parameter.detach().to(wanted), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, kept)
            else:
                parameter.data = parameter.data.to(wanted)
