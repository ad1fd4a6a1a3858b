"""The sizes over which a module can be sharded, found on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd

from torch import nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.batch import check_tokens
from cornstarch.parallel.expert import check_expert_plan, find_experts
from cornstarch.parallel.tensor.regions import TensorPlan, get_linear, plan_regions
from cornstarch.parallel.tensor.shard_layers import check_tensor_plan
from cornstarch.plan.cost import LayerCost, ModuleCost

_TP_SIZES = (1, 2, 4, 8, 16, 32, 64)
_CP_SIZES = (*_TP_SIZES, 128, 256, 512, 1024)
_FEW, _LEAST_TOKENS = 8, 1024
"""Above a cp of 8, each rank has at least so many tokens of a row."""


@dataclass(frozen=True)
class ModuleSizes:
    """The sizes over which a module can be sharded, and what tp shards beside its products."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    sequence: bool
    vocabulary: bool
    cut: frozenset[int] | None = None
    """The parameters that tp cuts, by id. None: unknown, and tp is 1."""
    tables: frozenset[int] = frozenset()
    """Those that it cuts with `tp_vocabulary`: of the embeddings and the head."""

    def count_whole(self, parameters: Iterable[nn.Parameter]) -> dict[str, int]:
        """Return how many numbers of these parameters every rank of tp has: always, or without `tp_vocabulary`."""
        left = [] if self.cut is None else [one for one in parameters if id(one) not in self.cut]
        tables = sum(one.numel() for one in left if id(one) in self.tables and self.vocabulary)
        return {"whole_parameters": sum(one.numel() for one in left) - tables, "table_parameters": tables}

    def build_cost(self, name: str, layers: Sequence[LayerCost]) -> ModuleCost:
        if not self.vocabulary:  # every rank of tp computes the whole head
            layers = [replace(one, tp_cuts="never") if one.tp_cuts == "vocabulary" else one for one in layers]
        return ModuleCost(
            name, tuple(layers), tp_sizes=self.tp, cp_sizes=self.cp, tp_sequence=self.sequence, ep_sizes=self.ep
        )


def find_module_sizes(part: nn.Module, is_language_model: bool, tokens: int) -> ModuleSizes:
    """Return the sizes of tp, cp and ep that suit a module; tokens: of a row of the language model."""
    tp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    found: TensorPlan | None = None
    with suppress(ConfigError):
        found = plan_regions(part)
        tp = tuple(size for size in _TP_SIZES if not any(region.misfits(size) for region in found.regions))
    with suppress(ConfigError):
        if is_language_model:
            check_tokens(part, 2)
        if is_language_model or isinstance(part, ModalEncoderModule):
            # An encoder on the ranks of a language model has its cp.
            cp = tuple(size for size in _CP_SIZES if size <= max(_FEW, tokens // _LEAST_TOKENS))
    # Encoders keep their activations whole: it is for language models that sharding them is tested.
    sequence = not isinstance(part, ModalEncoderModule) and _can_shard(part, max(tp), found, sequence=True)
    vocabulary = _can_shard(part, max(tp), found, vocabulary=True)
    inner = unwrap(part)
    cut = None if found is None else frozenset(_list_cut(inner, found))
    tables: frozenset[int] = frozenset()
    if vocabulary and isinstance(inner, PreTrainedModel):
        both = (inner.get_input_embeddings(), inner.get_output_embeddings())
        tables = frozenset(id(p) for table in both if table is not None for p in table.parameters())
    return ModuleSizes(tp, cp, _list_expert_sizes(part), sequence, vocabulary, cut, tables)


def _list_cut(inner: nn.Module, found: TensorPlan) -> Iterator[int]:
    """Yield the ids of the parameters of which each rank of tp gets a shard."""
    for name, style in found.styles.items():
        if style.kind in ("column", "row") and (layer := get_linear(inner, name)) is not None:
            yield id(layer.weight)
            if style.kind == "column" and layer.bias is not None:  # a row's ranks each add a part of its bias
                yield id(layer.bias)
        elif style.kind in ("heads", "expert"):
            yield id(inner.get_parameter(name))


def _list_expert_sizes(part: nn.Module) -> tuple[int, ...]:
    """Return the numbers of ranks over which the experts of a module can be shared out."""
    counts = [int(one.__dict__["num_experts"]) for one in find_experts(unwrap(part)).values()]
    try:
        check_expert_plan(part, 1)
    except ConfigError:  # it has none, or none that can be cut
        return (1,)
    return tuple(size for size in range(1, gcd(*counts) + 1) if gcd(*counts) % size == 0)


def _can_shard(
    part: nn.Module, tp: int, found: TensorPlan | None, sequence: bool = False, vocabulary: bool = False
) -> bool:
    """Return whether tp can shard the activations between layers, or the vocabulary, of a model."""
    try:
        check_tensor_plan(part, tp, sequence=sequence, vocabulary=vocabulary, found=found)
    except (ConfigError, AttributeError):  # an encoder may have no embeddings to ask for
        return False
    return True
