"""Copies of a model for several stages of it in one process: all of them have the very same parameters."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from torch import nn

from cornstarch.attention.verify import trust_masks
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.mesh import StageMeshes
from cornstarch.pipeline.programs import EncoderProgram, StageProgram
from cornstarch.pipeline.survey import survey_copy


def shared_copy(model: nn.Module, meshes: StageMeshes) -> nn.Module:
    """Return a copy of a model that has the very same parameters and buffers, and talks to the same processes."""
    kept: list[Any] = [*model.parameters(), *model.buffers(), *meshes.every()]
    kept += [mesh.get_group(axis) for mesh in meshes.every() for axis in range(mesh.ndim)]
    copy = deepcopy(model, {id(one): one for one in kept})
    if isinstance(copy, MultimodalModel):
        trust_masks(unwrap(copy.language_model))  # it attends as the model does, which was verified before it was cut
    else:
        survey_copy(copy, model)
    return copy


def give_up_parameters(model: nn.Module, programs: Iterable[StageProgram]) -> None:
    """Let a model that is not run itself list only what the stages here have."""
    own = {id(parameter) for program in programs for parameter in program.parameters()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in own:
                module._parameters[name] = None


def list_parameters(model: nn.Module, programs: Iterable[StageProgram]) -> None:
    """Let a model that is not run itself list the parameters of its copies, after they were sharded."""
    listed = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, nn.Parameter] = {}
    for program in programs:
        prefix = f"{program.name}_encoder" if isinstance(program, EncoderProgram) else ""
        for name, parameter in program.model.named_parameters(prefix):
            if found.setdefault(id(listed[name]), parameter) is not parameter:
                raise ConfigError(
                    f"{name} is in two of the stages that one process holds, and would be sharded twice. Use "
                    "virtual_stages = 1, or the kind ddp or zero1."
                )
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                module._parameters[name] = found.get(id(old), old)


__all__ = ["give_up_parameters", "list_parameters", "shared_copy"]
