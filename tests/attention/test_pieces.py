"""Masks as causal pieces, against the same mask written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cornstarch.attention import MaskSpec
from cornstarch.attention.choice import attend_with, attends_between, check_way, kernels_of_documents, wants_dense
from cornstarch.attention.mask import Counts, count_documents
from cornstarch.attention.pieces import Pieces, pieces_of
from cornstarch.attention.varlen import attend_in_pieces
from cornstarch.compat import compile_counts, compiled
from cornstarch.compute.recomputing import recompute_layer
from cornstarch.errors import ConfigError


def unwanted() -> Any:
    raise AssertionError("no block mask is needed")


def pieces(spec: MaskSpec) -> Pieces:
    assert spec.counts.in_pieces
    return pieces_of(spec, spec.counts, unwanted)


def marked(documents: list[list[int]], spans: dict[int, list[tuple[int, int, int]]] | None = None) -> MaskSpec:
    """Rows of documents by length (their numbers are 1, 2, ...), and (begin, end, number) of spans by row."""
    numbers = [torch.arange(1, len(row) + 1).repeat_interleave(torch.tensor(row)) for row in documents]
    rows = torch.stack(numbers)
    marks = torch.full_like(rows, -1)
    for row, found in (spans or {}).items():
        for begin, end, number in found:
            marks[row, begin:end] = number
    return MaskSpec(rows, marks)


def with_padding(spec: MaskSpec, row: int, begin: int) -> MaskSpec:
    documents = spec.documents.clone()
    documents[row, begin:] = 0
    return MaskSpec(documents, spec.spans)


def written_out(spec: MaskSpec, inputs: list[Tensor], weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return attention with a dense mask in float64, and its inputs with the gradients of the weighted sum."""
    exact = [one.detach().double().requires_grad_() for one in inputs]
    groups = exact[0].shape[1] // exact[1].shape[1]
    query, key, value = exact[0], *(one.repeat_interleave(groups, 1) for one in exact[1:])
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~spec.dense(), -torch.inf)
    reference = (scores.softmax(-1) @ value).transpose(1, 2)
    (reference * weight).sum().backward()
    return reference, exact


def assert_gradients(inputs: list[Tensor], exact: list[Tensor]) -> None:
    for one, ideal in zip(inputs, exact, strict=True):
        assert one.grad is not None and ideal.grad is not None
        torch.testing.assert_close(one.grad.double(), ideal.grad, rtol=1e-5, atol=1e-5)


SPECS = {
    "one document": marked([[24], [24]]),
    "documents": marked([[5, 12, 7], [1, 22, 1]]),
    "images": marked([[24], [24]], {0: [(3, 11, 0), (15, 20, 1)], 1: [(0, 24, 2)]}),
    "images side by side": marked([[24]], {0: [(3, 11, 0), (11, 20, 1)]}),
    "an image of one token": marked([[12, 12]], {0: [(3, 4, 0), (15, 20, 1), (22, 23, 2)]}),
    "numbers in another order": marked([[24]], {0: [(3, 8, 7), (12, 20, 2)]}),
    "equal numbers in other documents": marked([[10, 14]], {0: [(3, 8, 0), (12, 20, 0)]}),
    "equal numbers on both sides of a border": marked([[10, 14]], {0: [(3, 10, 0), (10, 20, 0)]}),
    "padding behind a row": with_padding(marked([[24], [24]], {0: [(3, 8, 0)]}), 0, 20),
    "padding": with_padding(marked([[10, 14], [24]], {0: [(3, 8, 0)]}), 0, 20),
}


def assert_equals_a_dense_mask(
    name: str, heads: tuple[int, int], attend: Callable[[MaskSpec, list[Tensor]], Tensor]
) -> None:
    spec = SPECS[name]
    rows, tokens = spec.documents.shape
    torch.manual_seed(0)
    inputs = [torch.randn(rows, n, tokens, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    weight = torch.randn(rows, tokens, heads[0], 8) * (spec.documents > 0)[..., None, None]  # padding is not trained on
    reference, exact = written_out(spec, inputs, weight)
    found = attend(spec, inputs)
    (found * weight).sum().backward()
    real = spec.documents > 0
    torch.testing.assert_close(found[real], reference.float()[real], rtol=1e-5, atol=1e-5)
    assert_gradients(inputs, exact)


def assert_compiled_once(attend: Callable[..., Tensor], render: Callable[[MaskSpec], Any]) -> None:
    """Attend in a compiled layer of ragged batches, which compiles no more after the second."""
    torch.compiler.reset()

    def layer(states: Tensor, mask: Any) -> Tensor:
        return attend(states * 2, states, states + 1, mask, 0.5).sin()

    quick = compiled(layer)
    before, frames = compile_counts(), []
    for length in (9, 17, 12, 30, 21, 5, 28):
        spec = marked([[length, 40 - length]], {0: [(1, 1 + length // 2, 0)]})
        states = torch.randn(1, 2, 40, 8, requires_grad=True)
        found = quick(states, render(spec))
        torch.testing.assert_close(found, layer(states, render(spec)))
        found.sum().backward()
        frames.append(compile_counts()["graphs"] - before["graphs"])
    assert frames[-1] == frames[1] <= 2, frames
    assert compile_counts()["breaks"] == before["breaks"]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_pieces_equal_a_dense_mask(name: str, heads: tuple[int, int]) -> None:
    assert_equals_a_dense_mask(name, heads, lambda spec, inputs: attend_in_pieces(*inputs, pieces(spec), 0.3))


@pytest.mark.parametrize("name", SPECS)
def test_counts(name: str) -> None:
    spec = SPECS[name]
    groups: dict[tuple[int, int, int], int] = {}
    for row, (documents, spans) in enumerate(zip(spec.documents.tolist(), spec.spans.tolist(), strict=True)):
        for document, span in zip(documents, spans, strict=True):
            if span >= 0 and document > 0:
                groups[row, document, span] = groups.get((row, document, span), 0) + 1
    found = spec.counts
    assert found.in_pieces and found.spans >= len(groups) and found.longest_span >= max(groups.values(), default=0)


def test_documents_are_counted() -> None:
    assert count_documents(torch.tensor([[1, 1, 2, 2, 2], [0, 1, 1, 0, 0]])) == Counts(5, 3, False)
    assert count_documents(torch.tensor([[1, 1, 1], [1, 1, 0]])) == Counts(3, 3, True), "padding behind is harmless"
    assert not count_documents(torch.tensor([[0, 1, 1]])).whole_rows, "padding in front would be seen"
    assert not count_documents(torch.tensor([[1, 1, 2, 1, 1]])).in_pieces
    assert not MaskSpec.from_documents(torch.tensor([[1, 2, 1]])).counts.in_pieces
    assert count_documents(torch.tensor([[0, 1, 0], [0, 0, 0]])).in_pieces, "padding may be on both sides"
    parts = marked([[24]], {0: [(3, 8, 0), (15, 20, 0)]})
    assert not parts.counts.in_pieces, "a span in two parts"


def test_what_is_said_is_not_looked_for() -> None:
    said = Counts(3, 9, False)
    spec = MaskSpec(torch.ones(1, 4, dtype=torch.long), torch.full((1, 4), -1), known_counts=said)
    assert spec.counts is said and spec.to("cpu").counts is said
    assert spec.with_spans(torch.zeros(1, 4, dtype=torch.long)).counts == Counts(1, 4, True, 1, 4)


def test_sizes_are_rounded_so_that_ragged_batches_share_kernels() -> None:
    shapes = set()
    for length in (9, 10, 12, 15):
        found = pieces(marked([[length, 40 - length, 24]], {0: [(0, length, 0), (44, 60, 1)]}))
        assert found.documents is not None and found.spans is not None
        shapes.add((tuple(found.documents.shape), tuple(found.spans.shape), tuple(found.sizes.tolist())))
        assert found.documents[1].tolist() == [*sorted([length, 40 - length, 24], reverse=True), 0, 0]
        assert sorted(found.spans[:, :2].T.tolist()) == [[0, length - 1], [44, 15]]
    assert len(shapes) == 1


@pytest.mark.timeout(1200)  # C++ is compiled, which a busy machine takes minutes for
def test_a_compiled_layer_is_compiled_once_for_ragged_batches() -> None:
    assert_compiled_once(attend_in_pieces, pieces)


@pytest.mark.parametrize("way", ["flex", "cudnn", "varlen"])
def test_kernels_of_a_gpu_are_refused_without_one(way: Any) -> None:
    with pytest.raises(ConfigError, match=f"attention = {way}\n.*GPU"):
        check_way(way, torch.device("cpu"), half=True)
    check_way("auto", torch.device("cpu"), half=False)
    check_way("sdpa", torch.device("cpu"), half=False)


def test_half_precision_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornstarch.attention.cudnn.has_cudnn", lambda: True)
    with pytest.raises(ConfigError, match="bf16"):
        check_way("varlen", torch.device("cuda"), half=False)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornstarch.attention.cudnn.has_cudnn", lambda: False)
    monkeypatch.setattr("cornstarch.attention.flash.has_flash", lambda: False)
    with pytest.raises(ConfigError, match=r"attention = varlen\n.*pip install 'cornstarch\[gpu\]'"):
        check_way("varlen", torch.device("cuda"), half=True)
    with pytest.raises(ConfigError, match=r"attention = cudnn\n.*pip install 'cornstarch\[gpu\]'"):
        check_way("cudnn", torch.device("cuda"), half=True)


def test_no_pieces_without_a_gpu() -> None:
    with attend_with("varlen"):
        assert kernels_of_documents(torch.device("cpu"), 64) is None
        assert not attends_between(torch.device("cpu"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that there is not, with both packages."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("cornstarch.attention.flash.runs_on", lambda device: True)
    monkeypatch.setattr("cornstarch.attention.cudnn.has_cudnn", lambda: True)
    monkeypatch.setattr("cornstarch.attention.cudnn.has_kernels", lambda width, device: True)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("way", "width", "expected"),
    [
        ("auto", 128, "flash"), ("varlen", 64, "flash"), ("cudnn", 128, "cudnn"), ("flex", 128, None),
        ("auto", 80, "cudnn"), ("auto", 20, None), ("auto", 192, None), ("auto", None, None),
    ],
)  # fmt: skip
def test_whose_kernels(way: Any, width: int | None, expected: str | None, hopper: torch.device) -> None:
    with attend_with(way):
        assert kernels_of_documents(hopper, width) == expected


def test_who_asks_for_equal_runs_gets_flex(hopper: torch.device) -> None:
    with attend_with("auto"):
        assert attends_between(hopper)
        torch.use_deterministic_algorithms(True)
        try:
            assert kernels_of_documents(hopper, 128) is None and not attends_between(hopper)
            with attend_with("varlen"):
                assert kernels_of_documents(hopper, 128) == "flash" and attends_between(hopper), "they are asked for"
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_longest_come_first() -> None:
    found = pieces(marked([[5, 12, 7]], {0: [(1, 3, 0), (8, 14, 1)]}))
    assert found.documents is not None and found.spans is not None
    assert found.documents[:, :3].tolist() == [[5, 17, 0], [12, 7, 5]]
    assert found.spans[:, :2].tolist() == [[8, 1], [5, 1]]


def test_what_is_computed_again_attends_as_before() -> None:
    seen = []

    class Layer(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append((wants_dense(), torch.backends.cuda.mem_efficient_sdp_enabled()))
            return super().forward(input)

    layer = Layer(2, 2)
    recompute_layer(layer)
    for way in ("sdpa", "cudnn", "auto"):
        seen.clear()
        with attend_with(way):  # type: ignore[arg-type]
            loss = layer(torch.ones(1, 2)).sum()
        loss.backward()
        assert seen == [(way == "sdpa", way != "cudnn")] * 2
    assert not wants_dense() and torch.backends.cuda.mem_efficient_sdp_enabled()
