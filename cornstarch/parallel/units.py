"""Which modules are gathered and freed together when parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from cornstarch.errors import ConfigError


def wrapping_units(model: nn.Module, classes: Sequence[str] | None = None, least: int = 0) -> list[nn.Module]:
    """Return the modules that become units of their own; what is in none belongs to the model itself.

    Found by themselves are the layers of the outermost lists of layers. Embeddings, norms and heads around them stay
    with the model: a language model's embeddings are looked up before it is called, and tied weights must be together.

    Args:
        model: The model.
        classes: Names of the classes whose modules are units, instead.
        least: Units with fewer parameters stay with what is around them.
    """
    own = list(model) if isinstance(model, nn.Sequential) else _layers(model)
    found = list(_of_classes(model, classes) if classes is not None else own)
    shared = _shared(model)
    return [unit for unit in found if _size(unit) >= max(least, 1) and not shared & {id(p) for p in unit.parameters()}]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from _elements(child)
        else:
            yield from _layers(child)


def _elements(layers: nn.ModuleList | nn.Sequential) -> Iterator[nn.Module]:
    for layer in layers:
        if isinstance(layer, nn.ModuleList | nn.ModuleDict):  # it is not called itself
            yield from _layers(layer)
        elif isinstance(layers, nn.ModuleList) or any(True for _ in layer.children()):
            yield layer  # of a chain, single linear layers are too little: a projector is one of two


def _of_classes(model: nn.Module, classes: Sequence[str]) -> Iterator[nn.Module]:
    there = {type(module).__name__ for module in model.modules()}
    missing = [name for name in classes if name not in there]
    if missing:
        listed = ", ".join(sorted(there))
        raise ConfigError(f"wrap names {', '.join(missing)}, which the model has not. It has: {listed}.")

    def inside(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).__name__ in classes:
                yield child
            else:
                yield from inside(child)

    return inside(model)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shared(model: nn.Module) -> set[int]:
    """Return the parameters that have several names."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
