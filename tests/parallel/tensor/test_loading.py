"""Models read by slice are, to the bit, those that are read whole and then cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cornstarch.compat import Destination
from cornstarch.parallel.tensor.shard_boxes import ShardSpec, find_stored_sharding
from tests import zoo
from tests.parallel.tensor.forms import forms
from tests.parallel.tensor.loading_work import (
    LARGE,
    MemoryPeak,
    compare,
    half_of_the_layers,
    load_anew,
    load_as,
    load_large,
    load_otherwise,
    refusals,
    stored,
)
from tests.parallel.tensor.work import build
from tests.parity.pool import Pool


@pytest.mark.parametrize("name", [*zoo.LANGUAGE_MODELS, *zoo.ENCODERS])
def test_every_model_of_the_zoo(workers: Pool, name: str, tmp_path: Path) -> None:
    folder = str(stored(name, tmp_path / name))
    for found in workers.run(2, compare, name, folder, 2, {}, {}):
        assert found["wrong"] == [] and found["reason"] is None and found["cut"]


@pytest.mark.parametrize("form", forms())
def test_other_layer_forms_match_one_process(workers: Pool, form: str, tmp_path: Path) -> None:
    folder = str(stored(form, tmp_path / form))
    for found in workers.run(2, compare, form, folder, 2, {}, {}):
        assert found["wrong"] == [] and found["reason"] is None, found


@pytest.mark.parametrize(
    ("name", "ranks", "how", "options", "loading"),
    [
        ("llama", 4, {}, {}, {}),  # two ranks share a head of keys and values
        ("llama", 2, {}, {"num_key_value_heads": 1, "attention_bias": True}, {}),
        ("llama", 2, {}, {}, {"dtype": torch.bfloat16, "attn_implementation": "eager"}),
        ("llama", 2, {"vocabulary": True}, {"vocab_size": zoo.VOCABULARY + 1}, {}),
        ("llama", 4, {"vocabulary": True}, {"vocab_size": 65}, {}),
        ("qwen2", 2, {"vocabulary": True}, {"tie_word_embeddings": True}, {}),
        ("gemma2", 2, {"vocabulary": True}, {}, {}),
        ("gemma3", 2, {}, {"tie_word_embeddings": True}, {}),
        ("gpt2", 2, {}, {"tie_word_embeddings": False}, {}),
        ("phi3", 2, {"sequence": True}, {}, {"dtype": torch.bfloat16}),
        ("mixtral", 2, {"sequence": True}, {}, {"dtype": torch.float16}),
    ],
)
def test_loading_options_match_from_pretrained(
    workers: Pool,
    name: str,
    ranks: int,
    how: dict[str, Any],
    options: dict[str, Any],
    loading: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder = str(stored(name, tmp_path / name, **options))
    for found in workers.run(ranks, compare, name, folder, ranks, how, loading):
        assert found["wrong"] == [] and found["reason"] is None, found


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification", "AutoModelForCausalLM"])
def test_folder_of_another_class_is_loaded(workers: Pool, kind: str, tmp_path: Path) -> None:
    """Names have another prefix there, or a head is new: that of the first rank is everyone's."""
    folder = str(stored("llama", tmp_path / "llama"))
    for found in workers.run(2, load_as, kind, folder, {}):
        assert found == {"wrong": [], "reason": None}


