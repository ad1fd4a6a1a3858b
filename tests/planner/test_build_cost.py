"""The cost of layers: against FLOP counts, saved tensors and numbers by hand; profiled, and in files."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cornstarch import MultimodalModel
from cornstarch.cost.activations import SavedTensors
from cornstarch.cost.analytic import ComputeSetting
from cornstarch.cost.flops import FlopCounter
from cornstarch.cost.profiled import PASSES, ProfiledCost
from cornstarch.cost.segments import ModuleCall
from cornstarch.errors import ConfigError
from cornstarch.kernels.fused_loss import fuse_head_with_loss
from cornstarch.parallel.device import DevicePlacement
from cornstarch.pipeline.split import analyze_model
from cornstarch.plan.cluster import Device, device, this_cpu
from cornstarch.plan.cost import LayerCost, RunCost
from cornstarch.plan.data_statistics import DataStatistics
from cornstarch.planner import (
    MicrobatchShape,
    build_microbatch_shape,
    model_cost,
    profile_model,
    profile_run,
    read_costs,
    run_cost,
    write_costs,
)
from cornstarch.planner.build_cost import build_run_model
from cornstarch.tasks.build_model import build_model
from cornstarch.train import RunConfig, load_config

H100 = device("H100")
LANGUAGE = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
VISION = {
    "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
TOKENS, ROWS = 64, 4


def config(encoder: dict[str, Any] | None = None, language: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """Return a run without data and tokenizer: only shapes matter."""
    vision = {"token": "<image>", "config": VISION, "train": "projector", **(encoder or {})}
    model = {
        "encoders": {"vision": vision},
        "language_model": {"tokenizer": "none/none", "config": LANGUAGE, **(language or {})},
    }
    loop = {"batch_size": ROWS, "steps": 1, **sections.pop("loop", {})}
    data = {"train": "none.json", "max_length": TOKENS}
    return load_config(None, base={"model": model, "data": data, "loop": loop, "threads": 1, **sections})


def text(**sections: Any) -> RunConfig:
    """Return a run of a language model alone."""
    model = {"language_model": {"tokenizer": "none/none", "config": LANGUAGE}}
    data, loop = {"train": "none.json", "max_length": TOKENS}, {"batch_size": ROWS, "steps": 1}
    return load_config(
        None, base={"model": model, "data": data, **sections, "loop": {**loop, **sections.get("loop", {})}}
    )


def language_layers(cost: RunCost) -> tuple[LayerCost, ...]:
    return cost.modules[-1].layers


def test_layers_are_the_segments_of_a_pipeline() -> None:
    run = config()
    cost = run_cost(run, H100)
    model, _ = build_run_model(run, H100)
    assert isinstance(model, MultimodalModel)
    assert [module.name for module in cost.modules] == ["vision", "language_model"]
    for module, part in zip(cost.modules, (model.encoders["vision"], model.language_model), strict=True):
        assert len(module.layers) == 1 + len(analyze_model(part).boundaries)
        unique = {id(p): p.numel() for p in part.parameters()}
        assert sum(layer.parameters for layer in module.layers) == sum(unique.values())
    assert cost.batch == cost.samples == ROWS and cost.tokens == TOKENS and cost.precision == "bf16"


def test_flops_equal_those_of_the_flop_counter() -> None:
    run = text()
    model, _ = build_run_model(run, H100)
    ids = torch.randint(0, 512, (ROWS, TOKENS))
    counted = FlopCounter(model).step({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    found = run_cost(run, H100)
    # The counter leaves out the head for the last token of each row, which predicts nothing.
    assert found.flops * ROWS == pytest.approx(counted.total + counted.untrained_head, rel=0.01)


def test_kept_bytes_are_what_autograd_saves() -> None:
    run = text(device="cpu", precision="fp32")
    cost = run_cost(run, this_cpu())
    model = build_model(run.model)
    language: Any = model.language_model
    assert fuse_head_with_loss(language) is None
    ids = torch.randint(0, 512, (ROWS, TOKENS))
    count = SavedTensors(model)
    with saved_tensors_hooks(count.add, lambda tensor: tensor):
        language(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: B018
    kept = sum(layer.activation_bytes for layer in language_layers(cost))
    assert kept == pytest.approx(count.activations().saved, rel=0.05)


def test_compiled_layers_keep_what_products_make() -> None:
    language = {"dtype": "bf16"}
    layer = language_layers(run_cost(config(language=language), H100))[1]
    width, middle, keys = 64, 192, 32
    # What goes in; queries, keys and values; queries and keys as attention reads them; what it makes; the sum behind
    # it; gate and up. One number for each row and head is beside it.
    by_hand = (width + (width + 2 * keys) + (width + keys) + width + width + 2 * middle) * ROWS * TOKENS * 2
    assert layer.activation_bytes == pytest.approx(by_hand, rel=0.05)
    assert layer.activation_bytes_recomputed == width * ROWS * TOKENS * 2
    eager = language_layers(run_cost(config(language=language, compile="off"), H100))[1]
    assert eager.activation_bytes > 1.8 * layer.activation_bytes
    assert eager.forward > layer.forward


def test_a_compiled_run_knows_the_price_of_eager_layers() -> None:
    found, eager = run_cost(config(), H100), run_cost(config(compile="off"), H100)
    assert found.eager == eager.modules and eager.eager == ()
    assert found.modules != eager.modules


def test_gathered_weights_are_computed_in_half_precision() -> None:
    cost = run_cost(text(), H100)
    assert cost.gathered_itemsize == 2
    for plain, half in zip(language_layers(cost), cost.gathered[-1].layers, strict=True):
        assert half.parameter_bytes == plain.parameter_bytes == 4 * plain.parameters
        assert half.activation_bytes <= plain.activation_bytes
    layer, half = cost.modules[-1].layers[1], cost.gathered[-1].layers[1]
    assert half.output_bytes == layer.output_bytes / 2 == layer.sum_bytes  # residuals in float32, sums in bf16
    assert half.sum_bytes is None and half.activation_bytes < layer.activation_bytes
    assert cost.module("model", compiled=False, gathered=True) == cost.gathered_eager[-1]
    assert run_cost(text(), this_cpu()).gathered == ()
    assert run_cost(text(precision="fp32"), H100).gathered == ()


def test_an_activation_budget_trades_bytes_for_products() -> None:
    whole, half = (run_cost(text(loop={"activation_budget": b}), H100).gathered[-1].layers[1] for b in (1.0, 0.6))
    assert 0.3 * whole.activation_bytes < half.activation_bytes <= 0.6 * whole.activation_bytes
    assert half.input_gradient > whole.input_gradient and half.forward == whole.forward
    eager = [
        run_cost(text(loop={"activation_budget": b}, compile="off"), H100).modules[-1].layers[1] for b in (1.0, 0.6)
    ]
    assert eager[0] == eager[1]  # only the compiler knows what to compute again


def test_frozen_parts_have_no_backward_pass() -> None:
    vision, language = run_cost(config(), H100).modules
    *frozen, projector = vision.layers
    assert all(not one.trained and one.input_gradient == one.weight_gradient == 0 for one in frozen)
    assert all(one.activation_bytes == 0 for one in frozen)
    assert projector.trained and 0 < projector.num_trainable < projector.parameters
    assert all(one.trained and one.weight_gradient > 0 for one in language.layers)
    still = run_cost(config(language={"train": "frozen"}), H100).modules[-1]
    assert all(not one.trained and one.weight_gradient == 0 and one.input_gradient > 0 for one in still.layers[:-1])


def test_adapters_alone_change() -> None:
    whole = run_cost(config(), H100)
    adapted = run_cost(config(language={"train": "lora", "lora": {"rank": 4}}), H100)
    layer = language_layers(adapted)[1]
    assert 0 < layer.num_trainable < 0.2 * layer.parameters
    assert adapted.flops < 0.85 * whole.flops  # no gradients of the weights that stay


def test_head_counts_labels_only() -> None:
    model, precision = build_run_model(text(), H100)
    heads = [
        model_cost(model, MicrobatchShape(ROWS, TOKENS, trained=count), H100, precision).modules[-1].layers[-1]
        for count in (ROWS * TOKENS, ROWS * TOKENS // 4)
    ]
    assert heads[1].forward < heads[0].forward
    assert heads[0].again == 0 and language_layers(run_cost(text(), H100))[1].again


def test_two_chunks_of_logits_exist_at_once_if_there_are_several() -> None:
    """Logits of 512 words in half precision: 2^20 rows are a chunk of 1 GiB; 1.5 times as many are two chunks."""
    model, precision = build_run_model(text(), H100)
    heads = [
        language_layers(model_cost(model, MicrobatchShape(2**15, TOKENS, trained=count), H100, precision))[-1]
        for count in (2**20, 3 * 2**19)
    ]
    picked = [count * 64 * 2 for count in (2**20, 3 * 2**19)]  # the states of rows with a label
    assert [head.working_bytes for head in heads] == [2**30 + picked[0], 2 * 3 * 2**28 + picked[1]]


def test_a_tied_head_shares_its_weights() -> None:
    untied = {"config": {**LANGUAGE, "tie_word_embeddings": False}}
    tied, own = (language_layers(run_cost(config(language=given), H100)) for given in ({}, untied))
    assert [one.shared_bytes for one in tied[:-1]] == [0] * (len(tied) - 1)
    assert tied[-1].shared_bytes == tied[0].parameter_bytes - tied[1].parameter_bytes > 0
    assert own[-1].shared_bytes == 0 and own[-1].parameters > tied[-1].parameters
    frozen = language_layers(run_cost(config(language={"train": "frozen"}), H100))
    assert frozen[-1].shared_bytes == 0


def test_microbatch_shape_follows_the_data() -> None:
    run = config()
    model, _ = build_run_model(run, H100)
    facts = DataStatistics(tokens=40.0, items={"vision": 1.5}, item_tokens={"vision": 16.0})
    shape = build_microbatch_shape(run, model, facts)
    assert (shape.rows, shape.tokens, shape.count("vision"), shape.labels) == (4, 40, 6, 4 * 40 - 6 * 16)
    assert build_microbatch_shape(config(loop={"accumulation": 2}), model).rows == 2


def test_sizes_follow_heads() -> None:
    vision, language = run_cost(config(), H100).modules
    assert language.tp_sizes == (1, 2, 4) and vision.tp_sizes == (1, 2)
    assert language.cp_sizes[:2] == vision.cp_sizes[:2] == (1, 2)
    assert {layer.items for layer in vision.layers} == {float(ROWS)}  # cp deals images out, and cuts tokens
    assert {layer.items for layer in language.layers} == {0.0}


@pytest.mark.parametrize(
    ("sizes", "task", "layers"),
    [
        ({"model_type": "bert", "vocab_size": 96, "num_hidden_layers": 2}, "masked-lm", 3),
        ({"model_type": "vit", "image_size": 16, "patch_size": 4, "num_hidden_layers": 3}, "image-classification", 4),
        ({"model_type": "gpt2", "vocab_size": 96, "n_layer": 2, "n_embd": 32, "n_head": 2}, "causal-lm", 3),
    ],
)
def test_whole_models_have_costs(sizes: dict[str, Any], task: str, layers: int) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = {"whole": {"config": {**small, **sizes}, "task": task}}
    run = load_config(None, base={"model": model, "data": {"train": "none.json", "max_length": TOKENS}})
    (found,) = run_cost(run, H100).modules
    assert found.name == "model" and len(found.layers) == layers
    assert all(layer.forward > 0 and layer.weight_gradient > 0 for layer in found.layers)
    assert (found.cp_sizes == (1,)) == (task != "causal-lm")


def test_models_that_cannot_be_traced_are_refused() -> None:
    model = {"whole": {"config": {"model_type": "clip", "text_config": {}, "vision_config": {}}, "task": "causal-lm"}}
    run = load_config(None, base={"model": model, "data": {"train": "none.json", "max_length": TOKENS}})
    with pytest.raises(ConfigError):
        run_cost(run, H100)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="The memory bandwidth of Abacus is not known"):
        run_cost(text(), Device("Abacus", 2**30, flops=1e12))
    assert run_cost(text(), Device("NVIDIA H100 80GB HBM3", 2**36)).flops > 0  # as a driver tells it


# ---------------------------------------------------------------------------------------------------- measured


def test_layers_are_measured_once_for_each_kind() -> None:
    run = config(device="cpu", precision="fp32")
    told: list[str] = []
    found, analytic = profile_run(run, on_measure=told.append), run_cost(run, this_cpu())
    assert told.count("Qwen3DecoderLayer") == 1 and told.count("SiglipEncoderLayer") == 1
    assert "Linear with its loss" in told
    for one, other in zip(found.modules, analytic.modules, strict=True):
        assert [layer.name for layer in one.layers] == [layer.name for layer in other.layers]
        assert [layer.parameters for layer in one.layers] == [layer.parameters for layer in other.layers]
        assert all(layer.forward > 0 for layer in one.layers)
    first, second = language_layers(found)[1:3]
    assert first.forward == second.forward and first.input_gradient > 0 and first.weight_gradient > 0


class Moody(nn.Linear):
    """A layer that is slow at times."""

    is_slow = False

    def forward(self, input: Tensor) -> Tensor:
        """Compute it, and something else before."""
        ends = time.process_time() + (0.02 if Moody.is_slow else 0.0)
        while time.process_time() < ends:
            pass
        return super().forward(input)


def test_a_slow_moment_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in three turns, the first of them slow."""
    torch.set_num_threads(1)
    called = ModuleCall(Moody(8, 8, device="meta"), (torch.empty(4, 8, device="meta"),), {})
    meter = ProfiledCost(
        DevicePlacement(torch.device("cpu"), "fp32"), ComputeSetting(torch.float32, False, False, False, 1)
    )
    monkeypatch.setattr(Moody, "is_slow", True)
    assert meter(called).forward >= 0.02
    monkeypatch.setattr(Moody, "is_slow", False)
    for _ in range(PASSES - 1):
        meter.measure_again()
    assert 0 < meter(called).forward < 0.01


