"""Count the bytes on the wire of a training step with each kind of data parallelism, and compare them with formulas.

All processes run in a network namespace of their own, so that the counter of its loopback interface has nothing but
their messages: gloo's, with the headers of TCP and IP. Counted are several steps of Cornstarch's Trainer, after the
first two, which set up connections. The formulas are those of rings (cornstarch/plan/communication.py), with P bytes of
gradients on a rank, N ranks that share them and M microbatches:

    ddp, zero1     2 (N - 1) / N P
    zero2          M (N - 1) / N (gather P + reduce-scatter P)
    zero3          M (N - 1) / N (gather P + gather the layers again + reduce-scatter P)

zero2 and zero3 use torch's reduce-scatter, which gloo runs as an all-reduce of twice the bytes; with NCCL it is a ring.
In a pipeline gradients are reduced once for all microbatches, and zero2 gathers parameters once; zero3 frees them
after every pass. With tp, a layer sums activations twice in a forward pass and twice in a backward pass; between
stages, activations travel forward and their gradients backward.

    OMP_NUM_THREADS=1 python benchmarks/wire_bytes.py    # Linux, root; prints the table

"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.plan.communication import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from cornstarch.train import Trainer

IN_NAMESPACE = "CORNSTARCH_WIRE_BYTES"
LAYERS, HIDDEN, VOCABULARY, ROWS, TOKENS = 4, 256, 4096, 2, 64
FIRST, STEPS = 2, 4  # steps before the counted ones, and the counted ones
_PORT = 29733


@dataclass(frozen=True)
class Case:
    """A plan, and its replicas."""

    title: str
    ranks: int
    data: dict[str, Any]
    microbatches: int = 1
    modules: dict[str, Any] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        return self.ranks // (self.modules.get("tp", 1) * self.modules.get("stages", 1))


CASES = [
    *(Case(kind, ranks, {"kind": kind}) for ranks in (2, 4) for kind in ("ddp", "zero1", "zero2", "zero3")),
    *(Case(f"{kind}, 4 microbatches", 2, {"kind": kind}, 4) for kind in ("ddp", "zero1", "zero2", "zero3")),
    Case("ddp × tp 2 × pp 2", 8, {"kind": "ddp"}, 2, {"tp": 2, "stages": 2}),
    Case("zero1 × tp 2 × pp 2", 8, {"kind": "zero1"}, 2, {"tp": 2, "stages": 2}),
    Case("zero2 × pp 2, 4 microbatches", 4, {"kind": "zero2"}, 4, {"stages": 2}),
    Case("zero3 × pp 2, 4 microbatches", 4, {"kind": "zero3"}, 4, {"stages": 2}),
]


def predict_bytes(case: Case, held: list[int], layers: list[int]) -> float:
    """Return the bytes of a step of all ranks; `held`: of each rank's gradients, `layers`: of them those of layers."""
    kind, n, many = case.data["kind"], case.replicas, case.microbatches
    # In a pipeline gradients wait for the last microbatch, and with zero2 parameters stay gathered until then.
    is_pipeline = case.modules.get("stages", 1) > 1
    gathers, sums = 1 if is_pipeline and kind == "zero2" else many, 1 if is_pipeline else many
    total = 0.0
    for whole, inside in zip(held, layers, strict=True):
        if kind in ("ddp", "zero1"):
            total += all_reduce_bytes(whole, n)
        else:
            again = inside if kind == "zero3" else 0
            total += gathers * all_gather_bytes(whole + again, n) + 2 * sums * reduce_scatter_bytes(whole, n)
    tp, stages = case.modules.get("tp", 1), case.modules.get("stages", 1)
    activations = 4 * ROWS * TOKENS * HIDDEN * many * n  # of all microbatches and replicas
    total += 4 * LAYERS * tp * all_reduce_bytes(activations, tp)
    return total + 2 * (stages - 1) * tp * activations


def build_trainer(case: Case, folder: str) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, tie_word_embeddings=False,
    )  # fmt: skip
    batch = ROWS * case.microbatches * case.replicas
    ids = torch.randint(VOCABULARY, (batch * (FIRST + STEPS), TOKENS))
    trainer = Trainer.from_objects(
        LlamaForCausalLM(config),
        train_data=[{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids],
        console=Console(file=io.StringIO()),
        output=folder,
        device="cpu",
        precision="fp32",
        compile="off",
        loop={"steps": FIRST + STEPS, "batch_size": batch, "gradient_accumulation_steps": case.microbatches},
        logging={"progress": "none"},
        parallel={"data": case.data, "modules": {"model": case.modules} if case.modules else {}, "verify": "never"},
    )
    trainer.setup()
    return trainer


def read_counter() -> int:
    """Return the bytes that went over the loopback interface."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def settle() -> int:
    """Wait until all ranks are here and nothing travels any more; return the counter."""
    dist.barrier()
    time.sleep(0.5)
    return read_counter()


def work(rank: int, case: Case, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORT), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo")
    trainer = build_trainer(case, folder)
    named = [(name, one) for name, one in trainer.model.named_parameters() if one.requires_grad and not one.is_meta]
    shards = case.replicas if case.data["kind"] in ("zero2", "zero3") else 1

    def count(words: str) -> int:
        return sum(shards * to_local_tensor(one.detach()).nbytes for name, one in named if words in name)

    sizes = torch.tensor([count(""), count("layers.")])
    gathered = [torch.empty_like(sizes) for _ in range(case.ranks)]
    dist.all_gather(gathered, sizes)
    begin = 0
    for number, batch in enumerate(trainer.batches(), start=1):
        trainer.step(batch)
        if number == FIRST:
            begin = settle()
    counted = (settle() - begin) / STEPS
    if rank == 0:
        formula = predict_bytes(case, *([int(one[i]) for one in gathered] for i in range(2)))
        figures = f"{counted / 1e6:.2f} | {formula / 1e6:.2f} | {counted / formula - 1:+.1%}"
        print(f"| {case.title} | {case.ranks} | {figures} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    if IN_NAMESPACE not in os.environ:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, IN_NAMESPACE: "1"}).returncode)
    print("| plan | ranks | counted, MB per step of all ranks | formula, MB | |\n|---|---|---|---|---|")
    chosen = [case for case in CASES if not sys.argv[1:] or case.title in sys.argv[1:]]
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (case, folder), nprocs=case.ranks)


if __name__ == "__main__":
    main()