def test_encoder_of_a_larger_checkpoint_is_loaded(workers: Pool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CLIPConfig(vision_config=zoo.tower_sizes(), text_config={**sizes, "vocab_size": 64})
    zoo.build(transformers.CLIPModel, config).save_pretrained(tmp_path)
    for found in workers.run(2, load_as, "CLIPVisionModel", str(tmp_path), {}):
        assert found == {"wrong": [], "reason": None}


def test_fused_stored_tensors_are_split(workers: Pool, tmp_path: Path) -> None:
    """DINOv2 stores gate and value in one tensor."""
    config = zoo.dinov2_config()
    config.use_swiglu_ffn = True
    zoo.build(transformers.Dinov2Model, config).save_pretrained(tmp_path)
    for found in workers.run(2, load_as, "Dinov2Model", str(tmp_path), {}):
        assert found == {"wrong": [], "reason": None}


# ------------------------------------------------------------------------------------------------ not by slice


def test_unknown_conversions_require_a_full_read(workers: Pool, tmp_path: Path) -> None:
    for found in workers.run(2, load_otherwise, str(stored("mixtral", tmp_path / "mixtral"))):
        assert found["wrong"] == []
        assert "MergeModulelist" in found["reason"] and "may need all of it" in found["reason"]


def test_new_weights_require_a_full_read(workers: Pool, tmp_path: Path) -> None:
    folder = stored("llama", tmp_path / "llama")
    for found in workers.run(2, load_anew, str(folder)):
        assert found["wrong"] == []
        assert found["reason"] == "model.layers.0.mlp.gate_proj.weight is stored with another shape, and made anew"


@pytest.mark.parametrize(
    ("destination", "cuts", "shape", "expected"),
    [
        # Kinds that are put one behind the other along what is cut: each is one of the parts.
        (Destination(("a",), (("Concatenate", 0),), 1, 2), [ShardSpec(0, (8, 4), 2)], (4, 3), ShardSpec(0, (4,), 2)),
        (Destination(("a",), (("Concatenate", 1),), 1, 2), [ShardSpec(0, (8,), 2)], (8, 3), ShardSpec(0, (8,), 2)),
        (Destination(("a",), (("Concatenate", 0),), 0, 2), [ShardSpec(0, (12,), 2)], (6, 3), None),
        # Stacked: the parameter has one more dim.
        (Destination(("a",), (("MergeModulelist", 0),)), [ShardSpec(2, (6,), 2)], (8, 6), ShardSpec(1, (6,), 2)),
        (Destination(("a",), (("MergeModulelist", 0),)), [ShardSpec(0, (4,), 2)], (8, 6), None),
        (
            Destination(("a",), (("MergeModulelist", 0), ("Concatenate", 0)), 0, 2),
            [ShardSpec(1, (6,), 2)],
            (6, 6),
            None,
        ),
        # Taken apart.
        (Destination(("a", "b"), (("Chunk", 0),)), [ShardSpec(0, (4,), 2)] * 2, (8, 3), ShardSpec(0, (4, 4), 2)),
        (Destination(("a", "b"), (("Chunk", 0),)), [ShardSpec(1, (4,), 2)] * 2, (8, 4), ShardSpec(1, (4,), 2)),
        (Destination(("a", "b"), (("Chunk", 0),)), [ShardSpec(0, (4,), 2), None], (8, 3), None),
        (Destination(("a", "b"), (("Chunk", 0),)), [ShardSpec(0, (2, 2), 2), ShardSpec(0, (2, 2), 2)], (8, 3), None),
        # Whatever else there is, or is there with options of its own.
        (Destination(("a",), (("Transpose", None),)), [ShardSpec(0, (4,), 2)], (4, 4), None),
        (Destination(("a",), (("Concatenate", None),), 0, 2), [ShardSpec(0, (4, 4), 2)], (4, 4), None),
        (Destination(("a",), (("Concatenate", 0),), 0, 2), [None], (4, 4), None),
    ],
)
def test_stored_sharding_of_conversions(
    destination: Destination, cuts: list[ShardSpec | None], shape: tuple[int, ...], expected: ShardSpec | None
) -> None:
    assert find_stored_sharding(destination, cuts, shape) == expected


# ------------------------------------------------------------------------------------------------ stages


@pytest.mark.parametrize("first", [True, False])
def test_stage_reads_only_its_layers(workers: Pool, first: bool, tmp_path: Path) -> None:
    """Of tied embeddings, which are stored once, the stage that has the head reads them for it."""
    folder = stored("qwen2", tmp_path / "qwen2", tie_word_embeddings=True)
    for found in workers.run(2, half_of_the_layers, str(folder), first):
        assert found["same"] and found["buffers"] and found["reason"] is None
        assert found["read"] == found["numbers"] and found["told"] == {}
        assert not any(f"layers.{1 if first else 0}." in name for name in found["names"])


# ------------------------------------------------------------------------------------------------ mistakes


def test_unloadable_folders_are_refused(workers: Pool, tmp_path: Path) -> None:
    for name in ("empty", "pickled", "incomplete", "other", "damaged"):
        stored("llama", tmp_path / name)
    for file in (tmp_path / "empty").glob("*.safetensors*"):
        file.unlink()
    for file in (tmp_path / "pickled").glob("*.safetensors*"):
        file.unlink()
    torch.save({"model.norm.weight": torch.ones(zoo.HIDDEN)}, tmp_path / "pickled" / "pytorch_model.bin")
    sorted((tmp_path / "incomplete").glob("*.safetensors"))[1].unlink()
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    damaged = sorted((tmp_path / "damaged").glob("*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    cases = [
        ("llama", str(tmp_path / name), {}) for name in ("empty", "pickled", "incomplete", "other", "damaged", "none")
    ]
    for said in workers.run(2, refusals, cases):
        empty, pickled, incomplete, other, broken, none = said
        assert str(tmp_path / "empty") in empty and "model.safetensors" in empty
        assert str(tmp_path / "pickled") in pickled and "model.safetensors" in pickled
        assert "model-00002-of-" in incomplete and "is not there" in incomplete
        assert "mlp.gate_proj.weight is [64, 32] there, [96, 32] here" in other and "and 3 more" in other
        assert str(tmp_path / "damaged") in broken and "HeaderTooLarge" not in broken[:40]
        assert str(tmp_path / "none") in none


def test_unshardable_model_is_refused_before_reading(workers: Pool, tmp_path: Path) -> None:
    folder = stored("llama", tmp_path / "llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    for (said,) in workers.run(2, refusals, [("llama", str(folder), {})]):
        assert "3 attention heads" in said


# ------------------------------------------------------------------------------------------------ memory

LARGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "several files": ("llama", LARGE, {}, "50MB"),
    "one file": ("llama", LARGE, {}, "10GB"),
    "fused": ("phi3", {k: v for k, v in LARGE.items() if k != "head_dim"}, {}, "50MB"),
    "many words": ("llama", {**LARGE, "num_hidden_layers": 2, "vocab_size": 12000}, {"vocabulary": True}, "50MB"),
    "experts one by one": (
        "mixtral", {**LARGE, "num_hidden_layers": 2, "intermediate_size": 1024, "num_local_experts": 8}, {}, "50MB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE_MODELS)
def test_loading_memory_is_bounded_by_the_shard(fresh: Pool, case: str, tmp_path: Path) -> None:
    """At most 0.55 of the model at any time, of which 0.5 stay; no tensor that is cut is read whole."""
    fresh.close()  # what a process has had before would count
    name, options, how, size = LARGE_MODELS[case]
    model: Any = build(name, **options)
    model.save_pretrained(tmp_path / "large", max_shard_size=size)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    numbers = {key: p.numel() for key, p in model.named_parameters()}
    del model
    stored(name, tmp_path / "tiny")
    assert whole > 150e6
    for found in fresh.run(2, load_large, name, str(tmp_path / "large"), how, {}):
        assert found["mapped"] == []  # so that all weights are in memory that is counted
        assert found["kept"] <= found["peak"] * 1.02
        assert found["peak"] <= 0.55 * whole
        for key in [key for key in numbers if "_proj.weight" in key]:
            assert found["reads"].get(key, 0) <= numbers[key] // 2, key


def test_memory_watch_sees_an_allocation() -> None:
    with MemoryPeak() as peak:
        ones = torch.ones(25_000_000)
        peak.wait()  # however busy the machine is
        del ones
    assert 95e6 < peak.bytes < 120e6
