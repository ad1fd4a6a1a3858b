"""Measure attention with multimodal masks on one GPU: forward and backward, per visible pair of tokens.

    python benchmarks/h200_attention.py [--tokens 4096 8192 ...] [--json results.json]

A batch has 65,536 tokens, 16 query heads and 8 key/value heads of width 128, in bf16. Masks:

- causal: a plain causal mask, as data.
- images N %: one document; N % of its tokens are in images with bidirectional attention, at even intervals: of 729
  tokens, and the rest of 256 and of 64.
- documents: lengths from a log-normal distribution (median 1,500 tokens, sigma 0.8, at least 64, seed 0) until the row
  is full; no images.
- documents, images N %: the same documents, with such images in each.

Contenders: Cornstarch (`attention: auto`), the same with cuDNN's kernels (`attention: cudnn`), the kernel for rows that
are sharded over ranks ("between"), FlexAttention with the same mask, and scaled_dot_product_attention with a dense mask
(up to 16,384 tokens). The baseline is causal scaled_dot_product_attention without any mask on the same row, with the
faster of FlashAttention and cuDNN: the ratio is that of times per visible pair. A GPU's clock depends on its recent
load, so each contender runs for a quarter of a second and the median counts. Causal attention and Cornstarch are timed
in turn, three times, and the middle ratio counts. Kernels are compiled and planned beforehand, and the GPU is busy
while they are launched, as in a training step; the CPU's launch time is a separate column. Masks are built once per
step and are not timed here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import on_gpu
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from cornstarch.attention import MaskSpec
from cornstarch.attention.backends import has_range_backend, select_backend, use_attention
from cornstarch.attention.cudnn_attention import attend_pieces, build_piece_mask
from cornstarch.attention.flash_attention import attend_documents, attend_range, build_document_mask
from cornstarch.compat.compiler import compile_variants

BATCH = 65536  # tokens
HEADS, GROUPS, WIDTH = 16, 8, 128
IMAGES = (729, 256, 64)  # tokens
SHARES = (20, 50, 80)  # percent
ROUNDS = 5  # at least
LASTING = 0.25  # seconds
TURNS = 3
OTHERS = ("cudnn", "between", "flex")

compiled_flex = compile_variants(flex_attention, dynamic=False)


def lengths_of(tokens: int, row: int) -> list[int]:
    """Return document lengths that fill a row."""
    made, lengths = random.Random(row), []
    while sum(lengths) < tokens:
        length = max(64, round(math.exp(made.gauss(math.log(1500), 0.8))))
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


def masks(tokens: int) -> dict[str, MaskSpec]:
    """Return the masks."""
    rows = BATCH // tokens
    whole, packed = [[tokens]] * rows, [lengths_of(tokens, row) for row in range(rows)]
    found = {"causal": _mask(whole, 0.0), **{f"images {share} %": _mask(whole, share / 100) for share in SHARES}}
    found["documents"] = _mask(packed, 0.0)
    return {**found, **{f"documents, images {share} %": _mask(packed, share / 100) for share in SHARES}}


def _mask(lengths: list[list[int]], share: float) -> MaskSpec:
    documents = torch.stack([torch.arange(1, len(row) + 1).repeat_interleave(torch.tensor(row)) for row in lengths])
    spans, number = torch.full_like(documents, -1), 0
    for row, begins in enumerate(lengths):
        begin = 0
        for length in begins:
            images = images_of(round(length * share))
            gap = (length - sum(images)) // (len(images) + 1)
            at = begin + gap
            for image in images:
                spans[row, at : at + image] = number
                at, number = at + image + gap, number + 1
            begin += length
    return MaskSpec(documents, spans)


def images_of(tokens: int) -> list[int]:
    """Return image lengths that add up to at most this number of tokens."""
    found = []
    for size in IMAGES:
        found += [size] * (tokens // size)
        tokens %= size
    return found


def pairs_of(spec: MaskSpec) -> int:
    """Return the number of visible pairs: causal triangles of documents, and the other triangles of spans."""
    apart = spec.documents + 1_000_000 * torch.arange(len(spec.documents))[:, None]
    _, lengths = apart.unique(return_counts=True)
    pairs = int((lengths * (lengths + 1) // 2).sum())
    _, sizes = spec.spans[spec.spans >= 0].unique(return_counts=True)
    return pairs + int((sizes * (sizes - 1) // 2).sum())


def timed(function: Callable[[], Any], lasting: float = LASTING) -> tuple[float, float]:
    """Return the median GPU milliseconds of a call over a given time, and the CPU milliseconds to launch it."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    rounds = max(ROUNDS, math.ceil(lasting / (time.perf_counter() - began)))
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(10):  # 14 ms, while the first calls are launched
        busy @ busy
    marks, began = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)], time.perf_counter()
    for mark in marks[:-1]:
        mark.record()
        function()
    marks[-1].record()
    cpu = 1e3 * (time.perf_counter() - began) / rounds
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)), cpu


