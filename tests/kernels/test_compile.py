"""Compiled layers compute the same, without graph breaks, and without recompiling for every batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cornstarch.attention.interface import IMPLEMENTATION, use_mask
from cornstarch.attention.mask import MaskSpec
from cornstarch.kernels.compile import CompiledForward, compile_layers, run_eagerly
from cornstarch.kernels.compile_log import CompileLog
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.item_encoders import attend_within_items
from cornstarch.parallel.ddp_fsdp import wrapping_units
from tests import zoo
from tests.kernels.uncompile import uncompile_layers
from tests.versions import compile_counts

BACKEND = "aot_eager"  # traces and differentiates as the default does; only kernels are torch's own
TRACED = "eager"  # traces as the default does, in half the time: what is counted are the graphs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(model: nn.Module, tokens: int, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(3, zoo.VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    documents = torch.ones_like(ids)
    documents[:, tokens // 2 :] = 2
    model.zero_grad()
    with use_mask(MaskSpec.from_documents(documents) if packed else None):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "backend"), [("llama", BACKEND), ("gemma2", TRACED)])  # layers of one kind and of two
def test_ragged_batches_compute_the_same_and_do_not_recompile(name: str, backend: str) -> None:
    model = zoo.LANGUAGE_MODELS[name].build(num_hidden_layers=4)
    model.config.use_cache = False
    model.set_attn_implementation(IMPLEMENTATION)
    right = copy.deepcopy(model)
    assert compile_layers(model.model.layers, fullgraph=True, backend=backend) == 4
    before = compile_counts()
    after_two = None
    for number, tokens in enumerate((12, 16, 20, 28, 36, 40)):
        for packed in (False, True):
            loss, found = step(model, tokens, packed)
            expected_loss, expected = step(right, tokens, packed)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
            for key, gradient in found.items():
                torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-5, msg=key)
        if number == 1:
            after_two = compile_counts()
    assert compile_counts() == after_two  # a second length makes lengths free; nothing after that
    assert compile_counts()["breaks"] == before["breaks"]


def test_evaluation_compiles_no_graph_per_layer() -> None:
    """A key/value cache is another object for every layer: each would be compiled separately, up to a limit."""
    counts = []
    for layers in (2, 6):
        torch.compiler.reset()
        model = zoo.LANGUAGE_MODELS["llama"].build(num_hidden_layers=layers)
        model.config.use_cache = True
        whole = MultimodalModel({}, model)
        compile_layers(model.model.layers, fullgraph=True, backend=TRACED)
        ids = torch.randint(3, zoo.VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
        before = compile_counts()["graphs"]
        whole(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            assert whole.eval()(input_ids=ids, labels=ids).past_key_values is None
        whole.train()(input_ids=ids, labels=ids).loss.backward()
        counts.append(compile_counts()["graphs"] - before)
    assert counts[0] == counts[1] <= 3  # with gradients, without, and nothing that depends on the number of layers


@pytest.mark.parametrize(
    ("name", "most", "backend"),
    [("siglip", 3, TRACED), ("clip", 3, BACKEND), ("qwen2_vl", 12, TRACED), ("qwen3_vl", 12, BACKEND)],
)
def test_any_number_of_images_computes_the_same_and_does_not_recompile(name: str, most: int, backend: str) -> None:
    part = zoo.ENCODERS[name]
    encoder = part.build().eval().requires_grad_(False)
    right = copy.deepcopy(encoder)
    compile_layers(wrapping_units(encoder), backend=backend)
    other = copy.deepcopy(encoder)
    before = compile_counts()["graphs"]
    for images in (3, 5, 1, 2):  # a number; any number; one, which is a case of its own
        compare_images(encoder, right, part.inputs(images))
    known = compile_counts()
    assert known["graphs"] - before <= most
    for images in (4, 8, 1, 7, 12, 6):
        compare_images(encoder, right, part.inputs(images))
    assert compile_counts() == known
    compare_images(other, right, part.inputs(2))
    uncompile_layers(wrapping_units(encoder))
    assert not any("forward" in module.__dict__ for module in encoder.modules())


@pytest.mark.parametrize(
    ("name", "backend"), [("qwen2_vl", TRACED), ("qwen2_5_vl", BACKEND), ("qwen3_vl", BACKEND), ("pixtral", BACKEND)]
)
def test_layers_over_items_of_any_size_compile_whole_and_once(name: str, backend: str) -> None:
    part = zoo.ENCODERS[name]
    encoder = part.build()
    right = copy.deepcopy(encoder)
    assert attend_within_items(encoder) == [type(encoder).__name__]
    layers = wrapping_units(encoder)
    compile_layers(layers, fullgraph=True, backend=backend)  # no graph break is possible
    before = compile_counts()["graphs"]
    known = None
    for number, images in enumerate((2, 5, 1, 3, 6, 4)):
        found, expected = (differentiate_images(one, part.inputs(images)) for one in (encoder, right))
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert float((found[key] - one).norm()) <= 1e-5 * float(one.norm()), key
        if number == 1:
            known = compile_counts()
    assert compile_counts() == known  # nothing after the second number of images
    assert known["graphs"] - before <= 3


def differentiate_images(encoder: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an encoder's output and the gradients of its parameters."""
    encoder.zero_grad()
    output = encoder(**inputs)[0]
    output.square().sum().backward()
    gradients = {name: one.grad.clone() for name, one in encoder.named_parameters() if one.grad is not None}
    return {"output": output.detach(), **gradients}


