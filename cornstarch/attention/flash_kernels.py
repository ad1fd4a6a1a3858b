"""FlashAttention-4's kernels for Hopper, with the visible tokens and the order of documents as data.

The package's kernels derive from a causal mask which tiles they visit and what is hidden in them, and search for the
document of a tile. Four small classes of the package decide that. This module replaces them, in private copies of the
package's modules. The replacements look everything up in one list of numbers behind the starts of documents (described
in `cornstarch.attention.flash_attention.DocumentMask`).

Private parts of the package are used only here and in `flash_attention.py`, for the versions that
`flash_attention.SUPPORTED_VERSIONS` names.

Import this module only where FlashAttention-4 is installed.
"""
# The kernel language reads annotations itself, and is not installed where types are checked.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import hashlib
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute import mask, utils
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.tile_scheduler import WorkTileInfo
from quack import layout_utils
from quack.cute_dsl_utils import ParamsBase

from cornstarch.attention.flash_attention import ENTRY_SIZE
from cornstarch.attention.mask import BLOCK_SIZE

_WARP_ROWS = 16  # rows of a tile of scores per warp
_FIRST_WARP = 4  # the first warp that computes; the warps before it load


@cute.jit
def _entry(begins, tokens, number):
    """Return one entry of the block order: document, blocks before it, its length, its start."""
    behind = begins.shape[0] + tokens + ENTRY_SIZE * number
    return cute.make_tensor(begins.iterator + behind, cute.make_layout(ENTRY_SIZE))


@dataclass(frozen=True)
class _DocumentInfo(SeqlenInfoQK):
    """The place of a document, and the limits of its tokens: what they see, or what sees them."""

    seen: Any = None
    limits: Any = field(default_factory=list)
    """While a kernel is traced: the limit of the row of its warp that this thread looked up."""

    @staticmethod
    def create(batch_idx, seqlen_q_static, seqlen_k_static, mCuSeqlensQ, tile_m=128, tile_n=128, **others):
        """Look the document up by the number of its entry."""
        tokens, begins = seqlen_q_static, mCuSeqlensQ
        entry = _entry(begins, tokens, batch_idx)
        number, length, begin = entry[0], entry[2], entry[3]
        return _DocumentInfo(
            offset_q=begin,
            offset_k=begin,
            padded_offset_q=cute.assume((begin + number * tile_m) // tile_m * tile_m, divby=tile_m),
            padded_offset_k=cute.assume((begin + number * tile_n) // tile_n * tile_n, divby=tile_n),
            seqlen_q=length,
            seqlen_k=length,
            m_block_offset=0,
            block_idx_offset=0,
            num_n_blocks=cute.ceil_div(length, tile_n),
            has_cu_seqlens_q=True,
            has_cu_seqlens_k=True,
            has_seqused_q=False,
            has_seqused_k=False,
            seen=cute.make_tensor(begins.iterator + (begins.shape[0] + begin), cute.make_layout(tokens)),
        )

    def look_up(self, row, pack=1) -> None:
        """Look up the limit of one row of this thread's warp, long before it is needed."""
        warp = cute.arch.warp_idx() - _FIRST_WARP
        own = cutlass.max(row + warp * _WARP_ROWS + cute.arch.lane_idx() % _WARP_ROWS, 0) // pack
        self.limits.append(self.seen[cutlass.min(own, self.seqlen_q - 1)])

    def limit(self, row):
        """Return the limit of a row of the tile, from the thread that looked it up."""
        return utils.shuffle_sync(self.limits[-1], row % _WARP_ROWS)


class _VisitedTiles(BlockInfo):
    """The range of visited tiles."""

    @cute.jit
    def get_n_block_min_max(self, seqlen_info, m_block, split_idx=0, num_splits=1):
        """Forward: up to the end of what the last query sees."""
        pack = self.qhead_per_kvhead_packgqa
        seqlen_info.look_up(m_block * self.tile_m, pack)
        behind = cutlass.min(cute.ceil_div((m_block + 1) * self.tile_m, pack), seqlen_info.seqlen_q)
        return 0, cute.ceil_div(seqlen_info.seen[behind - 1], self.tile_n)

    @cute.jit
    def get_m_block_min_max(self, seqlen_info, n_block):
        """Backward: from the first query that sees the first key."""
        seqlen_info.look_up(n_block * self.tile_n)
        first = seqlen_info.seen[n_block * self.tile_n]
        return first // self.tile_m, cute.ceil_div(seqlen_info.seqlen_q, self.tile_m)


class _LimitMask(mask.AttentionMask):
    """The hidden scores of a tile."""

    @cute.jit
    def apply_mask(
        self,
        acc_S,
        batch_idx,
        head_idx,
        m_block,
        n_block,
        thr_mma,
        mask_seqlen,
        mask_causal,
        mask_local=False,
        mask_mod=None,
        aux_data=None,
        fastdiv_mods=None,
    ):
        """Hide scores; backward passes swap queries and keys."""
        if const_expr(self.swap_AB):
            if m_block * self.tile_m < (n_block + 1) * self.tile_n - 1:  # otherwise all queries come after all keys
                self.hide_from_queries(acc_S, m_block * self.tile_m, n_block * self.tile_n, thr_mma)
        else:
            self.hide_keys(acc_S, n_block * self.tile_n, thr_mma)

    @cute.jit
    def hide_keys(self, acc_S, first_key, thr_mma):
        """A query sees keys up to its limit."""
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        own = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n))))
        for row in cutlass.range(cute.size(own.shape[0]), unroll_full=True):
            limit = self.seqlen_info.limit(own[row, 0][0]) - first_key - own[0][1]
            below = partial(mask.r2p_bitmask_below, mask.sm90_col_to_r2p_idx(limit))
            mask.mask_r2p_lambda(scores[row, None], below, rank1=True)

    @cute.jit
    def hide_from_queries(self, acc_S, first_query, first_key, thr_mma):
        """A key is seen by queries from its limit on."""
        scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=True)
        tile = cute.make_identity_tensor((self.tile_n, self.tile_m))
        own = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(tile), transpose=True)
        known = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(tile), transpose=True)
        for column in cutlass.range(cute.size(own.shape[1]), unroll_full=True):
            key = own[0, column][0]
            limit = self.seqlen_info.limit(key) - first_query - own[0][1]
            limit = limit if key < self.seqlen_k - first_key else self.tile_m
            for row in cutlass.range(cute.size(own.shape[0]), unroll_full=True):
                scores[row, column] = -Float32.inf if known[row, 0][1] < limit else scores[row, column]


