"""The loop against a hand-written one, and against itself: interrupted, in microbatches, with other precision."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.checkpoint.save import CheckpointWriter
from cornstarch.data.loader import StepBatch
from cornstarch.engine.failure import TrainingError
from cornstarch.errors import ConfigError
from cornstarch.tasks import build_task
from cornstarch.train import Trainer, load_config, load_run
from tests.trainer.tiny import losses, quiet, tiny_config, trainer_of

EVALUATED = {"loop": {"evaluate_every": 2}}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named_parameters(trainer.model).items()}


def with_evaluation(folder: Path) -> dict[str, Any]:
    return {"data": {"evaluation": [{"path": str(folder / "test.json"), "name": "held out"}]}}


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if line["kind"] == kind]


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


# ---------------------------------------------------------------------------------------------------- the reference


def hand_loop(trainer: Trainer, batches: list[StepBatch]) -> tuple[list[float], list[dict[str, Tensor]], nn.Module]:
    """Train as one would without a trainer, with torch's own AdamW and no fused kernels: sum over all tokens."""
    torch.manual_seed(0)
    model = build_task(trainer.config).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, foreach=False)
    found, gradients = [], []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 6)) / 2
        total, count = torch.zeros(()), 0
        for microbatch in batch.microbatches:
            logits = model(**{k: v for k, v in microbatch.inputs.items() if k != "labels"}).logits
            target = microbatch.inputs["labels"][:, 1:].reshape(-1)
            total = total + nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target, reduction="sum")
            count += int((target != -100).sum())
        (total / count).backward()
        found.append(float(total.detach() / count))
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found, gradients, model


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_step_is_what_a_hand_written_loop_does(tmp_path: Path, accumulation: int) -> None:
    no_dropout = {
        "model": {
            "encoders": {"vision": {"config": {"attention_dropout": 0.0}}},
            "language_model": {"config": {"attention_dropout": 0.0}},
        },
        "loop": {"accumulation": accumulation},
        "schedule": {"warmup": 0},
    }
    trainer = trainer_of(tiny_config(tmp_path, **no_dropout))
    trainer.setup()
    batches = [batch for batch, _ in zip(trainer.build_loader(), range(3), strict=False)]
    assert len({one.trained_tokens for batch in batches for one in batch.microbatches}) > 1  # means would differ

    gradients: list[dict[str, Tensor]] = []
    clip = trainer.update_weights

    def noting(batch: StepBatch, loss: Tensor) -> Any:
        gradients.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return clip(batch, loss)

    trainer.update_weights = noting  # type: ignore[method-assign]
    found = [float(trainer.step(batch).loss) for batch in batches]
    expected, expected_gradients, model = hand_loop(trainer, batches)
    assert found == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):  # has no effect, so its gradient is rounding, which Adam scales to a full step
            continue
        torch.testing.assert_close(weights(trainer)[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_activations_computed_again_change_nothing(tmp_path: Path) -> None:
    kept = trainer_of(tiny_config(tmp_path))
    kept.fit()
    again = trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'again'}", "loop.activation_checkpointing=true"))
    again.fit()
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


# ---------------------------------------------------------------------------------------------------- resume


HARD = {
    "data": {"packing": True, "workers": 2},
    "loop": {"ema": 0.9, "accumulation": 2, "evaluate_every": 2, "steps": 9},
    "checkpoint": {"every": 4},
}


@pytest.mark.parametrize("hard", [{}, HARD], ids=["plain", "packed, workers, ema, evaluated"])
def test_resumed_run_is_bit_equal(tmp_path: Path, hard: dict[str, Any]) -> None:
    tiny_config(tmp_path)
    if hard:
        hard = {**hard, "data": {**hard["data"], **with_evaluation(tmp_path)["data"]}}
    whole = trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'whole'}", **hard))
    whole.fit()

    first = trainer_of(tiny_config(tmp_path, **hard))
    with closing(first):
        first.setup()
        for batch in first.batches():
            first.step(batch)
            if first.position.step == 4:
                first.save()
            if first.position.step == 6:  # two steps that are lost
                break
    torch.manual_seed(12345)  # whatever the process did in between
    second = trainer_of(tiny_config(tmp_path, **hard))
    second.fit()
    assert second.position.step == whole.position.step
    after = {step: loss for step, loss in losses(tmp_path / "whole").items() if step > 4}
    assert {step: loss for step, loss in losses(tmp_path / "run").items() if step > 4} == after
    assert_equal(weights(second), weights(whole))
    if hard:
        assert second.averages is not None and whole.averages is not None
        assert_equal(second.averages.averages, whole.averages.averages)


