"""The counted tokens per item equal the encoders' real outputs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.preprocessing.token_count import (
    CHECKED_GEOMETRIES,
    FeatureCounter,
)
from cornstarch.models.multimodal_language_model.shape_inference import (
    ShapeInferenceMode,
    ShapeTensor,
    copy_without_weights,
)
from tests.zoo import ENCODER_HIDDEN, ENCODERS, HIDDEN, MERGED, Inputs, generator

WIDTH = 6


def projector(encoder: str) -> nn.Module:
    """Make a projection that fits an encoder of the zoo."""
    return nn.Linear(MERGED if encoder.startswith("qwen") and encoder.endswith("vl") else ENCODER_HIDDEN, HIDDEN)


def never_run(monkeypatch: pytest.MonkeyPatch, encoder: ModalEncoderModule) -> None:
    """Make any use of the real encoder an error."""

    def refuse(**inputs: Any) -> Any:
        raise AssertionError("the real encoder was run")

    monkeypatch.setattr(encoder.module, "forward", refuse)


def runs_of(module: nn.Module) -> list[None]:
    """Return a list that grows by one whenever the module runs."""
    runs: list[None] = []
    module.register_forward_hook(lambda *_: runs.append(None))
    return runs


class Patches(nn.Module):
    """An encoder that cuts a sequence [N, L, 2] into tokens of its own; `act` decides what it does with them."""

    def __init__(self, act: Callable[[Tensor], Any] = torch.clone) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.act = act

    def forward(self, values: Tensor, sizes: Tensor | None = None) -> Any:
        """Embed and act."""
        return BaseModelOutput(last_hidden_state=self.act(self.embed(values)))


def sequences(count: int = 3, length: int = 4) -> Inputs:
    """Make the input of `Patches`."""
    return {"values": torch.randn(count, length, 2, generator=generator(0))}


# ---------------------------------------------------------------------------------------- the encoders we name


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", ENCODERS)
def test_lengths_are_those_of_the_forward(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part = ENCODERS[name]
    encoder = ModalEncoderModule(part.build(), projector(name)).eval()
    inputs = part.inputs(count)
    real = encoder.features(inputs)
    assert real.lengths == part.feature_lengths(count) == FeatureCounter(encoder).lengths(inputs)
    counter = FeatureCounter(encoder)
    never_run(monkeypatch, encoder)

    assert counter.count(inputs).lengths == tuple(real.lengths)
    assert counter.count(inputs).total == len(real.tokens)
    assert counter.lengths(inputs) == real.lengths


@pytest.mark.parametrize("name", ENCODERS)
def test_counting_does_not_change_the_encoder(name: str) -> None:
    """Models keep tables in caches of their module: a table without values must not turn up in a real run."""
    part = ENCODERS[name]
    encoder = ModalEncoderModule(part.build(), projector(name)).eval()
    inputs = part.inputs(6)  # a number of items that no other test has
    FeatureCounter(encoder).count(inputs)
    tokens = encoder.features(inputs).tokens
    assert not isinstance(tokens, ShapeTensor) and bool(tokens.isfinite().all())
    FeatureCounter(encoder).count(inputs)
    assert torch.equal(encoder.features(inputs).tokens, tokens)


@pytest.mark.parametrize("name", ["wav2vec2", "whisper", "qwen2_audio"])
def test_a_mask_shortens_sounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = ENCODERS[name]
    encoder = ModalEncoderModule(part.build(), projector(name)).eval()
    inputs = part.inputs(3)
    mask = torch.ones(3, next(iter(inputs.values())).shape[-1], dtype=torch.long)
    mask[1, mask.shape[1] // 2 :] = 0
    inputs["attention_mask"] = mask
    if name == "qwen2_audio":  # its own attention_mask is one over scores, with four dimensions
        inputs["feature_attention_mask"] = inputs.pop("attention_mask")
        encoder.preprocess_callback = lambda given: {"input_features": given["input_features"]}
    real = encoder.features(inputs)
    counter = FeatureCounter(encoder)
    never_run(monkeypatch, encoder)

    assert counter.lengths(inputs) == real.lengths
    assert counter.count(inputs).total == len(real.tokens)


def test_precision_of_the_weights_is_that_of_the_inputs() -> None:
    part = ENCODERS["whisper"]
    encoder = ModalEncoderModule(part.build().to(torch.bfloat16), projector("whisper").to(torch.bfloat16))
    assert FeatureCounter(encoder).lengths(part.inputs(2)) == part.feature_lengths(2)


# ---------------------------------------------------------------------------------------- callbacks and projectors


def drop_first(output: Any) -> Any:
    """Leave out the class token."""
    output.last_hidden_state = output.last_hidden_state[:, 1:]
    return output


class Pool(nn.Module):
    """A projector that joins two neighbouring tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        """Join and project."""
        with torch.autocast(device_type=tokens.device.type, enabled=False):  # asks where the tensor is
            return self.linear(tokens.unflatten(-2, (-1, 2)).flatten(-2))


