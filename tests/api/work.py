"""A few steps of a tiny model: through a Booster, in one of several processes, or in a plain loop, in one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from cornstarch import Booster, EncodersColocatedPlugin, ModalParallelPlugin, MultimodalParallelPlugin, PipelineTemplate
from cornstarch.api.boosted_model import BoostedModel
from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.packing import pack
from cornstarch.parallel import distributed
from cornstarch.parallel.tensor import gather_full_tensors
from cornstarch.pipeline.runtime import StageError
from tests import zoo

STEPS, SAMPLES = 3, 8
"""Steps of a run, and samples of a step in all replicas together."""
IMAGE_TOKEN, SOUND_TOKEN = zoo.MODALITY_TOKEN, zoo.MODALITY_TOKEN + 1
MIXED = ("tt*ttt*t", "ttttt", "*ttt", "tt+tt", "t*+tt", "tttttttt", "+tt*t", "ttt*")
PICTURES = ("tt*ttt*t", "t*tttt", "*ttt", "tt*tt", "t*tt", "tttt*tttt", "tt*t", "ttt*")

Values = dict[str, "np.ndarray[Any, Any] | None"]


@dataclass(frozen=True)
class Case:
    """A run."""

    ranks: int = 1
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Of its `ModalParallelPlugin`; `stages` makes a template of so many, or of "embeddings, layers"."""
    audio: Mapping[str, Any] = field(default_factory=dict)
    llm: Mapping[str, Any] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)
    """More of the `MultimodalParallelPlugin`."""
    colocated: bool = False
    encoders: tuple[str, ...] = ("vision",)
    rows: tuple[str, ...] = PICTURES
    frozen: tuple[tuple[str, tuple[bool, bool]], ...] = ()
    """By encoder, whether it and its projector are trained; the language model is not."""
    replicas: int = 1
    tied: bool = False
    optimizer: str = "AdamW"
    accumulated: int = 1
    """Batches of a step of the optimizer."""
    own_criterion: bool = False
    """Whether the criterion is not the model's own loss."""
    packed: bool = False
    """Whether rows have several samples."""


@dataclass(frozen=True)
class Outcome:
    """What the steps came to."""

    losses: list[float | None]
    gradients: list[Values]
    parameters: Values
    rates: list[float]


# ------------------------------------------------------------------------------------------------ what is trained


def make_model(case: Case) -> MultimodalModel:
    """Return the model; equal cases have equal weights."""
    torch.manual_seed(0)
    parts = {"vision": "siglip", "audio": "whisper"}
    encoders = {
        name: ModalEncoderModule(zoo.ENCODERS[parts[name]].build(seed))
        for seed, name in enumerate(case.encoders, start=1)
    }
    language_model = zoo.LANGUAGE_MODELS["llama"].build(num_hidden_layers=4, tie_word_embeddings=case.tied)
    model = MultimodalModel(encoders=encoders, language_model=language_model)
    model.set_modality_token_ids({"vision": IMAGE_TOKEN, "audio": SOUND_TOKEN} if "audio" in encoders else
                                 {"vision": IMAGE_TOKEN} if encoders else {})  # fmt: skip
    _well_conditioned(model)
    if case.frozen:
        model.train(encoders_mode=dict(case.frozen), llm_mode=False)
    return model


@torch.no_grad()
def _well_conditioned(model: MultimodalModel) -> None:
    """Enlarge what the first norms are given: they divide by its size, and enlarge what was rounded before."""
    model.language_model.get_input_embeddings().weight.mul_(4.0)
    for encoder in model.encoders.values():
        for parameter in encoder.projector.parameters():
            parameter.mul_(4.0)


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Numbered samples."""

    def __init__(self, rows: Sequence[str]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 2 * STEPS * SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[(index * 3 + index // SAMPLES) % len(self.rows)]
        lengths = [4 if sign == "*" else 8 for sign in row if sign in "*+"]
        text = zoo.text_batch([row], lengths, seed=index)
        noise = zoo.generator(100 + index)
        images = zoo.images(row.count("*"), noise)["pixel_values"]
        sounds = zoo.spectrograms(row.count("+"), noise)["input_features"]
        tokens = {key: value[0] for key, value in text.items()}
        return {**tokens, "pixel_values": images, "input_features": sounds}


def collate(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a padded batch, with all items in one row; without any, there is none."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    fills = {"input_ids": zoo.PAD, "attention_mask": 0, "labels": zoo.IGNORED}
    batch = {}
    for key, fill in fills.items():
        batch[key] = torch.full((len(samples), longest), fill)
        for number, sample in enumerate(samples):
            batch[key][number, : len(sample[key])] = sample[key]
    for key in ("pixel_values", "input_features"):
        items = torch.cat([sample[key] for sample in samples])
        if len(items):
            batch[key] = items
    return batch


def packed(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch with several samples in a row."""
    return pack([{key: value for key, value in sample.items() if len(value)} for sample in samples], max_length=32)


