"""Runs whose parts are read by slice do what one process does, and read what each process has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import zoo
from tests.engine.loading_runs import (
    Alone,
    built,
    collect_refusal,
    describe_run,
    farthest,
    make_ready,
    store_parts,
    train_run,
)
from tests.parallel.conftest import workers
from tests.parallel.tensor.loading_work import LARGE
from tests.parity.pool import Pool

__all__ = ["workers"]

TP = {"modules": {"model": {"tp": 2}}}
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "everything trained": (2, TP, {}),
    "words": (2, {"modules": {"model": {"tp": 2, "tp_vocabulary": True}}}, {}),
    "tokens": (2, {"modules": {"model": {"tp": 2, "tp_sequence": True}}}, {}),
    "sharded too": (4, {"data": {"kind": "zero3"}, **TP}, {}),
    "the language model alone": (
        2,
        {"modules": {"vision": {"tp": 1}, "language_model": {"tp": 2}}, "ranks": "shared"},
        {},
    ),
    "activations computed again": (2, TP, {"loop": {"activation_checkpointing": True}}),
    "adapters": (
        2,
        TP,
        {
            "model": {
                "encoders": {"vision": {"train": "frozen"}},
                "language_model": {"train": "lora", "lora": {"rank": 2, "targets": "all-linear"}},
            }
        },
    ),
}


@pytest.fixture(scope="module")
def in_one_process(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Return what one process does."""
    return Alone(workers, tmp_path_factory.mktemp("alone"), store_parts)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process(workers: Pool, in_one_process: Alone, name: str, tmp_path: Path) -> None:
    ranks, parallel, sections = RUNS[name]
    run, alone = in_one_process("llama", **sections)
    workers.renew()  # torch remembers meshes of groups that have ended
    for found in workers.run(ranks, train_run, {**run, "parallel": parallel}, str(tmp_path / "several")):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert farthest(found["parameters"], alone["parameters"]) < 1e-4
        assert found["dtypes"] == alone["dtypes"] and found["traits"] == alone["traits"]
        assert found["reasons"] == {}
        assert found["reads"]["model.layers.0.self_attn.q_proj.weight"] == 32 * 32 // 2
        assert found["reads"]["model.layers.1.self_attn.o_proj.weight"] == 32 * 32 // 2
    workers.renew()


def test_weights_read_whole_come_to_the_same_to_the_bit(workers: Pool, tmp_path: Path) -> None:
    """Half precision, and adapters, which begin with the same random numbers."""
    store_parts(tmp_path)
    adapters = {"train": "lora", "dtype": "bf16", "lora": {"rank": 2, "dropout": 0.0, "targets": "all-linear"}}
    encoder = {"vision": {"train": "projector", "dtype": "bf16"}}
    run = describe_run(tmp_path, model={"encoders": encoder, "language_model": adapters}, parallel=TP)
    whole = workers.run(2, train_run, run, str(tmp_path / "whole"), False)
    workers.renew()
    for found, expected in zip(workers.run(2, train_run, run, str(tmp_path / "slices")), whole, strict=True):
        assert found["losses"] == expected["losses"] and found["dtypes"] == expected["dtypes"]
        assert farthest(found["parameters"], expected["parameters"]) == 0
        assert "torch.bfloat16" in found["dtypes"].values()
        assert found["reads"] and not expected["reads"]
    workers.renew()


def test_adapters_on_layers_whose_weights_stand_the_other_way_round(workers: Pool, tmp_path: Path) -> None:
    store_parts(tmp_path, "gpt2")
    adapters = {"train": "lora", "lora": {"rank": 2, "dropout": 0.0, "targets": ["c_attn", "c_fc", "c_proj"]}}
    run = describe_run(tmp_path, "gpt2", model={"language_model": adapters})
    (alone,) = workers.run(1, train_run, run, str(tmp_path / "alone"))
    workers.renew()
    for found in workers.run(2, train_run, {**run, "parallel": TP}, str(tmp_path / "several")):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert farthest(found["parameters"], alone["parameters"]) < 1e-4
        assert found["reasons"] == {} and found["reads"]["transformer.h.0.attn.c_attn.weight"] == 32 * 96 // 2
    workers.renew()


def test_what_is_read_whole_says_why(workers: Pool, tmp_path: Path) -> None:
    store_parts(tmp_path)
    adapters = {"train": "lora", "lora": {"rank": 2, "targets": ["lm_head"]}}
    run = describe_run(tmp_path, model={"language_model": adapters})
    sequence = {"modules": {"model": {"tp": 2, "tp_sequence": True}}}
    for found in workers.run(2, train_run, {**run, "parallel": sequence}, str(tmp_path / "several")):
        assert found["reasons"] == {"LlamaForCausalLM": "whether its tokens can be cut depends on its adapters"}
        assert "model.layers.0.self_attn.q_proj.weight" not in found["reads"]
    workers.renew()


def test_of_an_encoder_with_a_decoder_only_the_encoder_is_read(workers: Pool, tmp_path: Path) -> None:
    store_parts(tmp_path)
    sizes = {**zoo.speech_sizes(), "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    words = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **words)
    zoo.build(transformers.WhisperForConditionalGeneration, config).save_pretrained(tmp_path / "whisper")
    run = describe_run(tmp_path, parallel=TP)
    run["model"]["encoders"] = {"audio": {"path": str(tmp_path / "whisper"), "train": "full"}}
    for found in workers.run(2, built, {**run, "output": str(tmp_path / "run")}):
        assert found["kind"] == "WhisperEncoder" and found["wrong"] == [] and found["reasons"] == {}
        assert found["reads"]["model.encoder.layers.0.fc1.weight"] == 48 * 64 // 2
        assert not any("decoder" in name for name in found["reads"])
    workers.renew()


def test_the_memory_that_a_run_takes_before_its_first_step(workers: Pool, tmp_path: Path) -> None:
    store_parts(tmp_path)
    model: Any = zoo.LANGUAGE_MODELS["llama"].build(**LARGE)
    model.save_pretrained(tmp_path / "large", max_shard_size="50MB")
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    assert whole > 150e6
    runs = [{**describe_run(tmp_path, name), "parallel": TP} for name in ("llama", "large")]
    workers.close()  # memory is measured in processes that have used little
    for found in workers.run(2, make_ready, runs, str(tmp_path / "run")):
        assert found <= 0.55 * whole, f"{found / whole:.3f}"
    workers.renew()


def test_a_folder_that_does_not_fit(workers: Pool, tmp_path: Path) -> None:
    store_parts(tmp_path)
    path = tmp_path / "llama" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 96}))
    for said in workers.run(2, collect_refusal, {**describe_run(tmp_path), "parallel": TP}, str(tmp_path / "run")):
        assert said.startswith("model.language_model: ") and "is [64, 32] there, [96, 32] here" in said
    workers.renew()