def compare_images(encoder: nn.Module, right: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Compare the outputs of two encoders."""
    torch.testing.assert_close(encoder(**inputs)[0], right(**inputs)[0], rtol=1e-5, atol=1e-6)


def test_parameter_names_stay_and_copies_are_not_compiled() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build()
    names = list(model.state_dict())
    compile_layers(model.model.layers, backend=BACKEND)
    assert compile_layers(model.model.layers, backend=BACKEND) == 0
    assert list(model.state_dict()) == names
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.zero_()
    assert not isinstance(other.model.layers[0].forward, CompiledForward)
    ids = torch.arange(3, 13).unsqueeze(0)
    assert not torch.equal(other(ids).logits, model(ids).logits)  # the copy computes with its own weights
    uncompile_layers(model.model.layers)
    assert "forward" not in model.model.layers[0].__dict__


class DataDependent(nn.Module):
    """A layer whose control flow depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x > 0).all()) else x


def test_layer_that_cannot_be_compiled_runs_eagerly_and_reports_it() -> None:
    layer, reasons = DataDependent(), []
    compile_layers([layer], reasons.append, fullgraph=True, backend=BACKEND)
    assert layer(torch.ones(2)).tolist() == [2, 2]
    assert layer(-torch.ones(2)).tolist() == [-1, -1]
    assert len(reasons) == 1 and "DataDependent cannot be compiled" in reasons[0]


class Named(nn.Module):
    """A layer for whose name torch compiles a variant of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.name != "none" else x


def test_torch_gives_up_on_a_layer_and_the_log_names_the_guard() -> None:
    layers, reasons, log = [Named(f"layer {number}") for number in range(66)], [], CompileLog()
    compile_layers(layers, reasons.append, log=log, part="text", backend="eager")
    for layer in layers:
        assert layer(torch.ones(2)).tolist() == [2, 2]
    assert log.layers == {"text": 66} and log.eager == {"text": 2} and log.variants() == {("text", "Named"): 64}
    assert len(reasons) == 2 and "torch gave up on Named" in reasons[0] and "name == 'layer 6" in reasons[0]
    assert log.recompilations == 63 and "name == 'layer " in str(log.compilations[1].reason)
    assert len(log.read_new()) == 64 and not log.read_new()


def test_layers_run_eagerly_on_request() -> None:
    layer, log = Named("layer"), CompileLog()
    compile_layers([layer], log=log, backend="eager")
    with run_eagerly():
        assert layer(torch.ones(2)).tolist() == [2, 2]
    assert not log.compilations
    layer(torch.ones(2))
    assert len(log.compilations) == 1


def test_any_number_of_rows_is_one_variant_from_the_start() -> None:
    layer, log = nn.Linear(4, 4), CompileLog()
    compile_layers([layer], log=log, any_rows=True, backend="eager")
    for rows in (3, 5, 2, 9):
        layer(torch.ones(rows, 4))
    assert log.variants() == {("model", "Linear"): 1}