def make_loader(case: Case, replicas: int | None = None) -> DataLoader[Any]:
    """Return the loader of a replica's batches, before it is boosted."""
    size = SAMPLES // (replicas or case.replicas)
    return DataLoader(Samples(case.rows), batch_size=size, collate_fn=packed if case.packed else collate)  # type: ignore[arg-type]


def make_optimizer(case: Case, model: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return an optimizer with two groups, and its rates."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3},
    ]
    # With Adam's usual eps, rounding in a gradient that is zero in truth would be a step like any other.
    options = {"AdamW": {"eps": 1e-4}, "SGD": {"momentum": 0.9}, "Adagrad": {"eps": 1e-4}}[case.optimizer]
    optimizer = getattr(torch.optim, case.optimizer)(groups, lr=2e-3, **options)
    return optimizer, LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step])


def own_loss(outputs: Any, inputs: Any) -> Tensor:
    """Return the model's own loss."""
    return outputs.loss


def other_loss(outputs: Any, inputs: Any) -> Tensor:
    """Return the mean over samples of something else."""
    kept = inputs["attention_mask"].unsqueeze(-1)
    return ((outputs.logits * kept).sum(1) / kept.sum(1)).pow(2).mean()


# ------------------------------------------------------------------------------------------------ through a Booster


def _template(module: nn.Module, stages: int | str) -> PipelineTemplate:
    if stages == "embeddings, layers":
        names = PipelineTemplate.get_modules(module)
        return PipelineTemplate(PipelineTemplate.get_model_name(module), [names[:1], names[1:]])
    assert isinstance(stages, int)
    return PipelineTemplate.split(module, stages, by="uniform")