@dataclass
class _SchedulerArguments(ParamsBase):
    """Arguments of the scheduler."""

    begins: Any
    tokens: Int32
    heads: Int32
    pack: cutlass.Constexpr[int]
    tile: cutlass.Constexpr[int]
    last_first: cutlass.Constexpr[bool]


class _DocumentScheduler:
    """Assigns a tile to each thread block: documents in the given order, head after head."""

    def __init__(self, tiles, number):
        self.tiles, self._number, self._is_done = tiles, number, False

    @staticmethod
    def to_underlying_arguments(args, **others):
        pack = args.qhead_per_kvhead_packgqa
        tokens = args.total_q // pack
        return _SchedulerArguments(args.mCuSeqlensQ, tokens, args.num_head, pack, args.tile_shape_mn[0], args.lpt)

    @staticmethod
    def create(tiles, ctx=None, **others):
        return _DocumentScheduler(tiles, cute.arch.block_idx()[0])

    @staticmethod
    def get_grid_shape(tiles, **others):
        """Return the number of thread blocks, some of which have nothing to do."""
        entries = (tiles.tokens + (tiles.begins.shape[0] - 1) * (BLOCK_SIZE - 1)) // BLOCK_SIZE
        return entries * tiles.heads * tiles.pack, Int32(1), Int32(1)

    @cute.jit
    def get_current_work(self):
        """Return the tile of this thread block, once."""
        if const_expr(self._is_done):
            return WorkTileInfo((Int32(0), Int32(0), Int32(0), Int32(0)), Boolean(False))
        every = self.tiles.heads * self.tiles.pack  # tiles of an entry
        number = self._number // every
        entry = _entry(self.tiles.begins, self.tiles.tokens, number)
        document, before, length = entry[0], entry[1], entry[2]
        tiles = cute.ceil_div(length * self.tiles.pack, self.tiles.tile)
        place = self._number - every * before
        head = place // tiles
        tile = place - head * tiles
        if const_expr(self.tiles.last_first):
            tile = tiles - 1 - tile
        there_is = document >= 0 and head < self.tiles.heads
        return WorkTileInfo((Int32(tile), Int32(head), Int32(number), Int32(0)), there_is)

    def initial_work_tile_info(self):
        return self.get_current_work()

    def prefetch_next_work(self):
        """Each thread block computes one tile."""

    def advance_to_next_work(self):
        self._is_done = True

    def __extract_mlir_values__(self):
        values = cutlass.extract_mlir_values(self.tiles)
        self._count = len(values)
        return values + cutlass.extract_mlir_values(self._number)

    def __new_from_mlir_values__(self, values):
        tiles = cutlass.new_from_mlir_values(self.tiles, values[: self._count])
        scheduler = _DocumentScheduler(tiles, cutlass.new_from_mlir_values(self._number, values[self._count :]))
        scheduler._is_done = self._is_done
        return scheduler


class _AccumulatingCopy:
    """The module `cpasync`, whose copies of result tiles add to memory instead of overwriting it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cpasync, "CopyReduceBulkTensorTileS2GOp" if name == "CopyBulkTensorTileS2GOp" else name)


def _copy_module(name: str, label: str, **replacements: Any) -> ModuleType:
    """Load a second copy of a module of the package, with some of its names replaced."""
    found = importlib.util.find_spec(f"flash_attn.cute.{name}")
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"flash_attn_{label}_{name}", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the kernel language looks up the modules of functions there
    spec.loader.exec_module(module)
    for key, value in replacements.items():
        getattr(module, key)  # fail if the package no longer has it
        setattr(module, key, value)
    return module


@cache
def load_kernels(accumulate: bool = False) -> Any:
    """Return the package's functions with these kernels; `accumulate` adds to key and value gradients.

    The starts of documents (`cu_seqlens_q`, `cu_seqlens_k`) must be the first part of a list of a `DocumentMask`.
    """
    replacements = {
        "AttentionMask": _LimitMask,
        "BlockInfo": _VisitedTiles,
        "SeqlenInfoQK": _DocumentInfo,
        "SingleTileVarlenScheduler": _DocumentScheduler,
    }
    label = "accumulating" if accumulate else "storing"
    forward = _copy_module("flash_fwd_sm90", label, **replacements)
    backward = _copy_module(
        "flash_bwd_sm90", label, **replacements, **({"cpasync": _AccumulatingCopy()} if accumulate else {})
    )
    package = _copy_module(
        "interface",
        label,
        FlashAttentionForwardSm90=forward.FlashAttentionForwardSm90,
        FlashAttentionBackwardSm90=backward.FlashAttentionBackwardSm90,
    )
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    package._flash_attn_fwd.compile_cache = get_jit_cache(f"cornstarch_forward_{version}")
    package._flash_attn_bwd.compile_cache = get_jit_cache(f"cornstarch_backward_{label}_{version}")
    return package
