"""What the tests here let several processes do: dispatch tokens to experts, and compare with one module."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from cornstarch.cost.tracer import trace_memory
from cornstarch.errors import ConfigError
from cornstarch.parallel.expert import dispatch, measure_balance, shard_experts
from cornstarch.parallel.tensor import gather_full_tensors

EXPERTS, WIDTH, CHOSEN = 4, 8, 2


def experts(kind: str, implementation: str) -> nn.Module:
    """Return a module of four experts, the same on every rank."""
    sizes: dict[str, Any] = {"num_local_experts": EXPERTS, "hidden_size": WIDTH, "intermediate_size": 16}
    torch.manual_seed(0)
    config = MixtralConfig(**sizes) if kind == "mixtral" else GptOssConfig(**sizes)
    config._experts_implementation = implementation
    module = MixtralExperts(config) if kind == "mixtral" else GptOssExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def tokens_of(rank: int, counts: list[int], among: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, each with two experts of `among`, and the weights of these."""
    draw = torch.Generator().manual_seed(rank)
    hidden = torch.randn(counts[rank], WIDTH, generator=draw)
    chosen = [torch.randperm(len(among), generator=draw)[:CHOSEN] for _ in range(counts[rank])]
    index = torch.tensor(among)[torch.stack(chosen)] if chosen else torch.zeros(0, CHOSEN, dtype=torch.int64)
    return hidden, index, torch.rand(counts[rank], CHOSEN, generator=draw)


def run(module: nn.Module, tokens: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    hidden, index, weights = (one.clone() for one in tokens)
    hidden.requires_grad_(), weights.requires_grad_()
    output = module(hidden, index, weights)
    (output * torch.linspace(-1, 1, WIDTH)).sum().backward()
    assert hidden.grad is not None and weights.grad is not None
    return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}


def compare(kind: str, implementation: str, counts: list[int], among: list[int]) -> dict[str, float]:
    """Return how far outputs and gradients are from those of one module; the gradients of weights are summed."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = experts(kind, implementation)
    shared = nn.Sequential(copy.deepcopy(whole))
    expected = [run(whole, tokens_of(one, counts, among)) if counts[one] else {} for one in range(ranks)]
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    shard_experts(shared, mesh["ep"], mesh["dp"])
    found = run(shared[0], tokens_of(rank, counts, among))
    off = {name: float((found[name] - value).abs().max()) for name, value in expected[rank].items()}
    gradients = gather_full_tensors(shared, {name: one.grad for name, one in shared.named_parameters()})
    for name, one in whole.named_parameters():
        assert one.grad is not None
        off[name] = float((gradients[f"0.{name}"] * ranks - one.grad).abs().max())
    balance = measure_balance(shared.modules())
    assert balance is not None and measure_balance(shared.modules()) is None
    return {**off, "balance": balance}


def gradients_of_one_rank_only() -> float:
    """Return how far the gradient of tokens is off on the one rank where tokens need one; the others wait for it."""
    rank = dist.get_rank()
    frozen = experts("mixtral", "eager").requires_grad_(False)
    whole = copy.deepcopy(frozen)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
    shared = shard_experts(nn.Sequential(frozen), mesh["ep"], mesh["dp"])
    hidden, index, weights = tokens_of(rank, [3] * dist.get_world_size(), list(range(EXPERTS)))
    hidden.requires_grad_(rank == 0)
    output = shared[0](hidden, index, weights)
    assert output.requires_grad  # also where nothing is trained: or the others would wait
    output.square().sum().backward()
    if rank:
        return float(hidden.grad is not None)
    found, hidden.grad = hidden.grad, None
    whole(hidden, index, weights).square().sum().backward()
    assert found is not None and hidden.grad is not None
    return float((found - hidden.grad).abs().max() / hidden.grad.abs().max())


def collect_refusal() -> list[str]:
    """Return what is said of tokens that go to no expert, and of weights for experts that were not chosen."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
    shared = shard_experts(nn.Sequential(experts("mixtral", "eager")), mesh["ep"], mesh["dp"])
    hidden, index, weights = tokens_of(0, [3], list(range(EXPERTS)))
    said = []
    for chosen, given in ((torch.full_like(index, EXPERTS), weights), (index, torch.rand(3, EXPERTS))):
        try:
            shared[0](hidden, chosen, given)
        except ConfigError as error:
            said.append(str(error))
    return said


def count_bytes() -> dict[str, Any]:
    """Return the bytes that this rank sends to others in each all-to-all, and those that a trace says are dispatched.

    Every expert gets equally many tokens of every rank.
    """
    rank, ranks, counted = dist.get_rank(), dist.get_world_size(), list[int]()
    whole = experts("mixtral", "grouped_mm")
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    shared = shard_experts(nn.Sequential(copy.deepcopy(whole)), mesh["ep"], mesh["dp"])
    hidden, _, weights = tokens_of(rank, [8] * ranks, list(range(EXPERTS)))
    index = torch.arange(8 * CHOSEN).reshape(8, CHOSEN) % EXPERTS
    exchange = dispatch.all_to_all_single

    def count(received: Tensor, sent: Tensor, receive: list[int], send: list[int], group: Any) -> Any:
        counted.append(sum(rows for to, rows in enumerate(send) if to != rank) * sent[0].nbytes)
        return exchange(received, sent, receive, send, group=group)

    dispatch.all_to_all_single = count
    try:
        run(shared[0], (hidden, index, weights))
    finally:
        dispatch.all_to_all_single = exchange
    given = tuple(one.to("meta") for one in (hidden, index, weights))
    bare = whole.to("meta")
    return {"sent": counted, "traced": trace_memory(bare, lambda: bare(*given), torch.float32).sent_bytes}