def both_passes(attend: Callable[..., Tensor], tokens: int) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a function that runs forward and backward, with its output and gradients."""
    torch.manual_seed(0)
    rows = BATCH // tokens
    states = [
        torch.randn(rows, tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    given = torch.randn(rows, tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    left: list[Tensor] = []

    def run() -> None:
        output = attend(*states)
        found = torch.autograd.grad(output, states, given)
        left[:] = [output.detach(), *found]

    return run, left


def causal(backend: SDPBackend, tokens: int) -> Callable[[], None]:
    """Return plain causal attention."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    run = both_passes(attend, tokens)[0]

    def by_backend() -> None:
        with sdpa_kernel([backend]):
            run()

    return by_backend


def ways(spec: MaskSpec) -> dict[str, Callable[..., Tensor]]:
    """Return the contenders for a mask."""
    blocks = spec.block_mask()
    tokens = spec.documents.shape[1]

    def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled_flex(query, key, value, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    found: dict[str, Callable[..., Tensor]] = {}
    for way, name in (("auto", "ours"), ("cudnn", "cudnn")):
        with use_attention(way):
            maker = select_backend(spec.documents.device, WIDTH)
        if maker is None:
            continue
        if maker.name == "flash":
            documents = build_document_mask(spec)
            found[name] = partial(attend_documents, documents=documents, scale=WIDTH**-0.5)
        else:
            pieces = build_piece_mask(spec)
            found[name] = partial(attend_pieces, pieces=pieces, scale=WIDTH**-0.5)
    if has_range_backend(spec.documents.device):
        found["between"] = partial(attend_range, mask=spec.build_range_mask(), scale=WIDTH**-0.5)
    found.setdefault("ours", flex)
    found["flex"] = flex
    if tokens <= 16384:
        dense = spec.dense()

        def by_dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            repeated = [states.repeat_interleave(HEADS // GROUPS, 1) for states in (key, value)]
            return F.scaled_dot_product_attention(query, *repeated, attn_mask=dense).transpose(1, 2)

        found["dense"] = by_dense
    return found


def off(found: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest relative difference in norm."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, reference, strict=True))


def measure(tokens: int) -> list[dict[str, Any]]:
    """Measure all masks of one length."""
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    plain = {name: causal(backend, tokens) for name, backend in backends.items()}
    quickest = min(plain, key=lambda name: timed(plain[name])[0])
    rows = []
    for name, spec in masks(tokens).items():
        spec, pairs = spec.to("cuda"), pairs_of(spec)
        row: dict[str, Any] = {"tokens": tokens, "mask": name, "pairs": pairs, "causal_by": quickest}
        left: dict[str, list[Tensor]] = {}
        for way, attend in ways(spec).items():
            run, left[way] = both_passes(attend, tokens)
            row[way], row[f"{way}_cpu"] = timed(run)
            if way == "ours":
                turns = [(timed(plain[quickest])[0], timed(run)[0]) for _ in range(TURNS)]
                row["causal"], row["ours"] = (statistics.median(times) for times in zip(*turns, strict=True))
        unit = row["causal"] / (BATCH * (tokens + 1) / 2)
        row["ratio"] = {way: row[way] / pairs / unit for way in left}
        row["off"] = off(left["ours"], left["flex"])
        print(format_row(row), flush=True)
        rows.append(row)
    return rows


def format_row(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    dense = f"{row['dense']:.2f} ms, {row['dense'] / row['ours']:.1f} x ours" if "dense" in row else ""
    others = " | ".join(f"{row[way]:.2f}, {row['ratio'][way]:.2f}" if way in row else "" for way in OTHERS)
    return (
        f"| {row['tokens']:,} | {row['mask']} | {row['causal']:.2f} | {row['ours']:.2f} "
        f"| **{row['ratio']['ours']:.2f}** | {others} | {dense} | {row['ours_cpu']:.2f} | {row['off']:.1e} |"
    )


def main() -> None:
    """Measure the requested cases."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    arguments.add_argument("--json", type=Path)
    given = on_gpu.parse(arguments)
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    print(f"kernels: {select_backend(torch.device('cuda'), WIDTH)}\n")
    others = " | ".join(f"{way}: ms, per pair" for way in OTHERS)
    print(f"| tokens | mask | causal ms | ours ms | ours, per pair / causal | {others} | dense | CPU ms | off |")
    print("|---" * (8 + len(OTHERS)) + "|")
    rows = [row for tokens in given.tokens for row in measure(tokens)]
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
