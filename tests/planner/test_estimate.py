"""Estimates of runs and plans for every kind of model, and activations against the tensors that autograd saves."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from cornstarch import MultimodalModel, allow_code
from cornstarch.config import OptimizerConfig
from cornstarch.cost.activations import Activations, SavedTensors
from cornstarch.cost.tracer import trace_memory
from cornstarch.engine.memory_tracker import model_size
from cornstarch.engine.recompute import recompute_activations
from cornstarch.errors import ConfigError
from cornstarch.plan import DataPlan
from cornstarch.plan.cluster import Cluster, Device, device
from cornstarch.planner.estimate import estimate, estimate_activations, estimate_plan, needs_prediction
from cornstarch.planner.search_run import cost_of, own_plan
from cornstarch.tasks.build import build_meta_model
from cornstarch.train import RunConfig, load_config
from tests import zoo
from tests.trainer.tiny import tiny_config

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROWS, TOKENS = 3, 64


def text_config(model: dict[str, Any], **sections: Any) -> RunConfig:
    return load_config(None, base={"model": model, "data": {"train": "none.json", "max_length": TOKENS}, **sections})


# ---------------------------------------------------------------------------------------------------- activations


def measure_saved(model: nn.Module, call: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Activations:
    """Return the activations of a forward pass on the CPU."""
    count = SavedTensors(model)
    computing = nullcontext() if dtype is torch.float32 else torch.autocast("cpu", dtype=dtype)
    with computing, saved_tensors_hooks(count.add, lambda tensor: tensor):
        call()
    return count.activations()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "opt"])
def test_activations_of_language_models(name: str, precision: Any) -> None:
    language_model = zoo.LANGUAGE_MODELS[name].build().train()
    ids = torch.randint(3, 60, (ROWS, TOKENS))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    real = measure_saved(language_model, lambda: language_model(input_ids=ids, labels=ids, use_cache=False).loss, dtype)
    model = MultimodalModel({}, language_model).to("meta")
    config = text_config({"language_model": {"config": LLAMA}})
    found, notes = estimate_activations(model, config, ROWS, 1, precision, on_gpu=False)
    assert not notes and found is not None
    assert found.saved == pytest.approx(real.saved, rel=0.1)
    assert found.largest == pytest.approx(real.largest, rel=0.01)


@pytest.mark.parametrize("name", ["clip", "siglip", "dinov2", "whisper"])
def test_activations_of_encoders(name: str) -> None:
    encoder = zoo.ENCODERS[name].build().train()
    inputs = zoo.ENCODERS[name].inputs(ROWS)
    real = measure_saved(encoder, lambda: encoder(**inputs))
    shapes = {key: value.to("meta") for key, value in inputs.items()}
    encoder.to("meta")
    found = trace_memory(encoder, lambda: encoder(**shapes), torch.float32).saved.activations()
    assert found.saved == pytest.approx(real.saved, rel=0.1)
    encoder.requires_grad_(False)
    assert trace_memory(encoder, lambda: encoder(**shapes), torch.float32).saved.activations() == Activations()


def test_activation_checkpointing_keeps_inputs() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build(num_hidden_layers=6).train()
    ids = torch.randint(3, 60, (ROWS, TOKENS))

    def run(where: str) -> Callable[[], Any]:
        return lambda: model(input_ids=ids.to(where), labels=ids.to(where), use_cache=False).loss

    recompute_activations(model)
    real = measure_saved(model, run("cpu")).saved
    model.gradient_checkpointing_disable()
    model.to("meta")
    found = trace_memory(model, run("meta"), torch.float32).saved.activations()
    assert found.outside + found.inputs == pytest.approx(real, rel=0.1)
    assert found.peak(recomputed=True) < 0.6 * found.peak(recomputed=False)
    assert found.layer * 6 + found.outside == pytest.approx(found.saved, rel=0.01)


def test_copies_of_weights_are_activations_unless_gathered_in_that_precision() -> None:
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 10)).to("meta")
    rows = torch.empty(2, 100, device="meta", requires_grad=True)
    copied, plain = (
        trace_memory(model, lambda: model(rows), torch.bfloat16, casts_weights=casts).saved.activations()
        for casts in (True, False)
    )
    weights = sum(2 * parameter.numel() for parameter in model.parameters())
    assert copied.copies == weights and plain.copies == 0
    assert copied.saved - plain.saved == 2 * (100 * 200 + 200 * 10)  # no gradient needs a bias
    assert copied.peak(recomputed=True) >= weights  # autocast has them until forward ends


def test_scores_are_saved_if_no_fused_kernel_exists() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build().train().to("meta")
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long, device="meta")
    gpu, cpu = (
        trace_memory(model, lambda: model(input_ids=ids).logits, torch.float32, on_gpu).saved.activations().saved
        for on_gpu in (True, False)
    )
    assert gpu - cpu == zoo.LAYERS * ROWS * zoo.HEADS * TOKENS * (TOKENS - 1) * 4


def test_frozen_parts_before_what_is_trained_save_nothing(tmp_path: Path) -> None:
    found = []
    for train in ("full", "projector", "frozen"):
        config = tiny_config(tmp_path, f"model.encoders.vision.train={train}")
        known, _ = estimate_activations(build_meta_model(config), config, 4, 1, "fp32")
        assert known is not None
        found.append(known.saved)
    assert found[0] > found[1] > found[2] > 0


# ---------------------------------------------------------------------------------------------------- whole runs

GPU = Device("test", 80 * 10**9)


def test_a_run_on_four_ranks(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "parallel.data.kind=zero3", "parallel.data.param_dtype=bf16", "loop.batch_size=16")
    found = estimate(config, GPU, world=4)
    assert [kind.label for kind in found.kinds] == ["ddp", "zero1", "zero2", "zero3 = fsdp2", "hsdp, 2 copies"]
    assert found.chosen.data == config.parallel.data and found.precision == "bf16"
    assert [part.name for part in found.parts] == ["vision encoder", "vision projector", "language model"]
    assert (found.rows, found.tokens, found.notes) == (4, 32, ())
    ddp, zero1, zero2, zero3, hsdp = (kind.memory.persistent for kind in found.kinds if kind.memory is not None)
    assert ddp > zero1 > zero2 == zero3 < hsdp
    copied, gathered = found.kinds[0].activations, found.chosen.activations
    assert copied is not None and gathered is not None and copied > gathered  # autocast's copies of the weights
    assert "zero3 = fsdp2, fits on test" in found.advice and "parallel.data.kind=ddp" in found.advice


def test_one_process(tmp_path: Path) -> None:
    found = estimate(tiny_config(tmp_path, "parallel.data.kind=fsdp1"), GPU, world=1)
    assert [kind.label for kind in found.kinds] == ["one process"] and found.chosen is found.kinds[0]
    assert found.chosen.memory is not None and found.advice.startswith("It fits on test: 70.8")


def test_remedies_are_named_if_nothing_fits(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "loop.batch_size=16", "data.max_length=2048")
    found = estimate(config, Device("pebble", 2_000_000), world=4)
    assert not any(kind.fits(found.device) for kind in found.kinds)
    assert found.advice.startswith("Nothing fits on pebble: ") and "\n" not in found.advice
    for word in (
        "activation_checkpointing=true (then",
        "loop.gradient_accumulation_steps",
        "offload=true",
        "data.max_length",
    ):
        assert word in found.advice


def test_the_kind_that_communicates_least_is_advised(tmp_path: Path) -> None:
    model = {"language_model": {"config": {**LLAMA, "vocab_size": 60_000}}}
    config = tiny_config(tmp_path, "loop.batch_size=4", model=model)
    peaks = [kind.peak for kind in estimate(config, GPU, world=4).kinds]
    small = Device("small", int(1.1 * sorted(peaks)[2]))  # not large enough for the largest
    found = estimate(config, small, world=4)
    fitting = [kind for kind in found.kinds if kind.fits(small)]
    assert found.chosen not in fitting and fitting
    said = f"The config's kind, ddp, does not fit on small. Use parallel.data.kind={fitting[0].data.kind}"
    assert found.advice.startswith(said)


NOTES = [
    (
        ["loop.batch_size=6"],
        "loop.batch_size = 6 is not a multiple of accumulation 1 × 4 ranks, which training refuses; 2",
    ),
    (["parallel.data.kind=fsdp2", "parallel.data.offload=true"], "in the CPU's memory (offload)"),
    (
        ["parallel.data.kind=fsdp1", "model.encoders.vision.dtype=bf16", "model.encoders.vision.train=projector"],
        "fsdp1 is refused: It flattens",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), NOTES)
def test_notes(overrides: list[str], said: str, tmp_path: Path) -> None:
    assert any(said in note for note in estimate(tiny_config(tmp_path, *overrides), GPU, world=4).notes)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"stages": 2}])
def test_a_sharded_plan_is_predicted_as_by_the_planner(sizes: dict[str, int]) -> None:
    config = text_config(
        {"language_model": {"config": LLAMA}},
        parallel={"modules": {"model": sizes}},
        loop={"batch_size": 8, "accumulation": 4},
    )
    assert needs_prediction(config.parallel)
    found = estimate_plan(config, device("H100"), world=4, ranks_per_node=2)
    cluster = Cluster.parse("2x2xH100")
    own = own_plan(config, cluster, cost_of(config, cluster))
    assert own is not None and own.prediction is not None
    assert found.prediction.step == own.prediction.step and found.prediction.memory == own.prediction.memory
    assert len(found.prediction.memory) == sizes.get("stages", 1) and found.advice.startswith("The config's plan fits")


def test_more_items_take_more_memory_in_a_predicted_plan(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, parallel={"modules": {"vision": {}, "language_model": {"tp": 2}}})
    one, four = (estimate_plan(config, device("H100"), 3, items=count).prediction.memory[0] for count in (1, 4))
    assert one.holds == four.holds == "vision 0" and four.activations > 2 * one.activations


def test_a_plan_that_does_not_fit_is_reported() -> None:
    config = text_config({"language_model": {"config": LLAMA}}, parallel={"modules": {"model": {"tp": 2}}})
    found = estimate_plan(config, replace(device("H100"), memory=100_000), world=2)
    assert found.advice.startswith("The config's plan does not fit on H100") and not found.prediction.fits


WRONG = [
    (["parallel.modules.model.tp=3"], 4, "Sizes that work are multiples of 3"),
    (["parallel.data.kind=hsdp", "parallel.data.replicate=3"], 4, "the plan wants 3 copies"),
    ([], 0, "world = 0: expected a whole number"),
]


@pytest.mark.parametrize(("overrides", "world", "said"), WRONG)
def test_impossible_worlds_are_refused(overrides: list[str], world: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        estimate(tiny_config(tmp_path, *overrides), GPU, world=world)


def test_precision_follows_the_device(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    assert estimate(config, device("H100"), 1).precision == "bf16"
    assert estimate(config, device("T4"), 1).precision == "fp32"
    assert estimate(tiny_config(tmp_path, "precision=fp16"), device("T4"), 1).precision == "fp16"


# ---------------------------------------------------------------------------------------------------- all models

BERT = {
    "model_type": "bert", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
T5 = {
    "model_type": "t5", "vocab_size": 50, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
LLAVA = {
    "model_type": "llava", "vision_config": {**VIT, "model_type": "clip_vision_model"}, "text_config": LLAMA,
    "image_token_id": 95,
}  # fmt: skip
WHOLE = [
    ("causal-lm", LLAMA), ("masked-lm", BERT), ("sequence-classification", BERT), ("image-classification", VIT),
    ("seq2seq-lm", T5), ("multimodal", LLAVA),
]  # fmt: skip


@pytest.mark.parametrize(("task", "sizes"), WHOLE)
def test_whole_models(task: str, sizes: dict[str, Any]) -> None:
    config = text_config({"whole": {"config": sizes, "task": task}})
    assert all(parameter.is_meta for parameter in build_meta_model(config).parameters())
    found = estimate(config, GPU, world=2)
    assert found.chosen.activations is not None, found.notes
    assert sum(part.trained_count for part in found.parts) > 1000


def test_adapters_alone_are_trained() -> None:
    full, lora = (
        estimate(text_config({"whole": {"config": LLAMA, "task": "causal-lm", "train": train}}), GPU, 2)
        for train in ("full", "lora")
    )
    assert full.chosen.memory is not None and lora.chosen.memory is not None
    assert lora.parts[0].count > full.parts[0].count and lora.parts[0].trained_count < full.parts[0].count
    assert lora.chosen.memory.optimizer < full.chosen.memory.optimizer


def test_only_the_config_of_a_stored_model_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    found = estimate(text_config({"language_model": {"path": str(tmp_path)}}), GPU, 1)
    same = build_meta_model(text_config({"language_model": {"config": LLAMA}}))
    assert found.parts[0].count == sum(parameter.numel() for parameter in same.parameters())
    with pytest.raises(ConfigError, match="There is no such folder"):
        estimate(text_config({"language_model": {"path": str(tmp_path / "none")}}), GPU, 1)


def make(width: int, looks: bool = False) -> nn.Module:
    """Make a model, which may look at its numbers."""
    layer = nn.Linear(width, width)
    if looks:
        assert float(layer.weight.detach().abs().max()) > 0
    return nn.Sequential(layer, nn.Linear(width, 1))


@pytest.mark.parametrize("looks", [False, True])
def test_models_made_by_functions(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_here")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    allow_code("made_here")
    factory = {"function": "made_here:make", "arguments": {"width": 100, "looks": looks}}
    found = estimate(text_config({"factory": factory}), GPU, 2)
    assert found.parts[0].count == 100 * 100 + 100 + 101
    assert found.chosen.activations is None and found.tokens is None
    assert found.notes[0].startswith("the activations of the model are left out")
    assert "activations not counted" in found.advice


def test_given_models_cannot_be_estimated() -> None:
    with pytest.raises(ConfigError, match="this model was built in Python"):
        build_meta_model(text_config({"given": "Mine"}))


def test_units_are_those_of_the_wrapping(tmp_path: Path) -> None:
    model = build_meta_model(tiny_config(tmp_path, model={"language_model": {"config": LLAMA}}))
    size = model_size(model, DataPlan("fsdp2"), OptimizerConfig())
    names = [name for name, _ in model.named_parameters()]
    units = dict(zip(names, (parameter.unit for parameter in size.parameters), strict=True))
    assert units["language_model.model.embed_tokens.weight"] is None
    layers = {units[f"language_model.model.layers.{n}.mlp.up_proj.weight"] for n in range(3)}
    assert len(layers) == 3 and None not in layers
    whole = model_size(model, DataPlan("fsdp2", wrap="none"), OptimizerConfig())
    assert {parameter.unit for parameter in whole.parameters} == {None}