def test_saving_in_the_background_keeps_the_same(tmp_path: Path) -> None:
    whole = trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'whole'}", "checkpoint.every=2"))
    whole.fit()
    beside = trainer_of(tiny_config(tmp_path, "checkpoint.every=2", "checkpoint.background=true"))
    beside.fit()
    assert not beside.checkpoints.is_saving  # the run has waited for the last one
    assert_equal(weights(beside), weights(whole))
    saved = [line["text"] for line in lines(tmp_path / "run", "event") if line["event"] == "saved"]
    assert saved == [line["text"] for line in lines(tmp_path / "whole", "event") if line["event"] == "saved"]
    expected, found = whole.checkpoints.latest(), beside.checkpoints.latest()
    assert expected is not None and found is not None and found.step == expected.step == 6
    with expected.tensors() as a, found.tensors() as b:
        assert set(a) == set(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_save_that_fails_in_the_background_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "checkpoint.every=2", "checkpoint.background=true"))
    finish = CheckpointWriter.finish

    def full_disk(save: CheckpointWriter, *rest: Any) -> Path:
        if save.target.name.startswith("step_00000004"):
            raise ConfigError("no space is left")
        return finish(save, *rest)

    monkeypatch.setattr(CheckpointWriter, "finish", full_disk)
    with pytest.raises(ConfigError, match="no space is left"):
        trainer.fit()
    assert trainer.position.step <= 6
    assert [one.step for one in trainer.checkpoints.list()] == [2]  # what was there before is whole
    saved = [line["text"] for line in lines(tmp_path / "run", "event") if line["event"] == "saved"]
    assert saved == ["step_00000002"]


def test_a_changed_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path))
    with closing(trainer):
        trainer.setup()
        trainer.step(next(trainer.batches()))
        trainer.save()
    changed = tiny_config(tmp_path, "optimizer.learning_rate=0.001")
    with pytest.raises(ConfigError, match=r"at step 1 with another config:\n  optimizer.learning_rate: 0.01 → 0.001"):
        trainer_of(changed).fit()
    assert losses(tmp_path / "run") == {}  # nothing was touched
    allowed = trainer_of(changed, allow_changes=True)
    allowed.fit()
    assert allowed.position.step == 6
    assert max(line["learning_rate"] for line in lines(tmp_path / "run", "train")) <= 0.001


def test_what_changes_no_result_may_change(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path))
    with closing(trainer):
        trainer.setup()
        trainer.step(next(trainer.batches()))
        trainer.save()
    again = trainer_of(tiny_config(tmp_path, "logging.every=3", "data.workers=1", "checkpoint.keep=1"))
    assert again.fit().step == 6


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    config = tiny_config(tmp_path, **with_evaluation(tmp_path))
    first = trainer_of(config).fit()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    again = trainer_of(config)
    assert again.fit() == first
    assert "has ended already" in again.logger._console.file.getvalue()  # type: ignore[attr-defined]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_more_steps_go_on_when_told(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path)).fit()
    more = trainer_of(tiny_config(tmp_path, "loop.steps=8"), allow_changes=True)
    assert more.fit().step == 8
    assert sorted(losses(tmp_path / "run")) == list(range(1, 9))


def flip_a_byte(checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "checkpoint.every=2")
    whole = trainer_of(config)
    whole.fit()
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    flip_a_byte(checkpoints[-1])
    again = trainer_of(config)
    again.fit()
    assert "damaged" in again.logger._console.file.getvalue()  # type: ignore[attr-defined]
    assert_equal(weights(again), weights(whole))


def test_nothing_starts_from_zero_when_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer_of(config).fit()
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step_*"):
        flip_a_byte(checkpoint)
    with pytest.raises(ConfigError, match="None of the checkpoints"):
        trainer_of(config).fit()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    first = trainer_of(tiny_config(tmp_path))
    with closing(first):
        first.setup()
        with pytest.raises(ConfigError, match="Another run is writing"):
            trainer_of(tiny_config(tmp_path)).fit()
    trainer_of(tiny_config(tmp_path)).fit()  # free again


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'file' / 'run'}")).fit()


