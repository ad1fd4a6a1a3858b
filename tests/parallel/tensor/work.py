"""What the tests here let several processes do; each function runs in every one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cornstarch.errors import ConfigError
from cornstarch.kernels.compile import compile_layers
from cornstarch.parallel import wrapping_units
from cornstarch.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_full_tensors,
    load_full_tensors,
    original_boxes,
    shard_tensors,
    vocabulary_cross_entropy,
)
from cornstarch.parallel.tensor.shard_boxes import ShardSpec, shard_parameter
from tests import zoo
from tests.parallel.tensor.forms import forms
from tests.versions import compile_counts

ROWS = ("ttttttttttt", "tttttttt", "ttttt")  # longer than the sliding windows


@dataclass(frozen=True)
class Outcome:
    """What a forward and a backward pass came to; gradients are None where there are none."""

    loss: float
    gradients: dict[str, Tensor | None]


def build(name: str, **options: Any) -> nn.Module:
    """Build a model of the zoo."""
    part: Any = zoo.LANGUAGE_MODELS.get(name) or zoo.ENCODERS[name]
    return part.build(**options)


def loss_of(name: str, model: nn.Module, rows: tuple[str, ...] = ROWS) -> Tensor:
    """Return a loss that all of the output has a part in."""
    if name in zoo.LANGUAGE_MODELS:
        return model(**zoo.text_batch(rows)).loss
    part = zoo.ENCODERS[name]
    inputs = part.inputs(3)
    output = model(**inputs)
    found = [value for value in (part.select(output, inputs), output.get("pooler_output")) if value is not None]
    return sum(_weighed(value) for value in found)  # type: ignore[return-value]


def _weighed(value: Tensor) -> Tensor:
    return (value * torch.randn(value.shape, generator=zoo.generator(5))).sum() / value.shape[0]


def outcome(model: nn.Module, loss: Tensor) -> Outcome:
    """Return the loss, and gradients whole."""
    loss.backward()
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = gather_full_tensors(model, given)
    return Outcome(loss.item(), {name: whole.get(name) for name, _ in model.named_parameters()})


def alone(name: str, **options: Any) -> Outcome:
    """Do it in one process."""
    model = build(name, **options)
    return outcome(model, loss_of(name, model))


def cut(name: str, ranks: int, options: dict[str, Any], how: dict[str, Any] | None = None) -> Outcome:
    """Do it over several ranks."""
    model: Any = build(name, **options)
    how = dict(how or {})
    if how.pop("recompute", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    shard_tensors(model, mesh, **how)
    return outcome(model, loss_of(name, model))


def assert_same(found: Outcome, expected: Outcome) -> None:
    """The loss and every gradient are the same, up to rounding.

    Gradients that are sums of large numbers that cancel (of a bias of keys, say) are noise: what is allowed depends on
    the largest gradient too.
    """
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(value.abs().max()) for value in expected.gradients.values() if value is not None)
    for name, value in expected.gradients.items():
        other = found.gradients[name]
        assert (other is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(
                other, value, rtol=1e-4, atol=1e-6 * largest, msg=lambda text, name=name: f"{name}: {text}"
            )


# ------------------------------------------------------------------------------------------------ other forms


def forward_and_back(form: str, ranks: int = 1) -> Outcome:
    """Do it with one of the other forms."""
    model: Any = forms()[form]()
    if ranks > 1:
        shard_tensors(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    batch = zoo.text_batch(ROWS)
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    real = batch["attention_mask"].bool()
    return outcome(model, _weighed(output[0][real]))


# ------------------------------------------------------------------------------------------------ together with others


def with_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard what is left to be sharded."""
    for unit in wrapping_units(model):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compose_model(
    name: str, adapters: bool, shape: tuple[int, ...], axes: tuple[str, ...], how: dict[str, Any]
) -> dict[str, Any]:
    """Cut a model over one axis of a mesh, and shard it over the others; each replica has its own rows."""
    root = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    model = adapt(name) if adapters else build(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    shard_tensors(model, root["tp"], **how)
    if len(axes) > 1:
        with_fsdp(model, root["dp"] if len(axes) == 2 else root[axes[:-1]])
    mine = slice(root["dp"].get_local_rank(), None, 2)
    batch = {key: value[mine] for key, value in zoo.text_batch(ROWS_OF_TWO).items()}
    found = outcome(model, model(**batch).loss)
    after = gather_full_tensors(model)
    return {
        "outcome": found,
        "whole": sorted(key for key, value in before.items() if not torch.equal(after[key], value)),
        "boxes": sorted(_wrong_boxes(model, before)),
        "kinds": {key: isinstance(p, DTensor) for key, p in model.named_parameters()},
        "steps": stepped(model),
    }


# Two replicas have two each, of the same length: the mean of their losses is the loss of all.
ROWS_OF_TWO = ("tttttttttttt", "tttttttttttt", "tttttt", "tttttt")


def _wrong_boxes(model: nn.Module, whole: dict[str, Tensor]) -> list[str]:
    """Return the parameters of which `original_boxes` does not tell the truth."""
    wrong = []
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, boxes in original_boxes(model).items():
        local = parameters[name].detach().to_local()
        covered = torch.zeros_like(local)
        for box in boxes:
            covered[box.local] += 1
            if not torch.equal(local[box.local], whole[name][box.original]):
                wrong.append(name)
        if not bool((covered == 1).all()):
            wrong.append(name)
    return wrong


def stepped(model: nn.Module) -> dict[str, Tensor]:
    """Let an optimizer take a step, and return what it made of the parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    return gather_full_tensors(model)


def alone_on(name: str, adapters: bool, rows: tuple[str, ...]) -> tuple[Outcome, dict[str, Tensor]]:
    """Do the same in one process."""
    model = adapt(name) if adapters else build(name)
    found = outcome(model, loss_of(name, model, rows))
    return found, stepped(model)


def adapt(name: str, **options: Any) -> nn.Module:
    """Return a model with LoRA on all linear layers of attention and feed-forward."""
    from peft import LoraConfig, get_peft_model

    targets = [key for key in LORA if any(n.endswith(f".{key}") for n, _ in build(name).named_modules())]
    with zoo.reproducible(0):
        model = get_peft_model(build(name), LoraConfig(r=2, target_modules=targets, **options))  # type: ignore[arg-type]
    zoo.disturb(model)  # B is zero at first, and A has no gradient
    return model


LORA = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj", "c_attn", "c_fc", "qkv", "proj"),
)


def refill(name: str, sharded: bool) -> list[str]:
    """Load whole tensors into a model that is cut; return the parameters that came out differently."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wanted = {key: p.detach().clone() for key, p in build(name, seed=7).named_parameters()}
    model = build(name)
    shard_tensors(model, root["tp"])
    if sharded:
        with_fsdp(model, root["dp"])
    load_full_tensors(model, wanted)
    return sorted(key for key in original_boxes(model) if not torch.equal(gather_full_tensors(model)[key], wanted[key]))


def on_meta(name: str) -> dict[str, Any]:
    """Cut a model on the meta device, and fill it afterwards; return what it holds and what it computes."""
    whole = build(name)
    with torch.device("meta"):
        model: Any = type(whole)(whole.config)
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    held = {
        key: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape) for key, p in model.named_parameters()
    }
    return {"held": held, "meta": all(p.is_meta for p in model.parameters())}


