"""Measure the balance of context parallelism on real kernels: the work of 8 ranks, in turn, on one GPU.

    python benchmarks/h200_cp_balance.py [--tokens 32768 65536] [--flex] [--rounds 7] [--json results.json]

Rows are those of cp_balance.py: images with bidirectional attention between texts, as one document or packed. Each
rank's queries attend to the keys of all ranks: forward and backward, with the kernels of context parallelism
(FlashAttention-4 if installed, otherwise FlexAttention), 16 query heads and 8 key/value heads of width 128, in bf16.
Reported: the largest over the mean time of a rank; 1 is balanced. `--flex` always uses FlexAttention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).parent))

import on_gpu
from cp_balance import WAYS, row
from h200_attention import timed

from cornstarch.attention import MaskSpec
from cornstarch.attention.backends import has_range_backend
from cornstarch.attention.flash_attention import attend_range
from cornstarch.attention.mask import RangeMask
from cornstarch.compat.compiler import compile_variants
from cornstarch.plan.token_distribution import PARTIAL, choose_block_size, compute_mask_work, distribute

RANKS = 8
HEADS, GROUPS, WIDTH = 16, 8, 128

flex = compile_variants(flex_attention)


def share_time(mask: RangeMask, queries: Tensor, states: tuple[Tensor, Tensor, Tensor], use_flex: bool) -> float:
    """Return milliseconds of one rank's attention, forward and backward."""
    query = states[0][:, :, queries].contiguous().requires_grad_()
    key, value = (one.detach().requires_grad_() for one in states[1:])
    given = torch.randn_like(query)

    def run() -> None:
        if use_flex:
            output = flex(query, key, value, block_mask=mask.block_mask, enable_gqa=True)
        else:
            output = attend_range(query, key, value, mask, WIDTH**-0.5).transpose(1, 2)
        torch.autograd.grad(output, (query, key, value), given)

    return timed(run, lasting=0.05)[0]


def measure(tokens: int, share: float, packed: bool, use_flex: bool, turns: int) -> dict[str, Any]:
    """Time all distributions of one row."""
    one = row(tokens, share, packed, seed=0)
    spec = MaskSpec(torch.from_numpy(one.documents)[None], torch.from_numpy(one.spans)[None]).to("cuda")
    torch.manual_seed(0)
    states = tuple(
        torch.randn(1, heads, tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, GROUPS, GROUPS)
    )
    work = compute_mask_work(
        one.documents, one.spans, block=choose_block_size(tokens, RANKS), linear=0.0, partial=PARTIAL
    )
    found: dict[str, Any] = {"tokens": tokens, "images": share, "packed": packed}
    for way in WAYS:
        dealt = distribute(work, RANKS, way)
        shares = [torch.as_tensor(tokens_of, device="cuda") for tokens_of in map(dealt.tokens, range(RANKS))]
        everyone = torch.arange(tokens, device="cuda")
        asked = [(spec.build_range_mask(queries=queries, keys=everyone), queries) for queries in shares]
        rounds = [[share_time(*one, states, use_flex) for one in asked] for _ in range(turns)]
        times = [statistics.median(each) for each in zip(*rounds, strict=True)]
        tiles = [(int(m.block_mask.full_kv_num_blocks.sum()), int(m.block_mask.kv_num_blocks.sum())) for m, _ in asked]
        found[way] = {"times": times, "largest_over_mean": max(times) / statistics.mean(times), "tiles": tiles}
    return found


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536])
    arguments.add_argument("--flex", action="store_true")
    arguments.add_argument("--rounds", type=int, default=7, help="rounds over all ranks; the median counts")
    arguments.add_argument("--json", type=Path)
    given = on_gpu.parse(arguments)
    use_flex = given.flex or not has_range_backend(torch.device("cuda"))
    kernels = "FlexAttention" if use_flex else "FlashAttention-4"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {RANKS} ranks, {kernels}\n")
    print(f"| tokens | images | row | {' | '.join(WAYS)} | makespan_min, ms: mean, each rank |")
    print("|---" * (len(WAYS) + 4) + "|")
    results = []
    for tokens in given.tokens:
        for packed in (False, True):
            for share in (0.2, 0.5, 0.8):
                one = measure(tokens, share, packed, use_flex, given.rounds)
                figures = " | ".join(f"{one[way]['largest_over_mean']:.3f}" for way in WAYS)
                kind = "packed" if packed else "one document"
                mean = statistics.mean(one["makespan_min"]["times"])
                times = ", ".join(f"{time:.2f}" for time in one["makespan_min"]["times"])
                print(f"| {tokens:,} | {share:.0%} | {kind} | {figures} | {mean:.2f}: {times} |", flush=True)
                results.append(one)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
