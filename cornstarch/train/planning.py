"""The plan of a run on a cluster: what may be chosen, what was found, and which sections of a config that is.

    found = plan_run(config, Cluster.parse("2x8xH100"))
    planned = with_plan(config, found.best)

Nothing is loaded and nothing is started: costs are counted on the meta device, or read from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.plan.choice import Choice
from cornstarch.plan.compared import Own, Scaled, resized
from cornstarch.plan.cost import ModuleCost, RunCost
from cornstarch.plan.layout import Layout, unexecutable
from cornstarch.plan.plan import LANGUAGE_MODEL, WHOLE_MODEL, ModulePlan, Plan
from cornstarch.plan.predict import Prediction, predict
from cornstarch.plan.search import RUNNERS_UP, Found, search
from cornstarch.plan.space import Space
from cornstarch.report.plan_words import predicted, train_command
from cornstarch.train.config import ModuleParallelConfig, ParallelConfig, RunConfig
from cornstarch.train.source import as_data, write_data

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.facts import DataFacts

WHOLE = Space(ranks=("shared",), most_stages=1)
"""No pipeline: every device has all modules."""


def cost_of(
    config: RunConfig, cluster: Cluster, costs: str | Path | None = None, facts: DataFacts | None = None
) -> RunCost:
    """Return what the layers of a run cost on a device of a cluster.

    Args:
        config: The run.
        cluster: The machines.
        costs: A file of `cornstarch profile`. Default: they are counted.
        facts: What the data is like. Default: samples as long as they may be, with one item for each encoder.
    """
    if costs is None:
        from cornstarch.train.costing import run_cost

        return run_cost(_portioned(config, cluster.devices), cluster.device, facts, is_measured=cluster.measured)
    from cornstarch.train.costing import read_costs

    measured = read_costs(costs, cluster.device)
    names, expected = [module.name for module in measured.modules], module_names(config)
    if len(names) != len(expected) or (len(names) > 1 and names != expected):  # a whole model may have another name
        raise ConfigError(
            f"{costs}: it was measured for {', '.join(names)}; the run has {', '.join(expected)}.\n  Measure this run: "
            "cornstarch profile CONFIG --output FILE."
        )
    return replace(measured, batch=config.loop.batch_size)


def _portioned(config: RunConfig, devices: int) -> RunConfig:
    """Return a run whose portions are about as large as a device has them: costs are those of a portion."""
    batch = config.loop.batch_size
    rows = next(rows for rows in range(max(1, batch // devices), 0, -1) if batch % rows == 0)
    return config.model_copy(update={"loop": config.loop.model_copy(update={"accumulation": batch // rows})})


def plan_run(
    config: RunConfig,
    cluster: Cluster,
    cost: RunCost | None = None,
    runners_up: int = RUNNERS_UP,
    space: Space | None = None,
) -> Found:
    """Return the fastest plan of a run on a cluster, those of other kinds, and why they lost.

    What the config says about `parallel`, `loop.accumulation` and `loop.activation_checkpointing` is what is chosen;
    the rest of it is kept to.

    Args:
        config: The run.
        cluster: The machines.
        cost: Of the run. Default: counted.
        runners_up: How many, at most.
        space: What may be chosen. Default: everything that the rest of the config allows.
    """
    cost = cost or cost_of(config, cluster)
    # Polishing tries zero_bubble, which takes apart what layers in fp8 compute together.
    return search(_allowed(config, cost), cluster, space or _space(config), runners_up, polish=config.fp8 == "off")


def own_plan(config: RunConfig, cluster: Cluster, cost: RunCost) -> Own | None:
    """Return what the config's own plan takes on a cluster; None if it says nothing, or leaves it to us."""
    parallel, loop = config.parallel, config.loop
    if parallel.auto or parallel == ParallelConfig(verify=parallel.verify):
        return None
    plan = _every_module(parallel.plan(), [module.name for module in cost.modules], loop.activation_checkpointing)
    try:
        if reasons := unexecutable(plan):
            raise ConfigError(reasons[0])
        for module in cost.modules:
            _check_layers(plan.modules[module.name], module)
        dp = Layout.of(plan, cluster.devices, cluster.per_node).dp
        return Own(plan, predict(Choice.of(plan, dp, loop.accumulation, _starts(plan)), cost, cluster))
    except ConfigError as error:
        return Own(plan, None, " ".join(str(error).split()))


def what_if(config: RunConfig, cluster: Cluster, cost: RunCost, sizes: Sequence[int]) -> Iterator[Scaled]:
    """Yield the best plan on clusters of other sizes, of the same devices and links and for the same batch."""
    first: float | None = None
    for size in sizes:
        one = resized(cluster, size)
        best = plan_run(config, one, cost, runners_up=0).best
        rate = best.samples_per_second / size if best is not None else None
        first = rate if first is None else first
        yield Scaled(one, best, rate / first if rate is not None and first else None)


# ------------------------------------------------------------------------------------------------ what may be chosen