def test_longer_rows_take_longer() -> None:
    run = text(device="cpu", precision="fp32", threads=1)
    model, _ = build_run_model(run, this_cpu())
    torch.set_num_threads(1)
    placement = DevicePlacement(torch.device("cpu"), "fp32")
    short, long = (profile_model(model, MicrobatchShape(2, tokens), placement) for tokens in (64, 1024))
    assert language_layers(long)[1].forward > 3 * language_layers(short)[1].forward


# ---------------------------------------------------------------------------------------------------- files


def test_costs_survive_a_file(tmp_path: Path) -> None:
    cost = run_cost(config(language={"train": "lora", "lora": {"rank": 4}}), H100)
    write_costs(tmp_path / "costs.yaml", cost, "NVIDIA H100 80GB HBM3")
    measured = replace(cost, is_measured=True)  # that is what a file is for
    assert read_costs(tmp_path / "costs.yaml") == measured
    assert read_costs(tmp_path / "costs.yaml", on=H100) == measured
    with pytest.raises(ConfigError, match="measured on NVIDIA H100 80GB HBM3; they do not apply to A100-80"):
        read_costs(tmp_path / "costs.yaml", on=device("A100-80"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("modules:", "modulos:", "the file has no costs"),
        ("  forward:", "  forwards:", r"modules\.model\.layers\[0\]: forwards: unknown"),
        ("parameter_bytes: ", "parameter_bytes: many", "expected a number"),
        ("batch: 4", "batch: 0", "batch = 0: expected at least 1"),
        ("measured_on", "\t", "this is not YAML"),
    ],
)
def test_mistakes_in_files_are_reported(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "costs.yaml"
    write_costs(path, run_cost(text(), H100), "H100")
    written = path.read_text()
    assert old in written
    path.write_text(written.replace(old, new, 1))
    with pytest.raises(ConfigError, match=said) as told:
        read_costs(path)
    assert str(path) in str(told.value)


def test_missing_files_say_how_to_write_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="To write it: cornstarch profile CONFIG --output"):
        read_costs(tmp_path / "none.yaml")
