"""The search for a run's plan on a cluster. Nothing is loaded: costs are counted on the meta device, or read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cornstarch import __version__
from cornstarch.config import ParallelConfig, RunConfig
from cornstarch.config.config_file import plan_sections, replace_sections, with_plan, write_plan
from cornstarch.errors import ConfigError
from cornstarch.plan.candidates import Candidate, SearchSpace
from cornstarch.plan.cluster import Cluster, device, resize_cluster, this_cpu
from cornstarch.plan.cost import RunCost
from cornstarch.plan.layout import Layout, unexecutable
from cornstarch.plan.mixed_cluster import combine_costs, search_kinds
from cornstarch.plan.plan import LANGUAGE_MODEL, WHOLE_MODEL, ModulePlan, Plan
from cornstarch.plan.predict import Prediction, predict
from cornstarch.plan.search import RUNNERS_UP, OwnPlan, ScalingPoint, SearchResult
from cornstarch.planner.expected_step import ExpectedStep
from cornstarch.report.plan_text import build_train_command, describe_auto_plan, describe_prediction

if TYPE_CHECKING:
    import torch

    from cornstarch.plan.data_statistics import DataStatistics

WITHOUT_PIPELINE = SearchSpace(ranks=("shared",), most_stages=1)
"""Every device has all modules."""


def cost_of(
    config: RunConfig, cluster: Cluster, costs: str | Path | None = None, facts: DataStatistics | None = None
) -> RunCost:
    """Return the costs of a run's layers on a device of a cluster.

    costs: A file of `cornstarch profile`. Default: they are counted.
    facts: Statistics of the data. Default: samples of the maximal length, with one item for each encoder.
    """
    if costs is None:
        from cornstarch.planner import run_cost

        # Costs are those of a microbatch: they are counted for one of about the size that a device gets.
        batch = config.loop.batch_size
        rows = next(rows for rows in range(max(1, batch // cluster.devices), 0, -1) if batch % rows == 0)
        loop = config.loop.model_copy(update={"gradient_accumulation_steps": batch // rows})
        split = config.model_copy(update={"loop": loop})
        if cluster.parts:
            has_bf16 = cluster.device.has_bf16  # all compute in the same precision
            kinds = [(replace(part.device, has_bf16=has_bf16), part.measured) for part in cluster.parts]
            return combine_costs([run_cost(split, one, facts, is_measured=measured) for one, measured in kinds])
        return run_cost(split, cluster.device, facts, is_measured=cluster.measured)
    if cluster.parts:
        raise ConfigError(f"{costs}: costs are measured on one kind of device; {cluster.name} has several.")
    from cornstarch.planner import read_costs

    measured = read_costs(costs, cluster.device)
    names, expected = [module.name for module in measured.modules], module_names(config)
    if len(names) != len(expected) or (len(names) > 1 and names != expected):  # a whole model may have another name
        raise ConfigError(
            f"{costs}: it was measured for {', '.join(names)}; the run has {', '.join(expected)}.\n  Measure this run: "
            "cornstarch profile CONFIG --output FILE."
        )
    return replace(measured, batch=config.loop.batch_size)


def plan_run(
    config: RunConfig,
    cluster: Cluster,
    cost: RunCost | None = None,
    runners_up: int = RUNNERS_UP,
    space: SearchSpace | None = None,
) -> SearchResult:
    """Return the fastest plan of a run on a cluster, the best of other kinds, and why they lost.

    The search chooses `parallel`, `loop.gradient_accumulation_steps` and `loop.activation_checkpointing`; the rest of
    the config is kept.

    cost: Costs of the run. Default: counted.
    runners_up: How many, at most.
    space: The choices. Default: everything that the rest of the config allows.
    """
    cost = cost or cost_of(config, cluster)
    needs_whole_modules = config.features.cache or config.data.balance_encoders  # see the checks of `RunConfig`

    def restrict(one: RunCost) -> RunCost:
        modules = one.modules
        if needs_whole_modules:
            modules = tuple(replace(module, tp_sizes=(1,), cp_sizes=(1,), ep_sizes=(1,)) for module in modules)
        return replace(one, modules=modules, batch=config.loop.batch_size, parts=tuple(map(restrict, one.parts)))

    space = space or (WITHOUT_PIPELINE if needs_whole_modules else SearchSpace())
    # Polishing tries zero_bubble, which splits a backward pass that layers in fp8 compute at once.
    return search_kinds(restrict(cost), cluster, space, runners_up, polish=config.fp8 == "off")


def own_plan(config: RunConfig, cluster: Cluster, cost: RunCost) -> OwnPlan | None:
    """Return the prediction for the config's own plan on a cluster; None if the config has none."""
    parallel = config.parallel
    if parallel.auto:
        return None
    if parallel == ParallelConfig(verify=parallel.verify, cluster=parallel.cluster, costs=parallel.costs):
        return None
    return predict_own_plan(config, cluster, cost)


