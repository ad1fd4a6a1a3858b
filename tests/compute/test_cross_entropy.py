"""The loss from hidden states equals the loss from logits, in value and in every gradient, with less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cornstarch.compute import cross_entropy
from cornstarch.compute.cross_entropy import LogitShape, linear_cross_entropy

IGNORED = -100


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shape: LogitShape) -> Tensor:
    logits = shape.apply(nn.functional.linear(hidden, weight, bias).float())
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def setting(rows: int = 37, words: int = 50, width: int = 16, trained: float = 0.6) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    labels = torch.randint(0, words, (rows,), generator=made)
    labels[torch.rand(rows, generator=made) > trained] = IGNORED
    hidden = torch.randn(rows, width, generator=made, requires_grad=True)
    weight = torch.randn(words, width, generator=made, requires_grad=True)
    bias = torch.randn(words, generator=made, requires_grad=True)
    return hidden, weight, bias, labels


SHAPES = [LogitShape(), LogitShape(0.25), LogitShape(1 / 5, True, 5.0)]


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "scaled", "capped"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("at_most", [None, 30])
def test_loss_and_gradients(
    shape: LogitShape, with_bias: bool, at_most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_ROWS", 4)
    monkeypatch.setitem(cross_entropy._PORTION, "cpu", 50 * 4 * 8)  # 8 rows at a time
    hidden, weight, bias, labels = setting()
    given = bias if with_bias else None
    wanted = [hidden, weight, *([bias] if with_bias else [])]
    expected = torch.autograd.grad(plain(hidden, weight, given, labels, shape) * 0.5, wanted)
    loss = linear_cross_entropy(hidden, weight, labels, bias=given, shape=shape, at_most=at_most)
    torch.testing.assert_close(loss, plain(hidden, weight, given, labels, shape), rtol=1e-5, atol=1e-5)
    for found, right in zip(torch.autograd.grad(loss * 0.5, wanted), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    hidden, weight, _, labels = setting()
    (weight if frozen == "weight" else hidden).requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, _, labels = setting()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, None, labels, LogitShape()))


def test_no_row_is_trained_on() -> None:
    hidden, weight, _, labels = setting(trained=0.0)
    labels.fill_(IGNORED)
    loss = linear_cross_entropy(hidden, weight, labels, at_most=0)
    loss.backward()
    assert float(loss.detach()) == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_autocast_computes_in_its_precision_and_gives_gradients_in_theirs() -> None:
    hidden, weight, _, labels = setting()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    right = torch.autograd.grad(plain(hidden, weight, None, labels, LogitShape()), [weight])[0]
    assert (weight.grad - right).norm() <= 0.02 * right.norm()


@pytest.mark.parametrize(("rows", "words"), [(1, 10), (127, 151_936), (16_384, 151_936), (5, 10**9)])
def test_portions_are_all_rows_and_fit(rows: int, words: int) -> None:
    device = torch.device("cuda")
    sizes = cross_entropy.portions(rows, words, 2, device)
    assert sum(sizes) == rows and all(size > 0 for size in sizes)
    assert max(sizes) * words * 2 <= (1 << 30) or max(sizes) <= cross_entropy._ROWS


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        made = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor):
                self.numbers = max(self.numbers, one.numel())
        return made


def test_the_logits_of_all_rows_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_ROWS", 8)
    monkeypatch.setitem(cross_entropy._PORTION, "cpu", 8 * 1000 * 4)
    hidden, weight, _, labels = setting(rows=256, words=1000, width=4, trained=1.0)
    with _Largest() as found:
        linear_cross_entropy(hidden, weight, labels).backward()
    assert found.numbers == 8 * 1000