# ---------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_best_checkpoint_and_what_is_written(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    result = trainer_of(tiny_config(tmp_path, **{**EVALUATED, **with_evaluation(tmp_path)})).fit()
    folder = tmp_path / "run"
    evaluations = lines(folder, "evaluation")
    assert [line["step"] for line in evaluations] == [2, 4, 6]
    assert result.evaluation is not None and set(result.evaluation) >= {"loss", "accuracy", "token_accuracy", "sources"}
    assert evaluations[-1]["sources"]["held out"]["count"] == 9
    best = min(evaluations, key=lambda line: line["loss"])
    summary = json.loads((folder / "run.json").read_text())
    assert summary["best"] == {"step": best["step"], "metric": best["loss"], "name": "loss"}
    assert summary["status"] == "finished" and summary["step"] == 6
    assert {part["name"] for part in summary["parts"]} == {"vision encoder", "vision projector", "language model"}
    assert all(part["flops"] > 0 for part in summary["parts"])
    assert len(summary["answers"]) == 2
    pictures = [part["image"] for answer in summary["answers"] for part in answer["question"] if "image" in part]
    assert pictures and all((folder / name).is_file() for name in pictures)
    assert (folder / "report.html").stat().st_size > 10_000 and (folder / "loss.png").is_file()
    assert load_config(folder / "config.yaml") == tiny_config(tmp_path, **{**EVALUATED, **with_evaluation(tmp_path)})
    assert load_run(folder, "best").step == best["step"]
    assert load_run(folder, "last").step == 6


