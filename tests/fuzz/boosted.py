"""What the worker processes do with a case of the Booster: a loop of one's own, in several processes or in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cornstarch import Booster, ModalParallelPlugin, MultimodalParallelPlugin
from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.checkpoint.state_values import seed_all
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel.tensor import gather_full_tensors
from cornstarch.tasks import Task, build_task
from cornstarch.train import RunConfig, load_config
from tests.fuzz.case import Case, build_samples, describe_run
from tests.fuzz.models import Folders
from tests.fuzz.work import Outcome, Refusal, Values

_ZERO = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def train_boosted(case: Case, folders: str, output: str) -> Outcome | Refusal:
    """Train a case through the Booster, in this process, one of several, and save the model."""
    losses: list[float] = []
    try:
        config, task = _build(case, folders)
        model = task.model
        assert isinstance(model, MultimodalModel)
        booster = Booster(plugin=_build_plugin(case, task))
        replicas = booster.plugin.dp_size
        optimizer = _build_optimizer(case, model)
        loader = _build_loader(case, config, task, case["batch_size"] // replicas)
        fast, optimizer, _, loader, _ = booster.boost(model, optimizer, _own_loss, loader)
        batches = iter(loader)
        for _ in range(case["steps"]):
            result = booster.execute_pipeline(batches, fast, _own_loss, optimizer, loss_everywhere=True)
            losses.append(float(result["loss"]))
            optimizer.step()
            optimizer.zero_grad()
        booster.save_model(fast, f"{output}/model")
    except ConfigError as error:
        return Refusal(str(error), len(losses))
    return Outcome(_whole_values(fast.module), {}, {}, [], _as_metrics(losses))


def train_plainly(case: Case, folders: str) -> Outcome | Refusal:
    """Train the same case in a plain loop, in one process."""
    try:
        config, task = _build(case, folders)
    except ConfigError as error:
        return Refusal(str(error), 0)
    model = task.model
    start = _whole_values(model)
    optimizer, most = _build_optimizer(case, model), case["optimizer"].get("clip")
    half = {"bf16": torch.bfloat16}.get(case.get("precision", "fp32"))
    losses = []
    for _, batch in zip(range(case["steps"]), _build_loader(case, config, task, case["batch_size"]), strict=False):
        with torch.autocast("cpu", dtype=half, enabled=half is not None):
            loss = model(**batch).loss
        if loss.requires_grad:  # a batch of text alone teaches a projector nothing
            loss.backward()
        losses.append(float(loss.detach()))
        if most is not None:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(_whole_values(model), {}, start, [], _as_metrics(losses))


def load_boosted(case: Case, folders: str, output: str) -> Values | Refusal:
    """Read the saved weights into a model that was not boosted."""
    try:
        _, task = _build(case, folders)
        booster = Booster(plugin=MultimodalParallelPlugin(
            {name: ModalParallelPlugin() for name in case["encoders"]}, ModalParallelPlugin(), num_microbatches=1
        ))  # fmt: skip
        booster.load_model(task.model, f"{output}/model")
    except ConfigError as error:
        return Refusal(str(error), 0)
    return _whole_values(task.model)


def _build(case: Case, folders: str) -> tuple[RunConfig, Task]:
    described = describe_run({**case, "parallel": {}}, Folders(Path(folders)), "unused")
    config = load_config(None, base={**described, "loop": {"steps": case["steps"]}})
    seed_all(config.seed)
    task = build_task(config)
    task.model.train(task.model.training)
    return config, task


def _build_plugin(case: Case, task: Task) -> MultimodalParallelPlugin:
    plan = case["parallel"]

    def one(said: Mapping[str, Any]) -> ModalParallelPlugin:
        options: dict[str, Any] = {"tp_size": said.get("tp", 1), "sp_size": said.get("cp", 1)}
        if said.get("cp", 1) > 1:
            options["sequence_parallelism_mode"] = said.get("cp_mode")
            options["context_parallel_distribution_mode"] = said.get("cp_distribution", "auto")
        if said.get("stages", 1) > 1:
            options |= {"pp_size": said["stages"], "virtual_stages": said.get("virtual_stages", 1)}
        return ModalParallelPlugin(**options, activation_checkpointing=said.get("activation_checkpointing", False))

    modules = plan["modules"]
    return MultimodalParallelPlugin(
        {name: one(modules[name]) for name in case["encoders"]},
        one(modules["language_model"]),
        precision=case.get("precision"),
        num_microbatches=case["accumulation"],
        max_norm=case["optimizer"].get("clip") or 0,
        zero_stage=_ZERO[plan["data"]["kind"]],
        schedule=plan.get("schedule", "1f1b"),
        ranks=plan["ranks"] if plan["ranks"] != "auto" else None if _has_stages(modules) else "shared",
        processor=task.collator.processor if case["encoders"] else None,
    )


def _has_stages(modules: Mapping[str, Any]) -> bool:
    return any(module.get("stages", 1) > 1 for module in modules.values())


def _build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    said = case["optimizer"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if said["name"] == "sgd":
        return torch.optim.SGD(trained, lr=said["learning_rate"], momentum=said["momentum"])
    return torch.optim.AdamW(trained, lr=said["learning_rate"], eps=said["eps"], weight_decay=said["weight_decay"])


def _build_loader(case: Case, config: RunConfig, task: Task, size: int) -> DataLoader[Any]:
    prepared = [task.collator.prepare(sample) for sample in build_samples(case)]

    def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
        inputs = task.collator.join(samples).inputs
        return {name: value for name, value in inputs.items() if name != "facts"}

    return DataLoader(prepared, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]


def _own_loss(outputs: Any, inputs: Any) -> Tensor:
    return outputs.loss


def _whole_values(model: nn.Module) -> Values:
    own = {name: parameter.detach() for name, parameter in named_parameters(model).items()}
    return {name: tensor.clone().float().numpy() for name, tensor in gather_full_tensors(model, own).items()}


def _as_metrics(losses: list[float]) -> list[dict[str, Any]]:
    return [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
