"""Choices become sections of a config, and the rest of a config limits what may be chosen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from cornstarch.config import RunConfig
from cornstarch.config.config_file import load_config, plan_sections, with_plan
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.candidates import Candidate, SearchSpace
from cornstarch.plan.cluster import Cluster, resize_cluster
from cornstarch.plan.cost import ModuleCost, RunCost
from cornstarch.plan.plan import Plan
from cornstarch.plan.predict import Prediction, predict
from cornstarch.plan.search import search
from cornstarch.plan.validation import as_data
from cornstarch.planner.search_run import (
    cost_of,
    explain_failure,
    format_plan_file,
    own_plan,
    plan_run,
    use_all_devices,
    what_if,
)
from cornstarch.tasks.build import build_meta_model
from tests.plan.runs import cluster, enumerate_candidates, module, random_run
from tests.trainer.tiny import tiny_config

MODEL = {
    "encoders": {"vision": {"path": "a/vision", "train": "projector"}},
    "language_model": {"path": "a/language"},
}
DATA = {"train": "none.json"}


def run(*overrides: str, batch: int = 16, encoders: bool = True) -> RunConfig:
    model = MODEL if encoders else {"whole": {"path": "a/model"}}
    return load_config(None, [*overrides, f"loop.batch_size={batch}"], base={"model": model, "data": DATA})


def cost(batch: int = 16, layers: int = 8) -> RunCost:
    """Return an encoder that is frozen but for its last layer, and a language model."""
    frozen = module("vision", 3, trained=False, tp_sizes=(1, 2)).layers
    vision = ModuleCost("vision", (*frozen, *module("vision.projector", 1).layers), tp_sizes=(1, 2))
    return RunCost(
        (vision, module("language_model", layers, tp_sizes=(1, 2, 4), cp_sizes=(1, 2))), batch=batch, tokens=9
    )


def as_meant(config: RunConfig, choice: Candidate) -> Candidate:
    return Candidate.of(config.parallel, choice.dp, config.loop.gradient_accumulation_steps)


def test_any_choice_becomes_the_config_of_the_same_plan() -> None:
    draw = random.Random(4)
    seen = set()
    for run_cost, machines in [*(random_run(draw) for _ in range(12)), (cost(), cluster(1, 4))]:
        names = [one.name for one in run_cost.modules]
        encoders = {name: {"path": "a/b"} for name in names[:-1]}
        model = {"encoders": encoders, "language_model": {"path": "a/b"}} if encoders else {"whole": {"path": "a/b"}}
        base = {"model": model, "data": DATA, "loop": {"batch_size": run_cost.batch}}
        config = load_config(None, [], base=base)
        every = list(
            enumerate_candidates(run_cost, machines, SearchSpace(schedules=("1f1b", "interleaved", "zero_bubble")))
        )
        for choice in draw.sample(every, min(30, len(every))):
            one = predict(choice, run_cost, machines)
            planned = with_plan(config, one)
            meant = as_meant(planned, choice)
            assert tuple((name, replace(plan, layers=None)) for name, plan in meant.modules) == choice.modules
            assert planned.parallel.data.kind == choice.kind
            assert planned.loop.gradient_accumulation_steps == choice.microbatches
            other = predict(meant, run_cost, machines)
            assert one.step == other.step and one.peak == other.peak, choice.describe()
            for name, plan in meant.modules:
                parts = (one.layers[name],) if plan.layers is None else plan.layers
                assert sum(parts) == one.layers[name] and len(parts) == plan.stages * plan.virtual_stages
            seen |= {choice.ranks, choice.kind, choice.schedule}
    assert {"own", "colocated", "first_stage", "shared", "ddp", "zero3", "interleaved", "zero_bubble"} <= seen


def test_the_plan_decides_about_checkpointing_instead_of_the_loop() -> None:
    config = run("loop.activation_checkpointing=true")
    found = plan_run(config, cluster(1, 4), cost())
    assert found.best is not None
    planned = with_plan(config, found.best)
    assert not planned.loop.activation_checkpointing
    again = {name: one.activation_checkpointing for name, one in planned.parallel.modules.items()}
    assert again == {name: one.activation_checkpointing for name, one in found.best.candidate.modules}
    sized = run('loop.activation_budget="20 GB"')
    assert with_plan(sized, found.best).loop.activation_budget == 1.0


def test_verification_stays_as_the_config_says() -> None:
    config = run("parallel.verify=never")
    found = plan_run(config, cluster(1, 2), cost())
    assert found.best is not None
    assert with_plan(config, found.best).parallel.verify == "never"


@pytest.mark.parametrize("limit", ["features.cache=true", "data.balance_encoders=true"])
def test_what_goes_with_nothing_else_is_kept_to(limit: str) -> None:
    """Tensor parallelism would be fastest here: there is one sample, and the links cost nothing."""
    machines = cluster(1, 4, inside=1e15)
    free, bound = run(batch=1), run(limit, batch=1)
    best = plan_run(free, machines, cost(1)).best
    assert best is not None and best.candidate.modules[-1][1].tp > 1
    found = plan_run(bound, machines, cost(1))
    assert found.best is not None
    for one in (found.best, *(other.prediction for other in found.runners_up)):
        with_plan(bound, one)  # refused otherwise
        assert all(plan.tp == 1 for _, plan in one.candidate.modules)


def test_a_pipeline_is_cut_where_it_was_predicted(tmp_path: Path) -> None:
    """The layers that are counted are those between which a model can be cut."""
    config = tiny_config(tmp_path, "model.language_model.config.num_hidden_layers=5")
    config = load_config(None, ["model.encoders.vision.config.num_hidden_layers=3"], base=as_data(config))
    machines = Cluster.parse("4xH100")
    found = plan_run(config, machines, space=SearchSpace(ranks=("own",), least_stages=3, schedules=("1f1b",)))
    assert found.best is not None
    planned = with_plan(config, found.best)
    model = build_meta_model(config)
    assert isinstance(model, MultimodalModel)
    layers = planned.parallel.modules["language_model"].layers
    assert layers is not None and len(layers) == 3
    template = PipelineTemplate.of_layers(model.language_model, layers)
    begins = [names[0] for names in template.modules_per_stage]
    listed = ["model.embed_tokens", *(f"model.layers.{number}" for number in range(1, 5)), "model.norm"]
    assert begins == [listed[start] for start in found.best.starts["language_model"]]
    counted = cost_of(config, machines).module("vision").layers
    PipelineTemplate.of_layers(model.encoders["vision"], [1] * len(counted))


def test_the_file_is_read_as_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {encoders: {vision: {path: a/vision}}, language_model: {path: a/language}}\n"
        "data: {train: none.json}\nparallel: {auto: true, cluster: 8xH100}\nloop: {batch_size: 16, accumulation: 16}\n"
    )
    config, machines = load_config(tmp_path / "run.yaml"), cluster(1, 4)
    best = plan_run(config, machines, cost()).best
    assert best is not None
    text = format_plan_file(best, config, machines)
    assert best.candidate.describe() in text and "# Predicted: " in text
    (tmp_path / "plan.yaml").write_text(text)
    read = load_config(tmp_path / "run.yaml", plan=tmp_path / "plan.yaml")
    assert read == with_plan(config, best)
    changed = load_config(tmp_path / "run.yaml", ["loop.gradient_accumulation_steps=2"], plan=tmp_path / "plan.yaml")
    assert changed.loop.gradient_accumulation_steps == 2


WRONG_FILES = [
    (None, "There is no such file"),
    (
        "parallel: {modules: {vision: {tp: 2}, language_model: {tb: 2}}}\n",
        "plan.yaml:1  parallel.modules.language_model.tb",
    ),
    ("parallel: {}\nmodel: {}\n", "plan.yaml:2  model\n  A plan says nothing about it."),
    ("- parallel\n", "expected keys such as `parallel:` and `loop:`"),
    ("parallel: {data: {kind: zero1}}\nloop: {accumulation: 3}\n", "no multiple of `gradient_accumulation_steps` = 3"),
]


@pytest.mark.parametrize(("text", "said"), WRONG_FILES)
def test_a_wrong_file_is_told_with_its_line(text: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {encoders: {vision: {path: a/vision}}, language_model: {path: a/language}}\ndata: {train: none.json}\n"
    )
    if text is not None:
        (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "run.yaml", plan=tmp_path / "plan.yaml")
    assert said in str(error.value)


# ------------------------------------------------------------------------------------------------ beside the search


def test_the_own_plan_is_predicted_or_refused() -> None:
    machines = cluster(1, 4)
    assert own_plan(run(), machines, cost()) is None
    assert own_plan(run("parallel=auto"), machines, cost()) is None
    own = own_plan(run("parallel.modules.model.tp=2", "loop.activation_checkpointing=true"), machines, cost())
    assert own is not None and isinstance(own.prediction, Prediction)
    assert own.prediction.candidate.dp == 2
    assert [(plan.tp, plan.activation_checkpointing) for plan in own.plan.modules.values()] == [(2, True)] * 2
    three = own_plan(run("parallel.modules.model.tp=3"), machines, cost())
    assert three is not None and three.prediction is None and "multiples of 3" in three.trouble
    assert isinstance(three.plan, Plan)
    uneven = ["parallel.modules.vision.tp=1", "parallel.ranks=first_stage", "parallel.modules.language_model.stages=2"]
    for layers, trouble in (("[3,5]", ""), ("[3,6]", "layers add up to 9; the module has 8")):
        cut = own_plan(run(*uneven, f"parallel.modules.language_model.layers={layers}"), machines, cost())
        assert cut is not None and trouble in cut.trouble
        assert cut.prediction is None or cut.prediction.starts["language_model"] == (0, 3)


def test_other_sizes_have_the_same_batch() -> None:
    found = list(what_if(run(), cluster(2, 2), cost(), [1, 2, 4, 8]))
    assert [one.cluster.devices for one in found] == [1, 2, 4, 8]
    assert [(one.cluster.nodes, one.cluster.per_node) for one in found] == [(1, 1), (1, 2), (2, 2), (4, 2)]
    assert found[0].efficiency == 1.0
    for one in found:
        assert one.best is not None and one.efficiency is not None
        first = found[0].best
        assert first is not None
        assert one.efficiency == pytest.approx(first.step / one.best.step / one.cluster.devices)
    with pytest.raises(ConfigError, match="3 devices do not fill nodes of 2; 2 and 4 do"):
        resize_cluster(cluster(2, 2), 3)


def test_no_process_is_left_without_work() -> None:
    """With three samples, three of four devices are quicker than four that sum over all of them."""
    machines, config = cluster(1, 4, inside=1e3), run(batch=3, encoders=False)
    layers = module("model", 1, tp_sizes=(1, 4), parameters=1, parameter_bytes=2, output_bytes=1000, sums=2)
    three = RunCost((layers,), batch=3)
    found = plan_run(config, machines, three)
    assert found.best is not None and found.best.candidate.world == 3
    assert use_all_devices(found, config, machines, three).candidate.world == 4
    stubborn = RunCost((module("model", 1, tp_sizes=(1,)),), batch=3)
    found = plan_run(config, machines, stubborn)
    with pytest.raises(ConfigError, match="Start 3 processes, or let loop.batch_size = 3 be a multiple of 4"):
        use_all_devices(found, config, machines, stubborn)


def test_what_is_impossible_is_told_with_the_smallest_cluster_that_would_do() -> None:
    heavy = RunCost((module("model", 8, parameters=10**6, parameter_bytes=4 * 10**6, tp_sizes=(1, 2)),), batch=8)
    machines = cluster(1, 2, memory=30 * 10**6)
    found = search(heavy, machines)
    assert found.best is None and found.smallest is not None
    said = explain_failure(found, machines)
    assert found.smallest.name in said and "toys" in said and "smaller data.max_length" in said


def test_only_what_differs_from_the_defaults_is_written() -> None:
    best = plan_run(run(), cluster(1, 2), cost()).best
    assert best is not None
    said = plan_sections(best, run())
    assert set(said) == {"parallel", "loop"} and set(said["loop"]) == {"batch_size", "gradient_accumulation_steps"}
    assert "precision" not in str(said) and "cp_mode" not in str(said)
