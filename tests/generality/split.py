"""Cut every causal language model and every encoder that transformers can build tiny into stages; judge the result.

A model is cut at each boundary that is allowed, in two, and once in three, in one process. *supported*: loss and every
gradient are those of the whole model; *refused*: the package said why it cannot; *not built*: there is no small working
model; anything else is *wrong*, and a defect.

`python -m tests.generality.split` judges them all and puts what was found into the tested table.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.pipeline.split import survey
from cornstarch.pipeline.template import PipelineTemplate
from tests.generality import results
from tests.generality.tensor import built, is_activation, largest_difference, leaves, weighed
from tests.models import sweep
from tests.models.shrink import LAYER_COUNTS
from tests.models.sweep import NOT_BUILT, REFUSED, SUPPORTED, WRONG, NotBuiltError
from tests.pipeline.protocol import collect_staged_gradients, stages_of, whole_gradients
from tests.zoo import build

LAYERS = 4
SECONDS = 90.0


@dataclass(frozen=True)
class SplitVerdict:
    """What came of cutting one model."""

    model: str
    status: str
    reason: str = ""
    cuts: int = 0
    """At how many boundaries it was cut."""


def judge_split(model_name: str) -> SplitVerdict:
    """Cut one model wherever it may be cut, and compare it with itself in one piece."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with firm_limit(sweep.SECONDS_PER_MODEL):
                model, inputs = deepen(*built(model_name))
            with firm_limit(SECONDS):
                return judge_cuts(model_name, model, inputs)
        except NotBuiltError as error:
            return SplitVerdict(model_name, NOT_BUILT, str(error))
        except ConfigError as error:
            return SplitVerdict(model_name, REFUSED, str(error))
        except Exception as error:
            return SplitVerdict(model_name, WRONG, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def firm_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in a block that computes too long, and again if it goes on with something else."""
    with sweep.time_limit(seconds):
        signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
        yield


def judge_cuts(model_name: str, model: nn.Module, inputs: dict[str, Tensor]) -> SplitVerdict:
    """Compare each cut with the whole."""

    def loss_of(output: Any) -> Tensor:
        values = [output.logits] if "input_ids" in inputs else list(leaves(output))
        found = [value for value in values if is_activation(value)]
        real = inputs["attention_mask"].bool() if "input_ids" in inputs else ...
        if not found:
            raise NotBuiltError("no output has a gradient")
        return torch.stack([weighed(value[real].float()) for value in found]).sum()

    expected = whole_gradients(model, [inputs], loss_of)
    found = survey(model)
    places = found.boundaries
    if not places:
        why = next(iter(found.barred.values()), "it has one layer and nothing behind it")
        return SplitVerdict(model_name, REFUSED, f"cannot be cut anywhere: {why}")
    starts = [[0, place] for place in places]
    starts += [[0, places[0], places[-1]]] if len(places) > 1 else []
    for one in starts:
        parts = stages_of(model, template_of(model, one))
        difference = largest_difference(collect_staged_gradients(parts, [inputs], loss_of), expected)
        if difference:
            return SplitVerdict(model_name, WRONG, f"cut at {one[1:]}: {difference}")
    return SplitVerdict(model_name, SUPPORTED, cuts=len(places))


def template_of(model: nn.Module, starts: list[int]) -> PipelineTemplate:
    """Make a template whose stages begin with these segments."""
    found = survey(model)
    ends = [*starts[1:], len(found.layers) + 1]
    stages = [
        [name for name in found.modules if start <= found.segment_of(name) < end]
        for start, end in zip(starts, ends, strict=True)
    ]
    return PipelineTemplate(PipelineTemplate.get_model_name(model), stages)


def deepen(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Give a model twice as many layers, if it can have them: with two there is little to cut."""
    assert isinstance(model, PreTrainedModel)
    config = copy.deepcopy(model.config)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        count = next((vars(part)[name] for name in LAYER_COUNTS if isinstance(vars(part).get(name), int)), 0)
        if not 1 < count < LAYERS:
            continue
        for name, value in list(vars(part).items()):
            if name in LAYER_COUNTS and value == count:
                setattr(part, name, 2 * count)
            elif isinstance(value, list) and len(value) == count and name != "architectures":
                setattr(part, name, value * 2)
    try:
        deep = build(type(model), config).eval()
        with torch.no_grad():
            deep(**inputs)
    except Exception:
        return model, inputs
    return deep, inputs


def main() -> None:
    """Judge all, or those that are named."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or results.all_names(results.LANGUAGE_MODELS, results.ENCODERS)
    verdicts = []
    for name in names:
        start = time.perf_counter()
        verdict = judge_split(name)
        verdicts.append(verdict)
        took = time.perf_counter() - start
        print(
            f"{verdict.status:10} {name}  {verdict.cuts} {took:.1f}s {' '.join(verdict.reason.split())[:300]}",
            flush=True,
        )
    counts = Counter((results.group_of(verdict.model), verdict.status) for verdict in verdicts)
    print(", ".join(f"{number} {group} {status}" for (group, status), number in counts.items()))
    found = {one.model: results.entry(one.status, one.reason) for one in verdicts}
    results.keep("pp", found, whole_sweep=not sys.argv[1:])
    if any(verdict.status == WRONG for verdict in verdicts):
        raise SystemExit("some models are wrong")


if __name__ == "__main__":
    main()
