"""One operator attends in a compiled layer as Python code does in an eager one, and keeps no more for its backward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.attention.opaque_attention import attend_opaquely, count_held, hold, number_mask
from cornstarch.compat.compiler import set_activation_budget
from tests import zoo

HEADS, WIDTH = 4, 8


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    gc.collect()
    yield
    torch.compiler.reset()


Attend = Callable[[Sequence[Any], Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Mask:
    """A mask that attends by a function."""

    def __init__(self, attend: Attend) -> None:
        self.attend_with = attend


def attend_by_torch(options: Sequence[Any], query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """Return torch's own attention: its output is among what it saves, and so are its inputs."""
    return nn.functional.scaled_dot_product_attention(query, key, value, scale=options[0]).transpose(1, 2)


def attend_with_sinks(
    options: Sequence[Any], query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """Return the plain formula, with one more key per head that takes weight and gives nothing."""
    assert sinks is not None
    scores = query @ key.transpose(2, 3) * options[0]
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2).contiguous()


def give_back_query(options: Sequence[Any], query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """Attend to nothing, and return a view of what was given."""
    return query.transpose(1, 2)


class Layer(nn.Module):
    """A layer whose query, key and value are parts of one matrix, or turned as by rotary embeddings."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns, width = turns, HEADS * WIDTH
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x: Tensor, mask: Mask | None, number: Tensor, passes_query: bool = True) -> Tensor:
        """Attend by a number in a compiled layer, and by its mask in an eager one."""
        parts = self.enter(x).chunk(3, dim=-1)
        query, key, value = (one.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for one in parts)
        if self.turns:
            query, key = (one * one.cos() + one.sin() for one in (query, key))
        options = (WIDTH**-0.5, None, 0.0, self.training)
        if mask is None:
            found = attend_opaquely(query, key, value, self.sinks, number, options, passes_query)
        else:
            found = mask.attend_with(options, query, key, value, self.sinks)
        # Memory of a graph that is free by now is used again for these.
        return x + self.leave(found.flatten(2)).relu() * found.flatten(2).sin()


def build_layers(turns: bool) -> nn.ModuleList:
    with zoo.reproducible(3):
        return nn.ModuleList([Layer(turns) for _ in range(3)])


def run_layers(layers: nn.ModuleList, x: Tensor, mask: Mask, passes_query: bool = True, eager: bool = True) -> Any:
    """Return the output, and the gradients of the input and of all parameters."""
    x, number = x.clone().requires_grad_(), number_mask(mask)
    layers.zero_grad()
    states = x
    for layer in layers:
        states = layer(states, mask if eager else None, number, passes_query)
    states.square().sum().backward()
    found = {name: p.grad.clone() for name, p in layers.named_parameters() if p.grad is not None}
    return {"output": states.detach(), "input": x.grad, **found}


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("attend", [attend_by_torch, attend_with_sinks, give_back_query])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager_decomp_partition"])
def test_compiled_layers_attend_as_eager_ones_do(backend: str, attend: Attend, turns: bool) -> None:
    right, layers = build_layers(turns), build_layers(turns)
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
    mask = Mask(attend)
    for tokens, passes_query in ((5, True), (9, True), (7, True), (5, False)):
        x = torch.randn(2, tokens, HEADS * WIDTH, generator=zoo.generator(tokens))
        found = run_layers(layers, x, mask, passes_query, eager=False)
        expected = run_layers(right, x, mask)
        if attend is not attend_with_sinks:  # autograd gives no gradient of what was not used, operators give zeros
            for one in (found, expected):
                for name in [name for name in one if name.endswith("sinks")]:
                    assert not one.pop(name).any()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gc.collect()
    assert count_held() == 0


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.05])
def test_attention_is_never_computed_again_to_save_memory(budget: float) -> None:
    calls: list[int] = []

    def attend(options: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        calls.append(1)
        return attend_by_torch(options, query, key, value, sinks)

    layers = build_layers(turns=True)
    set_activation_budget(budget)
    try:
        for layer in layers:
            layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        run_layers(layers, torch.ones(2, 5, HEADS * WIDTH), Mask(attend), eager=False)
    finally:
        set_activation_budget(1.0)
    assert len(calls) == len(layers)


def test_nothing_is_kept_without_gradients_or_after_a_forward_pass_alone() -> None:
    layer, mask = Layer(turns=True), Mask(attend_by_torch)
    number = number_mask(mask)
    layer.compile(backend="aot_eager", fullgraph=True)
    x = torch.ones(1, 4, HEADS * WIDTH)
    with torch.no_grad():
        layer(x, None, number)
        assert count_held() == 0
    output = layer(x, None, number)
    assert count_held() == 1
    del output
    gc.collect()
    assert count_held() == 0


def test_the_query_is_not_copied() -> None:
    """What autograd keeps of it comes from the backward operator, in whatever layout it has there."""
    kept: list[Tensor] = []

    def attend(options: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        output = (query * key).square()  # saves a new tensor, the query and the key
        kept.append(output)
        return output.transpose(1, 2).contiguous()

    mask = Mask(attend)
    query, key = (torch.randn(1, 2, 3, 4, generator=zoo.generator(seed), requires_grad=True) for seed in (1, 2))
    expected = torch.autograd.grad((query * key).square().sum(), (query, key))
    operator = torch.ops.cornstarch
    numbers = (number_mask(mask), 1.0, None, 0.0, True, True, True)
    with torch.no_grad():
        output, record = operator.attend_opaquely(query, key, key, None, *numbers)
        other = query.detach().transpose(2, 3).contiguous().transpose(2, 3)  # other strides
        query.zero_()  # as where its memory is used again
        key.zero_()
        found = operator.attend_opaquely_backward(torch.ones_like(output), other, record, [2, 4, 0])
    torch.testing.assert_close(found[:2], expected)


def test_a_value_lives_as_long_as_the_memory_of_its_tensor() -> None:
    before = count_held()
    number = hold("a value")
    view = number.detach()
    del number
    assert count_held() == before + 1
    del view
    assert count_held() == before
