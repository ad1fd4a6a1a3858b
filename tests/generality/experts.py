"""Share out the experts of every mixture of experts that transformers can build tiny over two ranks; judge the result.

Each rank computes rows of its own. *supported*: the sum of the losses and every gradient are those of one process that
computes all rows; *refused*: the package said why it cannot; *not built*: there is no small working model; anything
else is *wrong*, and a defect. Models without experts are left out.

`python -m tests.generality.experts` judges them all and puts what was found into the tested table.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cornstarch.errors import ConfigError
from cornstarch.parallel.expert import check_expert_plan, shard_experts
from tests.generality import results
from tests.generality.tensor import built, largest_difference, passed
from tests.models import sweep
from tests.models.sweep import NOT_BUILT, REFUSED, SUPPORTED, WRONG, NotBuiltError, Verdict
from tests.parity.pool import Failed, pool

RANKS = 2
SECONDS = 240.0

Passed = dict[str, Tensor | None]


def list_declared() -> list[str]:
    """Return the language models in whose source transformers declares experts."""
    found = []
    for name in results.all_names(results.LANGUAGE_MODELS):
        module = sys.modules[getattr(transformers, name).__module__]
        if "use_experts_implementation" in vars(module):
            found.append(name)
    return found


def judge_experts(model_name: str) -> Verdict:
    """Share one model's experts out over two processes and compare it with itself in one process."""
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
                model, inputs = built(model_name)
            difference = differences(model, inputs)
        except NotBuiltError as error:
            return Verdict(model_name, NOT_BUILT, str(error))
        except ConfigError as error:
            return Verdict(model_name, REFUSED, str(error))
        except Exception as error:
            return Verdict(model_name, WRONG, f"{type(error).__name__}: {error}")
    return Verdict(model_name, WRONG if difference else SUPPORTED, difference)


def differences(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """Say how a model whose experts are shared out differs from the whole one."""
    check_expert_plan(model, RANKS)
    parts = [{name: value[rank::RANKS] for name, value in inputs.items()} for rank in range(RANKS)]
    expected = added([run(model, part) for part in parts])
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "ep"))
    shard_experts(model, mesh["ep"], mesh["dp"])
    return largest_difference(together(model, run(model, parts[dist.get_rank()])), expected)


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Passed:
    found = passed(model, inputs)
    for parameter in model.parameters():
        parameter.grad = None
    return found


def added(parts: list[Passed]) -> Passed:
    """Return the sums of what several batches came to."""
    found: Passed = {}
    for name in parts[0]:
        there = [value for part in parts if (value := part[name]) is not None]
        found[name] = torch.stack(there).sum(0) if there else None
    return found


def together(model: nn.Module, own: Passed) -> Passed:
    """Return the sums over ranks; the gradients of experts, which every rank has whole by now, are means already."""
    found: Passed = {}
    means = {name for name, one in model.named_parameters() if hasattr(one, "device_mesh")}
    for name, value in own.items():
        there = torch.zeros(()) if value is None else torch.ones(())
        dist.all_reduce(there)
        if name in means and value is not None:
            found[name] = value * RANKS
        elif there:
            found[name] = torch.zeros_like(model.get_parameter(name)) if value is None else value.clone()
            dist.all_reduce(found[name])
        else:
            found[name] = None
    return found


def main() -> None:
    """Judge all, or those that are named; a wrong one makes it fail."""
    names = sys.argv[1:] or list_declared()
    verdicts = []
    for name in names:
        verdicts.append(judge_experts(name))
        print(f"{name}: {verdicts[-1].status} {sweep.cell(verdicts[-1].reason)[:200]}", flush=True)
    counts = Counter(verdict.status for verdict in verdicts)
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    found = {one.model: results.entry(one.status, one.reason) for one in verdicts}
    results.keep("ep", found, whole_sweep=not sys.argv[1:])
    pool().close()
    if counts[WRONG]:
        raise SystemExit("some models are wrong: see above")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
