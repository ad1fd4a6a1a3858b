"""What is gathered together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.parallel import wrapping_units
from tests import zoo
from tests.parallel.work import Layered, multimodal, with_adapters


def llama(**options: object) -> nn.Module:
    return zoo.LANGUAGE_MODELS["llama"].build(**options)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    )


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=16, num_hidden_layers=2, num_local_experts=2, **sizes)
    )


class Around(nn.Module):
    """A module around some layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


def find_repeated() -> nn.Module:
    one = nn.Linear(2, 2)
    return Around(nn.ModuleList([one, nn.Linear(2, 2), one]))


def tie_into_a_layer() -> nn.Module:
    model = Around(nn.ModuleList(linears(2)))
    model.head = nn.Linear(2, 2)
    model.head.weight = model.layers[1].weight  # type: ignore[union-attr, index, assignment]
    return model


FOUND: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "llama": (llama, {"LlamaDecoderLayer": 2}),
    "tied": (lambda: llama(tie_word_embeddings=True), {"LlamaDecoderLayer": 2}),
    "lora": (with_adapters, {"LlamaDecoderLayer": 2}),
    "t5": (t5, {"T5Block": 4}),
    "mixtral": (mixtral, {"MixtralDecoderLayer": 2}),
    "multimodal": (multimodal, {"CLIPEncoderLayer": 2, "LlamaDecoderLayer": 2}),
    "blocks": (Layered, {"Sequential": 3}),
    "sequential": (lambda: Around(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))), {}),
    "sequential_itself": (lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)), {"Linear": 2}),
    "chain_of_blocks": (lambda: Around(nn.Sequential(*(Around(nn.Linear(2, 2)) for _ in range(3)))), {"Around": 3}),
    "lists_in_a_list": (lambda: Around(nn.ModuleList([nn.ModuleList(linears(2))])), {}),
    "layers_in_dictionaries": (
        lambda: Around(nn.ModuleList([nn.ModuleDict({"a": nn.ModuleList(linears(2))})])),
        {"Linear": 2},
    ),
    "one_layer_twice": (find_repeated, {"Linear": 1}),
    "tied_into_a_layer": (tie_into_a_layer, {"Linear": 1}),
    "nothing": (lambda: nn.Linear(2, 2), {}),
}


@pytest.mark.parametrize("name", FOUND)
def test_default_units_are_the_outermost_layers(name: str) -> None:
    make, expected = FOUND[name]
    assert Counter(type(unit).__name__ for unit in wrapping_units(make())) == expected


@pytest.mark.parametrize("name", FOUND)
def test_no_parameter_is_in_two_units_or_shared_with_outside(name: str) -> None:
    model = FOUND[name][0]()
    units = wrapping_units(model)
    counts = Counter(id(parameter) for unit in units for parameter in unit.parameters())
    assert all(count == 1 for count in counts.values())
    inside = {id(module) for unit in units for module in unit.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    assert not outside & counts.keys()


def test_embeddings_and_head_stay_with_the_model() -> None:
    model = llama(tie_word_embeddings=True)
    inside = {id(parameter) for unit in wrapping_units(model) for parameter in unit.parameters()}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
    assert id(model.get_input_embeddings().weight) not in inside  # type: ignore[operator]


def test_units_by_class_are_outermost_modules() -> None:
    model = multimodal()
    units = wrapping_units(model, ["LlamaDecoderLayer", "LlamaAttention"])
    assert [type(unit).__name__ for unit in units] == ["LlamaDecoderLayer"] * 2


def test_unknown_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wrap names Lama, which the model does not have\. It has: .*Linear"):
        wrapping_units(llama(), ["LlamaDecoderLayer", "Lama"])


def test_units_below_the_minimum_stay_with_their_parent() -> None:
    model = Around(nn.ModuleList([nn.Linear(2, 2), nn.Linear(9, 9)]))
    assert wrapping_units(model, least=90) == [model.layers[1]]  # type: ignore[index]
    assert wrapping_units(model, least=91) == []
    assert wrapping_units(model, ["Linear"], least=7) == [model.layers[1]]  # type: ignore[index]


def test_units_are_found_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert len(wrapping_units(llama())) == 2
