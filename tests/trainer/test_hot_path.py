"""A step does not read from the device: that would wait for all it has been told to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cornstarch.engine.failure import LossWatch
from cornstarch.parallel.device import Reading
from cornstarch.train import Trainer
from tests.trainer.tiny import tiny_config, trainer_of

# What waits for a GPU: numbers that are read, and results whose size follows from numbers.
_OPERATIONS = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "item", "unique_consecutive", "_unique2",
    "unique_dim",
}  # fmt: skip
_METHODS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "unique"}


class _Operations(TorchDispatchMode):
    """Forbids operations, also in a backward pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(one is not None and one.dtype == torch.bool for one in args[1])
        # Putting one value where a mask is true fills; several have to be counted.
        by_mask |= (
            name.startswith("index_put")
            and args[2].numel() != 1
            and any(one is not None and one.dtype == torch.bool for one in args[1])
        )
        uncounted = name == "repeat_interleave" and len(args) == 1 and not (kwargs or {}).get("output_size")
        if name in _OPERATIONS or by_mask or uncounted:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Forbids what reads a tensor without an operation, if it is on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METHODS and args and isinstance(args[0], Tensor):
            raise AssertionError(f"Tensor.{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_read() -> Iterator[None]:
    """Run a block in which nothing may be read from tensors."""
    with _Methods(), _Operations():
        yield


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.item(),
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: x[None][x[None] > 0],
        lambda x: torch.nonzero(x),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
        lambda x: [] if x.sum() > 0 else None,
    ],
)
def test_the_tests_themselves_notice(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), nothing_read():
        read(torch.ones(()))


def watch_steps(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, unwatched: int = 1) -> list[float]:
    """Do all steps, watched after the first; numbers may be read when they are late enough."""
    trainer.setup()
    trainer.watch = LossWatch(trainer.config, trainer.placement, late=True)
    numbers = Reading.numbers

    def read(reading: Reading) -> list[float]:
        with torch._C.DisableTorchFunction():
            return numbers(reading)

    monkeypatch.setattr(Reading, "numbers", read)
    losses = []
    for number, batch in enumerate(trainer.batches()):
        if number < unwatched:
            result = trainer.step(batch)
        else:
            with nothing_read():
                result = trainer.step(batch)
        losses.append(float(result.loss))
    return losses


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("attention", ["causal", "item", "modality"])
def test_a_step_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool, attention: str) -> None:
    sections = {"model": {"encoders": {"vision": {"attention": attention}}}, "data": {"packing": packing}}
    found = watch_steps(trainer_of(tiny_config(tmp_path, **sections)), monkeypatch)
    assert len(found) == 6


@pytest.mark.parametrize(
    "overrides",
    [
        ["loop.gradient_accumulation_steps=2"],
        ["loop.ema_decay=0.9"],
        ["optimizer.name=sgd", "optimizer.max_grad_norm=null"],
        ["precision=bf16"],
    ],
)
def test_a_step_reads_nothing_whatever_else_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    assert len(watch_steps(trainer_of(tiny_config(tmp_path, *overrides)), monkeypatch)) == 6
