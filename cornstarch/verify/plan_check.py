"""A model that nobody has cut before is verified by itself, before a run trains it.

Whether a class has been cut before is told by the tested table (`cornstarch.parallel.tested`). Tokens of a language
model need nothing here: `shard_tokens` computes a short text whole and cut at every start, whatever the class.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from torch import nn
from transformers import PreTrainedModel

from cornstarch.config import RunConfig
from cornstarch.engine.plan_requirements import check_loss
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import distributed
from cornstarch.parallel.apply import iter_planned_modules
from cornstarch.parallel.tensor import check_tensor_plan
from cornstarch.parallel.tested import is_tested
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import ModulePlan

_PULSE = 2.0  # seconds
_OFF = "To train without this check: parallel.verify=never."


def find_untested_modules(model: nn.Module, layout: Layout) -> list[str]:
    """Return what a layout cuts and no test has cut so before: `MyForCausalLM (tp)`. What cannot be cut is refused."""
    found = []
    for module, plan in iter_planned_modules(model, layout):
        inner = unwrap(module.module if isinstance(module, ModalEncoderModule) else module)
        name = type(inner).__name__
        is_known = type(inner).__module__.startswith("transformers.")  # not just a class of the same name
        for axis in _cuts(module, plan):
            if not (is_known and is_tested(name, axis, transformers.__version__)):
                found.append(f"{name} ({axis})")
        if plan.tp > 1:
            vocabulary = plan.tp_vocabulary and not isinstance(module, ModalEncoderModule)
            check_tensor_plan(inner, plan.tp, sequence=plan.tp_sequence, vocabulary=vocabulary)
    return list(dict.fromkeys(found))


def _cuts(module: nn.Module, plan: ModulePlan) -> list[str]:
    deals_items = plan.cp > 1 and isinstance(module, ModalEncoderModule)
    return [axis for axis, is_cut in (("tp", plan.tp > 1), ("cp", deals_items)) if is_cut]


def verify_plan(model: nn.Module, layout: Layout, config: RunConfig, note: Callable[[str], None]) -> None:
    """Try the plan on a tiny twin of the model if it cuts something untested; refuse to train if it is wrong.

    Whether the loss of a model can be computed over parts of a batch is tried in every case.

    All processes must call it. The first one tries it, in local processes of its own; all hear the answer.

    Args:
        model: The model, not cut yet.
        layout: How it will be.
        config: The run.
        note: Tells the user something.
    """
    how = config.parallel.verify
    if how != "never":
        check_loss(model, layout)
    is_cut = any(plan.tp > 1 or plan.cp > 1 for plan in layout.plan.modules.values())
    if how == "never" or not is_cut:
        return
    untested = find_untested_modules(model, layout)
    if how == "auto" and not untested:
        return
    why = f"Not in the table of tested models: {', '.join(untested)}. " if untested else ""
    if distributed.rank() == 0:
        note(f"{why}The plan is tried on a tiny twin of the model first (parallel.verify).")
    refusal = _answer(partial(_refusal, model, config))
    if refusal is not None:
        raise ConfigError(f"{why}{refusal}\n  {_OFF}")


def _answer(ask: Callable[[], str | None]) -> str | None:
    """Return what the first process finds out, on all of them.

    They speak with one another meanwhile: however long it takes, no exchange waits longer than a group allows.
    """
    if distributed.is_single_process():
        return ask()
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask) if distributed.rank() == 0 else None
        while True:
            is_known = asking is not None and bool(wait([asking], _PULSE).done)
            told = distributed.broadcast_json({"refusal": asking.result()} if asking is not None and is_known else None)
            if told is not None:
                return told["refusal"]


def _refusal(model: nn.Module, config: RunConfig) -> str | None:
    """Try the plan; return why not to train with it."""
    # Late: it needs the trainer, which needs this.
    from cornstarch.verify.twin_trial import (
        TrialError,
        build_given_twin_run,
        build_twin_run,
        choose_trial_size,
        run_trial,
    )

    try:
        # One replica, so that both sides see the same batch and the first wrong output can be told.
        ranks, replicas = choose_trial_size(config.parallel, (1, 2, 4))
        with TemporaryDirectory(prefix="cornstarch-verify-") as folder:
            place = Path(folder)
            if config.model.given is None and config.model.factory is None:
                twin = build_twin_run(config, place / "run", replicas)
            elif isinstance(inner := unwrap(model), PreTrainedModel):
                twin = build_given_twin_run(config, inner, place, replicas)
            else:
                return f"The plan cannot be verified: {type(inner).__name__} is no transformers model."
            found = run_trial(twin, ranks, place)
    except TrialError as error:
        return f"The plan cannot be verified, its trial on {ranks} local processes failed:\n  {error}"
    except ConfigError as error:
        return f"The plan cannot be verified: {str(error).rstrip('.')}."
    except Exception as error:  # an odd config, a full disk: the others wait for an answer
        return f"The plan cannot be verified: {type(error).__name__}: {error}."
    if found.is_equal:
        return None
    where = f" It begins in {found.begins}." if found.begins else ""
    worst = max((one.gradients for one in found.parts), default=0.0)
    return (
        f"The plan does something else than one process.{where} Of a tiny twin the loss is off by {found.loss:.1e}, a "
        f"gradient by {worst:.1e}; it is not trained.\n  Use tp = 1 and cp = 1 for what begins there."
    )
