"""What the tests here let several processes do: hold a model whose experts are shared out, and train it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.plan.cluster import Cluster, device
from cornstarch.planner import run_cost
from cornstarch.planner.search_run import predict_own_plan
from tests.parity.cell import make_trainer
from tests.parity.rows import row_of
from tests.parity.samples import alike


def hold(row: str, parallel: Mapping[str, Any], ranks: int, tokenizer: str, folder: str) -> dict[str, Any]:
    """Do a step and return the bytes of this rank's parameters and optimizer states, and those that are predicted."""
    loop = {"steps": 1, "batch_size": 4, "accumulation": 2 if _has_stages(parallel) else 1}
    trainer = make_trainer(row, alike(row_of(row).make, 4), loop, parallel, tokenizer, folder)
    for batch in trainer.batches():
        trainer.step(batch)
    pipeline = trainer.run_model.parallel.pipeline
    models = [trainer.model] if pipeline is None else pipeline.models
    parameters = {id(one): to_local_tensor(one.detach()).nbytes for model in models for one in model.parameters()}
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [to_local_tensor(one) for one in states if isinstance(one, torch.Tensor) and one.ndim]
    cluster = Cluster.of(device("H100"), 1, ranks)
    cost = run_cost(trainer.config, cluster.device)
    prediction = predict_own_plan(trainer.config, cluster, cost).prediction
    assert prediction is not None
    places = [asdict(place.states) for place in prediction.memory]
    return {"parameters": sum(parameters.values()), "states": sum(one.nbytes for one in tensors), "places": places}


def _has_stages(parallel: Mapping[str, Any]) -> bool:
    return any("stages" in module for module in parallel["modules"].values())
