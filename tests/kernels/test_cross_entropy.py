"""The loss from hidden states equals the loss from logits, in value and in every gradient, with less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cornstarch.compat import TorchDispatchMode
from cornstarch.kernels import cross_entropy
from cornstarch.kernels.cross_entropy import LogitTransform, linear_cross_entropy

IGNORED = -100


def reference_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, transform: LogitTransform
) -> Tensor:
    logits = transform.apply(nn.functional.linear(hidden, weight, bias).float())
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def build_inputs(rows: int = 37, words: int = 50, width: int = 16, trained: float = 0.6) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, words, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) > trained] = IGNORED
    hidden = torch.randn(rows, width, generator=generator, requires_grad=True)
    weight = torch.randn(words, width, generator=generator, requires_grad=True)
    bias = torch.randn(words, generator=generator, requires_grad=True)
    return hidden, weight, bias, labels


TRANSFORMS = [LogitTransform(), LogitTransform(0.25), LogitTransform(1 / 5, True, 5.0)]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "scaled", "capped"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("max_trained_rows", [None, 30])
def test_loss_and_gradients_equal_those_from_logits(
    transform: LogitTransform, with_bias: bool, max_trained_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "ROW_MULTIPLE", 4)
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 50 * 4 * 8)  # 8 rows at a time
    hidden, weight, bias, labels = build_inputs()
    given = bias if with_bias else None
    wanted = [hidden, weight, *([bias] if with_bias else [])]
    expected = torch.autograd.grad(reference_loss(hidden, weight, given, labels, transform) * 0.5, wanted)
    loss = linear_cross_entropy(
        hidden, weight, labels, bias=given, transform=transform, max_trained_rows=max_trained_rows
    )
    torch.testing.assert_close(loss, reference_loss(hidden, weight, given, labels, transform), rtol=1e-5, atol=1e-5)
    for found, right in zip(torch.autograd.grad(loss * 0.5, wanted), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    hidden, weight, _, labels = build_inputs()
    (weight if frozen == "weight" else hidden).requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_loss_without_gradients_needs_no_backward() -> None:
    hidden, weight, _, labels = build_inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference_loss(hidden, weight, None, labels, LogitTransform()))


def test_loss_is_zero_if_no_row_is_trained_on() -> None:
    hidden, weight, _, labels = build_inputs(trained=0.0)
    labels.fill_(IGNORED)
    loss = linear_cross_entropy(hidden, weight, labels, max_trained_rows=0)
    loss.backward()
    assert float(loss.detach()) == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_autocast_sets_the_compute_precision_and_gradients_keep_theirs() -> None:
    hidden, weight, _, labels = build_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    right = torch.autograd.grad(reference_loss(hidden, weight, None, labels, LogitTransform()), [weight])[0]
    assert (weight.grad - right).norm() <= 0.02 * right.norm()


@pytest.mark.parametrize(("rows", "words"), [(1, 10), (127, 151_936), (16_384, 151_936), (5, 10**9)])
def test_chunks_cover_all_rows_and_fit_in_memory(rows: int, words: int) -> None:
    device = torch.device("cuda")
    sizes = cross_entropy.split_rows(rows, words, 2, device)
    assert sum(sizes) == rows and all(size > 0 for size in sizes)
    assert max(sizes) * words * 2 <= (1 << 30) or max(sizes) <= cross_entropy.ROW_MULTIPLE


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        output = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for one in output if isinstance(output, tuple | list) else [output]:
            if isinstance(one, Tensor):
                self.size = max(self.size, one.numel())
        return output


def test_logits_of_all_rows_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "ROW_MULTIPLE", 8)
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 8 * 1000 * 4)
    hidden, weight, _, labels = build_inputs(rows=256, words=1000, width=4, trained=1.0)
    with LargestTensor() as found:
        linear_cross_entropy(hidden, weight, labels).backward()
    assert found.size == 8 * 1000
