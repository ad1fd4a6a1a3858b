"""`Pipe` and `PipelineModule` on several processes do what the same layers do in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.pipeline import LayerSpec, Pipe, PipelineModule, initialize
from tests.parity.pool import Pool
from tests.pipeline import doors

State = dict[str, Any]


def same(found: list[State], expected: State) -> None:
    """Compare what all processes have together with what one has."""
    together = {name: value for own in found for name, value in own.items()}
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        assert (together[name] is None) == (value is None), name
        if value is not None:
            np.testing.assert_allclose(together[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_pipe_trains_as_its_layers_do(workers: Pool, ranks: int, checkpoint: str) -> None:
    losses, gradients, parameters = doors.run_in_one_process()
    results = workers.run(ranks, doors.pipe, 4, checkpoint)
    for found, own, _ in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert own  # every process has layers
    same([own for _, own, _ in results], gradients)
    same([own for _, _, own in results], parameters)


def test_modules_around_a_pipe_have_their_gradients_everywhere(workers: Pool) -> None:
    losses, gradients, parameters = doors.around(False)
    results = workers.run(2, doors.around, True)
    for found, own, final in results:
        assert found == pytest.approx(losses, rel=1e-5)
        for state, expected in ((own, gradients), (final, parameters)):
            outside = {name: value for name, value in expected.items() if name.startswith("other")}
            same([{name: state[name] for name in outside}], outside)
    same([own for _, own, _ in results], gradients)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_add_up_over_backwards(workers: Pool, shared: bool) -> None:
    expected = doors.twice(False, shared)
    results = workers.run(2, doors.twice, True, shared)
    if shared:  # the other stage has the parameter under another name, and the gradient of both
        for own in results:
            same([{name.rpartition(".")[2]: value for name, value in own.items()}],
                 {name.rpartition(".")[2]: value for name, value in expected.items()})  # fmt: skip
    else:
        same(results, expected)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_running_statistics_are_those_of_chunks_or_deferred(workers: Pool, checkpoint: str) -> None:
    plain, deferred = ({**a, **b} for a, b in (workers.run(2, doors.normed, one, checkpoint) for one in (False, True)))
    norm = nn.BatchNorm1d(doors.WIDTH)
    whole = nn.BatchNorm1d(doors.WIDTH)
    for inputs, _ in doors.batches(2):
        whole(inputs)
        for chunk in inputs.chunk(2):
            norm(chunk)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        np.testing.assert_allclose(plain[f"0.{name}"], getattr(norm, name), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(deferred[f"0.{name}"], getattr(whole, name), rtol=1e-5, atol=1e-6)
    assert (plain["2.num_batches_tracked"], deferred["2.num_batches_tracked"]) == (4, 2)


def test_wrong_use_of_a_pipe_is_refused_with_the_reason(workers: Pool) -> None:
    for message in workers.run(2, doors.pipe_of, 4, 5, 12):
        assert "A batch of 12 samples cannot be cut into 5 chunks of the same size" in message
    for message in workers.run(3, doors.pipe_of, 2, 2, 12):
        assert "2 layers cannot be split over 3 processes" in message
    with pytest.raises(ConfigError, match="not Linear; PipelineModule takes a list"):
        Pipe(nn.Linear(2, 2), 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chunks = 0: expected a whole number of at least 1"):
        Pipe(nn.Sequential(nn.Linear(2, 2)), 0)
    with pytest.raises(ConfigError, match="checkpoint = 'sometimes': expected one of always, except_last, never"):
        Pipe(nn.Sequential(nn.Linear(2, 2)), 2, "sometimes")  # type: ignore[arg-type]


def test_a_layer_that_fails_stops_every_process(workers: Pool) -> None:
    for first, second in workers.run(2, doors.failing_pipe):
        assert first == "rank 1, stage 1 (model 1), microbatch 2: ValueError: a bad number"
        assert second == f"The pipeline has stopped: {first}"


@pytest.mark.parametrize(
    ("frozen", "takes", "named"),
    [(0, True, [[], ["2.weight", "2.bias"]]), (1, True, [["0.weight", "0.bias"], []]), (None, False, [[], []])],
)
def test_frozen_layers_have_no_gradient(workers: Pool, frozen: int | None, takes: bool, named: list[list[str]]) -> None:
    results = workers.run(2, doors.frozen_pipe, frozen)
    assert [found for found, _, _ in results] == [takes] * 2
    assert [own for _, own, _ in results] == named
    for _, _, message in results:
        assert ("nothing in its first stage is trained" in message) == (frozen != 1)


# ---------------------------------------------------------------------------------------------------- PipelineModule


@pytest.mark.parametrize(
    ("ranks", "stages", "method", "interval"),
    [
        (2, 2, "parameters", 0),
        (2, 2, "uniform", 2),
        (4, 4, "type:linear", 0),
        (4, 2, "uniform", 0),
        (2, 1, "uniform", 1),
    ],
)
def test_an_engine_trains_as_one_process_does(
    workers: Pool, ranks: int, stages: int, method: str, interval: int
) -> None:
    replicas = ranks // stages
    losses, evaluated, parameters, _ = doors.engine(1, "uniform", 0, replicas)
    results = workers.run(ranks, doors.engine, stages, method, interval, replicas)
    for found, evaluation, _, _ in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert evaluation == pytest.approx(evaluated, rel=1e-5)
    again = {name.replace("4.function.", "2."): name for own in results for name in own[2]}
    together = [{one: own[2][name] for one, name in again.items() if name in own[2]} for own in results]
    same(together, parameters)


def test_layers_are_built_where_they_are_needed(workers: Pool) -> None:
    results = workers.run(2, doors.own_layers, 2)
    assert results == [
        (3, [f"{n}.{name}" for n in (0, 1, 2) for name in ("weight", "bias")]),
        (3, [f"{n}.{name}" for n in (3, 4, 5) for name in ("weight", "bias")]),
    ]


@pytest.mark.parametrize(
    ("method", "starts"), [("uniform", [0, 4]), ("type:LINEAR", [0, 3]), ("type:tanh|lambda|gelu", [0, 2])]
)
def test_ways_to_balance(workers: Pool, method: str, starts: list[int]) -> None:
    assert workers.run(2, doors.engine, 2, method, 0)[0][3] == starts


def test_wrong_use_of_a_pipeline_module_is_refused_with_the_reason(workers: Pool) -> None:
    for message in workers.run(4, doors.module_of, 3):
        assert "num_stages = 3 does not fit 4 processes" in message and "--nproc-per-node=3" in message
    with pytest.raises(ConfigError, match="num_stages = 2 does not fit 1 process:"):
        PipelineModule(doors.small_layers(), 2)
    assert "can be cut into at most 2 stages; 3 were asked for" in workers.run(3, doors.module_of, 3, "uniform", 2)[0]
    with pytest.raises(ConfigError, match=r"layers\[1\] = 3: expected a module, a function or a LayerSpec"):
        PipelineModule([nn.ReLU(), 3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no layer has such a name; there are Linear, Tanh, GELU"):
        PipelineModule(doors.small_layers(), partition_method="type:conv")
    with pytest.raises(ConfigError, match=r"'\(' is no regular expression"):
        PipelineModule(doors.small_layers(), partition_method="type:(")
    with pytest.raises(ConfigError, match='expected "parameters", "uniform" or "type:REGEX"'):
        PipelineModule(doors.small_layers(), partition_method="best")
    with pytest.raises(ConfigError, match="expected a class of layers"):
        LayerSpec(nn.ReLU())  # type: ignore[arg-type]


def test_wrong_use_of_an_engine_is_refused_with_the_reason() -> None:
    model = PipelineModule(doors.small_layers(), loss_fn=lambda output, labels: output)
    engine = initialize(model, torch.optim.Adam, microbatches=2)
    pairs = [(torch.ones(2, doors.WIDTH), torch.zeros(2))]
    with pytest.raises(ConfigError, match="There is nothing to draw from"):
        engine.train_batch()
    with pytest.raises(ConfigError, match="found a list: use iter"):
        engine.train_batch(pairs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="The data ended after 1 of the 2 microbatches"):
        engine.train_batch(iter(pairs))
    with pytest.raises(ConfigError, match="needs an optimizer"):
        initialize(model).train_batch(iter(pairs))
    with pytest.raises(ConfigError, match="initialize takes a PipelineModule, not a Linear"):
        initialize(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"does not take args, config\.\n  args: leave it out.*\n  config: give micro"
    ):
        initialize(args=None, model=model, config={"train_batch_size": 2})
    with pytest.raises(ConfigError, match=r"loss_fn returned a tensor of the shape \[2, 4\]"):
        engine.train_batch(iter(pairs * 2))


def test_alexnet_of_the_documentation_runs_on_two_processes(workers: Pool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    (losses, steps, first), (again, _, last) = workers.run(2, doors.alexnet, page)
    assert losses == again and steps == len(losses) == 40
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    layers = {name.partition(".")[0] for name in (*first, *last)}
    assert layers == {"0", "3", "6", "8", "10", "16", "19", "21"} and not {*first} & {*last}