def test_evaluating_changes_nothing(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'plain'}")).fit()
    trainer_of(tiny_config(tmp_path, "loop.evaluate_every=1", **with_evaluation(tmp_path))).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_early_stopping_counts_evaluations_without_improvement(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    stopping = {
        "loop": {"evaluate_every": 1, "steps": 50, "early_stopping": {"patience": 2, "least": 100.0}},
        **with_evaluation(tmp_path),
    }
    result = trainer_of(tiny_config(tmp_path, **stopping)).fit()
    assert result.step == 3  # the first is the best, two more are not better by 100
    assert trainer_of(tiny_config(tmp_path, **stopping)).fit().step == 3  # and that was the end


@pytest.mark.parametrize("every", [1, 2, 3])
def test_each_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    tiny_config(tmp_path)
    trainer = trainer_of(
        tiny_config(tmp_path, "loop.steps=3", f"loop.evaluate_every={every}", **with_evaluation(tmp_path))
    )
    saved: list[tuple[int, bool]] = []
    save = trainer.save
    monkeypatch.setattr(
        trainer, "save", lambda metric: saved.append((trainer.position.step, metric is None)) or save(metric)
    )
    trainer.fit()
    # Where the last step is not evaluated in the loop, it is saved before the evaluation, too, which may fail.
    assert [step for step, is_unknown in saved if not is_unknown] == sorted({step for step, _ in saved})
    assert any(is_unknown for _, is_unknown in saved) == (3 % every != 0)


def test_averaged_weights_are_evaluated_and_loaded(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    trainer = trainer_of(tiny_config(tmp_path, "loop.ema_decay=0.5", **with_evaluation(tmp_path)))
    trainer.fit()
    assert trainer.averages is not None
    trained, averaged = weights(trainer), trainer.averages.averages
    assert any(not torch.equal(trained[name], averaged[name]) for name in averaged)
    loaded = dict(named_parameters(load_run(tmp_path / "run").task.model))
    for name in averaged:
        torch.testing.assert_close(loaded[name].detach(), averaged[name], rtol=0, atol=0)
    with trainer.averages.in_use():
        assert trainer.evaluator.evaluate().means() == trainer.evaluate().means()
    assert_equal(weights(trainer), trained)


def test_exchanged_items_are_measured_at_the_end(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    result = trainer_of(tiny_config(tmp_path, **with_evaluation(tmp_path))).fit()
    assert result.exchanged["vision"]["sources"]["held out"]["count"] == 8  # not the one without an image
    assert 0 <= result.exchanged["vision"]["sources"]["held out"]["chance"] < 0.5  # of four words
    assert lines(tmp_path / "run", "shuffled")[0]["modality"] == "vision"
    without = trainer_of(
        tiny_config(tmp_path, f"output={tmp_path / 'b'}", "loop.exchange_check=false", **with_evaluation(tmp_path))
    ).fit()
    assert without.exchanged == {}


def test_best_by_what_is_not_measured_is_told(tmp_path: Path) -> None:
    rows = [{"x": float(i), "y": float(i)} for i in range(8)]
    trainer = Trainer.from_objects(
        nn.Linear(1, 1),
        train_data=rows,
        evaluation_data=rows,
        loss=lambda model, batch: (model(batch["x"][:, None])[:, 0] - batch["y"]).square().mean(),
        output=str(tmp_path / "run"),
        checkpoint={"best_by": "accuracy"},
        console=quiet(),
    )
    with pytest.raises(ConfigError, match="the evaluation has only loss"):
        trainer.fit()


# ---------------------------------------------------------------------------------------------------- trouble


def test_a_loss_that_is_no_number_stops_with_step_and_samples(tmp_path: Path) -> None:
    wild = ["optimizer.name=sgd", "optimizer.learning_rate=1e30", "optimizer.max_grad_norm=null", "schedule.warmup=0"]
    trainer = trainer_of(tiny_config(tmp_path, *wild, "loop.steps=20", "checkpoint.every=1"))
    with pytest.raises(TrainingError, match=r"(?s)in step \d+.*train.json:\d+.*learning_rate \(now 1e\+30\).*warm-up"):
        trainer.fit()
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert summary["status"] == "failed"
    stopped_at = summary["step"]
    newest = trainer.checkpoints.latest()
    assert newest is not None and newest.step <= stopped_at
    with newest.tensors() as tensors:
        assert all(torch.isfinite(tensors[name]).all() for name in tensors if name.startswith("parameters/"))


class Greedy(nn.Module):
    """Needs more memory than any machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.empty(2**50)


def test_memory_that_is_not_enough_is_explained(tmp_path: Path) -> None:
    trainer = Trainer.from_objects(
        Greedy(),
        train_data=[{"x": 1.0}] * 8,
        loss=lambda model, batch: model(batch["x"][:, None]).mean(),
        output=str(tmp_path / "run"),
        device="cpu",
        console=quiet(),
    )
    with pytest.raises(TrainingError, match=r"(?s)forward pass of the model.*gradients.*gradient_accumulation_steps=2"):
        trainer.fit()


def test_nothing_trained_is_told(tmp_path: Path) -> None:
    frozen = {"model": {"encoders": {"vision": {"train": "frozen"}}, "language_model": {"train": "frozen"}}}
    with pytest.raises(ConfigError, match="Nothing is trained"):
        trainer_of(tiny_config(tmp_path, **frozen)).fit()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=cuda:7", "device = cuda:7"),
        ("device=nonsense", "device = nonsense"),
        ("device=meta", "device = meta\n  A run cannot use such a device"),
        ("optimizer.name=torch.optim.Nothing", "optimizer.name = torch.optim.Nothing"),
        ("optimizer.name=torch.optim.LBFGS", "several times per step"),
        ("optimizer.name=torch.nn.Linear", "no class of optimizers"),
        ("optimizer.name=os.path.join", "--allow-code os"),
        ("optimizer.arguments={nonsense: 1}", r"optimizer.arguments has \['nonsense'\]"),
        ("model.start_from=/nowhere", "model.start_from = /nowhere"),
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tiny_config(tmp_path, override)).fit()


# ---------------------------------------------------------------------------------------------------- precision, parts


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fewer_bits_learn_too(tmp_path: Path, precision: str) -> None:
    partly = {"model": {"encoders": {"vision": {"train": "projector"}}}}
    trainer = trainer_of(tiny_config(tmp_path, f"precision={precision}", "loop.steps=12", **partly))
    trainer.fit()
    found = losses(tmp_path / "run")
    assert found[12] < found[1]
    kinds = {name: p.dtype for name, p in named_parameters(trainer.model).items()}
    frozen = {kind for name, kind in kinds.items() if name.startswith("vision_encoder.module.")}
    assert frozen == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert {kind for name, kind in kinds.items() if not name.startswith("vision_encoder.module.")} == {torch.float32}
    load_run(tmp_path / "run")


def test_each_part_has_its_own_rate_and_decay(tmp_path: Path) -> None:
    said = {
        "model": {
            "encoders": {"vision": {"train": "full", "learning_rate": 3e-4, "projector_learning_rate": 5e-3}},
            "language_model": {"weight_decay": 0.1},
        },
        "schedule": {"name": "constant", "warmup": 0},
        "optimizer": {"weight_decay": 0.01},
    }
    trainer = trainer_of(tiny_config(tmp_path, **said))
    trainer.setup()
    trainer.step(next(trainer.batches()))
    by_name = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            by_name[id(parameter)] = (group["lr"], group["weight_decay"])
    for name, parameter in named_parameters(trainer.model).items():
        rate, decay = by_name[id(parameter)]
        if name.startswith("language_model"):
            expected = (1e-2, 0.1)
        elif ".projector" in name:
            expected = (5e-3, 0.01)
        else:
            expected = (3e-4, 0.01)
        assert (rate, decay) == (expected[0], expected[1] if parameter.dim() > 1 else 0.0), name


def test_lora_trains_adapters_only_and_goes_on(tmp_path: Path) -> None:
    lora = {"model": {"encoders": {"vision": {"train": "projector"}}, "language_model": {"train": "lora"}}}
    config = tiny_config(tmp_path, "checkpoint.every=3", **lora)
    trainer = trainer_of(config)
    trainer.setup()
    before = weights(trainer)
    trainer.fit()
    changed = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name or ".projector" in name for name in changed)
    assert load_run(tmp_path / "run").step == 6


# ---------------------------------------------------------------------------------------------------- stages, own loops


def test_a_second_stage_begins_with_the_first_ones_weights(tmp_path: Path) -> None:
    first = {"model": {"encoders": {"vision": {"train": "projector"}}, "language_model": {"train": "frozen"}}}
    one = trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'one'}", **first))
    one.fit()
    two = trainer_of(tiny_config(tmp_path, f"model.start_from={tmp_path / 'one'}", "model.language_model.train=lora"))
    two.setup()
    trained, started = weights(one), weights(two)
    projector = [name for name in trained if ".projector" in name]
    assert projector and all(torch.equal(trained[name], started[name]) for name in projector)


def test_a_stage_that_does_not_fit_is_told(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'one'}")).fit()
    wider = {"model": {"language_model": {"config": {"intermediate_size": 24}}}}
    with pytest.raises(ConfigError, match=r"intermediate|mlp.*is \[16, 16\] there, \[24, 16\] here"):
        trainer_of(tiny_config(tmp_path, f"model.start_from={tmp_path / 'one'}", **wider)).fit()


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'fit'}")).fit()
    trainer = trainer_of(tiny_config(tmp_path))
    trainer.setup()
    found = {}
    for batch in trainer.batches():
        result = trainer.step(batch)
        found[result.step] = float(result.loss)
    assert found == pytest.approx(losses(tmp_path / "fit"), rel=1e-6)
    path = trainer.save()
    assert path.is_dir() and trainer.position.step == 6


def regression(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean square error, and the share of answers that are near."""
    error = model(batch["inputs"])[:, 0] - batch["labels"]
    return {"loss": error.square().mean(), "accuracy": (error.abs() < 0.5).float().mean()}


def test_any_module_and_any_data_set(tmp_path: Path) -> None:
    inputs = torch.randn(64, 3)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1))
    trainer = Trainer.from_objects(
        nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)),
        train_data=data,
        evaluation_data=data,
        loss=regression,
        loop={"epochs": 30, "batch_size": 16, "activation_checkpointing": True},
        optimizer={"name": "torch.optim.Adafactor", "learning_rate": 0.05},
        checkpoint={"best_by": "accuracy"},
        output=str(tmp_path / "run"),
        console=quiet(),
    )
    result = trainer.fit()
    assert result.step == 120
    assert result.evaluation is not None and result.evaluation["accuracy"] > 0.9


def test_a_description_without_its_object_is_told(tmp_path: Path) -> None:
    config = load_config(None, base={"model": {"given": "Net"}, "data": {"train": {"path": "x", "format": "given"}}})
    with pytest.raises(ConfigError, match="no data was handed"):
        trainer_of(replace_output(config, tmp_path)).fit()
    with pytest.raises(ConfigError, match="no task was handed over"):
        trainer_of(replace_output(config, tmp_path), train_data=[{"x": 1.0}]).fit()


def replace_output(config: Any, folder: Path) -> Any:
    return config.model_copy(update={"output": folder / "given"})


def test_epochs_may_be_parts(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "loop.steps=null", "loop.epochs=1.5", "logging.every=1"))
    assert trainer.fit().step == 7 + 4  # 25 samples in batches of 4, then half of 7 batches
    seen = [sample for batch in replace(trainer.build_loader(), start=(0, 0), epochs=1) for p in batch.microbatches
            for sample in p.sample_ids]  # fmt: skip
    assert len(seen) == len(set(seen)) == 25
