"""Whole Hugging Face models, taken apart and trained on a batch with images in one process and text in the other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from cornstarch import MultimodalModel
from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.models.multimodal_language_model.import_hf.decompose import UndividedModel
from cornstarch.parallel import apply_data_parallel, data_mesh
from cornstarch.plan import DataPlan
from tests.models.whole_models import FAMILIES, text_batch
from tests.parity.cell import Values, whole_array

_TEXT = ("input_ids", "attention_mask")


def gradients(family: str, kind: str | None, in_one_piece: bool = False) -> Values:
    """Return the gradients of both batches together: each in a process of its own, or both in this one."""
    whole = FAMILIES[family].build()
    batches = [FAMILIES[family].batch(whole), text_batch()]
    made = UndividedModel(whole, "It is tried.") if in_one_piece else MultimodalModel.from_multimodal(whole)
    model = made.train()
    if kind is None:
        for batch in batches:
            (_loss(model, batch) / 2).backward()
    else:
        items = {name: value for name, value in batches[0].items() if name not in _TEXT}
        if in_one_piece:
            alone = FAMILIES[family].batch(whole, "none")
            row = {name: alone.pop(name) for name in _TEXT}
            model.keep_encoders_running({"vision": {"tokens": row, "items": alone}})
        else:
            model.keep_encoders_running(model.split_batch(items)[0])
        wrapped = apply_data_parallel(model, data_mesh("cpu"), DataPlan(kind=kind))  # type: ignore[arg-type]
        for _ in range(2):  # the second time all know in which order layers are used
            model.zero_grad()
            _loss(wrapped, batches[dist.get_rank()]).backward()
    found = {name: parameter.grad for name, parameter in named_parameters(model).items()}
    return {name: None if gradient is None else whole_array(gradient) for name, gradient in found.items()}


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss
