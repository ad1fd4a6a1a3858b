"""Items that lie end to end in a row attend as each does alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from cornstarch.attention import backends, item_attention
from cornstarch.attention.cudnn_attention import PieceBatch, PlainKernel
from cornstarch.attention.item_attention import attend_items, item_attention_forward
from cornstarch.errors import UnsupportedModelError

LENGTHS = {"images": (5, 5, 9, 1, 14), "windows": (4,) * 9 + (2, 1), "one": (7,), "empty item": (3, 0, 6)}


def draw_states(lengths: tuple[int, ...], head_dim: int = 8, **options: object) -> tuple[list[Tensor], Tensor]:
    noise = torch.Generator().manual_seed(sum(lengths))
    states = [torch.randn(sum(lengths), 3, head_dim, generator=noise) for _ in range(4)]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return [one.to(**options) for one in states], bounds.to(states[0].to(**options).device)  # type: ignore[call-overload]


def attend_alone(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """Attend with the formula, item after item."""
    found = []
    for first, end in itertools.pairwise(bounds.tolist()):
        one = slice(first, end)
        weights = torch.einsum("qhd,khd->hqk", query[one], key[one]).mul(scale).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, value[one]))
    return torch.cat(found)


def differentiate(output: Tensor, states: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    return output, *torch.autograd.grad(output, states, gradient)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("longest", [0, 14])  # unknown; the longest or more
def test_items_attend_as_alone(lengths: tuple[int, ...], longest: int) -> None:
    (*states, gradient), bounds = draw_states(lengths)
    states = [one.requires_grad_() for one in states]
    found = differentiate(attend_items(*states, bounds, longest, 0.3), states, gradient)
    expected = differentiate(attend_alone(*states, bounds, 0.3), states, gradient)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_operator_is_traced_and_differentiated_as_torch_requires() -> None:
    (*states, _), bounds = draw_states((4, 3))
    arguments = (*(one.requires_grad_() for one in states), bounds, 4, 0.3)
    torch.library.opcheck(torch.ops.cornstarch.attend_items, arguments)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_pieces_for_cudnn_are_the_items(lengths: tuple[int, ...]) -> None:
    (*states, _), bounds = draw_states(lengths)
    batch = item_attention._batch_items(bounds, max(lengths), 0.3)
    assert isinstance(batch, PieceBatch) and batch.pieces is not None
    count = batch.pieces.shape[1] - 1
    assert count & (count - 1) == 0 and batch.pieces[1, -1] == 0 and batch.longest >= max(lengths)
    output, logsumexp = PlainKernel()(*states, batch)
    torch.testing.assert_close(output, attend_alone(*states, bounds, 0.3), rtol=1e-5, atol=1e-6)
    expected = item_attention.ItemsByLength().forward(states, bounds, 0, 0.3)[1]
    torch.testing.assert_close(logsumexp, expected, rtol=1e-5, atol=1e-6)


def test_layers_with_dropout_see_only_their_items() -> None:
    (query, key, _, _), bounds = draw_states((4, 3, 5))
    value = torch.eye(12)[:, None].expand(12, 3, 12).contiguous()  # the output is the weights
    layer = nn.Module().train()
    states = [one.transpose(0, 1)[None] for one in (query, key, value)]
    output, _ = item_attention_forward(layer, *states, None, cu_seq_lens_q=bounds, dropout=0.5, is_causal=False)
    item = torch.tensor([0] * 4 + [1] * 3 + [2] * 5)
    assert not output[0][(item[:, None] != item)[:, None].expand(12, 3, 12)].any()
    assert output.any()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"is_causal": True}, "causally"), ({"sliding_window": 4, "is_causal": False}, "more than their bounds")],
)
def test_other_patterns_are_refused(options: dict[str, object], reason: str) -> None:
    (*states, _), bounds = draw_states((4, 3))
    states = [one.transpose(0, 1)[None] for one in states]
    with pytest.raises(UnsupportedModelError, match=reason):
        item_attention_forward(nn.Module(), *states, None, cu_seq_lens_q=bounds, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-3)])
@pytest.mark.parametrize("lengths", [(300, 1564, 7, 0, 64), (64,) * 40 + (32, 16)], ids=["images", "windows"])
def test_kernels_of_a_gpu_attend_as_alone(
    head_dim: int, dtype: torch.dtype, off: float, lengths: tuple[int, ...]
) -> None:
    (*states, gradient), bounds = draw_states(lengths, head_dim, device="cuda", dtype=dtype)
    exact = [one.double().requires_grad_() for one in states]
    expected = differentiate(attend_alone(*exact, bounds, 0.1), exact, gradient.double())
    kinds = [item_attention.EfficientItems, item_attention.ItemsByLength]
    if dtype == torch.bfloat16:
        kinds += [item_attention.FlashItems]
        if isinstance(item_attention.select_item_kernel(states[0], 999), item_attention.CudnnItems):
            kinds += [item_attention.CudnnItems]
    for kind in kinds:
        output, logsumexp = kind().forward(states, bounds, max(lengths), 0.1)
        found = kind().backward((gradient, *states, output, logsumexp), bounds, max(lengths), 0.1)
        for one, right in zip((output, *found), expected, strict=True):
            assert float((one.double() - right).norm() / right.norm()) < off, kind.__name__


@pytest.mark.gpu
def test_choice_of_kernels_on_a_gpu() -> None:
    states = torch.randn(8, 2, 64, device="cuda")
    assert isinstance(item_attention.select_item_kernel(states, 999), item_attention.EfficientItems)
    with backends.use_attention("flex"):
        assert isinstance(item_attention.select_item_kernel(states.bfloat16(), 999), item_attention.FlashItems)


def test_bounds_are_read_again_only_if_they_are_others() -> None:
    reads: list[int] = []

    def find_longest(bounds: torch.Tensor) -> int:
        def read() -> int:
            reads.append(int(bounds.diff().max()))
            return reads[-1]

        return item_attention._remember(bounds, "test", read)

    bounds = torch.tensor([0, 3, 5])
    assert [find_longest(bounds), find_longest(bounds), find_longest(bounds.detach())] == [3, 3, 3]
    assert reads == [3]
    bounds[1] = 4  # in place, at the same address
    assert find_longest(bounds) == 4 and reads == [3, 4]
    assert find_longest(torch.tensor([0, 1, 2])) == 1 and reads == [3, 4, 1]
    others = [torch.tensor([0, 6, number]) for number in range(7, 17)]
    assert [find_longest(one) for one in others] == [max(6, number - 6) for number in range(7, 17)]
