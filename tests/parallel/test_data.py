"""Data parallelism of every kind does what one process does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.ddp_fsdp import check_data_plan
from cornstarch.plan import DataPlan
from tests.parallel.work import (
    SAMPLES,
    Step,
    adapters_in_fp32,
    alone,
    build_layers,
    call_inside,
    refuse_unused,
    rows,
    step,
    train_by_hand,
)
from tests.parity.pool import Pool

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"kind": "ddp"}),
    "ddp, small buckets": (2, {"kind": "ddp", "bucket_mb": 0.001}),
    "ddp, own gradients": (2, {"kind": "ddp", "gradient_as_bucket_view": False}),
    "ddp, static graph": (2, {"kind": "ddp", "static_graph": True}),
    "ddp, all used": (2, {"kind": "ddp", "find_unused": False}),
    "zero1": (2, {"kind": "zero1"}),
    "fsdp1": (2, {"kind": "fsdp1"}),
    "fsdp1, kept": (2, {"kind": "fsdp1", "reshard_after_forward": False}),
    "fsdp1, one unit": (2, {"kind": "fsdp1", "wrap": "none"}),
    "fsdp2": (2, {"kind": "fsdp2"}),
    "fsdp2, kept": (2, {"kind": "fsdp2", "reshard_after_forward": False}),
    "fsdp2, prefetch": (2, {"kind": "fsdp2", "prefetch": 2}),
    "fsdp2, offload": (2, {"kind": "fsdp2", "offload": True}),
    "fsdp2, one unit": (2, {"kind": "fsdp2", "wrap": "none"}),
    "fsdp2, by class": (2, {"kind": "fsdp2", "wrap": ["Linear"]}),
    "fsdp2, by size": (2, {"kind": "fsdp2", "wrap_min_parameters": 10**6}),
    "fsdp2, two after forward": (4, {"kind": "fsdp2", "reshard_after_forward": 2}),
    "zero2": (2, {"kind": "zero2"}),
    "zero3": (2, {"kind": "zero3"}),
    "hsdp, one copy": (2, {"kind": "hsdp", "replicate": 1}),
    "hsdp, all copies": (2, {"kind": "hsdp", "replicate": 2}),
    "hsdp": (4, {"kind": "hsdp", "replicate": 2}),
}


def assert_same(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(
                found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_norm_and_clipped_gradients_equal_those_of_one_process(workers: Pool, name: str, microbatches: int) -> None:
    ranks, plan = PLANS[name]
    if ranks * microbatches > SAMPLES // 2 and microbatches > 1:
        pytest.skip("a microbatch would be a single sample")
    expected = alone(most=0.1)
    assert expected.norm > 0.1
    found: list[Step] = workers.run(ranks, step, plan, 0.1, microbatches)
    for one in found:
        assert one.norm == pytest.approx(expected.norm, rel=1e-5)
        assert_same(one.gradients, expected.gradients)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_zero1_takes_its_shards_of_compressed_means(workers: Pool, microbatches: int) -> None:
    compression = {"kind": "bf16", "error_feedback": False}
    means, shards = (
        workers.run(2, step, {"kind": kind, "compression": compression}, 0.1, microbatches) for kind in ("ddp", "zero1")
    )
    for one, expected in zip(shards, means, strict=True):
        assert one.norm == pytest.approx(expected.norm, rel=1e-5)
        assert_same(one.gradients, expected.gradients)


@pytest.mark.parametrize("kind", ["ddp", "zero1"])
def test_only_the_last_microbatch_synchronizes_gradients(workers: Pool, kind: str) -> None:
    for rank, found in enumerate(workers.run(2, step, {"kind": kind}, 1.0, 2)):
        model = build_layers()
        (model(rows()[rank::2].chunk(2)[0]) / 2).backward()
        own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same(found.kept, own)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "zero2"])
def test_model_can_be_called_directly_inside_use_full_model(workers: Pool, kind: str) -> None:
    model = build_layers()
    with torch.no_grad():
        expected = model.out(model.blocks[1](model.into(rows())))
    for found in workers.run(2, call_inside, kind):
        torch.testing.assert_close(found, expected)


def test_error_names_unused_parameters(workers: Pool) -> None:
    for said in workers.run(2, refuse_unused):
        assert "parallel.data.find_unused = false" in said and "left unused.weight, unused.bias without" in said


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", "zero3"])
def test_fp32_adapters_train_beside_bf16_weights(workers: Pool, kind: str) -> None:
    expected = workers.run(1, adapters_in_fp32, "ddp")[0]
    assert expected and all("lora" in name for name in expected)
    for found in workers.run(2, adapters_in_fp32, kind):
        assert found == pytest.approx(expected, rel=2e-2)


# The tests of a plan itself are in tests/plan; these are of plans and models together.
def test_mixed_dtypes_are_refused_with_fsdp1() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"fsdp1\n.*bfloat16 and float32.*use fsdp2"):
        check_data_plan(model, DataPlan(kind="fsdp1"))
    check_data_plan(model, DataPlan(kind="fsdp2"))
    check_data_plan(model.to(torch.bfloat16), DataPlan(kind="fsdp1"))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"kind": "ddp", "param_dtype": "bf16"}, "autocast"),
        ({"kind": "ddp", "offload": True}, "whole parameters"),
        ({"kind": "zero1", "wrap": "none"}, "wraps the model once"),
        ({"kind": "fsdp2", "static_graph": True}, "does not record the graph"),
        ({"kind": "fsdp2", "bucket_mb": 1.0}, "no buckets"),
        ({"kind": "fsdp2", "replicate": 2}, "Only hsdp"),
        ({"kind": "fsdp1", "prefetch": 1}, "decides by itself"),
        ({"kind": "fsdp2", "buffer_dtype": "bf16"}, "Only fsdp1 casts buffers"),
        ({"kind": "zero2", "reshard_after_forward": True}, "zero2 keeps"),
    ],
)
def test_contradicting_options_are_refused(plan: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DataPlan(**plan)


# ------------------------------------------------------------------------------------------------ by hand

TRAINED = {
    "projector and language model": ((False, True), True),
    "projector": ((False, True), False),
    "everything": ((True, True), True),
}


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2"])
def test_multimodal_model_wrapped_by_hand_trains_on_mixed_batches(workers: Pool, how: str, trained: str) -> None:
    expected = train_by_hand(None, *TRAINED[trained])
    for found in workers.run(2, train_by_hand, how, *TRAINED[trained]):
        plain = {name.removeprefix("module."): value for name, value in found.items()}
        assert plain.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                plain[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
