"""Activations within a size: which layers are computed again, what is kept then, and that nothing else changes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cornstarch.compute.compiling import CompiledForward, compile_layers, plain_layers
from cornstarch.compute.head import fuse_head_with_loss
from cornstarch.compute.recomputing import RecomputedForward, recompute_layer
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.train import RunConfig, load_config
from cornstarch.train.activations import SavedBytes, counted, keep_as_fused_loss
from cornstarch.train.budget import (
    Recomputation,
    Shapes,
    choose,
    fit_activations,
    layer_activations,
    spread,
    without_weights,
)
from cornstarch.train.compiled_layers import compiled_bytes
from cornstarch.train.config import size_in_bytes, size_of_bytes
from cornstarch.train.data.formats import JoinedSources
from cornstarch.train.layers_kept import OUTSIDE, LayerActivations, Stored
from cornstarch.train.on_meta import calls_of
from cornstarch.train.precision import Placement
from tests import zoo
from tests.train.tiny import losses, tiny_config, trainer_of

ROWS, TOKENS, LAYERS = 2, 48, 6
CPU = Placement(torch.device("cpu"), "fp32")
NEAR = 4096  # labels, counts and positions, which no estimate counts


def text_model(name: str = "llama") -> MultimodalModel:
    torch.manual_seed(0)
    model = MultimodalModel({}, zoo.LANGUAGE_MODELS[name].build(num_hidden_layers=LAYERS))
    return model.train(llm_mode=True)


def described(budget: str | float, **loop: Any) -> RunConfig:
    return load_config(
        None,
        base={
            "model": {"given": "mine"},
            "data": {"train": [{"path": "rows", "format": "given"}], "max_length": TOKENS},
            "loop": {"batch_size": ROWS, "activation_budget": budget, **loop},
        },
    )


def fitted(model: nn.Module, budget: str, told: list[str] | None = None, **loop: Any) -> Recomputation:
    note = (lambda words: None) if told is None else told.append
    found = fit_activations(model, described(budget, **loop), CPU, JoinedSources([]), 1, note)
    assert found is not None
    return found


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, zoo.VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def step(model: nn.Module) -> tuple[int, dict[str, Tensor | None]]:
    """Return the bytes that a forward pass keeps for its backward pass, and the gradients."""
    count = SavedBytes(model)
    model.zero_grad()
    with saved_tensors_hooks(count.add, lambda tensor: tensor):
        loss = model(**batch()).loss
    loss.backward()
    return count.total().saved, {name: parameter.grad for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_what_is_kept_fits_and_one_more_layer_would_not(name: str, share: float) -> None:
    model = text_model(name)
    fuse_head_with_loss(model.language_model)
    kept, expected = step(model)
    told: list[str] = []
    budget = int(kept * share)
    chosen = fitted(model, f"{budget} B", told)
    assert 0 < len(chosen.recomputed) < chosen.layers == LAYERS
    found, gradients = step(model)
    assert found <= budget + NEAR and chosen.after <= budget
    assert chosen.after == pytest.approx(found, rel=0.05)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected[key]), key
    for layer in chosen.recomputed:  # each of them is needed
        of_layer = model.get_submodule(layer).__dict__
        around = of_layer.pop("forward")
        assert isinstance(around, RecomputedForward)
        assert step(model)[0] > budget
        of_layer["forward"] = around
    assert told == [chosen.line()] and f"{len(chosen.recomputed)} of {LAYERS} layers are recomputed: " in told[0]


def test_nothing_is_recomputed_where_everything_fits() -> None:
    model = text_model()
    chosen = fitted(model, "1 GB")
    assert chosen.recomputed == () and chosen.before == chosen.after
    assert "no layer is recomputed" in chosen.line()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_smallest_possible_is_named_and_possible() -> None:
    with pytest.raises(ConfigError, match=r"activation_budget = 1 kB\n  The smallest possible is") as raised:
        fitted(text_model(), "1 kB")
    smallest = str(raised.value).split("smallest possible is ")[1].split(",")[0]
    chosen = fitted(text_model(), smallest)
    assert len(chosen.recomputed) >= LAYERS - 1 and chosen.after <= size_in_bytes(smallest)


def test_accumulation_takes_less() -> None:
    whole, halves = (fitted(text_model(), "600 kB", accumulation=count) for count in (1, 2))
    assert len(halves.recomputed) < len(whole.recomputed)
    assert halves.before == pytest.approx(whole.before / 2, rel=0.1)


def test_a_cache_of_keys_is_not_written_twice() -> None:
    model = text_model()
    model.language_model.config.use_cache = True
    fuse_head_with_loss(model.language_model)
    _, expected = step(model)
    for layer in model.language_model.model.layers[::2]:
        recompute_layer(layer)
    for key, gradient in step(model)[1].items():
        assert torch.equal(gradient, expected[key]), key


# ---------------------------------------------------------------------------------------------------- frozen, compiled


def composed(llm_mode: bool) -> MultimodalModel:
    torch.manual_seed(0)
    encoder = zoo.ENCODERS["clip"].build()
    language_model = zoo.LANGUAGE_MODELS["llama"].build(num_hidden_layers=LAYERS)
    model = MultimodalModel({"vision": ModalEncoderModule(encoder)}, language_model)
    return model.train(encoders_mode={"vision": (False, True)}, llm_mode=llm_mode)


def test_frozen_encoders_keep_nothing_and_frozen_language_models_do() -> None:
    found = layer_activations(composed(llm_mode=False), Shapes(ROWS, TOKENS, 2), CPU)
    gains = {name: found.gain(number) for number, name in enumerate(found.names)}
    assert len(gains) == zoo.LAYERS + LAYERS
    assert all((gain > 0) == name.startswith("language_model.") for name, gain in gains.items())
    chosen = fitted(model := composed(llm_mode=False), f"{found.most() // 2} B")
    assert chosen.recomputed and all(name.startswith("language_model.") for name in chosen.recomputed)
    layer = model.get_submodule(chosen.recomputed[0])
    assert not layer.training and isinstance(layer.forward, RecomputedForward)


def test_a_compiled_layer_stays_inside_and_keeps_what_was_measured() -> None:
    torch.compiler.reset()
    model = text_model()
    model.language_model.config.use_cache = False
    fuse_head_with_loss(model.language_model)
    plain, expected = step(model)
    bare = without_weights(model)
    keep_as_fused_loss(bare.language_model, torch.float32)
    _, part, call = next(iter(calls_of(bare, ROWS, TOKENS, 1)))
    calls = counted(part, call, torch.float32, on_gpu=False).calls
    layers, found = model.language_model.model.layers, layer_activations(model, Shapes(ROWS, TOKENS), CPU)
    own = compiled_bytes(calls[0], CPU, backend="aot_eager")
    assert 0 < own < found.own(0)
    recompute_layer(layers[1])
    assert compile_layers(layers, backend="aot_eager") == LAYERS
    assert compile_layers(layers, backend="aot_eager") == 0
    assert isinstance(layers[1].forward, RecomputedForward) and isinstance(layers[1].forward.inner, CompiledForward)
    kept, gradients = step(model)
    predicted = found.scaled(dict.fromkeys(range(LAYERS), own / found.own(0)))
    assert predicted.kept(frozenset({1})) == pytest.approx(kept, rel=0.05) and kept < plain
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-5, msg=key)
    plain_layers(layers)
    assert not isinstance(layers[1].forward.inner, CompiledForward)
    torch.compiler.reset()


# ---------------------------------------------------------------------------------------------------- choosing


def layers_of(sizes: list[tuple[str, int, float]], outside: int = 5) -> LayerActivations:
    """Return layers of (kind, bytes, work), each with an input of one byte."""
    stored = [Stored(outside, frozenset({OUTSIDE}), frozenset())]
    for number, (_, size, _) in enumerate(sizes):
        stored += [Stored(size, frozenset({number}), frozenset()), Stored(1, frozenset({number}), frozenset({number}))]
    kinds, _, work = zip(*sizes, strict=True)
    return LayerActivations(tuple(f"layers.{n}" for n in range(len(sizes))), kinds, work, tuple(stored))


@pytest.mark.parametrize("budget", range(27, 106, 7))
def test_no_choice_of_equal_layers_is_smaller(budget: int) -> None:
    found = layers_of([("a", 9, 1.0)] * 10)
    chosen = choose(found, budget)
    sets = (frozenset(one) for count in range(11) for one in itertools.combinations(range(10), count))
    fewest = next(len(one) for one in sets if found.most(one) <= budget)
    assert len(chosen) == fewest and found.most(chosen) <= budget


def test_what_frees_most_for_its_work_comes_first() -> None:
    found = layers_of([("dear", 10, 100.0), ("cheap", 10, 1.0)] * 4 + [("end", 10, 1e9)])
    assert choose(found, found.most() - 20) == {1, 5}
    assert choose(found, found.most() - 41) == {0, 1, 3, 5, 7}


def test_a_layer_that_is_no_longer_needed_is_kept() -> None:
    found = layers_of([("large", 50, 100.0), ("small", 2, 1.0), ("end", 30, 1e9)])
    assert choose(found, found.most() - 2) == {1}
    assert choose(found, found.most() - 30) == {0}


@pytest.mark.parametrize("count", range(12))
def test_equal_layers_are_spread_and_the_last_is_kept(count: int) -> None:
    taken = spread(range(12), count)
    gaps = [after - before for before, after in itertools.pairwise(taken)]
    assert len(set(taken)) == count and 11 not in taken
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


# ---------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("train", ["full", "frozen"])
def test_a_run_within_a_budget_is_the_same(tmp_path: Path, train: str) -> None:
    sizes = {"num_hidden_layers": 3}
    model = {"language_model": {"train": train, "config": sizes}, "encoders": {"vision": {"train": "projector"}}}
    loop = {"accumulation": 2, "steps": 3}
    trainer_of(tiny_config(tmp_path, model=model, loop=loop)).fit()
    found = layer_activations(trainer_model(tmp_path, model), Shapes(2, 32), CPU)
    budget = f"{found.most() * 2 // 3} B"
    again = tiny_config(
        tmp_path, f"output={tmp_path / 'again'}", model=model, loop={**loop, "activation_budget": budget}
    )
    trainer = trainer_of(again)
    trainer.fit()
    assert trainer.recomputation is not None and trainer.recomputation.recomputed
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    told = json.loads((tmp_path / "again" / "run.json").read_text())["recomputation"]
    assert told["recomputed"] == list(trainer.recomputation.recomputed) and told["after"] <= size_in_bytes(budget)
    assert "layers are recomputed" in (tmp_path / "again" / "report.html").read_text()


def trainer_model(folder: Path, model: dict[str, Any]) -> nn.Module:
    trainer = trainer_of(tiny_config(folder, f"output={folder / 'looked_at'}", model=model))
    trainer.setup()
    return trainer.model


PIPELINE = {"modules": {"vision": {}, "language_model": {"stages": 2}}}


@pytest.mark.parametrize(
    ("loop", "parallel", "words"),
    [
        ({"activation_checkpointing": True}, {}, "computes every layer again"),
        ({}, PIPELINE, "is not estimated yet"),
        ({}, {"modules": {"vision": {}, "language_model": {"tp": 2}}}, "is not estimated yet"),
        ({}, {"modules": {"vision": {"activation_checkpointing": True}, "language_model": {}}}, "vision.activation_ch"),
        ({"activation_budget": "20 gigabytes"}, {}, "activation_budget"),
        ({"activation_budget": 1.5}, {}, "activation_budget"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, loop: Any, parallel: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config(tmp_path, loop={"activation_budget": "20 GB", **loop}, parallel=parallel)


def test_a_model_that_cannot_be_looked_at_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="What the layers of Linear keep could not be found out: what it is"):
        fitted(nn.Linear(2, 2), "1 GB")


@pytest.mark.parametrize(("count", "size"), [(0, "0 B"), (999, "999 B"), (19_550_000_001, "19.6 GB"), (2_000, "2 kB")])
def test_sizes_are_said_and_read(count: int, size: str) -> None:
    assert size_of_bytes(count) == size and size_in_bytes(size) >= count


def test_a_share_stays_a_share() -> None:
    loop = described(0.8).loop
    assert loop.activation_share == 0.8 and loop.activation_bytes is None
    assert described("1.5 GB").loop.activation_share == 1.0
