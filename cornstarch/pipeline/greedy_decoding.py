"""Greedy decoding with a model that is split into stages: all stages compute each token together."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel

if TYPE_CHECKING:
    from cornstarch.pipeline.pipeline import Pipeline
    from cornstarch.pipeline.stage_program import Inputs

_OPTIONS = {"max_new_tokens", "eos_token_id", "pad_token_id", "do_sample"}
_MAX_NEW_TOKENS = 20  # the default of transformers


@torch.no_grad()
def generate(pipeline: Pipeline, input_ids: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Continue left-padded prompts with the most likely tokens; the result includes the prompts.

    All processes of a replica must call it, and all get the result. There is no KV cache: each token costs a forward
    pass of the whole sequence. To generate much, load a checkpoint in one process, or export it.
    """
    batch = {name: value for name, value in options.items() if isinstance(value, Tensor | dict)}
    settings = {name: value for name, value in options.items() if name not in batch and value is not None}
    unknown = sorted(settings.keys() - _OPTIONS)
    if unknown or settings.get("do_sample"):
        raise ConfigError(
            f"generate({(unknown or ['do_sample'])[0]}=…): a model that is cut into stages only takes the likeliest "
            "token. Load a checkpoint in one process to generate otherwise."
        )
    eos = settings.get("eos_token_id")
    ends = [] if eos is None else [int(one) for one in (eos if isinstance(eos, list | tuple) else [eos])]
    padding = settings.get("pad_token_id", min(ends, default=0))
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    prompt = input_ids.shape[1]
    for _ in range(settings.get("max_new_tokens", _MAX_NEW_TOKENS)):
        inputs = {"input_ids": input_ids, "attention_mask": mask, **batch}
        new = _compute_next_token(pipeline, inputs, prompt).to(input_ids.device)
        new = torch.where(ended, torch.full_like(new, padding), new)
        input_ids = torch.cat([input_ids, new[:, None]], 1)
        mask = torch.cat([mask, (~ended).to(mask)[:, None]], 1)
        for end in ends:
            ended |= new == end
        if bool(ended.all()):
            break
    return input_ids


def _compute_next_token(pipeline: Pipeline, inputs: Inputs, prompt: int) -> Tensor:
    """Return the most likely next token of each row, on every process; the first `prompt` tokens were given."""
    found = torch.zeros(len(inputs["input_ids"]), dtype=torch.int64, device=pipeline.device)

    def compute_last_logits(model: nn.Module, given: Inputs) -> Tensor:
        logits: Tensor = model(**pipeline.move_batch(given)).logits[:, -1]
        return logits

    def finish(_: int, logits: Tensor) -> None:
        found.copy_(logits.argmax(-1))

    with ExitStack() as stack:
        stack.enter_context(pipeline.use_call(compute_last_logits))
        for program in pipeline.programs.values():
            if isinstance(program.model, MultimodalModel):
                stack.enter_context(program.model.use_prompt_length(prompt))
        pipeline.forward([inputs], finish)
    dist.broadcast(found, pipeline.rank_with_loss, group=pipeline.channel.group)
    return found
