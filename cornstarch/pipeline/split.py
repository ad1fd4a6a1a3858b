"""Cutting any model into pipeline stages, without code for any model.

    template = PipelineTemplate.split(model, 2)
    part = cut(model, template, stage=0)
    payload = part({"input_ids": ids})          # what stage 1 must be given as `received`

The model's own forward is kept; what other stages own is taken out of it. See `holes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.pipeline.anatomy import frame_of
from cornstarch.pipeline.findings import Survey
from cornstarch.pipeline.holes import Elsewhere
from cornstarch.pipeline.parts import Call, StagePart, call_with_names, make_part
from cornstarch.pipeline.payload import Payload
from cornstarch.pipeline.sequential import SequentialPart, make_sequential_part, sequential_stages
from cornstarch.pipeline.survey import survey
from cornstarch.pipeline.survey import survey as find_out

if TYPE_CHECKING:
    from cornstarch.pipeline.template import PipelineTemplate


def cut(
    model: nn.Module,
    template: PipelineTemplate,
    stage: int,
    survey: Survey | None = None,
    call: Call | None = None,
) -> StagePart:
    """Make one stage out of a model, in place: what other stages own is given up, and its memory with it.

    Parameters keep their names. A model on the meta device stays there. For several stages of one model, copy it first.

    Args:
        model: A transformers model, also inside PEFT; a `ModalEncoderModule`; an `nn.Sequential`.
        template: Which modules each stage has.
        stage: Which of its stages to make.
        survey: How the model is made, if that is known already.
        call: Runs the model on a batch, if `model(**inputs)` does not: a `MultimodalModel` around its language model.
    """
    if any(isinstance(part, Elsewhere) for part in model.modules()):
        raise ConfigError(f"{type(model).__name__} was cut into stages before. Copy the whole model for each stage.")
    known = survey if survey is not None else find_out(model)
    starts = template.starts(model, known)
    if not 0 <= stage < len(starts):
        raise ConfigError(f"stage = {stage}: {template!r} has the stages 0 to {len(starts) - 1}.")
    if isinstance(frame_of(model).inner, nn.Sequential):
        return make_sequential_part(model, starts, stage, call)
    return make_part(model, known, starts, stage, call or call_with_names)


__all__ = ["Payload", "SequentialPart", "StagePart", "Survey", "cut", "sequential_stages", "survey"]
