"""FSDP units: the modules whose parameters are gathered and freed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.plan.plan import DataPlan


def wrapping_units(model: nn.Module, classes: Sequence[str] | None = None, least: int = 0) -> list[nn.Module]:
    """Return the modules that become FSDP units; all other parameters belong to the root unit, the model itself.

    By default these are the layers of the outermost lists of layers. Embeddings, norms and heads stay with the model:
    a language model's embeddings are looked up before it is called, and tied weights must be in one unit.

    Args:
        model: The model.
        classes: Names of the classes whose modules are units, instead of the default.
        least: The minimum number of parameters of a unit.
    """
    own = list(model) if isinstance(model, nn.Sequential) else _find_layers(model)
    found = list(_find_by_class(model, classes) if classes is not None else own)
    shared = {number for number, uses in _count_parameter_uses(model).items() if uses > 1}
    return [
        unit
        for unit in found
        if sum(parameter.numel() for parameter in unit.parameters()) >= max(least, 1)
        and not shared & {id(parameter) for parameter in unit.parameters()}
    ]


def find_fsdp_units(model: nn.Module, plan: DataPlan) -> list[nn.Module]:
    """Return the FSDP units that a plan asks for."""
    if plan.wrap == "none":
        return []
    return wrapping_units(model, None if plan.wrap == "auto" else list(plan.wrap), plan.wrap_min_parameters or 0)


def _find_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList | nn.Sequential):
            yield from _find_layers(child)
            continue
        for layer in child:
            if isinstance(layer, nn.ModuleList | nn.ModuleDict):  # never called itself, so no hook would run
                yield from _find_layers(layer)
            elif isinstance(child, nn.ModuleList) or any(True for _ in layer.children()):
                yield layer  # a single linear layer of a Sequential is too small: a projector consists of two


def _find_by_class(model: nn.Module, classes: Sequence[str]) -> Iterator[nn.Module]:
    there = {type(module).__name__ for module in model.modules()}
    missing = [name for name in classes if name not in there]
    if missing:
        listed = ", ".join(sorted(there))
        raise ConfigError(f"wrap names {', '.join(missing)}, which the model does not have. It has: {listed}.")

    def find_inside(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).__name__ in classes:
                yield child
            else:
                yield from find_inside(child)

    return find_inside(model)


def find_frozen_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are entirely frozen: FSDP 1 would create zero gradients for them.

    Exceptions stay with the model around them: modules that share a parameter with others, as tied embeddings do,
    because FSDP 1 would take it away from the others; modules around the embedding table of a language model, which a
    multimodal model looks up before it calls that model; and modules whose weights are read without a call, because
    FSDP 1 gathers a unit when it is called.
    """
    table = model.language_model.get_input_embeddings() if isinstance(model, MultimodalModel) else None  # type: ignore[operator]
    uses = _count_parameter_uses(model)

    def find_inside(module: nn.Module) -> Iterator[nn.Module]:
        # torch's own attention computes with the weights of its output projection without calling it.
        for child in () if isinstance(module, nn.MultiheadAttention) else module.children():
            parameters = list(child.parameters())
            is_shared = any(count < uses[number] for number, count in _count_parameter_uses(child).items())
            is_around_table = child is not table and any(inner is table for inner in child.modules())
            if any(parameter.requires_grad for parameter in parameters) or is_shared or is_around_table:
                yield from find_inside(child)
            elif parameters and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield child

    return find_inside(model)


def _count_parameter_uses(module: nn.Module) -> Counter[int]:
    """Return under how many names a module has each parameter, by id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
