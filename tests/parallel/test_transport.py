"""Messages that have to go through the CPU's memory, as gloo wants it of a GPU's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cornstarch.parallel import data_mesh
from cornstarch.parallel.context.modes import pass_to_next_rank
from cornstarch.parallel.distributed import TensorTransport, get_device_backend
from cornstarch.pipeline.message import PayloadSpec, TensorSpec
from cornstarch.pipeline.p2p import P2PChannel, PendingReceive
from tests.parity.pool import Pool

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
THROUGH_CPU = TensorTransport(CPU, through_cpu=True)  # a GPU's way, on a machine without one


@contextmanager
def group_of_one(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "for_gpus", "through_cpu"),
    [("cpu:gloo,cuda:gloo", "gloo", True), ("gloo", "gloo", True), ("cpu:gloo", None, False)],
)
def test_only_gloo_takes_gpu_tensors_through_the_cpu(backend: str, for_gpus: str | None, through_cpu: bool) -> None:
    with group_of_one(backend):
        assert (get_device_backend(None, "cpu"), get_device_backend(None, "cuda")) == ("gloo", for_gpus)
        assert TensorTransport.of(None, GPU) == TensorTransport(GPU, through_cpu)
        assert TensorTransport.of(None, CPU) == TensorTransport(CPU, False)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", "gloo"])
def test_gpu_mesh_uses_the_backend_of_the_world(backend: str) -> None:
    with group_of_one(backend):
        mesh = data_mesh("cuda")
        assert mesh.device_type == "cuda"
        assert get_device_backend(mesh.get_group(), "cuda") == "gloo"


def test_prepared_tensor_is_a_contiguous_copy() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    sent = THROUGH_CPU.prepare_send(tensor)
    assert sent.is_contiguous() and torch.equal(sent, tensor)
    tensor.zero_()
    assert float(sent.sum()) == 66.0
    same = torch.ones(3)
    assert TensorTransport(CPU).prepare_send(same) is same and TensorTransport(CPU).finish_receive(same) is same


FORM = PayloadSpec(
    None, tuple(TensorSpec(dtype, shape, False) for dtype, shape in
                [(torch.float32, (200, 100)), (torch.bfloat16, (3, 5)), (torch.int64, (7,)), (torch.float32, (0, 2))])
)  # fmt: skip


def tensors(rank: int) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(rank)
    return [(100 * torch.randn(one.shape, generator=noise)).to(one.dtype) for one in FORM.tensors]


def posted() -> list[list[float]]:
    """Send to the other process, large tensors and small ones, and spoil them at once; return what arrives."""
    rank = dist.get_rank()
    post = P2PChannel(dist.new_group(backend="gloo"), CPU)
    post.transport = THROUGH_CPU
    own = tensors(rank)
    arrival = PendingReceive(post, FORM, 1 - rank, tag=1)
    post.send(FORM, own, 1 - rank, tag=1, microbatch=0)
    for one in own:
        one.zero_()
    found = [one.double().flatten().tolist() for one in arrival.wait()]
    post.limit_in_flight(0)
    dist.barrier()
    post.close()
    return found


def pass_on() -> list[float]:
    """Pass a tensor round, and spoil it at once; return what arrives."""
    rank = dist.get_rank()
    with mock.patch.object(TensorTransport, "of", lambda group, device: TensorTransport(device, through_cpu=True)):
        own = torch.full((2, 3 + rank), 1.0 + rank)
        finish = pass_to_next_rank(own, (2, 4 - rank), dist.group.WORLD)
        own.zero_()
        return finish().flatten().tolist()


def test_stages_exchange_activations_through_the_cpu(workers: Pool) -> None:
    expected = [[one.double().flatten().tolist() for one in tensors(rank)] for rank in (1, 0)]
    assert workers.run(2, posted) == expected


def test_ring_passes_tensors_through_the_cpu(workers: Pool) -> None:
    assert workers.run(2, pass_on) == [[2.0] * 8, [1.0] * 6]
