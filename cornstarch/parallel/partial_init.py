"""Randomly initialized models of which a rank keeps its part: the same numbers as one process draws for the whole.

The model is built as usual, but parameters of other ranks lose their memory as soon as they are registered. Random
numbers for them are drawn all the same and thrown away, so that everything after them is drawn as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cornstarch.compat import TorchDispatchMode
from cornstarch.parallel.loading import LocalNames, mark_partial, record_full_read
from cornstarch.parallel.shard_reading import FullReadRequired

_Registered = tuple[nn.Module, str, torch.Size]  # the module, the name in it, and the shape of a parameter


def build_partial_model(make: Callable[[], nn.Module], held: LocalNames) -> nn.Module:
    """Return a new model in which only the parameters of this rank have memory; all others are on the meta device.

    Its numbers, and the state of the random number generator afterwards, are those of the full model. If a model cannot
    be built in this way, it is built in full, and `full_read_reason` tells why.

    Args:
        make: Builds the model on the CPU.
        held: Returns the names of the parameters of this rank, given the model on the meta device.
    """
    before = torch.get_rng_state()
    try:
        return _build(make, held)
    except (FullReadRequired, NotImplementedError, RuntimeError) as error:
        is_known = isinstance(error, FullReadRequired)
        reason = str(error) if is_known else f"it looks at numbers while it is made ({error})"
    torch.set_rng_state(before)
    model = make()
    record_full_read(model, reason)
    return model


def _build(make: Callable[[], nn.Module], held: LocalNames) -> nn.Module:
    # Built twice: only the finished model tells the names of its parameters, but memory has to go while it is built.
    # The first pass draws nothing and records the order in which parameters come.
    with torch.random.fork_rng(devices=[]), _Construction(None) as rehearsal:
        bare = make()
    names = held(bare)
    with _Construction(rehearsal.find_kept(bare, names), rehearsal.registered) as construction:
        model = make()
    if len(construction.registered) != len(rehearsal.registered):
        raise FullReadRequired("it is not made in the same way every time")
    lost = [n for n, p in model.named_parameters(remove_duplicate=False) if n in names and p.is_meta]
    if lost:
        raise FullReadRequired(f"{lost[0]} is copied from what is not here")
    mark_partial(model)
    return model


class _Construction(TorchDispatchMode):
    """Records parameters while a model is built, and takes the memory of some.

    Args:
        keeps: For each parameter in order, whether it keeps its memory. None: none does, and nothing is drawn.
        expected: The parameters that are to come.
    """

    def __init__(self, keeps: Sequence[bool] | None, expected: Sequence[_Registered] = ()) -> None:
        super().__init__()
        self._keeps, self._expected = keeps, expected
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.registered: list[_Registered] = []

    def __enter__(self) -> _Construction:
        self._hook = register_module_parameter_registration_hook(self._register)  # type: ignore[arg-type]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        self._scratch.clear()
        super().__exit__(*error)

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        number = len(self.registered)
        self.registered.append((module, name, parameter.shape))
        if self._keeps is not None:
            before = self._expected[number] if number < len(self._expected) else None
            if before is None or (type(module), name, parameter.shape) != (type(before[0]), *before[1:]):
                raise FullReadRequired("it is not made in the same way every time")
        if parameter.is_meta or (self._keeps is not None and self._keeps[number]):
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    def find_kept(self, model: nn.Module, names: Collection[str]) -> list[bool]:
        """Return which of the registered parameters have one of these names in the model, or are not in it."""
        paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(f"{path}." if path else "")
        return [
            id(module) not in paths or any(f"{path}{name}" in names for path in paths[id(module)])
            for module, name, _ in self.registered
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Draw random numbers for a parameter without memory, too, and throw them away."""
        if self._keeps is not None and torch.Tag.nondeterministic_seeded in func.tags and any(map(_is_bare, args)):
            func(*(self._scratch_like(one) if _is_bare(one) else one for one in args), **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _scratch_like(self, bare: Tensor) -> Tensor:
        if not bare.is_contiguous():  # torch draws for those in another order
            return torch.empty_like(bare, device="cpu")
        # Always the same memory: a fragmented heap is seldom given back to the system.
        known = self._scratch.get(bare.dtype)
        if known is None or known.numel() < bare.numel():
            known = self._scratch[bare.dtype] = torch.empty(bare.numel(), dtype=bare.dtype, device="cpu")
        return known[: bare.numel()].view(bare.shape)


def _is_bare(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
