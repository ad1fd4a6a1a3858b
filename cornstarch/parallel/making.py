"""Models with random weights of which a process keeps its part: the same numbers as one process draws for the whole.

A model is made as ever, but parameters that other processes have lose their memory as soon as they are there. Whatever
is drawn for them afterwards is drawn all the same, and forgotten: so all that follows is drawn as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cornstarch.compat import TorchDispatchMode
from cornstarch.parallel.loading import Held, note_in_part, note_whole
from cornstarch.parallel.pieces import ReadWhole


def made_in_part(make: Callable[[], nn.Module], held: Held) -> nn.Module:
    """Return a new model of which only some parameters have memory; all others are on the meta device.

    What is there has the same numbers as in the whole model, and the same random numbers are left to those who draw
    after it. A model for which that cannot be done is made whole; `loaded_whole` tells why.

    Args:
        make: Makes the model, on the CPU.
        held: Returns the names of the parameters that this process has, given the model without memory.
    """
    before = torch.get_rng_state()
    try:
        return _made(make, held)
    except (ReadWhole, NotImplementedError, RuntimeError) as error:
        reason = str(error) if isinstance(error, ReadWhole) else f"it looks at numbers while it is made ({error})"
    torch.set_rng_state(before)
    model = make()
    note_whole(model, reason)
    return model


def _made(make: Callable[[], nn.Module], held: Held) -> nn.Module:
    with torch.random.fork_rng(devices=[]), _Making(None) as rehearsal:
        bare = make()
    names = held(bare)
    with _Making(rehearsal.kept(bare, names), rehearsal.registered) as making:
        model = make()
    if len(making.registered) != len(rehearsal.registered):
        raise ReadWhole("it is not made in the same way every time")
    lost = [n for n, p in model.named_parameters(remove_duplicate=False) if n in names and p.is_meta]
    if lost:
        raise ReadWhole(f"{lost[0]} is copied from what is not here")
    note_in_part(model)
    return model


Came = tuple[nn.Module, str, torch.Size]
"""A parameter that came: the module that it came to, its name there, and its shape."""


class _Making(TorchDispatchMode):
    """The making of a model: notes parameters in the order in which they come, and takes the memory of some.

    Args:
        keeps: For each parameter that comes, whether it keeps its memory. None: none does, and nothing is drawn.
        expected: What is to come.
    """

    def __init__(self, keeps: Sequence[bool] | None, expected: Sequence[Came] = ()) -> None:
        super().__init__()
        self._keeps, self._expected = keeps, expected
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.registered: list[Came] = []

    def __enter__(self) -> _Making:
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
            self._check(number)
        if parameter.is_meta or (self._keeps is not None and self._keeps[number]):
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    def _check(self, number: int) -> None:
        module, name, shape = self.registered[number]
        if number < len(self._expected):
            other, other_name, other_shape = self._expected[number]
            if (type(module), name, shape) == (type(other), other_name, other_shape):
                return
        raise ReadWhole("it is not made in the same way every time")

    def kept(self, model: nn.Module, names: Collection[str]) -> list[bool]:
        """Return which of the parameters that came have one of these names in the model, or are not in it."""
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
        """Draw what is drawn for a parameter without memory, too, and forget it."""
        if self._keeps is not None and torch.Tag.nondeterministic_seeded in func.tags and any(map(_is_bare, args)):
            func(*(self._scratch_like(one) if _is_bare(one) else one for one in args), **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _scratch_like(self, bare: Tensor) -> Tensor:
        """Return memory to draw into; always the same, because holes in a heap are seldom given back."""
        if not bare.is_contiguous():  # torch draws for those in another order
            return torch.empty_like(bare, device="cpu")
        known = self._scratch.get(bare.dtype)
        if known is None or known.numel() < bare.numel():
            known = self._scratch[bare.dtype] = torch.empty(bare.numel(), dtype=bare.dtype, device="cpu")
        return known[: bare.numel()].view(bare.shape)


def _is_bare(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


__all__ = ["made_in_part"]
