"""Measure encoder load balancing (`data.balance_encoders`) with two processes, one of which has all images.

Both processes run the forward and backward pass of the same small model on a CPU, one thread each: a tower of Qwen2-VL,
which merges four patches into one token, before a Llama. The first has a row with many images, the second a row of text
of the same length. Steps with and without load balancing alternate, so that both see the same machine load.

    python benchmarks/encoder_balancing.py --output benchmarks/results/encoder_balancing.md
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from contextlib import nullcontext
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import known_models
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from prediction_ranks import free_port
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from cornstarch import ModalEncoderModule, MultimodalModel
from cornstarch.parallel import apply_data_parallel, attach_encoder_balancing, balance_encoders
from cornstarch.plan import DataPlan

IMAGE_TOKEN, SIDE, TEXT = 5, 16, 64  # an image has SIDE² patches, which become a quarter as many tokens
CASES = ((4, False, "ddp"), (16, False, "ddp"), (16, True, "ddp"), (16, True, "zero3"))
"""The number of images, whether the encoder is trained, and the kind of data parallelism."""


def made(images: int, trained: bool, rank: int) -> tuple[MultimodalModel, dict[str, Any]]:
    """Return a model and the batch of a process."""
    torch.manual_seed(0)
    sizes = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "embed_dim": 384, "hidden_size": 384}
    vision = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**sizes, depth=8, num_heads=6, mlp_ratio=4))
    projector = nn.Sequential(nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 384))
    encoder = ModalEncoderModule(vision, projector)
    language = known_models.language_model("small Llama")
    model = MultimodalModel(encoders={"vision": encoder}, language_model=language)
    model.set_modality_token_ids({"vision": IMAGE_TOKEN})
    model.train(encoders_mode={"vision": (trained, True)}, llm_mode=True)
    pixels, grid = torch.randn(images * SIDE**2, 1176), torch.tensor([[1, SIDE, SIDE]] * images)
    model.keep_encoders_running({"vision": {"hidden_states": pixels[: SIDE**2], "grid_thw": grid[:1]}})
    ids = torch.randint(10, 8000, (1, images * SIDE**2 // 4 + TEXT))
    if rank:  # text only, of the same length
        return model, {"input_ids": ids, "labels": ids}
    ids[:, : images * SIDE**2 // 4] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    return model, {"input_ids": ids, "labels": labels, "hidden_states": pixels, "grid_thw": grid}


def measure(case: tuple[int, bool, Any], rounds: int) -> tuple[float, float, float]:
    """Return the milliseconds of a step without and with balancing, and the largest difference of losses."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    port = free_port()
    workers = [context.Process(target=_work, args=(rank, port, case, rounds, there)) for rank in range(2)]
    for worker in workers:
        worker.start()
    there.close()
    try:
        return here.recv()
    finally:
        for worker in workers:
            worker.join()


def _work(rank: int, port: int, case: tuple[int, bool, Any], rounds: int, results: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    images, trained, kind = case
    model, batch = made(images, trained, rank)
    attach_encoder_balancing(model.encoders["vision"], init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    wrapped = apply_data_parallel(model, init_device_mesh("cpu", (2,)), DataPlan(kind))
    times: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, float] = {}
    for number in range(1 + rounds):
        for lent in (False, True) if number % 2 else (True, False):
            dist.barrier()
            begin = time.perf_counter()
            with balance_encoders(model) if lent else nullcontext():
                loss = wrapped(**batch).loss
                loss.backward()
            wrapped.zero_grad(set_to_none=True)
            losses[lent] = float(loss.detach())
            dist.barrier()
            times[lent] += [time.perf_counter() - begin] if number else []
    if rank == 0:
        results.send((1e3 * median(times[False]), 1e3 * median(times[True]), abs(losses[True] / losses[False] - 1)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure all cases."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--output", type=Path, help="a Markdown file")
    given.add_argument("--rounds", type=int, default=10)
    asked = given.parse_args()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [
        "# Encoder load balancing",
        "",
        f"`python {shlex.join(sys.argv)}`, {versions}, {os.cpu_count()} cores, {date.today().isoformat()}",
        "",
        f"Two processes with one row each; the first has all images of {SIDE**2} patches. Forward and backward passes.",
        "",
        "| images | encoder | kind | ms unbalanced | ms balanced | speedup | loss differs by |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    for case in CASES:
        plain, lent, off = measure(case, asked.rounds)
        images, trained, kind = case
        state = "trained" if trained else "frozen"
        lines.append(f"| {images} | {state} | {kind} | {plain:.0f} | {lent:.0f} | {plain / lent:.2f}× | {off:.0e} |")
        print(lines[-1], flush=True)
        if asked.output:
            asked.output.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