def _space(config: RunConfig) -> Space:
    """Return what the rest of a config leaves to choose."""
    return WHOLE if _is_whole(config) else Space()


def _is_whole(config: RunConfig) -> bool:
    """Whether every process must hold whole modules: see the checks of `RunConfig`."""
    return config.features.cache or config.data.split_images


def _allowed(config: RunConfig, cost: RunCost) -> RunCost:
    """Return costs with no more sizes than the rest of a config allows."""
    no_tp, no_cp = _is_whole(config) or config.fp8 != "off", _is_whole(config)

    def narrowed(module: ModuleCost) -> ModuleCost:
        tp, cp = ((1,) if no_tp else module.tp_sizes), ((1,) if no_cp else module.cp_sizes)
        return replace(module, tp_sizes=tp, cp_sizes=cp)

    return replace(cost, modules=tuple(map(narrowed, cost.modules)), batch=config.loop.batch_size)


def module_names(config: RunConfig) -> list[str]:
    """Return the modules that a run is planned by: encoders and the language model, or the whole model."""
    return [*config.model.encoders, LANGUAGE_MODEL] if config.model.encoders else [WHOLE_MODEL]


def _every_module(plan: Plan, names: Sequence[str], again: bool) -> Plan:
    """Return a plan with an entry for each module, where `model` stands for all of them."""
    every = [*plan.modules.values()]
    modules = {name: plan.modules[name] if name in plan.modules else every[0] for name in names}
    if again:
        modules = {name: replace(module, activation_checkpointing=True) for name, module in modules.items()}
    ranks = "shared" if plan.shared and len(names) > 1 else plan.ranks
    return Plan(modules, plan.data, ranks, plan.schedule)


def _check_layers(plan: ModulePlan, module: ModuleCost) -> None:
    if plan.layers is not None and sum(plan.layers) != len(module.layers):
        raise ConfigError(
            f"modules.{module.name}.layers add up to {sum(plan.layers)}; the module has {len(module.layers)}."
        )


def _starts(plan: Plan) -> dict[str, tuple[int, ...]] | None:
    """Return the first layer of each part, if a plan says how many layers they have."""
    said = {name: module.layers for name, module in plan.modules.items() if module.layers is not None}
    return {name: tuple(accumulate((0, *layers[:-1]))) for name, layers in said.items()} or None


# ------------------------------------------------------------------------------------------------ as a config


def sections_of(best: Prediction, config: RunConfig) -> dict[str, Any]:
    """Return the sections of a config that a prediction is of: `parallel`, and some keys of `loop`."""
    choice = best.choice
    modules = {name: _module(replace(module, layers=_layers(best, name))) for name, module in choice.modules}
    copies = {} if choice.replicate is None else {"replicate": choice.replicate}
    parallel: dict[str, Any] = {"modules": modules, "data": {"kind": choice.kind, **copies}}
    if len(modules) > 1:
        parallel["ranks"] = choice.ranks
    if choice.is_pipeline:
        parallel["schedule"] = choice.schedule
    if config.parallel.verify != "auto":
        parallel["verify"] = config.parallel.verify
    loop: dict[str, Any] = {"batch_size": config.loop.batch_size, "accumulation": choice.microbatches}
    if config.loop.activation_checkpointing:  # modules say it themselves
        loop["activation_checkpointing"] = False
    if config.loop.activation_bytes is not None:
        loop["activation_budget"] = 1.0
    return {"parallel": parallel, "loop": loop}


def _module(plan: ModulePlan) -> dict[str, Any]:
    return ModuleParallelConfig(**vars(plan)).model_dump(exclude_defaults=True)


def _layers(best: Prediction, name: str) -> tuple[int, ...] | None:
    """Return how many layers each part of a module has; None if it is in one."""
    starts = best.starts[name]
    ends = (*starts[1:], best.layers[name])
    return tuple(end - start for start, end in zip(starts, ends, strict=True)) if len(starts) > 1 else None


def with_plan(config: RunConfig, best: Prediction) -> RunConfig:
    """Return a run with what was predicted as its plan."""
    return with_sections(config, sections_of(best, config))


def with_sections(config: RunConfig, sections: dict[str, Any]) -> RunConfig:
    """Return a run with what `sections_of` returned put in its place."""
    data = as_data(config)
    return RunConfig.model_validate({**data, "parallel": sections["parallel"], "loop": data["loop"] | sections["loop"]})


def plan_file(best: Prediction, config: RunConfig, cluster: Cluster) -> str:
    """Return a plan as YAML that `cornstarch train CONFIG --plan FILE` takes."""
    choice = best.choice
    lines = [
        f"The plan of {config.name} for {cluster.name or cluster.describe()}, chosen by Cornstarch {__version__}.",
        choice.describe(),
        f"Predicted: {predicted(best)}.",
        f"To train with it: {train_command(best, cluster, 'CONFIG', 'THIS_FILE')}",
    ]
    return "".join(f"# {line}\n" for line in lines) + write_data(sections_of(best, config))
