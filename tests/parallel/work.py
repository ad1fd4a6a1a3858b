"""What the tests here let several processes do; each function runs in every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from cornstarch import MultimodalModel
from cornstarch.errors import ConfigError
from cornstarch.parallel import Zero1, apply_data_parallel, data_mesh, distributed
from cornstarch.parallel.ddp_fsdp import defer_gradient_sync, use_full_model
from cornstarch.parallel.distributed import to_full_tensor
from cornstarch.parallel.gradients import clip_gradients
from cornstarch.plan import DataPlan
from cornstarch.trees import tensors_in
from tests import zoo

SAMPLES, WIDTH = 8, 6


class Layered(nn.Module):
    """Blocks between two layers; the first block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.out = nn.Linear(8, 1)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of squares."""
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return (self.out(x) ** 2).mean()


def build_layers() -> Layered:
    """Return the model, always with the same weights."""
    with zoo.reproducible(0):
        return Layered()


def rows() -> Tensor:
    """Return the samples of a step, of all processes."""
    return torch.randn(SAMPLES, WIDTH, generator=zoo.generator(1))


@dataclass(frozen=True)
class Step:
    """What a step came to; gradients are None where there are none."""

    norm: float
    gradients: dict[str, Tensor | None]
    """Clipped."""
    kept: dict[str, Tensor | None]
    """Of this process, after the first of two microbatches."""


def alone(most: float) -> Step:
    """Do the step in this process alone."""
    model = build_layers()
    model(rows()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), most)
    return Step(norm.item(), {name: p.grad for name, p in model.named_parameters()}, {})


def step(plan: Mapping[str, Any], most: float, microbatches: int = 1) -> Step:
    """Do a step together, in microbatches, and clip its gradients."""
    given = DataPlan(**plan)
    model = build_layers()
    replicate = (given.replicate or 1) if given.kind == "hsdp" else None
    wrapped = apply_data_parallel(model, data_mesh("cpu", replicate), given)
    mine = rows()[dist.get_rank() :: dist.get_world_size()]
    kept: dict[str, Tensor | None] = {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    averaged = given.compression.kind != "none"
    zero1 = Zero1(trained, bucket_bytes=1000, averaged=averaged) if given.kind == "zero1" else None
    for number, microbatch in enumerate(mine.chunk(microbatches), start=1):
        overlap = zero1.overlap_reduction() if zero1 is not None and number == microbatches else nullcontext()
        with defer_gradient_sync(wrapped, number < microbatches), overlap:
            (wrapped(microbatch) / microbatches).backward()
        if number == 1 and microbatches > 1 and given.kind in ("ddp", "zero1"):
            kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if zero1 is not None:
        zero1.reduce_gradients()
        assert all(parameter.grad is None for parameter in trained.values())
        norm = clip_gradients(None, list(zero1.shards.values()), most, is_divided=True)
        gradients = dict.fromkeys(name for name, _ in model.named_parameters()) | zero1.gather_gradients()
        return Step(norm.item(), gradients, kept)
    norm = clip_gradients(wrapped, list(trained.values()), most)
    return Step(norm.item(), _gradients(wrapped, model), kept)


def _gradients(wrapped: nn.Module, model: nn.Module) -> dict[str, Tensor | None]:
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False, with_grads=True):
            found = {name: p.grad for name, p in model.named_parameters()}
            return {_plain(name): None if g is None else g.clone() for name, g in found.items()}
    return {name: None if p.grad is None else to_full_tensor(p.grad).clone() for name, p in model.named_parameters()}


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


# ------------------------------------------------------------------------------------------------ wrapped by hand


def multimodal(mode: tuple[bool, bool] = (False, True), llm: bool = True) -> MultimodalModel:
    """Return CLIP and Llama, with stand-ins."""
    with zoo.reproducible(0):
        encoder = zoo.ENCODERS["clip"].build()
        model = MultimodalModel({"vision": encoder}, zoo.LANGUAGE_MODELS["llama"].build())
    zoo.disturb(model)
    model.set_modality_token_ids({"vision": zoo.MODALITY_TOKEN})
    model.train(encoders_mode={"vision": mode}, llm_mode=llm)
    model.keep_encoders_running({"vision": zoo.images(1, zoo.generator(9))})
    return model


# Step by step, the samples of rank 0 and of rank 1: images on one of them only, then on the other, then on none.
MIXED = ((("tt*tt", "*ttt"), ("ttttt",)), (("tttt",), ("t*t", "tt")), (("ttt",), ("tttttt",)))


def batch_of(texts: Iterable[str], seed: int) -> dict[str, Tensor]:
    """Return a batch whose samples do not depend on what else is in it."""
    singles = []
    pictures = []
    for text in texts:
        count = zoo.item_count([text])
        own = sum(map(ord, text)) + seed
        singles.append(zoo.text_batch([text], [5] * count, seed=own))
        if count:
            pictures.append(zoo.images(count, zoo.generator(own))["pixel_values"])
    longest = max(one["input_ids"].shape[1] for one in singles)
    fill = {"input_ids": zoo.PAD, "attention_mask": 0, "labels": zoo.IGNORED}
    batch = {
        key: torch.cat([nn.functional.pad(one[key], (0, longest - one[key].shape[1]), value=value) for one in singles])
        for key, value in fill.items()
    }
    return batch | ({"pixel_values": torch.cat(pictures)} if pictures else {})


def count_trained_tokens(batch: Mapping[str, Tensor]) -> int:
    """Return over how many tokens the loss of a batch is a mean."""
    counted = (batch["labels"] != zoo.IGNORED) & (batch["input_ids"] != zoo.MODALITY_TOKEN)
    return int(counted[:, 1:].sum())


def wrap_by_hand(model: MultimodalModel, how: str) -> nn.Module:
    """Wrap as the guide does."""
    blocks = {LlamaDecoderLayer, CLIPEncoderLayer}
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp1":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy(blocks), use_orig_params=True, device_id=torch.device("cpu")
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if type(module) in blocks:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_by_hand(how: str | None, mode: tuple[bool, bool], llm: bool) -> dict[str, Tensor]:
    """Train on mixed batches, alone if `how` is None; return all parameters."""
    model = multimodal(mode, llm)
    wrapped: Any = model if how is None else wrap_by_hand(model, how)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)
    for number, shares in enumerate(MIXED):
        texts = [text for share in shares for text in share] if how is None else shares[dist.get_rank()]
        batch = batch_of(texts, number)
        tokens = count_trained_tokens(batch)
        share = tokens * distributed.world_size() / distributed.sum_over_ranks([tokens])[0]
        loss = wrapped(**batch).loss * share
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            return {_plain(name): p.detach().clone() for name, p in model.named_parameters()}
    return {name: to_full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------------ the rest


def step_shards(keep_whole: bool, dtypes: bool, members: list[int] | None) -> dict[str, Any] | None:
    """Step the shards of some parameters by SGD, in two steps, of which the second has gradients on one rank only."""
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return None
    with zoo.reproducible(0):
        parameters = {f"p{n}": nn.Parameter(torch.randn(n + 1, 3).t()) for n in range(5)}  # not contiguous
    if dtypes:
        parameters["p1"] = nn.Parameter(parameters["p1"].detach().to(torch.bfloat16))
    zero1 = Zero1(parameters, group, keep_whole=keep_whole, bucket_bytes=80)
    optimizer = torch.optim.SGD(zero1.shards.values(), lr=1.0)
    rank = dist.get_rank(group)
    for step in range(2):
        with zero1.overlap_reduction():
            used = [p for n, p in enumerate(parameters.values()) if n != 2 and not (step and rank and n == 3)]
            sum((p.float() * (rank + 1)).sum() for p in used).backward()
        zero1.reduce_gradients()
        missing = sorted(name for name, shard in zero1.shards.items() if shard.grad is None)
        optimizer.step()
        optimizer.zero_grad()
        zero1.gather_parameters()
    shapes = {name: tuple(shard.shape) for name, shard in zero1.shards.items()}
    return {"shapes": shapes, "missing": missing, "values": {n: p.detach().clone() for n, p in parameters.items()}}


class CollectiveCounter(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, if they are rings; and how often each was called."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.calls = 0.0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            self.calls[name] += 1
            group = next(one for one in args if isinstance(one, torch.ScriptObject))
            ranks = dist.ProcessGroup.unbox(group).size()
            whole = max(sum(tensor.nbytes for tensor in tensors_in(one)) for one in args)
            self.sent += (2 if "allreduce" in name else 1) * (ranks - 1) / ranks * whole
        return func(*args, **(kwargs or {}))


def count_sent_bytes(kind: str) -> tuple[float, float]:
    """Return the bytes that a step sends, and those that the ring of an all-reduce of all gradients would send."""
    ranks, model = dist.get_world_size(), nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20))
    wrapped = apply_data_parallel(model, data_mesh("cpu"), DataPlan(kind=kind))  # type: ignore[arg-type]
    trained = dict(model.named_parameters())
    zero1 = Zero1(trained, bucket_bytes=4000) if kind == "zero1" else None
    optimizer = torch.optim.SGD(trained.values() if zero1 is None else zero1.shards.values())
    with CollectiveCounter() as counter:
        with nullcontext() if zero1 is None else zero1.overlap_reduction():
            wrapped(torch.ones(4, 30)).sum().backward()
        if zero1 is not None:
            zero1.reduce_gradients()
        optimizer.step()
        if zero1 is not None:
            zero1.gather_parameters()
    return counter.sent, 2 * (ranks - 1) / ranks * sum(one.nbytes for one in trained.values())


def collect_refused_owners() -> str:
    """Deal out one parameter among several processes."""
    return _refusal(lambda: Zero1({"only": nn.Parameter(torch.zeros(2))}, keep_whole=True))


def collect_refused_mesh(replicate: int) -> str:
    """Make a mesh that cannot be."""
    return _refusal(lambda: data_mesh("cpu", replicate))


def _refusal(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "not refused"


def mesh_of(replicate: int | None) -> tuple[tuple[str, ...], list[Any]]:
    """Return the axes of a mesh, and its ranks."""
    mesh = data_mesh("cpu", replicate)
    return mesh.mesh_dim_names or (), mesh.mesh.tolist()


def talk(values: list[Any]) -> dict[str, Any]:
    """Let processes tell one another what they have."""
    rank = dist.get_rank()
    return {
        "alone": distributed.is_single_process(),
        "rank": distributed.rank(),
        "size": distributed.world_size(),
        "sum": distributed.sum_over_ranks([2**52 + rank, 0.5, rank]),
        "gathered": distributed.all_gather_json(values[rank]),
        "first": distributed.broadcast_json(values[rank]),
        "last": distributed.broadcast_json(values[rank], source=len(values) - 1),
    }


def call_inside(kind: str) -> Tensor:
    """Call a part of a sharded model that is no unit by itself."""
    model = build_layers()
    wrapped = apply_data_parallel(model, data_mesh("cpu"), DataPlan(kind=kind))  # type: ignore[arg-type]
    wrapped(rows())
    with torch.no_grad(), use_full_model(wrapped):
        found = model.out(model.blocks[1](model.into(rows())))
    wrapped(rows()).backward()  # it can still be trained
    return to_full_tensor(found) if isinstance(found, DTensor) else found


class Unused(nn.Module):
    """A module with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Leave a layer out."""
        return self.used(rows).mean()


def refuse_unused() -> str:
    """Train a module with an unused layer, without looking for it; return what is said."""
    wrapped = apply_data_parallel(Unused(), data_mesh("cpu"), DataPlan(kind="ddp", find_unused=False))
    wrapped(torch.ones(1, 2)).backward()
    try:
        wrapped(torch.ones(1, 2))
    except ConfigError as error:
        return str(error)
    return ""


def adapters_in_fp32(kind: str) -> dict[str, float]:
    """Train adapters in fp32 beside frozen weights in bf16; return the norms of their gradients."""
    model: Any = with_adapters()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    wrapped = apply_data_parallel(model, data_mesh("cpu"), DataPlan(kind=kind))  # type: ignore[arg-type]
    batch = zoo.text_batch(["tttttt", "ttttt"])
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(**batch).loss
    loss.backward()
    return {name: to_full_tensor(p.grad).norm().item() for name, p in model.named_parameters() if p.grad is not None}


def with_adapters() -> nn.Module:
    """Return a Llama with LoRA."""
    from peft import LoraConfig, get_peft_model

    with zoo.reproducible(0):
        model = get_peft_model(zoo.LANGUAGE_MODELS["llama"].build(), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    return model
