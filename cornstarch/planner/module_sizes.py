"""The sizes over which a module can be sharded, found on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import gcd

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.batch import check_tokens
from cornstarch.parallel.expert import check_expert_plan, find_experts
from cornstarch.parallel.tensor.regions import plan_regions
from cornstarch.parallel.tensor.shard_layers import check_tensor_plan
from cornstarch.plan.cost import LayerCost, ModuleCost

_TP_SIZES = (1, 2, 4, 8, 16, 32, 64)
_CP_SIZES = (*_TP_SIZES, 128, 256, 512, 1024)
_FEW, _LEAST_TOKENS = 8, 1024
"""Above a cp of 8, each rank has at least so many tokens of a row."""


def build_module_cost(
    name: str, part: nn.Module, is_language_model: bool, tokens: int, layers: Sequence[LayerCost]
) -> ModuleCost:
    """Return the cost of a module with the sizes of tp and cp that suit it; tokens: of a row of the language model."""
    tp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    with suppress(ConfigError):
        regions = plan_regions(part).regions
        tp = tuple(size for size in _TP_SIZES if not any(region.misfits(size) for region in regions))
    with suppress(ConfigError):
        if is_language_model:
            check_tokens(part, 2)
        if is_language_model or isinstance(part, ModalEncoderModule):
            # An encoder on the ranks of a language model has its cp.
            cp = tuple(size for size in _CP_SIZES if size <= max(_FEW, tokens // _LEAST_TOKENS))
    if not _can_shard(part, max(tp), vocabulary=True):  # every rank of tp computes the whole head
        layers = [replace(one, tp_cuts="never") if one.tp_cuts == "vocabulary" else one for one in layers]
    # Encoders keep their activations whole: it is for language models that sharding them is tested.
    sequence = not isinstance(part, ModalEncoderModule) and _can_shard(part, max(tp), sequence=True)
    ep = _list_expert_sizes(part)
    return ModuleCost(name, tuple(layers), tp_sizes=tp, cp_sizes=cp, tp_sequence=sequence, ep_sizes=ep)


def _list_expert_sizes(part: nn.Module) -> tuple[int, ...]:
    """Return the numbers of ranks over which the experts of a module can be shared out."""
    counts = [int(one.__dict__["num_experts"]) for one in find_experts(unwrap(part)).values()]
    try:
        check_expert_plan(part, 1)
    except ConfigError:  # it has none, or none that can be cut
        return (1,)
    return tuple(size for size in range(1, gcd(*counts) + 1) if gcd(*counts) % size == 0)


def _can_shard(part: nn.Module, tp: int, sequence: bool = False, vocabulary: bool = False) -> bool:
    """Return whether tp can shard the activations between layers, or the vocabulary, of a model."""
    try:
        check_tensor_plan(part, tp, sequence=sequence, vocabulary=vocabulary)
    except (ConfigError, AttributeError):  # an encoder may have no embeddings to ask for
        return False
    return True
