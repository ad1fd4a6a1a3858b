"""Many steps of samples drawn at random, with the Trainer and in a loop written by hand; what the processes run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from cornstarch import MultimodalModel, MultimodalProcessor
from cornstarch.parallel import distributed
from tests.models import local_processors
from tests.parity.cell import Values, make_trainer, parameter_arrays
from tests.parity.rows import ROWS
from tests.parity.samples import WORDS, of_kinds
from tests.zoo import ENCODERS, LANGUAGE_MODELS

End = tuple[list[float], Values]
"""The losses of all steps, and the weights after them."""

KINDS = (". " * 4 + "i ii iii s ss is " + "x " * 4).split()
BATCH = 4


def train_run(row: str, steps: int, parallel: Mapping[str, Any], tokenizer: str, folder: str) -> End:
    """Train on steps of 4 random samples, many of them broken; return the losses, and the weights at the end."""
    drawn = random.Random(1)
    kinds = [drawn.choice(KINDS) for _ in range(steps * BATCH)]
    for broken in (8, 9, 10, 11, 20, 21, 26, 27):  # a step of nothing; one where one process has none; one the other
        kinds[broken] = "x"
    samples = of_kinds(ROWS[row].make, kinds)
    trainer = make_trainer(row, samples, {"epochs": 1, "batch_size": BATCH}, parallel, tokenizer, folder)
    trainer.watching = False
    losses = []
    for batch in trainer.batches():
        result = trainer.step(batch)
        if result.totals.trained_tokens:
            losses.append(float(result.loss))
    ends = parameter_arrays(trainer.model, trainer.task.wrapped)
    return [distributed.sum_over_ranks([loss])[0] for loss in losses], ends


# ------------------------------------------------------------------------------------------------ without the Trainer

LAYERS = (CLIPEncoderLayer, WhisperEncoderLayer, LlamaDecoderLayer)


def _ddp(model: nn.Module) -> nn.Module:
    # CLIP has a norm that only its pooled output goes through.
    return DistributedDataParallel(model, find_unused_parameters=True)


def _fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(set(LAYERS)), use_orig_params=True, device_id=torch.device("cpu")
    )


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, LAYERS):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda model: model, "ddp": _ddp, "fsdp1": _fsdp1, "fsdp2": _fsdp2,
}  # fmt: skip


def train_by_hand(way: str, frozen: bool, steps: int) -> End:
    """Train in a loop as the documentation has it.

    With SGD, because in a step without any image a process alone has no gradient for the vision encoder, and several
    have zeros: without momentum that is the same.
    """
    model = _model(frozen)
    processor = _processor(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks > 1:
        model.keep_encoders_running(processor.stand_ins())
    wrapped = WAYS[way](model)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for samples in _drawn(steps):
        mine = samples[rank::ranks]
        batch, labels = _batch(processor, mine or samples[:1])
        tokens = int((labels[:, 1:] != -100).sum()) if mine else 0
        (total,) = distributed.sum_over_ranks([tokens])
        loss = wrapped(**batch, labels=labels).loss * (tokens / total)
        if loss.requires_grad:
            (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += distributed.sum_over_ranks([float(loss.detach())])
    return losses, parameter_arrays(model, wrapped)


def _model(frozen: bool) -> MultimodalModel:
    """Return a model that is trained, or of which only the projectors are."""
    torch.manual_seed(0)  # the projectors are new
    encoders = {"vision": ENCODERS["clip"].build(), "audio": ENCODERS["whisper"].build()}
    model = MultimodalModel(encoders=encoders, language_model=LANGUAGE_MODELS["llama"].build())
    model.train(encoders_mode=dict.fromkeys(encoders, (not frozen, True)), llm_mode=not frozen)
    return model


def _processor(model: MultimodalModel) -> MultimodalProcessor:
    parts = {"vision": local_processors.processor_of("clip"), "audio": local_processors.processor_of("whisper")}
    return MultimodalProcessor(parts, local_processors.tokenizer(), model)


def _drawn(steps: int) -> Iterator[list[tuple[int, str]]]:
    """Yield the samples of each step, from one to five: a number, and a text."""
    drawn = random.Random(2)
    kinds = ["", "", "<vision>", "<vision> <vision>", "<audio>", "<vision> <audio>"]
    for step in range(steps):
        items = drawn.choices(kinds, k=drawn.randint(1, 5))
        yield [(10 * step + n, f"{_words(drawn)} {item} {_words(drawn)}") for n, item in enumerate(items)]


def _words(drawn: random.Random) -> str:
    return " ".join(drawn.choices(WORDS, k=drawn.randint(1, 6)))


def _batch(processor: MultimodalProcessor, samples: list[tuple[int, str]]) -> tuple[dict[str, Tensor], Tensor]:
    texts = [text for _, text in samples]
    images = [local_processors.image(seed=seed) for seed in _seeds(samples, "<vision>")]
    sounds = [local_processors.sound(seed=seed) for seed in _seeds(samples, "<audio>")]
    given: dict[str, Any] = {"vision": {"images": images}} if images else {}
    if sounds:
        given["audio"] = {"raw_speech": sounds, "sampling_rate": local_processors.SOUND_RATE}
    batch = dict(processor(given, {"text": texts, "padding": True}, return_tensors="pt"))
    placeholders = torch.isin(batch["input_ids"], torch.tensor(list(processor.modality_token_ids.values())))
    labels = batch["input_ids"].masked_fill((batch["attention_mask"] == 0) | placeholders, -100)
    return batch, labels


def _seeds(samples: list[tuple[int, str]], token: str) -> list[int]:
    return [100 * number + place for number, text in samples for place in range(text.count(token))]