def make_plugin(case: Case, model: nn.Module) -> MultimodalParallelPlugin:
    """Return the plugin of a case."""

    def one(said: Mapping[str, Any], module: nn.Module) -> ModalParallelPlugin:
        options = dict(said)
        if stages := options.pop("stages", 0):
            options["pipeline_template"] = _template(module, stages)
        return ModalParallelPlugin(**options)

    said = {"vision": case.vision, "audio": case.audio}
    encoders = model.encoders if isinstance(model, MultimodalModel) else {}
    language_model = model.language_model if isinstance(model, MultimodalModel) else model
    kind = EncodersColocatedPlugin if case.colocated else MultimodalParallelPlugin
    return kind(
        encoder_plugins={name: one(said[name], encoder) for name, encoder in encoders.items()},
        language_model_plugin=one(case.llm, language_model),
        **{"num_microbatches": 4 // case.replicas, **case.plugin},
    )


def boost_run(case: Case) -> tuple[Booster, BoostedModel, torch.optim.Optimizer, Iterator[Any], LambdaLR]:
    """Return everything that a step needs."""
    model = make_model(case)
    optimizer, rates = make_optimizer(case, model)
    booster = Booster(plugin=make_plugin(case, model))
    fast, same, _, loader, also = booster.boost(model, optimizer, own_loss, make_loader(case), rates)
    assert same is optimizer and also is rates
    return booster, fast, same, iter(loader), also


def run(case: Case) -> Outcome:
    """Do the steps in this process, one of several."""
    booster, model, optimizer, batches, rates = boost_run(case)
    losses, gradients, seen = [], [], []
    criterion = other_loss if case.own_criterion else own_loss
    for _ in range(STEPS):
        for _ in range(case.accumulated):
            result = booster.execute_pipeline(batches, model, criterion, optimizer, loss_everywhere=True)
            losses.append(float(result["loss"]))
        found = {n: p.grad for n, p in named_parameters(model.module).items()}
        if model.parallel.zero1 is not None:
            found |= model.parallel.zero1.gather_gradients()
        gradients.append(whole(model.module, found))
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return Outcome(losses, gradients, parameters(model.module), seen)


def whole(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> Values:
    """Return tensors whole; all processes have to ask together."""
    there = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    found = gather_full_tensors(model, there)
    return {name: found[name].clone().numpy() if name in found else None for name in tensors}


def parameters(model: nn.Module) -> Values:
    """Return this process's parameters, whole."""
    return whole(model, {name: parameter.data for name, parameter in named_parameters(model).items()})


# ------------------------------------------------------------------------------------------------ more to do


def save_after_one(case: Case, folder: str) -> None:
    """Do one step, and save everything."""
    booster, model, optimizer, batches, rates = boost_run(case)
    _steps(booster, model, optimizer, batches, rates, 1)
    booster.save_model(model, f"{folder}/model")
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    booster.save_lr_scheduler(rates, f"{folder}/rates")


def go_on(case: Case, folder: str) -> Values:
    """Load what was saved after one step, in whatever layout, do the others; return the parameters."""
    booster, model, optimizer, batches, rates = boost_run(case)
    booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    booster.load_lr_scheduler(rates, f"{folder}/rates")
    next(batches)
    _steps(booster, model, optimizer, batches, rates, STEPS - 1)
    return parameters(model.module)


def _steps(booster: Any, model: Any, optimizer: Any, batches: Any, rates: Any, many: int) -> list[float]:
    losses = []
    for _ in range(many):
        result = booster.execute_pipeline(batches, model, own_loss, optimizer, loss_everywhere=True)
        losses.append(float(result["loss"]))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return losses


def precise(case: Case) -> tuple[list[float], list[str], float, bool]:
    """Do some steps; return losses, types of what is trained, the scale of losses, whether weights changed."""
    model = make_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster = Booster(plugin=make_plugin(case, model))
    fast, _, _, loader, _ = booster.boost(model, optimizer, None, make_loader(case))
    batches = iter(loader)
    losses = []
    before = [parameter.detach().clone() for parameter in fast.parameters()]
    for _ in range(4):
        losses.append(float(booster.execute_pipeline(batches, fast, own_loss, optimizer, loss_everywhere=True)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    kinds = sorted({str(parameter.dtype) for parameter in fast.parameters()})
    changed = any(not torch.equal(old, new) for old, new in zip(before, fast.parameters(), strict=True))
    return losses, kinds, booster.loss_scale.value if booster.loss_scale is not None else 0.0, changed


def look(case: Case) -> dict[str, Any]:
    """Return what a step without gradients hands back, and what is known of this process."""
    booster, model, optimizer, batches, _ = boost_run(case)
    model.eval()
    with torch.no_grad():
        found = booster.execute_pipeline(batches, model, own_loss, return_outputs=True)
    model.train()
    again = booster.execute_pipeline(batches, model, own_loss, optimizer, return_loss=False)
    manager = booster.plugin.stage_manager
    assert manager is not None
    return {
        "loss": None if found["loss"] is None else float(found["loss"]),
        "logits": None if found["outputs"] is None else found["outputs"].logits.numpy(),
        "again": again,
        "last": manager.is_last_stage(check_only_in_modal=False),
        "training": model.training and model.module.training,
    }


def count_computed(case: Case) -> dict[str, int]:
    """Return how often this process computes the layers of each module for a batch, by the names of both."""
    booster, model, optimizer, batches, _ = boost_run(case)
    calls: Counter[str] = Counter()
    for name, module in model.module.named_modules():
        if name.rpartition(".")[2].isdigit() and any(True for _ in module.parameters()):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    booster.execute_pipeline(batches, model, own_loss, optimizer)
    return dict(calls)


def collect_refusal(case: Case, what: str) -> str:
    """Do something wrong; return what is said."""
    try:
        _do_wrong(case, what)
        said = "nothing"
    except (ConfigError, StageError) as error:
        said = str(error)
    gc.collect()  # a process that ends cuts its lines; this one goes on, and gives up what holds them
    return said


def _do_wrong(case: Case, what: str) -> None:
    booster, model, optimizer, batches, _ = boost_run(case)
    criterion: Any = {
        "none": lambda o, i: None,
        "many": lambda o, i: o.logits,
        "logits": lambda o, i: o.logits.pow(2).mean(),
    }.get(what, own_loss)
    if what == "batches" and distributed.rank() == 1:
        next(batches)
    if what == "call":
        model(**next(batches))
    booster.execute_pipeline(batches, model, criterion, optimizer)


# ------------------------------------------------------------------------------------------------ in a plain loop


def alone(case: Case) -> Outcome:
    """Do the steps in a plain loop, in one piece."""
    model = make_model(case)
    optimizer, rates = make_optimizer(case, model)
    batches = iter(make_loader(case, replicas=1))
    losses, gradients, seen = [], [], []
    for _ in range(STEPS):
        for _ in range(case.accumulated):
            inputs = next(batches)
            outputs = model(**inputs)
            loss = other_loss(outputs, inputs) if case.own_criterion else outputs.loss
            loss.backward()
            losses.append(float(loss.detach()))
        gradients.append(whole(model, {n: p.grad for n, p in model.named_parameters()}))
        if most := case.plugin.get("max_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return Outcome(losses, gradients, parameters(model), seen)
