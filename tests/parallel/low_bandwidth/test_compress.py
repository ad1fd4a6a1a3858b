"""Every compression does what its formula says, and sends the bytes that it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.parallel import apply_data_parallel, data_mesh
from cornstarch.parallel.low_bandwidth import build_replica_sync
from cornstarch.parallel.low_bandwidth.compressed_mean import SCHEMES
from cornstarch.plan import Compression, DataPlan
from tests import zoo
from tests.parallel.low_bandwidth.compressing import (
    RATE,
    STEPS,
    average,
    average_in_pieces,
    interrupted,
    leave_to_torch,
    rows,
    threads_of_powersgd,
    train_run,
    vectors,
)
from tests.parallel.low_bandwidth.reference import means
from tests.parallel.work import build_layers
from tests.parity.pool import Pool

HOWS: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "bf16"},
    "fp16": {"kind": "fp16"},
    "topk": {"kind": "topk", "ratio": 0.1, "block": 32},
    "topk, short offsets": {"kind": "topk", "ratio": 0.02, "block": 512},
    "topk, forgetful": {"kind": "topk", "ratio": 0.1, "block": 32, "error_feedback": False},
    "topk, warm": {"kind": "topk", "ratio": 0.1, "block": 32, "warmup": 2},
    "randomk": {"kind": "randomk", "ratio": 0.1, "seed": 3},
    "randomk, forgetful": {"kind": "randomk", "ratio": 0.3, "error_feedback": False},
    "8 bits": {"kind": "quantize", "block": 32, "stochastic": False},
    "4 bits": {"kind": "quantize", "bits": 4, "block": 32, "stochastic": False},
    "signs": {"kind": "quantize", "bits": 1, "block": 32},
}
CHANCE: dict[str, dict[str, Any]] = {
    "8 bits": {"kind": "quantize", "block": 32},
    "4 bits": {"kind": "quantize", "bits": 4, "block": 32},
}


def close(found: Tensor, expected: Any, within: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(np.asarray(expected)), rtol=within, atol=within)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", HOWS)
def test_compressed_mean_follows_the_formula_and_counts_bytes(workers: Pool, name: str, ranks: int) -> None:
    numbers = 333
    how = Compression(**HOWS[name])
    given = [[one.double().numpy() for one in step] for step in vectors(ranks, numbers)]
    expected, left = means(how, given)
    found = workers.run(ranks, average, HOWS[name], numbers)
    for rank, one in enumerate(found):
        for flat, mean in zip(one["means"], expected, strict=True):
            close(flat, mean, 1e-4)
        assert all(torch.equal(mine, first) for mine, first in zip(one["means"], found[0]["means"], strict=True))
        if how.error_feedback and ranks > 1:
            close(one["memory"], left[rank], 1e-4)
        bytes_whole = Compression().count_sent_bytes(numbers, 4, ranks)
        assert one["sent"] == [
            bytes_whole if step < how.warmup else how.count_sent_bytes(numbers, 4, ranks) for step in range(STEPS)
        ]


@pytest.mark.parametrize("how", [*CHANCE.values(), HOWS["signs"], HOWS["topk"], HOWS["bf16"]])
def test_pipelined_pieces_give_the_unpipelined_mean(workers: Pool, how: dict[str, Any]) -> None:
    whole = workers.run(2, average, how, 333)
    for one, other in zip(whole, workers.run(2, average_in_pieces, how, 333, 64), strict=True):
        assert one["sent"] == other["sent"]
        assert torch.equal(one["memory"], other["memory"])
        assert all(torch.equal(mine, its) for mine, its in zip(one["means"], other["means"], strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CHANCE)
def test_error_feedback_keeps_stochastic_rounding_errors(workers: Pool, name: str, ranks: int) -> None:
    """What was sent and what is left add up to what there was."""
    numbers = 200
    found = workers.run(ranks, average, CHANCE[name], numbers)
    sent = torch.stack(found[0]["means"]).sum(0)
    left = torch.stack([one["memory"] for one in found]).mean(0)
    there = torch.stack([torch.stack(step).mean(0) for step in vectors(ranks, numbers)]).sum(0)
    torch.testing.assert_close(sent + left, there, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(one["means"][-1], found[0]["means"][-1]) for one in found)


@pytest.mark.parametrize("name", CHANCE)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    how = Compression(**CHANCE[name])
    codec, chance = SCHEMES[how.kind].build_codec(how, torch.float32), zoo.generator(1)
    row = torch.randn(1, 64, generator=zoo.generator(2))
    step = row.view(2, 32).abs().amax(1, keepdim=True) / (2 ** (how.bits - 1) - 1)
    tries = torch.cat([codec.decode(codec.encode(row, chance), 64) for _ in range(2000)])
    off = ((tries - row).view(-1, 2, 32) / step).abs()
    assert off.max() <= 1.001
    mean_off = ((tries.mean(0) - row).view(2, 32) / step).abs().max()
    assert mean_off < 0.06  # 0.5 / sqrt(2000), five times


def test_bfloat16_gradients_have_float32_error_memory(workers: Pool) -> None:
    how = {"kind": "randomk", "ratio": 0.5}
    found = workers.run(2, average, how, 100, "bfloat16")
    assert found[0]["means"][0].dtype == torch.bfloat16
    assert found[0]["memory"].dtype == torch.float32
    assert found[0]["sent"][0] == Compression(**how).count_sent_bytes(100, 2, 2)


# ---------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("how", "numbers", "ranks", "expected"),
    [
        ({"kind": "none"}, 1000, 4, 2 * 3 * 250 * 4),
        ({"kind": "bf16"}, 1000, 2, 2000),
        ({"kind": "bf16"}, 1000, 4, 2 * 3 * 250 * 2),
        ({"kind": "topk"}, 1024 * 10, 2, 10 * 10 * 4),  # 10 of 1,024, two bytes each for value and offset
        ({"kind": "topk", "block": 256}, 1024 * 10, 2, 40 * 3 * 3),
        ({"kind": "topk"}, 1024 * 10, 4, 2 * 3 * 3 * 10 * 4),  # 10 blocks are 3 for each of 4 ranks
        ({"kind": "randomk"}, 10_050, 4, 2 * 3 * 26 * 4),  # 101 numbers, no offsets
        ({"kind": "quantize"}, 4096, 2, 4 * (1024 + 4)),
        ({"kind": "quantize", "bits": 4}, 4096, 2, 4 * (512 + 4)),
        ({"kind": "quantize", "bits": 1}, 4096, 4, 2 * 3 * (128 + 4)),
        ({"kind": "quantize"}, 1, 1, 0),
    ],
)
def test_bytes_sent_per_compression(how: dict[str, Any], numbers: int, ranks: int, expected: int) -> None:
    assert Compression(**how).count_sent_bytes(numbers, 4, ranks) == expected


def test_bytes_sent_by_powersgd() -> None:
    how = Compression(kind="powersgd", rank=4)
    shapes = [(64, 32), (64,), (8, 8), (16, 4, 4, 4)]
    # Two matrices are sent as factors; the vector and the small matrix, which factors would not halve, as they are.
    assert (
        how.count_sent_bytes(64 * 32 + 64 + 64 + 1024, 4, 2, shapes)
        == 2 * (4 * (64 + 32) + 64 + 64 + 4 * (16 + 64)) // 2 * 4
    )


# ---------------------------------------------------------------------------------------------------- DDP


def train_alone(how: Compression, ranks: int, order: list[str], steps: int = STEPS) -> dict[str, Tensor]:
    """Train all replicas in this process, gradients in one vector in the order of the bucket."""
    model = build_layers()
    parameters = dict(model.named_parameters())
    history: list[list[Any]] = []
    for step in range(steps):
        history.append([])
        for rank in range(ranks):
            model.zero_grad()
            model(rows(step)[rank::ranks]).backward()
            history[-1].append(torch.cat([parameters[name].grad.view(-1) for name in order]).double().numpy())  # type: ignore[union-attr]
        mean = torch.from_numpy(means(how, history)[0][-1]).float()
        with torch.no_grad():
            for name, part in zip(order, mean.split([parameters[name].numel() for name in order]), strict=True):
                parameters[name].sub_(RATE * part.view_as(parameters[name]))
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["bf16", "topk", "randomk", "4 bits", "signs"])
def test_compressed_ddp_follows_the_formula(workers: Pool, name: str, ranks: int) -> None:
    found = workers.run(ranks, train_run, {"compression": HOWS[name]})
    order = list(found[0]["own"]["exchange"]["memory"])
    expected = train_alone(Compression(**HOWS[name]), ranks, order)
    assert len(order) == sum(parameter.requires_grad for parameter in build_layers().parameters())
    for one in found:
        for key, value in expected.items():
            torch.testing.assert_close(one["weights"][key], value, rtol=1e-4, atol=1e-5, msg=key)
    numbers = sum(p.numel() for p in build_layers().parameters() if p.requires_grad)
    assert found[0]["figures"]["bytes_sent"] == STEPS * Compression(**HOWS[name]).count_sent_bytes(numbers, 4, ranks)


@pytest.mark.parametrize("name", ["topk", "signs"])
def test_single_rank_compresses_nothing(workers: Pool, name: str) -> None:
    (found,) = workers.run(1, train_run, {"compression": HOWS[name]})
    for key, value in _whole(build_layers(), ranks=1).items():
        torch.testing.assert_close(found["weights"][key], value, rtol=1e-5, atol=1e-6)
    assert found["figures"] == {"bytes_sent": 0}


@pytest.mark.parametrize("kind", [{}, {"kind": "hsdp", "replicate": 2}], ids=["ddp", "hsdp"])
def test_microbatches_of_a_step_are_sent_once(workers: Pool, kind: dict[str, Any]) -> None:
    plan = {"compression": HOWS["topk"], **kind}
    one, two = (workers.run(2, train_run, plan, STEPS, microbatches)[0] for microbatches in (1, 2))
    assert one["figures"] == two["figures"]
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-4, atol=1e-5)


def test_several_buckets_follow_the_formula(workers: Pool) -> None:
    plan = {"compression": {"kind": "bf16", "error_feedback": False}}
    small, whole = (workers.run(2, train_run, {**plan, **more})[0] for more in ({"bucket_mb": 0.001}, {}))
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(small["weights"][name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [{"compression": HOWS["topk"]}, {"compression": {"kind": "quantize", "block": 32}}])
def test_gradient_scaler_does_not_change_weights(workers: Pool, plan: dict[str, Any]) -> None:
    plain, scaled = workers.run(2, train_run, plan)[0], workers.run(2, train_run, plan, STEPS, 1, None, True)[0]
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(scaled["weights"][name], weight, rtol=1e-4, atol=1e-5)


RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "topk": (3, {"compression": HOWS["topk"]}),
    "topk, two": (2, {"kind": "zero1", "compression": HOWS["topk, warm"]}),
    "topk, several buckets": (2, {"compression": HOWS["topk"], "bucket_mb": 0.001}),
    "randomk": (2, {"compression": HOWS["randomk"]}),
    "8 bits by chance": (3, {"compression": CHANCE["8 bits"]}),
    "powersgd": (2, {"compression": {"kind": "powersgd", "rank": 1}, "bucket_mb": 0.001}),
    "hsdp": (4, {"kind": "hsdp", "replicate": 2, "compression": HOWS["signs"]}),
}


def test_powersgd_runs_outside_of_gloo_threads(workers: Pool) -> None:
    """A process that ends would wait for it, and it for the interpreter."""
    plan = {"compression": {"kind": "powersgd", "rank": 2, "warmup": 2}, "bucket_mb": 0.001}
    assert workers.run(2, threads_of_powersgd, plan) == [{"exchange"}] * 2


def test_no_compression_leaves_torch_untouched(workers: Pool) -> None:
    assert workers.run(2, leave_to_torch) == [True, True]


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_equal(workers: Pool, name: str) -> None:
    ranks, plan = RESUMED[name]
    for one in workers.run(ranks, interrupted, plan):
        assert one["whole"]["figures"] == one["resumed"]["figures"]
        for key, weight in one["whole"]["weights"].items():
            assert torch.equal(one["resumed"]["weights"][key], weight), key


# ---------------------------------------------------------------------------------------------------- HSDP, PowerSGD


def test_hsdp_replicas_stay_equal(workers: Pool) -> None:
    plan = {"kind": "hsdp", "replicate": 2}
    found = workers.run(4, train_run, {**plan, "compression": {"kind": "bf16"}})
    model = build_layers()
    expected = _whole(model, ranks=4)
    for one in found:
        for name, weight in expected.items():
            torch.testing.assert_close(one["weights"][name], weight, rtol=1e-2, atol=1e-3)
            assert torch.equal(one["weights"][name], found[0]["weights"][name])
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sent = found[0]["figures"]["bytes_sent"]
    assert sent == pytest.approx(STEPS * 2 * numbers / 2, rel=0.1)  # a half of the numbers, two bytes each; padding


def _whole(model: Any, ranks: int) -> dict[str, Tensor]:
    return train_alone(Compression(), ranks, [n for n, p in model.named_parameters() if p.requires_grad])


@pytest.mark.parametrize("more", [{}, {"bucket_mb": 0.001}], ids=["one bucket", "several"])
def test_powersgd_of_full_rank_equals_plain_ddp(workers: Pool, more: dict[str, Any]) -> None:
    how = {"kind": "powersgd", "rank": 16}  # full rank: as good as nothing lost, where factors are sent at all
    found = workers.run(2, train_run, {"compression": how, **more})
    for name, weight in _whole(build_layers(), ranks=2).items():
        torch.testing.assert_close(found[0]["weights"][name], weight, rtol=1e-4, atol=1e-5)
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name])


def attach(plan: dict[str, Any]) -> bool:
    model = build_layers()
    mesh, given = data_mesh("cpu"), DataPlan(**plan)
    wrapped = apply_data_parallel(model, mesh, given)
    optimizer = torch.optim.SGD(model.parameters())
    return build_replica_sync(model, wrapped, mesh, given, optimizer) is not None


def test_no_gradient_sync_without_compression(workers: Pool) -> None:
    """So that it costs nothing: DDP and FSDP are torch's own."""
    assert workers.run(2, attach, {}) == [False, False]
    assert workers.run(2, attach, {"kind": "zero3"}) == [False, False]
    assert workers.run(2, attach, {"compression": {"kind": "bf16"}}) == [True, True]


def failing() -> str:
    model = build_layers()
    mesh, plan = data_mesh("cpu"), DataPlan(compression=Compression("powersgd"))
    wrapped = apply_data_parallel(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError) as caught:
        build_replica_sync(model, wrapped, mesh, plan, optimizer, torch.amp.GradScaler("cpu"))
    return str(caught.value)


def test_powersgd_with_a_gradient_scaler_is_refused(workers: Pool) -> None:
    assert "Use bf16, or error_feedback: false." in workers.run(2, failing)[0]