def cut_with_adapters(name: str) -> Outcome:
    """Cut a model with LoRA over two ranks."""
    model = adapt(name)
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return outcome(model, loss_of(name, model))


# ------------------------------------------------------------------------------------------------ words


def scored(words: int, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropies, their gradient for this rank's logits, and the logits themselves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    step = -(-words // mesh.size())
    logits = all_logits(words)[..., mesh.get_local_rank() * step :][..., :step].clone().requires_grad_()
    losses = vocabulary_cross_entropy(logits, all_labels(words), mesh.get_group(), words)
    (losses.mean() if mean else (losses * torch.arange(losses.numel()).view_as(losses)).sum()).backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad, logits.detach()


def all_logits(words: int) -> Tensor:
    """Return logits, some of them large."""
    return 30 * torch.randn(3, 4, words, generator=zoo.generator(1))


def all_labels(words: int) -> Tensor:
    """Return labels, some of which are none."""
    labels = torch.randint(0, words, (3, 4), generator=zoo.generator(2))
    return labels.masked_fill(torch.rand(3, 4, generator=zoo.generator(3)) < 0.3, zoo.IGNORED)


def speak(name: str) -> dict[str, Any]:
    """Return what a model cut by words gives back when it is not trained, and what it holds."""
    model: Any = build(name, vocab_size=zoo.VOCABULARY + 1)
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), vocabulary=True)
    batch = zoo.text_batch(ROWS)
    with torch.no_grad():
        output = model.eval()(**batch)
    local = model.train()(**batch).logits.weight.shape[0]
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return {"logits": output.logits, "loss": output.loss.item(), "local": local, "tied": tied}


# ------------------------------------------------------------------------------------------------ layers by hand


