"""What several processes are refused, in the tests here: each function returns what was said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.attention import MaskSpec, use_mask
from cornstarch.errors import ConfigError
from cornstarch.parallel.context import shard_items, shard_tokens, unshard_tokens, verify_tokens
from tests import zoo
from tests.parallel.context.special import Normed, llama
from tests.parallel.context.work import TOKENS, mesh, pad_rows, text


def said(call: Callable[[], Any]) -> str:
    """Return what a call is refused with; "" if it is not."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


class Neighbours(nn.Module):
    """Adds a token's neighbour to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        """Mix."""
        return self.inner(states + 0.5 * nn.functional.pad(states, (0, 0, 1, 0))[:, :-1])


class Counting(nn.Module):
    """Adds something that grows with the place in what it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        """Count."""
        return self.inner(states + torch.arange(states.shape[1]).sqrt()[:, None])


class Elsewhere(nn.Module):
    """Stands for attention of a model's own."""

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Attend to nothing."""
        return hidden_states, None


def collect_refused_models() -> dict[str, str]:
    """Verify models that mix tokens beside attention."""
    changes: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
        "mixes neighbours": ("mlp", Neighbours),
        "counts from where a rank begins": ("mlp", Counting),
        "attends in one layer only": ("self_attn", lambda module: Elsewhere()),
    }
    found = {}
    for name, (part, change) in changes.items():
        model = llama()
        shard_tokens(model, mesh())
        layer = model.model.layers[1]
        setattr(layer, part, change(getattr(layer, part)))
        found[name] = said(lambda model=model: verify_tokens(model))
    # A model that is refused is left as it was.
    found["afterwards, as before"] = "" if model(**text()).logits.shape[1] == TOKENS else "cut"
    found["cut again"] = said(lambda: shard_tokens(model, mesh()))
    return found


def collect_refused_batches() -> dict[str, str]:
    """Give a model whose tokens are cut what it cannot take."""
    model, batch = llama(), text()
    shard_tokens(model, mesh(), distribution="zigzag")
    shorter = {name: value[:, : value.shape[1] - dist.get_rank()] for name, value in batch.items()}
    mask = pad_rows()["attention_mask"]
    hole = mask.clone()
    hole[0, 5] = 0
    cases: dict[str, dict[str, Any]] = {
        "other batch": shorter,
        "4-D mask": {**batch, "attention_mask": torch.ones(2, 1, 37, 37)},
        "hole": {**batch, "attention_mask": hole},
        "padding in front": {**batch, "attention_mask": mask.flip(1)},
        "labels at padding": {**batch, "attention_mask": mask},
        "positions": {**batch, "position_ids": torch.arange(37)[None].expand(2, -1) % 20},
        "one token": {name: value[:, :1] for name, value in batch.items()},
        "logits_to_keep": {**batch, "logits_to_keep": 1},
        "router": {**batch, "output_router_logits": True},
        "nothing": {"labels": batch["labels"]},
        "unknown input": {**batch, "deltas": torch.zeros(2, 3)},
    }
    found = {name: said(lambda given=given: model(**given)) for name, given in cases.items()}
    found["twice"] = said(lambda: shard_tokens(model, mesh()))
    other = llama()
    found["mode"] = said(lambda: shard_tokens(other, mesh(), mode="star"))  # type: ignore[arg-type]
    found["distribution"] = said(lambda: shard_tokens(other, mesh(), distribution="fair"))  # type: ignore[arg-type]
    with use_mask(MaskSpec.from_documents(torch.ones(2, 5, dtype=torch.long))):
        found["other mask"] = said(lambda: model(**batch))
    found["and then a good one"] = said(lambda: model(**batch).loss.backward())
    return found


def collect_refused_rotations() -> dict[str, str]:
    """Cut models that turn positions by the longest of them."""
    sizes = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 8.0}
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **sizes}, "max_position_embeddings": 16}
    long = {"rope_parameters": {"rope_type": "longrope", **factors, **sizes}, "max_position_embeddings": 128}
    found = {}
    for name, config, how, tokens in (
        ("dynamic, long", dynamic, "zigzag", 37),
        ("dynamic, short", dynamic, "zigzag", 15),
        ("longrope, uniform", long, "uniform", 30),
        ("longrope, zigzag", long, "zigzag", 37),
    ):
        model = llama(**config)
        batch = {key: value[:, :tokens] for key, value in text().items()}
        shard_tokens(model, mesh(), distribution=how)  # type: ignore[arg-type]
        found[name] = said(lambda model=model, batch=batch: model(**batch))
        unshard_tokens(model)
    return found


def collect_refused_items() -> dict[str, str]:
    """Deal out what cannot be."""
    items = torch.randn(4, 3)
    normed = shard_items(Normed().train(), mesh())
    clip = shard_items(zoo.ENCODERS["clip"].build(), mesh())
    frozen = shard_items(Normed().eval(), mesh())
    count = 2 + dist.get_rank()
    return {
        "batch norm": said(lambda: normed(pixel_values=items)),
        "different items": said(lambda: clip(**zoo.ENCODERS["clip"].inputs(count))),
        "mesh": said(lambda: shard_items(normed, None)),  # type: ignore[arg-type]
        "unknown input": said(lambda: frozen(pixel_values=items, sizes=torch.zeros(3))),
    }
