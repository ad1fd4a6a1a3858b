"""FlashAttention-4's kernels for Hopper, which are told what each token sees and in which order documents come.

The package's kernels find out from a causal mask which tiles they visit and what is hidden in them, and search for the
document of a tile. Four small classes of it decide that, and others stand here in their place, in copies of its modules
that nobody else uses. They look everything up in one list of numbers, which is laid behind the places where documents
begin (`cornstarch.attention.documents` says what is in it).

What is private of the package is used here and in `flash.py` only: for the versions that `flash.TRIED` names.

Imported where there is FlashAttention-4 only.
"""
# The language of these kernels reads annotations itself, and is not there where types are checked.
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

from cornstarch.attention.documents import ENTRY
from cornstarch.attention.mask import BLOCK

_WARP_ROWS = 16  # of a tile of scores, that a warp holds
_FIRST_WARP = 4  # of those that compute; those before it load


@cute.jit
def _entry(begins, tokens, number):
    """Return one entry of the order: document, blocks before it, its length, where it begins."""
    behind = begins.shape[0] + tokens + ENTRY * number
    return cute.make_tensor(begins.iterator + behind, cute.make_layout(ENTRY))


@dataclass(frozen=True)
class _Document(SeqlenInfoQK):
    """Where a document is, and the list of what its tokens see, or are seen by."""

    seen: Any = None
    limits: Any = field(default_factory=list)
    """While a kernel is written: a row's limit, of the one of its warp's rows that a thread looked up."""

    @staticmethod
    def create(batch_idx, seqlen_q_static, seqlen_k_static, mCuSeqlensQ, tile_m=128, tile_n=128, **others):
        """Look it up by the number of its entry."""
        tokens, begins = seqlen_q_static, mCuSeqlensQ
        entry = _entry(begins, tokens, batch_idx)
        number, length, begin = entry[0], entry[2], entry[3]
        return _Document(
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
        """Look up the limit of one of the rows of a thread's warp, long before it is needed."""
        warp = cute.arch.warp_idx() - _FIRST_WARP
        own = cutlass.max(row + warp * _WARP_ROWS + cute.arch.lane_idx() % _WARP_ROWS, 0) // pack
        self.limits.append(self.seen[cutlass.min(own, self.seqlen_q - 1)])

    def limit(self, row):
        """Return the limit of a row of the tile, from the thread that looked it up."""
        return utils.shuffle_sync(self.limits[-1], row % _WARP_ROWS)


class _Blocks(BlockInfo):
    """Which tiles are visited."""

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


class _Mask(mask.AttentionMask):
    """What is hidden in a tile."""

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
        """Hide it; backward passes have keys in the place of queries."""
        if const_expr(self.swap_AB):
            if m_block * self.tile_m < (n_block + 1) * self.tile_n - 1:  # else all queries are behind all keys
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
class _Tiles(ParamsBase):
    """What the order of tiles is made from."""

    begins: Any
    tokens: Int32
    heads: Int32
    pack: cutlass.Constexpr[int]
    tile: cutlass.Constexpr[int]
    last_first: cutlass.Constexpr[bool]


class _Order:
    """Which tile a block of threads computes: of the next document in the order, head after head."""

    def __init__(self, tiles, number):
        self.tiles, self._number, self._begun = tiles, number, False

    @staticmethod
    def to_underlying_arguments(args, **others):
        """Take what is asked for."""
        pack = args.qhead_per_kvhead_packgqa
        tokens = args.total_q // pack
        return _Tiles(args.mCuSeqlensQ, tokens, args.num_head, pack, args.tile_shape_mn[0], args.lpt)

    @staticmethod
    def create(tiles, ctx=None, **others):
        """Return the order for this block of threads."""
        return _Order(tiles, cute.arch.block_idx()[0])

    @staticmethod
    def get_grid_shape(tiles, **others):
        """Return how many there are, of which some have nothing to do."""
        entries = (tiles.tokens + (tiles.begins.shape[0] - 1) * (BLOCK - 1)) // BLOCK
        return entries * tiles.heads * tiles.pack, Int32(1), Int32(1)

    @cute.jit
    def get_current_work(self):
        """Return the tile, or that there is no other."""
        if const_expr(self._begun):
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
        """Return the tile."""
        return self.get_current_work()

    def prefetch_next_work(self):
        """There is none."""

    def advance_to_next_work(self):
        """Be done."""
        self._begun = True

    def __extract_mlir_values__(self):
        values = cutlass.extract_mlir_values(self.tiles)
        self._count = len(values)
        return values + cutlass.extract_mlir_values(self._number)

    def __new_from_mlir_values__(self, values):
        tiles = cutlass.new_from_mlir_values(self.tiles, values[: self._count])
        made = _Order(tiles, cutlass.new_from_mlir_values(self._number, values[self._count :]))
        made._begun = self._begun
        return made


class _Adding:
    """What moves tiles of results to memory, but adds them to what is there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cpasync, "CopyReduceBulkTensorTileS2GOp" if name == "CopyBulkTensorTileS2GOp" else name)


def _copy(name: str, label: str, **others: Any) -> ModuleType:
    """Return a module of the package once more, in which some names stand for others."""
    found = importlib.util.find_spec(f"flash_attn.cute.{name}")
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"flash_attn_{label}_{name}", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the language looks for its functions' modules there
    spec.loader.exec_module(module)
    for key, value in others.items():
        getattr(module, key)  # there must be one
        setattr(module, key, value)
    return module


@cache
def kernels(adding: bool = False) -> Any:
    """Return the package's functions with these kernels; their backward pass may add to gradients of keys and values.

    Where documents begin (`cu_seqlens_q`, `cu_seqlens_k`) must be the front part of a list as `documents` makes it.
    """
    ours = {
        "AttentionMask": _Mask,
        "BlockInfo": _Blocks,
        "SeqlenInfoQK": _Document,
        "SingleTileVarlenScheduler": _Order,
    }
    label = "adding" if adding else "storing"
    forward = _copy("flash_fwd_sm90", label, **ours)
    backward = _copy("flash_bwd_sm90", label, **ours, **({"cpasync": _Adding()} if adding else {}))
    found = _copy(
        "interface",
        label,
        FlashAttentionForwardSm90=forward.FlashAttentionForwardSm90,
        FlashAttentionBackwardSm90=backward.FlashAttentionBackwardSm90,
    )
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    found._flash_attn_fwd.compile_cache = get_jit_cache(f"cornstarch_forward_{version}")
    found._flash_attn_bwd.compile_cache = get_jit_cache(f"cornstarch_backward_{label}_{version}")
    return found