def by_hand(apart: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what two layers made by hand compute, beside what they should."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(dist.get_rank())  # the layers see to it that all ranks have the same weights
    first = ColumnParallelLinear(5, 12, mesh, gather=apart)
    second = RowParallelLinear(12, 4, mesh, split=apart)
    model = nn.Sequential(first, nn.GELU(), second)
    whole = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 4))
    whole.load_state_dict(gather_full_tensors(model))
    inputs = torch.randn(2, 3, 5, generator=zoo.generator(4))
    here, there = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    output, expected = model(here), whole(there)
    (output**2).sum().backward()
    (expected**2).sum().backward()
    assert here.grad is not None and there.grad is not None
    found = gather_full_tensors(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    gradients = {name: (found[name], p.grad) for name, p in whole.named_parameters() if p.grad is not None}
    return {"output": (output.detach(), expected.detach()), "input": (here.grad, there.grad), **gradients}


def exchanges() -> dict[str, int]:
    """Count the sums over ranks in a step."""
    model = build("llama")
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    counts = []
    original = dist.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        counts.append(1)
        return original(*arguments, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        loss = loss_of("llama", model)
        forward = len(counts)
        loss.backward()
    return {"forward": forward, "backward": len(counts) - forward}


def collect_refused_models() -> list[str]:
    """Cut a model twice, and over a mesh of two axes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = shard_tensors(build("llama"), mesh)
    messages = []
    for given in (mesh, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))):
        try:
            shard_tensors(model, given)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def collect_refused_layers() -> list[str]:
    """Make layers that cannot be cut evenly."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    messages = []
    for make in (lambda: ColumnParallelLinear(4, 7, mesh), lambda: RowParallelLinear(7, 4, mesh)):
        try:
            make()
        except ConfigError as error:
            messages.append(str(error))
    return messages


# ------------------------------------------------------------------------------------------------ compiled


@dataclass(frozen=True)
class CompiledRun:
    """What some steps of compiled layers came to."""

    outcomes: list[Outcome]
    """Of each step."""
    parameters: dict[str, Tensor]
    """After the last step."""
    graphs: int
    breaks: int


def train_compiled(lengths: tuple[int, ...], shape: tuple[int, ...], how: dict[str, Any], backend: str) -> CompiledRun:
    """Train a step with rows of each length; without a shape of a mesh, eagerly in this process alone."""
    model: Any = build("llama")
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        shard_tensors(model, mesh["tp"], **how)
        if len(shape) > 1:
            with_fsdp(model, mesh["dp"])
        compile_layers(model.model.layers, backend=backend, fullgraph=True)
    before, optimizer, outcomes = compile_counts(), torch.optim.SGD(model.parameters(), lr=0.1), []
    for length in lengths:
        ids = torch.randint(0, zoo.VOCABULARY, (2, length), generator=zoo.generator(length))
        outcomes.append(outcome(model, model(input_ids=ids, labels=ids, use_cache=False).loss))
        optimizer.step()
        optimizer.zero_grad()
    after = compile_counts()
    parameters = {name: value.clone() for name, value in gather_full_tensors(model).items()}
    return CompiledRun(outcomes, parameters, after["graphs"] - before["graphs"], after["breaks"] - before["breaks"])


# ------------------------------------------------------------------------------------------------ tokens


def find_kept_between(sequence: bool) -> tuple[int, ...]:
    """Return the shape of what a norm between two regions works on."""
    model: Any = build("llama")
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), sequence=sequence)
    shapes = []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape))
    loss_of("llama", model)
    return tuple(shapes[0])


def two_lengths(ranks: int) -> Outcome:
    """Let a batch of another length through before the backward pass of the first."""
    model: Any = build("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if ranks > 1:
        shard_tensors(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), sequence=True)
    loss = loss_of("llama", model)
    other = loss_of("llama", model, ("tttttttt", "tttt"))
    return outcome(model, loss + 0 * other.detach())


def sharded_vocabulary(words: int, replicas: int) -> bool:
    """Say whether a process has what it says that it has, of words cut over two ranks and then by FSDP2."""
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
    table = nn.Embedding(words, 2)
    whole = torch.arange(2.0 * words).view(words, 2)
    table.weight.detach().copy_(whole)
    shard_parameter(table, "weight", ShardSpec(0, (words,), 2), mesh["tp"])
    fully_shard(table, mesh=mesh["dp"])
    (boxes,) = original_boxes(table).values()
    local = table.weight.to_local()
    return sum(local[box.local].numel() for box in boxes) == local.numel() and all(
        torch.equal(local[box.local], whole[box.original]) for box in boxes
    )
