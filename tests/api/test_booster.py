"""What a Booster hands back, saves and refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cornstarch import Booster, ConfigError, ModalParallelPlugin, MultimodalModel, MultimodalParallelPlugin
from tests.api.test_parity import close
from tests.api.work import (
    MIXED,
    PICTURES,
    SAMPLES,
    Case,
    Samples,
    alone,
    collate,
    collect_refusal,
    count_computed,
    go_on,
    look,
    make_loader,
    make_model,
    make_optimizer,
    make_plugin,
    own_loss,
    precise,
    save_after_one,
)
from tests.parity.pool import Pool

SHARED = {"ranks": "shared"}


def one_process(**plugin: Any) -> tuple[Case, MultimodalModel, Booster]:
    case = Case(1, plugin={"num_microbatches": 4, **SHARED, **plugin}, rows=MIXED[:2])
    model = make_model(case)
    return case, model, Booster(plugin=make_plugin(case, model))


# ------------------------------------------------------------------------------------------------ handed back


def test_boost_returns_five_objects_and_nothing_happens_before() -> None:
    case, model, booster = one_process()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer, rates = make_optimizer(case, model)
    loader = make_loader(case)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert booster.plugin.stage_manager is None
    found = booster.boost(model, optimizer, own_loss, loader, rates)
    assert found[1:] == (optimizer, own_loss, loader, rates) and found[0].unwrap() is model
    assert found[0].encoder_names == model.encoder_names  # what the model has
    only = Booster(plugin=booster.plugin).boost(make_model(case))
    assert only[1:] == (None, None, None, None)


def test_loss_and_outputs_are_on_the_last_stage_only(workers: Pool) -> None:
    case = Case(3, llm={"stages": 2})
    found = workers.run(3, look, case)
    model = make_model(case)
    batch = next(iter(DataLoader(Samples(PICTURES), batch_size=SAMPLES, collate_fn=collate)))  # type: ignore[arg-type]
    with torch.no_grad():
        expected = model(**batch)
    assert [one["last"] for one in found] == [False, False, True]
    assert [one["loss"] is None for one in found] == [True, True, False]
    assert found[2]["loss"] == pytest.approx(float(expected.loss), rel=1e-5)
    np.testing.assert_allclose(found[2]["logits"], expected.logits.numpy(), atol=1e-5)
    assert all(one["logits"] is None for one in found[:2])
    assert all(one["again"] == {"loss": None, "outputs": None} and one["training"] for one in found)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains(precision: str, workers: Pool) -> None:
    options = {"precision": precision, "initial_scale": 2.0**40, "max_scale": 2.0**40, "hysteresis": 1}
    found = workers.run(3, precise, Case(3, llm={"stages": 2}, plugin=options))
    for losses, kinds, scale, changed in found:
        assert losses == found[0][0] and kinds == ["torch.float32"]
        assert all(np.isfinite(losses))
        # Such a scale is too much for fp16: steps are left out, by all processes, until it is small enough.
        assert scale == (2.0**36 if precision == "fp16" else 0.0)
        assert changed == (precision == "bf16")


def test_each_stage_recomputes_activations_as_its_plugin_says(workers: Pool) -> None:
    vision, first, last = workers.run(3, count_computed, Case(3, llm={"stages": 2, "activation_checkpointing": True}))
    assert set(vision.values()) == {4} and len(vision) == 2  # a time for each microbatch
    assert set(first.values()) == set(last.values()) == {8} and len(first) + len(last) == 4


# ------------------------------------------------------------------------------------------------ files

LAYOUTS = {
    "one process": Case(1, plugin=SHARED),
    "pp 2": Case(3, llm={"stages": 2}),
    "vision tp 2": Case(3, vision={"tp_size": 2}),
    "zero 1": Case(4, replicas=2, plugin={"zero_stage": 1}),
    "zero 2": Case(4, replicas=2, plugin={"zero_stage": 2}),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("pp 2", "vision tp 2"), ("vision tp 2", "zero 1"), ("zero 1", "zero 2"), ("zero 2", "one process"),
     ("one process", "pp 2")],
)  # fmt: skip
def test_a_state_saved_in_one_layout_resumes_in_another(saved: str, loaded: str, workers: Pool, tmp_path: Path) -> None:
    workers.renew()  # torch remembers meshes that equal those of an earlier job
    workers.run(LAYOUTS[saved].ranks, save_after_one, LAYOUTS[saved], str(tmp_path))
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.bin"))
    workers.renew()
    found = workers.run(LAYOUTS[loaded].ranks, go_on, LAYOUTS[loaded], str(tmp_path))
    close(found, alone(Case()).parameters)


def test_a_frozen_model_is_saved_whole_and_other_folders_are_refused(tmp_path: Path) -> None:
    _, model, booster = one_process()
    model.requires_grad_(False)
    booster.save_model(model, tmp_path / "model")
    booster.save_model(model, tmp_path / "model")  # again: in its place
    _, other, _ = one_process()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    booster.load_model(other, tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    with pytest.raises(ConfigError, match="nothing that booster.save_model saved"):
        booster.load_model(other, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="holds model, not what was asked for: values"):
        rates = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=1.0))
        booster.load_lr_scheduler(rates, tmp_path / "model")
    with pytest.raises(ConfigError, match="does not fit the model"):
        booster.load_model(make_model(Case(encoders=())), tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        booster.save_model(model, tmp_path / "file")
    with pytest.raises(ConfigError, match="not the one that booster.boost returned"):
        booster.save_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), tmp_path / "optimizer")


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("what", "llm", "said"),
    [
        ("none", {}, r"rank 1, stage 1 .*microbatch 0: The criterion returned None"),
        ("many", {}, "The criterion returned a tensor of shape"),
        ("logits", {"sp_size": 2}, "Let the criterion return outputs.loss"),
        ("batches", {"stages": 2}, "The processes of replica 0 were given different batches"),
        ("call", {"stages": 2}, "A model that is cut into stages is not called"),
    ],
)
def test_errors_are_raised_on_all_processes(what: str, llm: dict[str, Any], said: str, workers: Pool) -> None:
    ranks = 3 if llm else 2
    found = workers.run(ranks, collect_refusal, Case(ranks, llm=llm), what)
    workers.close()  # lines between processes were cut
    for text in found:
        assert re.search(said, text), text


def test_packed_batches_need_packed_true(workers: Pool) -> None:
    case = Case(3, llm={"stages": 2}, packed=True, plugin={"num_microbatches": None, "microbatch_size": 1})
    for text in workers.run(3, collect_refusal, case, ""):
        assert "Use MultimodalParallelPlugin(packed=True)." in text


def test_replicas_in_step_need_a_processor(workers: Pool) -> None:
    case = Case(2, replicas=2, rows=("tt*tt", "ttt"), plugin={**SHARED, "num_microbatches": 4})
    for text in workers.run(2, collect_refusal, case, ""):
        assert "microbatches have something for the vision encoder" in text


def test_a_last_microbatch_without_an_encoder_needs_a_processor_under_ddp(workers: Pool) -> None:
    """DDP reduces with the last microbatch what that one uses; gradients of earlier ones would be left out."""
    cp = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
    plugin = {**SHARED, "num_microbatches": 8, "zero_stage": 0}
    case = Case(2, llm=cp, vision=cp, rows=("tt*tt", "ttttt"), plugin=plugin)
    for text in workers.run(2, collect_refusal, case, ""):
        assert "The last of 8 microbatches has nothing for the vision encoder, but an earlier one has" in text


def test_a_batch_that_does_not_divide_is_refused() -> None:
    case, model, booster = one_process(num_microbatches=3)
    fast, *_ = booster.boost(model)
    with pytest.raises(ConfigError, match="num_microbatches = 3: a batch of 8 samples does not divide by it. Use 1 or"):
        booster.execute_pipeline(iter(make_loader(case)), fast, own_loss)
    with pytest.raises(ConfigError, match=r"expected an iterator: iter\(dataloader\)"):
        booster.execute_pipeline(make_loader(case), fast, own_loss)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        booster.execute_pipeline(iter([]), fast, own_loss)
    with pytest.raises(ConfigError, match="What is trained is declared before boost"):
        fast.train(encoders_mode={"vision": (True, True)})


def test_encoders_and_plugins_must_match() -> None:
    model = make_model(Case(encoders=("vision", "audio")))
    one = ModalParallelPlugin()
    plugin = MultimodalParallelPlugin({"vision": one}, one, num_microbatches=2, ranks="shared")
    with pytest.raises(ConfigError, match="The audio encoder has no plugin"):
        Booster(plugin=plugin).boost(model)
    plugin = MultimodalParallelPlugin({"vision": one, "sound": one}, one, num_microbatches=2, ranks="shared")
    with pytest.raises(ConfigError, match=r"encoder_plugins\['sound'\]: the model has no such encoder"):
        Booster(plugin=plugin).boost(make_model(Case()))
    plugin = MultimodalParallelPlugin({"vision": one}, one, num_microbatches=2)
    with pytest.raises(ConfigError, match="1 rank is too few: a replica takes 2"):
        Booster(plugin=plugin).boost(make_model(Case()))


def test_unsupported_optimizers_are_refused() -> None:
    _, model, booster = one_process()
    with pytest.raises(ConfigError, match="that is not one of the model's"):
        booster.boost(model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0))
    with pytest.raises(ConfigError, match="several times per step"):
        booster.boost(model, torch.optim.LBFGS(model.parameters()))
    stepped = torch.optim.AdamW(model.parameters())
    model.vision_encoder.projector.projection.weight.grad = torch.zeros_like(
        model.vision_encoder.projector.projection.weight
    )
    stepped.step()
    with pytest.raises(ConfigError, match="has made steps already"):
        booster.boost(model, stepped)
    with pytest.raises(ConfigError, match="of another optimizer"):
        fresh = torch.optim.AdamW(model.parameters())
        booster.boost(model, fresh, lr_scheduler=torch.optim.lr_scheduler.ConstantLR(stepped))
    with pytest.raises(ConfigError, match="expected a MultimodalParallelPlugin"):
        Booster(plugin=ModalParallelPlugin())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without weights"):
        booster.boost(make_model(Case()).to("meta"))
