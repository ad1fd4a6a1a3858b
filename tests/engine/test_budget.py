"""The activation budget: which layers are recomputed, what is kept then, and that nothing else changes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cornstarch.config import format_size, parse_size
from cornstarch.cost.activations import OUTSIDE, LayerActivations, SavedTensors, StoredTensor, measure_compiled_bytes
from cornstarch.cost.meta_kernels import use_fused_loss
from cornstarch.cost.tracer import trace_memory
from cornstarch.data.formats import JoinedSources
from cornstarch.engine.recompute import (
    Recomputation,
    choose_layers,
    copy_to_meta,
    fit_activations,
    pick_evenly,
    trace_layers,
)
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile import CheckpointedForward, CompiledForward, checkpoint_layer, compile_layers
from cornstarch.kernels.fused_loss import fuse_head_with_loss
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.parallel.device import DevicePlacement
from cornstarch.tasks.build import build_calls
from cornstarch.train import RunConfig, load_config
from tests import zoo
from tests.kernels.uncompile import uncompile_layers
from tests.trainer.tiny import losses, tiny_config, trainer_of

ROWS, TOKENS, LAYERS = 2, 48, 6
CPU = DevicePlacement(torch.device("cpu"), "fp32")
NEAR = 4096  # labels, counts and positions, which no estimate counts


def text_model(name: str = "llama") -> MultimodalModel:
    torch.manual_seed(0)
    model = MultimodalModel({}, zoo.LANGUAGE_MODELS[name].build(num_hidden_layers=LAYERS))
    return model.train(llm_mode=True)


def budget_config(budget: str | float, **loop: Any) -> RunConfig:
    return load_config(
        None,
        base={
            "model": {"given": "mine"},
            "data": {"train": [{"path": "rows", "format": "given"}], "max_length": TOKENS},
            "loop": {"batch_size": ROWS, "activation_budget": budget, **loop},
        },
    )


def fit(model: nn.Module, budget: str, log: list[str] | None = None, **loop: Any) -> Recomputation:
    write = (lambda words: None) if log is None else log.append
    found = fit_activations(model, budget_config(budget, **loop), CPU, JoinedSources([]), 1, write)
    assert found is not None
    return found


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, zoo.VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def step(model: nn.Module) -> tuple[int, dict[str, Tensor | None]]:
    """Return the bytes that a forward pass keeps for its backward pass, and the gradients."""
    count = SavedTensors(model)
    model.zero_grad()
    with saved_tensors_hooks(count.add, lambda tensor: tensor):
        loss = model(**batch()).loss
    loss.backward()
    return count.activations().saved, {name: parameter.grad for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------- saved bytes


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.8])
def test_saved_bytes_fit_the_budget_and_every_chosen_layer_is_needed(name: str, fraction: float) -> None:
    model = text_model(name)
    fuse_head_with_loss(model.language_model)
    kept, expected = step(model)
    log: list[str] = []
    budget = int(kept * fraction)
    chosen = fit(model, f"{budget} B", log)
    assert 0 < len(chosen.recomputed) < chosen.layers == LAYERS
    found, gradients = step(model)
    assert found <= budget + NEAR and chosen.after <= budget
    assert chosen.after == pytest.approx(found, rel=0.05)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected[key]), key
    for layer in chosen.recomputed:  # each of them is needed
        of_layer = model.get_submodule(layer).__dict__
        around = of_layer.pop("forward")
        assert isinstance(around, CheckpointedForward)
        assert step(model)[0] > budget
        of_layer["forward"] = around
    assert log == [chosen.line()] and f"{len(chosen.recomputed)} of {LAYERS} layers are recomputed: " in log[0]


def test_nothing_is_recomputed_where_everything_fits() -> None:
    model = text_model()
    chosen = fit(model, "1 GB")
    assert chosen.recomputed == () and chosen.before == chosen.after
    assert "no layer is recomputed" in chosen.line()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_smallest_possible_is_named_and_possible() -> None:
    with pytest.raises(ConfigError, match=r"activation_budget = 1 kB\n  The smallest possible is") as raised:
        fit(text_model(), "1 kB")
    smallest = str(raised.value).split("smallest possible is ")[1].split(",")[0]
    chosen = fit(text_model(), smallest)
    assert len(chosen.recomputed) >= LAYERS - 1 and chosen.after <= parse_size(smallest)


def test_gradient_accumulation_needs_less_recomputation() -> None:
    whole, halves = (fit(text_model(), "600 kB", gradient_accumulation_steps=count) for count in (1, 2))
    assert len(halves.recomputed) < len(whole.recomputed)
    assert halves.before == pytest.approx(whole.before / 2, rel=0.1)


def test_a_cache_of_keys_is_not_written_twice() -> None:
    model = text_model()
    model.language_model.config.use_cache = True
    fuse_head_with_loss(model.language_model)
    _, expected = step(model)
    for layer in model.language_model.model.layers[::2]:
        checkpoint_layer(layer)
    for key, gradient in step(model)[1].items():
        assert torch.equal(gradient, expected[key]), key


# ---------------------------------------------------------------------------------------------------- frozen, compiled


def vision_model(llm_mode: bool) -> MultimodalModel:
    torch.manual_seed(0)
    encoder = zoo.ENCODERS["clip"].build()
    language_model = zoo.LANGUAGE_MODELS["llama"].build(num_hidden_layers=LAYERS)
    model = MultimodalModel({"vision": ModalEncoderModule(encoder)}, language_model)
    return model.train(encoders_mode={"vision": (False, True)}, llm_mode=llm_mode)


def test_frozen_encoders_keep_nothing_and_frozen_language_models_do() -> None:
    found = trace_layers(vision_model(llm_mode=False), (ROWS, TOKENS, 2), CPU)
    gains = {name: found.gain(number) for number, name in enumerate(found.names)}
    assert len(gains) == zoo.LAYERS + LAYERS
    assert all((gain > 0) == name.startswith("language_model.") for name, gain in gains.items())
    chosen = fit(model := vision_model(llm_mode=False), f"{found.peak() // 2} B")
    assert chosen.recomputed and all(name.startswith("language_model.") for name in chosen.recomputed)
    layer = model.get_submodule(chosen.recomputed[0])
    assert not layer.training and isinstance(layer.forward, CheckpointedForward)


def test_a_compiled_layer_stays_inside_and_keeps_what_was_measured() -> None:
    torch.compiler.reset()
    model = text_model()
    model.language_model.config.use_cache = False
    fuse_head_with_loss(model.language_model)
    plain, expected = step(model)
    bare = copy_to_meta(model)
    use_fused_loss(bare.language_model, torch.float32)
    _, part, call = next(iter(build_calls(bare, ROWS, TOKENS, 1)))
    calls = trace_memory(part, call, torch.float32, on_gpu=False).saved.calls
    layers, found = model.language_model.model.layers, trace_layers(model, (ROWS, TOKENS, 1), CPU)
    own = measure_compiled_bytes(calls[0], CPU, backend="aot_eager")
    assert 0 < own < found.own_bytes(0)
    checkpoint_layer(layers[1])
    assert compile_layers(layers, backend="aot_eager") == LAYERS
    assert compile_layers(layers, backend="aot_eager") == 0
    assert isinstance(layers[1].forward, CheckpointedForward) and isinstance(layers[1].forward.inner, CompiledForward)
    kept, gradients = step(model)
    predicted = found.scale(dict.fromkeys(range(LAYERS), own / found.own_bytes(0)))
    assert predicted.bytes_after_forward(frozenset({1})) == pytest.approx(kept, rel=0.05) and kept < plain
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-5, msg=key)
    uncompile_layers(layers)
    assert not isinstance(layers[1].forward.inner, CompiledForward)
    torch.compiler.reset()


# ---------------------------------------------------------------------------------------------------- choosing


def layers_of(sizes: list[tuple[str, int, float]], outside: int = 5) -> LayerActivations:
    """Return layers of (kind, bytes, work), each with an input of one byte."""
    stored = [StoredTensor(outside, frozenset({OUTSIDE}), frozenset())]
    for number, (_, size, _) in enumerate(sizes):
        own = frozenset({number})
        stored += [StoredTensor(size, own, frozenset()), StoredTensor(1, own, own)]
    kinds, _, work = zip(*sizes, strict=True)
    return LayerActivations(tuple(f"layers.{n}" for n in range(len(sizes))), kinds, work, tuple(stored))


@pytest.mark.parametrize("budget", range(27, 106, 7))
def test_no_choice_of_equal_layers_is_smaller(budget: int) -> None:
    found = layers_of([("a", 9, 1.0)] * 10)
    chosen = choose_layers(found, budget)
    sets = (frozenset(one) for count in range(11) for one in itertools.combinations(range(10), count))
    fewest = next(len(one) for one in sets if found.peak(one) <= budget)
    assert len(chosen) == fewest and found.peak(chosen) <= budget


def test_layers_that_free_most_bytes_per_flop_come_first() -> None:
    found = layers_of([("dear", 10, 100.0), ("cheap", 10, 1.0)] * 4 + [("end", 10, 1e9)])
    assert choose_layers(found, found.peak() - 20) == {1, 5}
    assert choose_layers(found, found.peak() - 41) == {0, 1, 3, 5, 7}


def test_superfluous_layers_are_not_recomputed() -> None:
    found = layers_of([("large", 50, 100.0), ("small", 2, 1.0), ("end", 30, 1e9)])
    assert choose_layers(found, found.peak() - 2) == {1}
    assert choose_layers(found, found.peak() - 30) == {0}


@pytest.mark.parametrize("count", range(12))
def test_equal_layers_are_picked_evenly_and_the_last_is_kept(count: int) -> None:
    taken = pick_evenly(range(12), count)
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
    found = trace_layers(trainer_model(tmp_path, model), (2, 32, 1), CPU)
    budget = f"{found.peak() * 2 // 3} B"
    again = tiny_config(
        tmp_path, f"output={tmp_path / 'again'}", model=model, loop={**loop, "activation_budget": budget}
    )
    trainer = trainer_of(again)
    trainer.fit()
    assert trainer.run_model.recomputation is not None and trainer.run_model.recomputation.recomputed
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    log = json.loads((tmp_path / "again" / "run.json").read_text())["recomputation"]
    assert log["recomputed"] == list(trainer.run_model.recomputation.recomputed)
    assert log["after"] <= parse_size(budget)
    assert "layers are recomputed" in (tmp_path / "again" / "report.html").read_text()


def trainer_model(folder: Path, model: dict[str, Any]) -> nn.Module:
    trainer = trainer_of(tiny_config(folder, f"output={folder / 'looked_at'}", model=model))
    trainer.setup()
    return trainer.model


PIPELINE = {"modules": {"vision": {}, "language_model": {"stages": 2}}}


@pytest.mark.parametrize(
    ("loop", "parallel", "words"),
    [
        ({"activation_checkpointing": True}, {}, "recomputes every layer"),
        ({}, PIPELINE, "is not estimated yet"),
        ({}, {"modules": {"vision": {}, "language_model": {"tp": 2}}}, "is not estimated yet"),
        ({}, {"modules": {"vision": {"activation_checkpointing": True}, "language_model": {}}}, "vision.activation_ch"),
        ({"activation_budget": "20 gigabytes"}, {}, "activation_budget"),
        ({"activation_budget": 1.5}, {}, "activation_budget"),
    ],
)
def test_impossible_budgets_are_refused(tmp_path: Path, loop: Any, parallel: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config(tmp_path, loop={"activation_budget": "20 GB", **loop}, parallel=parallel)


def test_a_model_that_cannot_be_traced_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="The activations of the layers of Linear cannot be computed: what it is"):
        fit(nn.Linear(2, 2), "1 GB")


@pytest.mark.parametrize(("count", "size"), [(0, "0 B"), (999, "999 B"), (19_550_000_001, "19.6 GB"), (2_000, "2 kB")])
def test_sizes_are_written_and_read(count: int, size: str) -> None:
    assert format_size(count) == size and parse_size(size) >= count


def test_a_fraction_stays_a_fraction() -> None:
    loop = budget_config(0.8).loop
    assert loop.activation_fraction == 0.8 and loop.activation_bytes is None
    assert budget_config("1.5 GB").loop.activation_fraction == 1.0
