"""Estimated memory with its activations against what CUDA's allocator says."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from cornstarch.engine.memory_tracker import model_size
from cornstarch.engine.model_parts import cast_parts, split_into_parts
from cornstarch.engine.optimizer import make_optimizer
from cornstarch.engine.recompute import recompute_activations
from cornstarch.parallel.device import DTYPES
from cornstarch.plan import DataPlan, memory_of
from cornstarch.planner.estimate import estimate_activations
from cornstarch.tasks.build import build_meta_model
from cornstarch.train import load_config

pytestmark = pytest.mark.gpu

ROWS, TOKENS = 4, 1024
LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip


def use_libraries() -> None:
    """Let cuBLAS take its workspaces, which it takes once."""
    square = torch.ones(64, 64, device="cuda", requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = square.to(dtype)
        torch.addmm(matrix[0], matrix, matrix @ matrix).sum().backward()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_of_one_process(precision: Any, recomputed: bool) -> None:
    described = {"language_model": {"tokenizer": "none/none", "config": LLAMA}}
    config = load_config(None, base={"model": described, "data": {"train": "none.json", "max_length": TOKENS}})
    shapes = build_meta_model(config)
    cast_parts(split_into_parts(shapes, config.model, config.optimizer), DTYPES[precision])
    found, notes = estimate_activations(shapes, config, ROWS, 1, precision)
    assert not notes and found is not None
    expected = memory_of(model_size(shapes, DataPlan(), config.optimizer), DataPlan(), ranks=1)

    gc.collect()
    use_libraries()
    before = torch.cuda.memory_allocated()
    model: Any = copy.deepcopy(shapes).to_empty(device="cuda")
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.normal_(tensor.data, std=0.02)
    if recomputed:
        recompute_activations(model)
    optimizer = make_optimizer(config.optimizer, split_into_parts(model, config.model, config.optimizer))
    ids = torch.randint(0, 32000, (ROWS, TOKENS), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=DTYPES[precision], enabled=precision != "fp32"):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
    del loss
    held, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    peak = expected.peak(found.peak(recomputed), last=found.layer)
    print(f"\n{precision} {recomputed=}: most {most / 1e9:.3f} GB, estimated {peak / 1e9:.3f} ({peak / most - 1:+.1%})")
    assert held == pytest.approx(expected.persistent - expected.gradients, rel=0.03)
    assert most == pytest.approx(peak, rel=0.2)
