"""Is the loss of a model a mean over tokens? Only then does it not matter how a batch is dealt out to ranks.

Models with a router may add a loss over all tokens of a batch, so that experts are used evenly
(`output_router_logits`). It is no sum over tokens: of each half of a batch it is another one than of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.facts import IGNORED
from cornstarch.models.multimodal_language_model.unwrap import accepts, unwrap
from cornstarch.models.twin import disturb, twin_config
from cornstarch.plan.layout import Layout
from cornstarch.plan.options import APART

_ROWS, _TOKENS = 4, 12
_SAME = 2e-6  # of the loss; rounding is below 5e-7, a router's loss that is weighted with 1e-3 makes more than 1e-5


def check_loss(model: nn.Module, layout: Layout) -> None:
    """Refuse a loss that ranks would compute over other tokens than one process does.

    Args:
        model: The model, not cut yet.
        layout: How it will be.
    """
    cuts = _cuts(layout)
    inner = unwrap(model.language_model) if isinstance(model, MultimodalModel) else unwrap(model)
    if not cuts or not isinstance(inner, PreTrainedModel) or not depends_on_batch(inner):
        return
    router = getattr(inner.config.get_text_config(), "output_router_logits", False)
    why = " (output_router_logits = True adds a loss over all tokens of a batch)" if router else ""
    advice = "Set output_router_logits to false in the model's config.json" if router else "Use one replica"
    raise ConfigError(
        f"The loss of {type(inner).__name__} is no mean over tokens: of two rows it is another one than of each row by "
        f"itself{why}. With {cuts} no rank has all that it is computed from, and the run would train something else "
        f"than one process.\n  {advice}. Replicas that each compute it over their own rows, as most libraries have it: "
        "parallel.verify=never."
    )


def _cuts(layout: Layout) -> str:
    """Return what deals the tokens of a batch, or the layers that see them, out to ranks; empty if nothing does."""
    plans = layout.plan.modules.values()
    found = [f"{layout.dp} replicas"] if layout.dp > 1 and layout.plan.data.kind not in APART else []
    found += ["context parallelism"] if any(plan.cp > 1 for plan in plans) else []
    found += ["several stages"] if any(plan.stages > 1 for plan in plans) else []
    return ", ".join(found)


def depends_on_batch(model: PreTrainedModel) -> bool:
    """Whether the loss of two rows is another one than the mean over the tokens of each: tried on a tiny twin."""
    if not (accepts(model, "input_ids") and accepts(model, "labels")):
        return False
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            twin = type(model)(twin_config(model.config))
            disturb(twin, scale=1.0)  # a router that is sure of itself
            return _differs(twin.train())
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        # There is no twin, or it takes other labels: what transformers calls the option is all that is known.
        return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


@torch.no_grad()
def _differs(twin: PreTrainedModel) -> bool:
    words = twin.config.get_text_config().vocab_size
    # Rows of one word each, so that a router sends each to other experts; with different numbers of labels.
    ids = torch.tensor([[words * (row + 1) // (_ROWS + 1)] for row in range(_ROWS)]).expand(_ROWS, _TOKENS)
    labels = ids.clone()
    for row in range(_ROWS):
        labels[row, : 1 + row] = IGNORED  # the first one always: some models shift labels, others do not
    options = {"use_cache": False} if accepts(twin, "use_cache") else {}

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return twin(input_ids=ids, labels=labels, **options).loss

    together = loss(ids, labels)
    if not torch.equal(together, loss(ids, labels)):  # noise that the twin's config does not name
        twin.eval()
        together = loss(ids, labels)
    each = torch.stack([loss(*row) for row in zip(ids.split(1), labels.split(1), strict=True)])
    counts = (labels != IGNORED).sum(1)
    mean = (each * counts).sum() / counts.sum()
    return bool((together - mean).abs() > _SAME * mean.abs())


__all__ = ["check_loss", "depends_on_batch"]