def test_callbacks_and_projector_are_counted() -> None:
    part = ENCODERS["clip"]
    encoder = ModalEncoderModule(part.build(), Pool(ENCODER_HIDDEN), postprocess_module_callback=drop_first)
    assert FeatureCounter(encoder).lengths(part.inputs(3)) == [2, 2, 2]


def test_a_formula_that_callbacks_make_wrong_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    part = ENCODERS["qwen2_vl"]
    lengths = part.feature_lengths(4)

    def halves(inputs: Inputs, output: Any) -> BaseModelOutput:
        items = [item[: len(item) // 2] for item in output.pooler_output.split(lengths)]
        return BaseModelOutput(last_hidden_state=items)

    encoder = ModalEncoderModule(part.build(), nn.Linear(MERGED, HIDDEN), postprocess_module_callback=halves)
    counter = FeatureCounter(encoder)
    never_run(monkeypatch, encoder)
    for _ in range(2):
        assert counter.lengths(part.inputs(4)) == [length // 2 for length in lengths]


def test_inputs_reach_the_preprocess_callback_under_their_own_names() -> None:
    part = ENCODERS["qwen2_5_vl"]
    encoder = ModalEncoderModule(
        part.build(),
        nn.Linear(MERGED, HIDDEN),
        additional_args=["pixel_values", "image_grid_thw"],
        preprocess_callback=lambda inputs: {
            "hidden_states": inputs["pixel_values"],
            "grid_thw": inputs["image_grid_thw"],
        },
    )
    made = part.inputs(3)
    outputs = {"pixel_values": made["hidden_states"], "image_grid_thw": made["grid_thw"]}
    counter = FeatureCounter(encoder)
    assert counter.lengths(counter.arguments(outputs)) == part.feature_lengths(3)


def flat(output: Any) -> Tensor:
    """Forget where items end."""
    return output[0].flatten(0, 1)


def test_items_of_a_flat_output_are_counted_alone() -> None:
    encoder = ModalEncoderModule(Patches(), nn.Linear(WIDTH, HIDDEN), postprocess_projector_callback=flat)
    counter = FeatureCounter(encoder)
    assert (counter.count(sequences()).lengths, counter.count(sequences()).total) == (None, 12)
    assert counter.lengths(sequences()) == [4, 4, 4]


def test_flat_tokens_without_boundaries_are_refused() -> None:
    def shared(output: Any) -> Tensor:
        return torch.cat([flat(output), flat(output)[:1]])

    encoder = ModalEncoderModule(Patches(), nn.Linear(WIDTH, HIDDEN), postprocess_projector_callback=shared)
    with pytest.raises(ConfigError, match="13 tokens in one flat tensor.*num_feature_calculation_funcs"):
        FeatureCounter(encoder).lengths(sequences())


# ---------------------------------------------------------------------------------------- what must be run for real


def keep_positive(tokens: Tensor) -> Any:
    """Keep the tokens whose first number is positive: how many is a matter of values."""
    return [item[item[:, 0] > 0] for item in tokens]


def test_an_encoder_that_reads_values_is_run_once_per_geometry() -> None:
    encoder = ModalEncoderModule(Patches(keep_positive), nn.Linear(WIDTH, HIDDEN)).train()
    encoder.module.norm = nn.BatchNorm1d(WIDTH)
    encoder.module.norm.eval()
    runs = runs_of(encoder.module)
    inputs = sequences()
    expected = [len(item) for item in keep_positive(encoder.module.embed(inputs["values"]))]
    counter = FeatureCounter(encoder)

    assert counter.lengths(inputs) == expected
    assert counter.lengths(inputs) == expected
    assert len(runs) == 1
    assert encoder.training and encoder.module.embed.training and not encoder.module.norm.training


def test_a_pickled_counter_cannot_run_the_encoder() -> None:
    encoder = ModalEncoderModule(Patches(keep_positive), nn.Linear(WIDTH, HIDDEN))
    travelled = pickle.loads(pickle.dumps(FeatureCounter(encoder)))
    with pytest.raises(ConfigError, match="Patches makes depends on the values.*num_feature_calculation_funcs"):
        travelled.lengths(sequences())


class Uncopyable:
    """A callback that cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse."""
        raise TypeError("cannot be copied")

    def __call__(self, output: Any) -> Any:
        """Change nothing."""
        return output


def test_an_encoder_that_cannot_be_copied_is_run() -> None:
    encoder = ModalEncoderModule(Patches(), postprocess_module_callback=Uncopyable())
    runs = runs_of(encoder.module)
    counter = FeatureCounter(encoder)
    assert counter.lengths(sequences(3, 5)) == [5, 5, 5]
    assert len(runs) == 1
    with pytest.raises(ConfigError, match="Patches cannot be copied"):
        pickle.loads(pickle.dumps(counter)).lengths(sequences(3, 5))


def test_a_pickled_counter_has_no_weights() -> None:
    part = ENCODERS["clip"]
    encoder = ModalEncoderModule(part.build(), projector("clip"))
    sent = pickle.dumps(FeatureCounter(encoder))
    assert len(sent) < sum(p.numel() * p.element_size() for p in encoder.parameters()) / 2
    assert pickle.loads(sent).lengths(part.inputs(2)) == part.feature_lengths(2)


def test_inputs_that_the_encoder_refuses_are_reported() -> None:
    encoder = ModalEncoderModule(ENCODERS["clip"].build(), projector("clip"))
    with pytest.raises(ConfigError, match=r"CLIPVisionModel does not take.*\(2, 3, 8, 8\).*Input image size"):
        FeatureCounter(encoder).lengths({"pixel_values": torch.zeros(2, 3, 8, 8)})


# ---------------------------------------------------------------------------------------- how often it is measured


@pytest.mark.parametrize("name", ["clip", "qwen2_vl"])
def test_a_formula_is_trusted_after_some_checks(name: str) -> None:
    part = ENCODERS[name]
    encoder = part.build()
    runs = runs_of(encoder)  # hooks are copied, so shape inference runs are counted as well
    counter = FeatureCounter(ModalEncoderModule(encoder, projector(name)))
    for count in range(1, CHECKED_GEOMETRIES + 6):
        for _ in range(2):
            assert counter.lengths(part.inputs(count)) == part.feature_lengths(count)
    assert len(runs) == CHECKED_GEOMETRIES


def test_confirm_names_both_numbers() -> None:
    part = ENCODERS["clip"]
    counter = FeatureCounter(ModalEncoderModule(part.build(), projector("clip")))
    counter.confirm([5, 5], part.inputs(2), "f")
    counter.confirm([10], part.inputs(2), "f")  # one image in two crops
    with pytest.raises(ConfigError, match="f says 4 tokens for item 1, but CLIPVisionModel .* makes 5"):
        counter.confirm([5, 4], part.inputs(2), "f")
    with pytest.raises(ConfigError, match="f says 9 tokens in all, but CLIPVisionModel .* makes 10"):
        counter.confirm([9], part.inputs(2), "f")


# ---------------------------------------------------------------------------------------- shapes


def known(values: Any) -> Tensor:
    return torch.tensor(values)


CALCULATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda x: x[known([True, False, True, True])],
    "mask over two dimensions": lambda x: x[known([[True, False], [True, True], [False] * 2, [True] * 2])],
    "grid": lambda x: x.repeat_interleave(known([1, 3, 0, 2]), dim=0),
    "numbers": lambda x: x[: int((known([5, 9]) / 2).floor().sum().item()) - 4],
    "split": lambda x: torch.cat([piece[:1] for piece in x.split(known([1, 3]).tolist())]),
    "factory": lambda x: torch.zeros(3, 2, device=x.device) + x[:3],
    "in place": lambda x: x.clone().add_(1).mul_(x),
    "written": lambda x: _write(x),
    "position": lambda x: x + torch.arange(len(x), device=x.device)[:, None] ** 0.5,
    "like": lambda x: torch.cat([torch.full_like(x, 2), x.new_zeros(1, 2)]),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones(4), torch.ones(4))),
}


