"""Plan files: the sections of a config that a planned run replaces, `parallel` and `loop`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cornstarch.config.config_file import write_data
from cornstarch.config.run import RunConfig
from cornstarch.plan.plan import ModulePlan
from cornstarch.plan.validation import as_data

if TYPE_CHECKING:
    from cornstarch.plan.predict import Prediction


def plan_sections(best: Prediction, config: RunConfig) -> dict[str, Any]:
    """Return the sections of a config for a predicted plan: `parallel`, and some keys of `loop`."""
    choice = best.candidate
    modules = {name: _module_data(plan, _layers(best, name)) for name, plan in choice.modules}
    copies = {} if choice.replicate is None else {"replicate": choice.replicate}
    parallel: dict[str, Any] = {"modules": modules, "data": {"kind": choice.kind, **copies}}
    if len(modules) > 1:
        parallel["ranks"] = choice.ranks
    if choice.is_pipeline:
        parallel["schedule"] = choice.schedule
    if config.parallel.verify != "auto":
        parallel["verify"] = config.parallel.verify
    loop: dict[str, Any] = {
        "batch_size": config.loop.batch_size,
        "gradient_accumulation_steps": choice.microbatches,
    }
    if config.loop.activation_checkpointing:  # the modules of the plan have it
        loop["activation_checkpointing"] = False
    if config.loop.activation_bytes is not None:
        loop["activation_budget"] = 1.0
    return {"parallel": parallel, "loop": loop}


def _module_data(plan: ModulePlan, layers: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the options of a module that differ from their defaults."""
    data, usual = as_data(dataclasses.replace(plan, layers=layers)), as_data(ModulePlan())
    return {name: value for name, value in data.items() if value != usual[name]}


def _layers(best: Prediction, name: str) -> tuple[int, ...] | None:
    """Return how many layers each part of a module has; None if there is one part."""
    starts = best.starts[name]
    ends = (*starts[1:], best.layers[name])
    return tuple(end - start for start, end in zip(starts, ends, strict=True)) if len(starts) > 1 else None


def with_plan(config: RunConfig, best: Prediction) -> RunConfig:
    """Return a config with a predicted plan."""
    return replace_sections(config, plan_sections(best, config))


def replace_sections(config: RunConfig, sections: dict[str, Any]) -> RunConfig:
    """Return a config with the sections of a plan."""
    data = as_data(config)
    return RunConfig.model_validate({**data, "parallel": sections["parallel"], "loop": data["loop"] | sections["loop"]})


def write_plan(best: Prediction, config: RunConfig, comments: list[str]) -> str:
    """Return a plan file that `cornstarch train CONFIG --plan FILE` takes, with comments at its top."""
    return "".join(f"# {line}\n" for line in comments) + write_data(plan_sections(best, config))
