"""Trials of plans meet what plans have gone wrong with: microbatches without images, stored parts, a scaled loss."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from cornstarch.errors import ConfigError
from cornstarch.trainer.recording_trainer import STEPS, build_trial, choose_samples
from cornstarch.verify.twin_trial import build_twin_run, hand_over_samples
from tests.trainer.tiny import tiny_config

STAGES = ["parallel.modules.vision={}", "parallel.modules.language_model.stages=4", "parallel.ranks=first_stage"]


@pytest.mark.parametrize(("overrides", "microbatches"), [([], 2), (STAGES, 4)], ids=["two", "four"])
def test_some_microbatches_have_no_items(tmp_path: Path, overrides: list[str], microbatches: int) -> None:
    twin = build_twin_run(tiny_config(tmp_path, *overrides), tmp_path / "twin", replicas=1)
    assert (twin.loop.batch_size, twin.loop.gradient_accumulation_steps) == (2 * microbatches, microbatches)
    samples = choose_samples(twin)
    has = [[bool(one.media) for one in samples[first : first + 2]] for first in range(0, len(samples), 2)]
    assert len(has) == STEPS * microbatches
    without = [number for number, found in enumerate(has) if not any(found)]
    assert without == [2 * microbatches - 1, 2 * microbatches]  # the last of the second step, the first of the third


def test_few_samples_are_taken_again_and_broken_ones_are_not(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    rows = json.loads((tmp_path / "train.json").read_text())
    (tmp_path / "train.json").write_text(json.dumps([{"conversations": "nothing"}, *rows[:3]]))
    samples = choose_samples(build_twin_run(tiny_config(tmp_path), tmp_path / "twin", replicas=1))
    assert len(samples) == STEPS * 4 and len({sample.id for sample in samples}) == 3


def test_stored_parts_have_stored_twins(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    stored = {"model": {"language_model": {"path": str(tmp_path / "llama"), "config": None}}}
    twin = build_twin_run(tiny_config(tmp_path, **stored), tmp_path / "trial" / "run", replicas=1)
    text, vision = twin.model.language_model, twin.model.encoders["vision"]
    assert text is not None and text.config is None and text.path is not None
    assert AutoConfig.from_pretrained(text.path).num_hidden_layers == 2
    assert vision.path is None and vision.config is not None  # made from its config, as in the run
    assert text.tokenizer == str(tmp_path / "tokenizer")


def test_a_trial_of_fp16_scales_its_loss_and_rounds_nothing(tmp_path: Path) -> None:
    twin = build_twin_run(tiny_config(tmp_path, "precision=fp16"), tmp_path / "twin", replicas=1)
    witness = build_trial(twin, console=Console(file=io.StringIO()))
    witness.setup()
    assert witness.scaler is not None and witness.placement.dtype == torch.float32
    result = witness.step(next(iter(witness.batches())))
    norm = torch.nn.utils.get_total_norm([one for one in witness.gradients[0].values() if one is not None])
    torch.testing.assert_close(result.grad_norm, norm)  # what is recorded is not scaled
    with witness.placement.forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_rows_that_cannot_travel_are_refused_in_words(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "data.train.0={path: rows, format: given}")
    twin = build_twin_run(config, tmp_path / "twin", replicas=1)
    rows = [{"text": "a cat", "more": lambda: None}]
    with pytest.raises(ConfigError, match="the given data cannot be handed to another process"):
        hand_over_samples(twin, rows, tmp_path)
    readable = build_twin_run(tiny_config(tmp_path), tmp_path / "x", 1)
    assert hand_over_samples(readable, None, tmp_path) is readable


@pytest.mark.parametrize(
    "options",
    ["{kind: ddp, compression: {kind: quantize, bits: 4}}", "{kind: diloco, local: {every: 2}}", "{kind: gossip}"],
    ids=["compressed", "diloco", "gossip"],
)
def test_a_trial_leaves_out_what_differs_from_one_process_on_purpose(tmp_path: Path, options: str) -> None:
    overrides = ["parallel.modules.model.tp=2", f"parallel.data={options}"]
    twin = build_twin_run(tiny_config(tmp_path, *overrides), tmp_path / "twin", replicas=1)
    assert (twin.parallel.data.kind, twin.parallel.data.compression.kind) == ("ddp", "none")
    assert all(module.tp == 2 for module in twin.parallel.modules.values())


def test_a_trial_goes_back_to_no_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "loop.on_bad_loss=rewind", "checkpoint.every=2")
    twin = build_twin_run(config, tmp_path / "twin", replicas=1)
    assert twin.loop.on_bad_loss == "stop" and twin.checkpoint.every is None
