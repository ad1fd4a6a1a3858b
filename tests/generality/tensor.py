"""Cut every causal language model and every encoder that transformers can build tiny over two ranks; judge the result.

*supported*: loss and every gradient are those of one process; *refused*: the package said why it cannot; *not built*:
there is no small working model; anything else is *wrong*, and a defect.

`python -m tests.generality.tensor` judges them all and puts what was found into the tested table.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cornstarch.errors import ConfigError
from cornstarch.parallel.tensor import find_unsharded_modules, gather_full_tensors, shard_tensors
from tests.generality import results
from tests.models import sweep
from tests.models.sweep import NOT_BUILT, REFUSED, SUPPORTED, WRONG, NotBuiltError
from tests.parity.pool import Failed, pool
from tests.zoo import generator, text_batch

RANKS = 2
ROWS = ("tttttttttttt", "tttttt", "ttttttttt")
SECONDS = 240.0


@dataclass(frozen=True)
class TensorVerdict:
    """What came of cutting one model."""

    model: str
    status: str
    reason: str = ""
    whole: tuple[str, ...] = ()
    """What was left whole, and why, one line for each kind of module."""


def judge_tensor(model_name: str) -> TensorVerdict:
    """Cut one model over two processes and compare it with itself in one process."""
    try:
        verdicts: list[TensorVerdict] = pool().run(RANKS, judge_here, model_name, seconds=SECONDS)
    except Failed as failure:
        return TensorVerdict(model_name, WRONG, str(failure).strip().splitlines()[-1])
    return next((verdict for verdict in verdicts if verdict.status == WRONG), verdicts[0])


def judge_here(model_name: str) -> TensorVerdict:
    """Judge, in each of the processes."""
    transformers.logging.set_verbosity_error()
    whole: tuple[str, ...] = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with sweep.time_limit(sweep.SECONDS_PER_MODEL):
                model, inputs = built(model_name)
            expected = passed(model, inputs)
            for parameter in model.parameters():
                parameter.grad = None
            left = find_unsharded_modules(model)
            whole = tuple(sorted({f"{type(model.get_submodule(name)).__name__}: {why}" for name, why in left.items()}))
            shard_tensors(model, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
            difference = largest_difference(passed(model, inputs), expected)
        except NotBuiltError as error:
            return TensorVerdict(model_name, NOT_BUILT, str(error))
        except ConfigError as error:
            return TensorVerdict(model_name, REFUSED, str(error))
        except Exception as error:
            return TensorVerdict(model_name, WRONG, f"{type(error).__name__}: {error}", whole)
    return TensorVerdict(model_name, WRONG if difference else SUPPORTED, difference, whole)


def built(model_name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a tiny model, and what it reads."""
    if model_name in sweep.language_model_names():
        batch = text_batch(ROWS)
        return sweep.build_language_model(model_name), {key: batch[key] for key in ("input_ids", "attention_mask")}
    model, items = sweep.build_encoder(getattr(transformers, model_name))
    return model, items.together


def passed(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the loss and all gradients of one pass."""
    torch.manual_seed(0)
    output = model(**inputs)
    values = [output.logits] if "input_ids" in inputs else list(leaves(output))
    found = [value for value in values if is_activation(value)]
    real = inputs["attention_mask"].bool() if "input_ids" in inputs else ...
    loss = sum(weighed(value[real].float()) for value in found)
    if not isinstance(loss, Tensor):
        raise NotBuiltError("no output has a gradient")
    loss.backward()
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: gradient.clone() for name, gradient in gather_full_tensors(model, given).items()}
    return {"loss": loss.detach(), **{name: gradients.get(name) for name, _ in model.named_parameters()}}


def leaves(value: Any) -> Iterator[Any]:
    """Yield what an output is made of."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def is_activation(value: Any) -> bool:
    """Say whether part of an output has a gradient."""
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def weighed(value: Tensor) -> Tensor:
    """Return a number that all of an activation has a part in."""
    return (value * torch.randn(value.shape, generator=generator(4))).mean()


def largest_difference(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> str:
    """Say where two passes differ most, beyond rounding; "" if nowhere."""
    if found.keys() != expected.keys():
        return "other parameters than before"
    scale = max(float(value.abs().max()) for value in expected.values() if value is not None and value.numel())
    worst, where = 1.0, ""
    for name, value in expected.items():
        other = found[name]
        if (value is None) != (other is None):
            return f"{name} has {'no' if other is None else 'a'} gradient"
        if value is None or other is None or not value.numel():
            continue
        allowed = 1e-4 * value.abs().max() + 1e-5 * scale
        ratio = float((other - value).abs().max() / allowed)
        if not ratio <= worst:
            worst, where = ratio, f"{name} differs by {float((other - value).abs().max()):.2g}"
    return where


def main() -> None:
    """Judge all, or those that are named."""
    names = sys.argv[1:] or results.all_names(results.LANGUAGE_MODELS, results.ENCODERS)
    verdicts = []
    for name in names:
        verdict = judge_tensor(name)
        verdicts.append(verdict)
        lines = [f"{verdict.status:10} {name}  {' '.join(verdict.reason.split())[:300]}"]
        lines += [f"{'':10}   whole: {line}" for line in verdict.whole]
        print("\n".join(lines), flush=True)
    counts = Counter(verdict.status for verdict in verdicts)
    partly = sum(verdict.status == SUPPORTED and bool(verdict.whole) for verdict in verdicts)
    print(", ".join(f"{number} {status}" for status, number in counts.items()), f"({partly} of them partly whole)")
    found = {one.model: results.entry(one.status, one.reason, one.whole) for one in verdicts}
    results.keep("tp", found, whole_sweep=not sys.argv[1:])
    pool().close()
    if counts[WRONG]:
        raise SystemExit("some models are wrong")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