def _write(x: Tensor) -> Tensor:
    rows = torch.empty(6, 2, dtype=x.dtype, device=x.device)
    rows[:4] = x
    rows[known([False] * 4 + [True] * 2)] = x[0]
    return rows


@pytest.mark.parametrize("name", CALCULATIONS)
def test_shapes_are_those_of_the_calculation(name: str) -> None:
    real = CALCULATIONS[name](torch.ones(4, 2))
    given = ShapeTensor.of((4, 2), torch.float32)
    with ShapeInferenceMode():
        shape = CALCULATIONS[name](given)
    assert isinstance(shape, ShapeTensor)
    assert (shape.shape, shape.dtype, shape.device.type) == (real.shape, real.dtype, real.device.type)


UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "a value": lambda x: x.sum().item(),
    "a list": lambda x: x.tolist(),
    "a decision": lambda x: bool((x > 0).any()),
    "a selection": lambda x: x[x > 0],
    "an array": lambda x: x.numpy(),
    "a known tensor overwritten": lambda x: known([1, 2]).copy_(x[0]),
    "a shape changed in place": lambda x: x.clone().unsqueeze_(0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_values_are_never_invented(name: str) -> None:
    given = ShapeTensor.of((4, 2), torch.float32)
    with ShapeInferenceMode(), pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        UNKNOWN[name](given)


def test_a_copy_without_weights_does_not_change_the_module() -> None:
    module = Patches()
    copied = copy_without_weights(module)
    assert isinstance(copied.embed.weight, ShapeTensor) and not isinstance(module.embed.weight, ShapeTensor)
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert module.training and not copied.training