def predict_own_plan(config: RunConfig, cluster: Cluster, cost: RunCost) -> OwnPlan:
    """Return the prediction for the plan that a config has, or that it has by default; or why there is none."""
    parallel, loop = config.parallel, config.loop
    names, every = [module.name for module in cost.modules], parallel.modules
    default = next(iter(every.values()), ModulePlan())  # `model` stands for all of them
    modules = {name: every.get(name) or default for name in names}
    if loop.activation_checkpointing:
        modules = {name: replace(module, activation_checkpointing=True) for name, module in modules.items()}
    ranks = "shared" if parallel.shared and len(names) > 1 else parallel.ranks
    plan = Plan(modules, parallel.data, ranks, parallel.schedule)
    try:
        if reasons := unexecutable(plan):
            raise ConfigError(reasons[0])
        starts: dict[
            str, tuple[int, ...]
        ] = {}  # the first layer of each part, if the plan says how many layers they have
        for module in cost.modules:
            layers, many = plan.modules[module.name].layers, len(module.layers)
            if layers is not None and sum(layers) != many:
                raise ConfigError(f"modules.{module.name}.layers add up to {sum(layers)}; the module has {many}.")
            starts |= {module.name: tuple(accumulate((0, *layers[:-1])))} if layers is not None else {}
        dp = Layout.of(plan, cluster.devices, cluster.per_node).dp
        return OwnPlan(plan, predict(Candidate.of(plan, dp, loop.microbatches, starts), cost, cluster))
    except ConfigError as error:
        return OwnPlan(plan, None, " ".join(str(error).split()))


def what_if(config: RunConfig, cluster: Cluster, cost: RunCost, sizes: Sequence[int]) -> Iterator[ScalingPoint]:
    """Yield the best plan on clusters of other sizes, of the same devices and links and for the same batch."""
    first: float | None = None
    for size in sizes:
        one = resize_cluster(cluster, size)
        best = plan_run(config, one, cost, runners_up=0).best
        rate = best.samples_per_second / size if best is not None else None
        first = rate if first is None else first
        yield ScalingPoint(one, best, rate / first if rate is not None and first else None)


def module_names(config: RunConfig) -> list[str]:
    """Return the modules of a run's plan: encoders and the language model, or the whole model."""
    return [*config.model.encoders, LANGUAGE_MODEL] if config.model.encoders else [WHOLE_MODEL]


def format_plan_file(best: Prediction, config: RunConfig, cluster: Cluster) -> str:
    """Return a plan file that `cornstarch train CONFIG --plan FILE` takes, with the prediction as comments."""
    comments = [
        f"The plan of {config.name} for {cluster.name or cluster.describe()}, chosen by Cornstarch {__version__}.",
        best.candidate.describe(),
        f"Predicted: {describe_prediction(best)}.",
        f"To train with it: {build_train_command(best, cluster, 'CONFIG', 'THIS_FILE')}",
    ]
    return write_plan(best, config, comments)


@dataclass(frozen=True)
class AutoPlan:
    """The plan that was chosen for a run."""

    config: RunConfig
    """The run with its plan."""
    text: str
    """The plan on one line."""
    file: str
    """The plan as YAML."""
    expected: ExpectedStep
    """What is predicted of the run's steps."""


