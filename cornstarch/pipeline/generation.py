"""Continuing texts with a model that is cut into stages: all of them compute each token together."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel

if TYPE_CHECKING:
    from cornstarch.pipeline.apply import Pipeline
    from cornstarch.pipeline.programs import Inputs

_UNDERSTOOD = {"max_new_tokens", "eos_token_id", "pad_token_id", "do_sample"}
_MOST = 20  # new tokens, if nothing is said; as transformers does it


@torch.no_grad()
def generate(pipeline: Pipeline, input_ids: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Continue texts, padded on the left, with the likeliest token each time; the result has the prompt in front.

    All processes of a replica must ask, and get the same. Nothing is cached: each token costs a forward pass of the
    whole text. To generate much, load a checkpoint in one process, or export it.
    """
    batch = {name: value for name, value in options.items() if isinstance(value, Tensor | dict)}
    settings = {name: value for name, value in options.items() if name not in batch and value is not None}
    _check(settings)
    ends = _ends(settings.get("eos_token_id"))
    padding = settings.get("pad_token_id", min(ends, default=0))
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    prompt = input_ids.shape[1]
    for _ in range(settings.get("max_new_tokens", _MOST)):
        new = _next(pipeline, {"input_ids": input_ids, "attention_mask": mask, **batch}, prompt).to(input_ids.device)
        new = torch.where(ended, torch.full_like(new, padding), new)
        input_ids = torch.cat([input_ids, new[:, None]], 1)
        mask = torch.cat([mask, (~ended).to(mask)[:, None]], 1)
        for end in ends:
            ended |= new == end
        if bool(ended.all()):
            break
    return input_ids


def _check(settings: dict[str, Any]) -> None:
    unknown = sorted(settings.keys() - _UNDERSTOOD)
    if unknown or settings.get("do_sample"):
        raise ConfigError(
            f"generate({(unknown or ['do_sample'])[0]}=…): a model that is cut into stages only takes the likeliest "
            "token. Load a checkpoint in one process to generate otherwise."
        )


def _ends(said: Any) -> Collection[int]:
    if said is None:
        return ()
    return [int(one) for one in said] if isinstance(said, list | tuple) else [int(said)]


def _next(pipeline: Pipeline, inputs: Inputs, prompt: int) -> Tensor:
    """Return the likeliest next token of each text, whose first `prompt` tokens were given, on every process."""
    found = torch.zeros(len(inputs["input_ids"]), dtype=torch.int64, device=pipeline.device)

    def last_logits(model: nn.Module, given: Inputs) -> Tensor:
        logits: Tensor = model(**pipeline.moved(given)).logits[:, -1]
        return logits

    def finish(_: int, logits: Tensor) -> None:
        found.copy_(logits.argmax(-1))

    with ExitStack() as stack:
        stack.enter_context(pipeline.called_for(last_logits))
        for program in pipeline.programs.values():
            if isinstance(program.model, MultimodalModel):
                stack.enter_context(program.model.prompt_of(prompt))
        pipeline.forward([inputs], finish)
    dist.broadcast(found, pipeline.rank_with_loss, group=pipeline.post.group)
    return found


__all__ = ["generate"]
