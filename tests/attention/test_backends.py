"""The registry of attention backends, and which of them is selected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.attention import AttentionBackend, MaskSpec, register_attention_backend
from cornstarch.attention.backends import (
    ATTENTION_BACKENDS,
    check_attention,
    has_range_backend,
    is_dense_requested,
    run_attention,
    select_backend,
    use_attention,
)
from cornstarch.attention.cudnn_attention import build_piece_mask
from cornstarch.attention.flash_attention import build_document_mask
from cornstarch.compat.compiler import compile_variants
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile import checkpoint_layer
from tests.attention.packed_masks import SPECS
from tests.versions import compile_counts


@dataclass
class ConstantMask:
    """The mask of `ConstantBackend`."""

    value: float
    spec: MaskSpec


class ConstantBackend(AttentionBackend):
    """Returns a constant, except under dropout."""

    name = "constant"
    mask_type = ConstantMask
    choices = ("varlen",)
    priority = 99

    def build_mask(self, spec: MaskSpec, queries: Tensor | None = None, keys: Tensor | None = None) -> ConstantMask:
        return ConstantMask(7.0, spec)

    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        return options["dropout"] == 0

    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        return torch.full_like(query, mask.value).transpose(1, 2), None

    def convert_mask(self, mask: Any, query: Tensor, key: Tensor) -> Tensor:
        return mask.spec.dense()


@pytest.fixture
def constant() -> Iterator[ConstantBackend]:
    backend = ConstantBackend()
    register_attention_backend(backend)
    yield backend
    del ATTENTION_BACKENDS[ConstantMask]


def build_states() -> list[Tensor]:
    return [torch.randn(2, 4, 24, 8) for _ in range(3)]


def test_a_registered_backend_is_selected_and_runs(constant: ConstantBackend) -> None:
    with use_attention("varlen"):
        assert select_backend(torch.device("cuda"), 64) is constant
    mask = constant.build_mask(SPECS["documents"])
    output, _ = run_attention(nn.Module(), *build_states(), mask)
    assert output.shape == (2, 24, 4, 8) and bool((output == 7).all())
    with pytest.raises(ValueError, match="ConstantMask is the mask of the attention backend 'constant'"):
        register_attention_backend(ConstantBackend())


def test_a_layer_that_a_backend_does_not_support_runs_on_a_more_general_one(constant: ConstantBackend) -> None:
    spec, states, layer = SPECS["documents"], build_states(), nn.Module().eval()
    output, _ = run_attention(layer, *states, constant.build_mask(spec), dropout=0.5, softcap=3.0)
    expected, _ = run_attention(layer, *states, spec.dense(), softcap=3.0)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("build", [build_document_mask, build_piece_mask, MaskSpec.build_range_mask, MaskSpec.dense])
def test_compiled_layers_find_their_backend_without_graph_breaks(build: Any) -> None:
    torch.compiler.reset()
    layer = nn.Module()
    layer.num_key_value_groups = 1

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return run_attention(layer, query, key, value, mask, scaling=0.3)[0].sin()

    states, mask, before = build_states(), build(SPECS["images"]), compile_counts()["breaks"]
    found = compile_variants(attend, fullgraph=True, backend="aot_eager")(*states, mask)
    torch.testing.assert_close(found, attend(*states, mask))
    assert compile_counts()["breaks"] == before


@pytest.mark.parametrize("choice", ["flex", "cudnn", "varlen"])
def test_gpu_kernels_are_refused_without_a_gpu(choice: Any) -> None:
    with pytest.raises(ConfigError, match=f"attention = {choice}\n.*GPU"):
        check_attention(choice, torch.device("cpu"), half=True)
    check_attention("auto", torch.device("cpu"), half=False)
    check_attention("sdpa", torch.device("cpu"), half=False)


def test_kernels_in_half_precision_are_refused_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornstarch.attention.cudnn_attention.has_cudnn", lambda: True)
    with pytest.raises(ConfigError, match="bf16"):
        check_attention("varlen", torch.device("cuda"), half=False)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornstarch.attention.cudnn_attention.has_cudnn", lambda: False)
    monkeypatch.setattr("cornstarch.attention.flash_attention.has_flash", lambda: False)
    with pytest.raises(ConfigError, match=r"attention = varlen\n.*pip install 'cornstarch\[gpu\]'"):
        check_attention("varlen", torch.device("cuda"), half=True)
    with pytest.raises(ConfigError, match=r"attention = cudnn\n.*pip install 'cornstarch\[gpu\]'"):
        check_attention("cudnn", torch.device("cuda"), half=True)


def test_no_backend_is_selected_without_a_gpu() -> None:
    with use_attention("varlen"):
        assert select_backend(torch.device("cpu"), 64) is None
        assert not has_range_backend(torch.device("cpu"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Pretend to have a Hopper GPU with both packages."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("cornstarch.attention.flash_attention.has_flash_on", lambda device: True)
    monkeypatch.setattr("cornstarch.attention.cudnn_attention.has_cudnn", lambda: True)
    monkeypatch.setattr("cornstarch.attention.cudnn_attention.has_kernels", lambda width, device: True)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("choice", "head_dim", "expected"),
    [
        ("auto", 128, "flash"), ("varlen", 64, "flash"), ("cudnn", 128, "cudnn"), ("flex", 128, None),
        ("auto", 80, "cudnn"), ("auto", 20, None), ("auto", 192, None), ("auto", None, None),
    ],
)  # fmt: skip
def test_selected_backend_depends_on_choice_and_head_dim(
    choice: Any, head_dim: int | None, expected: str | None, hopper: torch.device
) -> None:
    with use_attention(choice):
        backend = select_backend(hopper, head_dim)
    assert (None if backend is None else backend.name) == expected


def test_auto_selects_only_deterministic_kernels_if_asked(hopper: torch.device) -> None:
    with use_attention("auto"):
        assert has_range_backend(hopper)
        torch.use_deterministic_algorithms(True)
        try:
            assert select_backend(hopper, 128) is None and not has_range_backend(hopper)
            with use_attention("varlen"):
                backend = select_backend(hopper, 128)
                assert backend is not None and backend.name == "flash" and has_range_backend(hopper), "explicit"
        finally:
            torch.use_deterministic_algorithms(False)


def test_recomputed_layers_use_the_same_kernels() -> None:
    seen = []

    class Layer(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append((is_dense_requested(), torch.backends.cuda.mem_efficient_sdp_enabled()))
            return super().forward(input)

    layer = Layer(2, 2)
    checkpoint_layer(layer)
    for choice in ("sdpa", "cudnn", "auto"):
        seen.clear()
        with use_attention(choice):  # type: ignore[arg-type]
            loss = layer(torch.ones(1, 2)).sum()
        loss.backward()
        assert seen == [(choice == "sdpa", choice != "cudnn")] * 2
    assert not is_dense_requested() and torch.backends.cuda.mem_efficient_sdp_enabled()