def choose_plan(config: RunConfig, ranks: int, per_node: int, own: torch.device | None = None) -> AutoPlan:
    """Return the fastest plan that uses every process. All processes must call it; all get the plan of rank 0.

    Raises the same ConfigError in all of them if nothing fits. `own`: the device of this process, if not the config's.
    """
    from cornstarch.parallel import distributed

    answer: dict[str, Any] = {}
    if distributed.rank() == 0:
        try:
            cluster = build_cluster(config, ranks, per_node, own)
            cost = cost_of(config, cluster, config.parallel.costs)
            found = plan_run(config, cluster, cost)
            if found.best is None:
                raise ConfigError(explain_failure(found, cluster))
            best = use_all_devices(found, config, cluster, cost)
            plan, file = plan_sections(best, config), format_plan_file(best, config, cluster)
            expected = asdict(ExpectedStep.of(best, cost, cluster))
            answer = {"plan": plan, "text": describe_auto_plan(best, cluster), "file": file, "expected": expected}
        except ConfigError as error:  # the other ranks wait for an answer
            answer = {"wrong": str(error)}
    answer = distributed.broadcast_json(answer)
    if "wrong" in answer:
        raise ConfigError(answer["wrong"])
    planned = replace_sections(config, answer["plan"])
    return AutoPlan(planned, answer["text"], answer["file"], ExpectedStep(**answer["expected"]))


def use_all_devices(found: SearchResult, config: RunConfig, cluster: Cluster, cost: RunCost) -> Prediction:
    """Return the fastest plan that leaves no device idle: every started process must take part."""
    assert found.best is not None
    best = found.best.candidate
    if best.world == cluster.devices:
        return found.best
    simple = plan_run(config, cluster, cost, space=WITHOUT_PIPELINE)
    others = [one.prediction for one in (*found.runners_up, *simple.runners_up)]
    others = [one for one in (simple.best, *others) if one is not None and one.candidate.world == cluster.devices]
    if others:
        return min(others, key=lambda one: one.step)
    raise ConfigError(
        f"parallel: auto: no plan uses all {cluster.devices} processes. With {best.world} it would be: "
        f"{best.describe()}.\n  Start {best.world} processes, or let loop.batch_size = {config.loop.batch_size} be a "
        f"multiple of {cluster.devices}."
    )


def explain_failure(found: SearchResult, cluster: Cluster) -> str:
    lines = [f"No plan of this run fits {cluster.name or 'the cluster'} ({cluster.describe()})."]
    lines += [f"  nearest: {one}" for one in found.refused[:3]]
    smallest = "No cluster of these devices would do, however large."
    if found.smallest is not None:
        smallest = f"The smallest cluster of these devices that would do: {found.smallest.name}."
    advice = "a smaller data.max_length, fewer trained weights (`train: lora`), or devices with more memory"
    return "\n".join([*lines, f"  {smallest}", f"  Or try {advice}."])


def build_cluster(config: RunConfig, ranks: int, per_node: int, own: torch.device | None = None) -> Cluster:
    """Return the cluster of a run's processes: the config's, else this machine with the catalogue's figures."""
    if ranks % per_node:
        raise ConfigError(
            f"parallel: auto: {ranks} processes, {per_node} on this machine: every machine must have equally many.\n"
            "  Write the plan yourself (docs/layout.md), or start equally many on each machine."
        )
    nodes = ranks // per_node
    if config.parallel.cluster is not None:
        return Cluster.parse(config.parallel.cluster).resize(nodes, per_node)
    from cornstarch.parallel.device import choose_placement

    place = choose_placement(str(own or config.device), "auto").device
    if place.type != "cuda":
        return Cluster.of(this_cpu(per_node), nodes, per_node)
    import torch

    properties = torch.cuda.get_device_properties(place)
    try:
        known = device(properties.name)
    except ConfigError as error:
        raise ConfigError(
            f"parallel: auto: {error}\n  Measure this machine: cornstarch doctor --measure --output cluster.yaml; then "
            "parallel.cluster=cluster.yaml."
        ) from None
    return Cluster.of(replace(known, memory=int(properties.total_memory)), nodes, per_node)


__all__ = [
    "WITHOUT_PIPELINE", "cost_of", "format_plan_file", "module_names", "own_plan", "plan_run", "what_if", "with_plan",
]  # fmt: skip
