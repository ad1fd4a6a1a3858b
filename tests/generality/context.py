"""Cut what every model that transformers can build tiny computes over two ranks, and judge the result.

Of causal language models the tokens are cut, of encoders the items are dealt out. *supported*: loss and every gradient
are those of one process; for language models in every mode, for padded rows and for packed documents; *refused*: the
package said why it cannot; *not built*: there is no small working model; anything else is *wrong*, and a defect.

`python -m tests.generality.context` judges them all and puts what was found into the tested table.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import get_args

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from cornstarch.attention import MaskSpec, use_mask
from cornstarch.errors import ConfigError
from cornstarch.parallel.context import Mode, shard_items, shard_tokens, unshard_tokens
from tests.generality import results
from tests.generality.tensor import built, is_activation, largest_difference, leaves, weighed
from tests.models import sweep
from tests.models.sweep import NOT_BUILT, REFUSED, SUPPORTED, WRONG, NotBuiltError, Verdict
from tests.parallel.context.work import Gradients, difference, gradients, shuffle_rows, summed
from tests.parity.pool import Failed, pool
from tests.zoo import IGNORED, text_batch

RANKS = 2
ROWS = ("tttttttttttttttttt", "tttttt", "ttttttttttt")
SECONDS = 240.0
MODES: tuple[str, ...] = get_args(Mode)

Found = tuple[Tensor, Gradients]


def judge_context(model_name: str) -> Verdict:
    """Cut one model's tokens over two processes and compare it with itself in one process."""
    try:
        verdicts: list[Verdict] = pool().run(RANKS, judge_here, model_name, seconds=SECONDS)
    except Failed as failure:
        return Verdict(model_name, WRONG, str(failure).strip().splitlines()[-1])
    return next((verdict for verdict in verdicts if verdict.status == WRONG), verdicts[0])


def judge_here(model_name: str) -> Verdict:
    """Judge, in each of the processes."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with sweep.time_limit(sweep.SECONDS_PER_MODEL):
                model, items = built(model_name)
            found = differences(model) if "input_ids" in items else dealt_differences(model, items)
        except NotBuiltError as error:
            return Verdict(model_name, NOT_BUILT, str(error))
        except ConfigError as error:
            return Verdict(model_name, REFUSED, str(error))
        except Exception as error:
            return Verdict(model_name, WRONG, f"{type(error).__name__}: {error}")
    return Verdict(model_name, WRONG if found else SUPPORTED, found)


def differences(model: PreTrainedModel) -> str:
    """Say how a model whose tokens are cut differs from the whole one, in whatever mode."""
    padded = text_batch(ROWS)
    # Before anything of the model is changed: what its own code computes.
    with sweep.harness(type(model).__name__):
        expected = passed(model, padded, None)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    packed, spec = pack_batch()
    whole: Found | None = None
    for mode in MODES:
        shard_tokens(model, mesh, mode=mode, distribution=shuffle_rows)  # type: ignore[arg-type]
        found = together(passed(model, padded, None))
        other = together(passed(model, packed, spec))
        unshard_tokens(model)
        whole = whole or passed(model, packed, spec)
        for what, one, truth in (("padded", found, expected), ("packed", other, whole)):
            if said := said_difference(one, truth):
                return f"{mode}, {what}: {said}"
    return ""


def dealt_differences(encoder: nn.Module, items: dict[str, Tensor]) -> str:
    """Say how an encoder whose items are dealt out differs from one that has them all."""
    with sweep.harness(type(encoder).__name__):
        expected = encoded(encoder, items, 1)
    shard_items(encoder, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)))
    found = together(encoded(encoder, items, RANKS))
    return largest_difference({"loss": found[0], **found[1]}, {"loss": expected[0], **expected[1]})


def encoded(encoder: nn.Module, items: dict[str, Tensor], shares: int) -> Found:
    """Return a share of a number that all of the output has a part in, and every gradient of it."""
    torch.manual_seed(0)
    loss = sum(weighed(value.float()) for value in leaves(encoder(**items)) if is_activation(value))
    if not isinstance(loss, Tensor):
        raise NotBuiltError("no output has a gradient")
    return loss.detach() / shares, gradients(encoder, loss / shares)


def said_difference(found: Found, expected: Found) -> str:
    """Compare losses, then gradients."""
    if not torch.allclose(found[0], expected[0], rtol=1e-4):
        return f"loss {float(found[0]):.6f} instead of {float(expected[0]):.6f}"
    return difference(found[1], expected[1])


def pack_batch() -> tuple[dict[str, Tensor], MaskSpec]:
    """Return one row of two documents and padding."""
    batch = text_batch(("ttttttttttttttttttttt",))
    documents = torch.ones_like(batch["input_ids"])
    documents[0, 9:18], documents[0, 18:] = 2, 0
    spec = MaskSpec.from_documents(documents)
    labels = batch["labels"].masked_fill((documents == 0) | (spec.positions() == 0), IGNORED)
    masked = {"attention_mask": (documents > 0).long(), "position_ids": spec.positions()}
    return {"input_ids": batch["input_ids"], "labels": labels, **masked}, spec


def passed(model: PreTrainedModel, batch: dict[str, Tensor], spec: MaskSpec | None) -> Found:
    """Return the loss of a batch and every gradient."""
    with nullcontext() if spec is None else use_mask(spec):
        loss = model(**batch).loss
    return loss.detach(), gradients(model, loss)


def together(found: Found) -> Found:
    """Add up over the ranks."""
    loss = found[0].clone()
    dist.all_reduce(loss)
    return loss, summed(found[1])


def main() -> None:
    """Judge every model, or those that are named; a wrong one makes it fail."""
    names = sys.argv[1:] or results.all_names(results.LANGUAGE_MODELS, results.ENCODERS)
    verdicts = []
    for name in names:
        verdicts.append(judge_context(name))
        print(f"{name}: {verdicts[-1].status} {sweep.cell(verdicts[-1].reason)[:200]}", flush=True)
    counts = Counter(verdict.status for verdict in verdicts)
    print(", ".join(f"{counts[status]} {status}" for status in (SUPPORTED, REFUSED, WRONG, NOT_BUILT)))
    found = {one.model: results.entry(one.status, one.reason) for one in verdicts}
    results.keep("cp", found, whole_sweep=not sys.argv[1:])
    if counts[WRONG]:
        raise SystemExit("some models are wrong: see above")


if __name__ == "__main__":
    main()
