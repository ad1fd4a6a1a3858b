"""What processes do with layers that are compiled under context parallelism: train, count graphs, compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cornstarch.attention import MaskSpec, attend_through_masks, use_mask
from cornstarch.attention.interface import ScoreOptions, ShardedMask
from cornstarch.attention.opaque_attention import count_held
from cornstarch.compat.compiler import set_activation_budget
from cornstarch.kernels.compile import checkpoint_layer, compile_layers
from cornstarch.kernels.compile_log import CompileLog
from cornstarch.parallel import wrapping_units
from cornstarch.parallel.context import encoder_items, register_context_parallel_mode, shard_items, shard_tokens
from cornstarch.parallel.context.modes import MODES, gather_varying
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.tensor import gather_full_tensors, shard_tensors
from cornstarch.plan.data_options import REGISTERED
from tests import zoo
from tests.parallel.context.work import DISTRIBUTIONS
from tests.parallel.tensor.work import with_fsdp
from tests.versions import compile_counts

LENGTHS = (37, 41, 53)


@dataclass(frozen=True)
class Setup:
    """How a model is trained."""

    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    mode: str = "ring_attn"
    distribution: str = "random"
    images: bool = True
    tp: int = 1
    tp_sequence: bool = False
    cp: int = 2
    fsdp: bool = False
    recompute: bool = False
    activation_budget: float = 1.0
    backend: str = "aot_eager_decomp_partition"  # divides graphs as inductor does, and makes no kernels


@dataclass(frozen=True)
class Run:
    """What some steps of training came to, whole."""

    losses: list[float]
    gradients: list[dict[str, Tensor | None]]
    """Of each step."""
    parameters: dict[str, Tensor]
    """After the last step."""
    graphs: int = 0
    breaks: int = 0
    variants: int = 0
    """The largest number of variants of a kind of layer."""
    held: int = 0
    """Records of attention that are still there."""


def batch_of(tokens: int, images: bool) -> tuple[dict[str, Tensor], MaskSpec]:
    """Return two packed rows with padding behind, with or without spans of tokens that see each other."""
    documents = torch.ones(2, tokens, dtype=torch.long)
    documents[0, tokens // 3 : -4], documents[0, -4:], documents[1, tokens // 2 :] = 2, 0, 2
    spans = torch.full_like(documents, -1)
    if images:
        spans[0, 3:9], spans[0, 14:26], spans[1, 5:12], spans[1, tokens // 2 + 1 : tokens // 2 + 6] = 0, 1, 0, 1
    spec = MaskSpec(documents, spans)
    ids = torch.randint(zoo.EOS + 1, zoo.VOCABULARY, documents.shape, generator=zoo.generator(tokens))
    trained = (documents > 0) & (spec.positions() > 0)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(~trained, zoo.IGNORED),
        "attention_mask": (documents > 0).long(),
        "position_ids": spec.positions(),
    }
    return batch, spec


def train_each(setups: list[Setup]) -> list[Run]:
    """Train each setup, compiled and over all ranks, as if it were the first in this process."""
    found = []
    for setup in setups:
        torch.compiler.reset()
        found.append(train(setup))
    return found


def train(setup: Setup, is_whole: bool = False, lengths: tuple[int, ...] = LENGTHS) -> Run:
    """Train a step with rows of each length: compiled and over the ranks of a setup, or whole and uncompiled."""
    model: Any = zoo.LANGUAGE_MODELS[setup.model].build(**setup.config).train()
    log, group = CompileLog(), None
    if is_whole:
        attend_through_masks(model)
    else:
        mesh = init_device_mesh("cpu", (setup.cp, setup.tp), mesh_dim_names=("cp", "tp"))
        group = mesh["cp"].get_group()
        _parallelize(model, mesh, setup, log)
    before, optimizer = compile_counts(), torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for length in lengths:
        batch, spec = batch_of(length, setup.images)
        with use_mask(spec):
            loss = model(**batch).loss
        total = loss.detach().clone()
        (loss * (setup.cp if setup.fsdp and group is not None else 1)).backward()
        if group is not None:
            dist.all_reduce(total, group=group)
            for parameter in () if setup.fsdp else model.parameters():  # FSDP takes means
                dist.all_reduce(to_local_tensor(parameter.grad), group=group)
        losses.append(float(total))
        given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole = gather_full_tensors(model, given)
        gradients.append({name: whole.get(name) for name, _ in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        del loss, total
    parameters = {name: value.detach().clone() for name, value in gather_full_tensors(model).items()}
    return Run(losses, gradients, parameters, *_count(before, log))


def _count(before: dict[str, int], log: CompileLog) -> tuple[int, int, int, int]:
    after = compile_counts()
    graphs, breaks = (after[name] - before[name] for name in ("graphs", "breaks"))
    return graphs, breaks, max(log.variants().values(), default=0), count_held()


def _parallelize(model: nn.Module, mesh: DeviceMesh, setup: Setup, log: CompileLog) -> None:
    layers = wrapping_units(model)
    if setup.recompute:
        for layer in layers:
            checkpoint_layer(layer)
    if setup.tp > 1:
        shard_tensors(model, mesh["tp"], sequence=setup.tp_sequence)
    if setup.cp > 1:
        with offer_plain_mode() if setup.mode == "plain_python" else nullcontext():
            shard_tokens(model, mesh["cp"], mode=setup.mode, distribution=DISTRIBUTIONS[setup.distribution])  # type: ignore
    if setup.fsdp:
        with_fsdp(model, mesh["cp"])
    set_activation_budget(setup.activation_budget)
    compile_layers(layers, log=log, backend=setup.backend, fullgraph=True)


class PlainMode:
    """A mode that notes values of its queries: nothing that torch could compile."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.seen: list[float] = []

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend to the keys of all ranks by the plain formula."""
        sharding = mask.sharding
        keys, values = (gather_varying(one, 2, sharding.sizes, self.group) for one in (key, value))
        self.seen.append(float(query.detach().abs().max()))
        hidden = ~mask.render((sharding.rank,), sharding.all_ranks)
        keys, values = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (keys, values))
        scores = torch.einsum("bhqd,bhkd->bhqk", query, keys) * scoring.scaling
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ values).transpose(1, 2)


@contextmanager
def offer_plain_mode() -> Iterator[None]:
    """Register the mode for a block: other tests list the names of all modes."""
    register_context_parallel_mode("plain_python", PlainMode)
    try:
        yield
    finally:
        del MODES["plain_python"]
        REGISTERED["cp_mode"].discard("plain_python")


def train_encoder(
    counts: tuple[int, ...], is_whole: bool = False, divides_patches: bool = False, recompute: bool = False
) -> Run:
    """Train a step with each number of images: over all ranks and compiled, or whole and uncompiled."""
    torch.compiler.reset()
    part, log = zoo.ENCODERS["clip"], CompileLog()
    model: Any = part.build().train()
    layers = wrapping_units(model)
    if recompute:
        for layer in layers:
            checkpoint_layer(layer)
    ranks = 1
    if not is_whole:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        ranks = mesh.size()
        shard_items(model, mesh, patches="always" if divides_patches else "auto")
        compile_layers(layers, log=log, any_rows=True, backend="aot_eager", fullgraph=True)
    before, optimizer = compile_counts(), torch.optim.SGD(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for count in counts:
        with mock.patch.object(encoder_items, "MIN_PATCHES", 4 if divides_patches else 1 << 30):  # the zoo is small
            features = model(**part.inputs(count)).last_hidden_state
        loss = features.square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        for parameter in model.parameters():
            if ranks > 1 and parameter.grad is not None:  # every rank takes the loss of all features
                dist.all_reduce(parameter.grad.div_(ranks))
        named = list(model.named_parameters())
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    return Run(losses, gradients, parameters, *_count(before, log))
