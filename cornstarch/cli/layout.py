"""`cornstarch layout` shows which rank holds which part of a model; `cornstarch explain` how ranks work together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cornstarch.cli import RanksPerNode, write_file
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.config.yaml_tree import Node
    from cornstarch.plan import Plan

TOPIC_NAMES = (
    "allreduce, allgather, reducescatter, ddp, zero1, zero2, zero3, fsdp, tp, ulysses, ring, naive, gpipe, 1f1b, "
    "interleaved, zero-bubble"
)


def layout(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan, or a config with `parallel`: a YAML file.", show_default=False),
    ],
    world: Annotated[int, typer.Option(metavar="N", help="The number of ranks.", show_default=False)],
    ranks_per_node: RanksPerNode = 8,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the layout as SVG.")] = None,
) -> None:
    """Show which rank holds which part of a model under a plan: module, stage, replica and shards.

    Nothing is started, and no GPU is needed. Groups that cross nodes are listed, and so is what cannot run yet.
    """
    parsed = read_plan_file(plan)  # mistakes are reported before anything is drawn
    from cornstarch.plan.layout import Layout
    from cornstarch.plan.picture import as_svg, as_text

    found = Layout.of(parsed, world, ranks_per_node)
    print(f"{parsed.describe()}\n\n{as_text(found)}")
    if svg is not None:
        write_file("--svg", svg, as_svg(found))
        print(f"\n{svg}")


def explain(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help=f"One of: {TOPIC_NAMES}.", show_default=False)],
    ranks: Annotated[int | None, typer.Option(metavar="N", help="The number of ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Pipelines: microbatches per step.")] = None,
    elements: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Elements of a tensor (collectives), hidden channels (tp), tokens (ulysses, ring), or elements of an "
            "activation (pipelines).",
        ),
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(metavar="N", help="ddp, zero, fsdp: parameters of the model.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Show only this step.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an interactive page with pictures instead.")
    ] = None,
) -> None:
    """Draw a collective, a kind of parallelism or a schedule, step by step, with the bytes that each rank sends.

    Nothing is started: small lists are exchanged within this process, and schedules are the ones that runs execute.
    """
    from rich.console import Console

    from cornstarch.explain import explain
    from cornstarch.explain.page import render
    from cornstarch.explain.terminal import show

    story = explain(topic, ranks, microbatches, elements, parameters)
    if step is not None and not 1 <= step <= len(story.steps):
        raise ConfigError(f"--step {step}: {story.topic} has the steps 1 to {len(story.steps)}.")
    if html is not None:
        write_file("--html", html, render(story))
        print(html)
    else:
        show(story, Console(highlight=False), step)


def read_plan_file(path: Path) -> Plan:
    """Return the plan in a YAML file; one ConfigError names every mistake with its line."""
    from cornstarch.config import yaml_tree as tree
    from cornstarch.config.config_file import read_yaml_file
    from cornstarch.plan.plan import read_plan

    values, mistakes = read_yaml_file(path, "cornstarch plan CONFIG --output PLAN", "`modules:` and `data:`")
    if values is None:
        tree.raise_mistakes(mistakes)
    assert values is not None  # a file that cannot be read has a mistake
    key, section = _find_plan(values)
    plan, wrong = read_plan(section.plain())
    for mistake in wrong:
        # The node at the path of the mistake, or the nearest one above it: a missing key has no node of its own.
        paths = (mistake.path[:length] for length in range(len(mistake.path), 0, -1))
        node = next((node for one in paths if (node := tree.descend(section, one)) is not None), section)
        if not node.broken:  # a broken node has its mistake already
            mistakes.append(tree.Mistake((*key, *mistake.path), mistake.found, mistake.text, node.where))
    tree.raise_mistakes(mistakes)
    assert plan is not None
    return plan


def _find_plan(values: Node) -> tuple[tuple[str, ...], Node]:
    """Return the plan and the path to it: the whole file, or `parallel` of a config, by default with its modules."""
    from cornstarch.config.config_file import UNDECIDED
    from cornstarch.config.yaml_tree import Node, descend, tree_of

    assert isinstance(values.value, dict)
    if not {"parallel", "model"} & {*values.value}:
        return (), values
    section = values.value.get("parallel", Node({}, values.where))
    auto = descend(section, ("auto",))
    if section.value == "auto" or (auto is not None and auto.value is True):
        raise ConfigError(UNDECIDED)
    if section.value is None:
        section = Node({}, section.where)
    if isinstance(section.value, dict):  # keys about how a run finds and checks its plan are not part of it
        others = ("verify", "auto", "cluster", "costs")
        section = Node({name: node for name, node in section.value.items() if name not in others}, section.where)
    if isinstance(section.value, dict) and "modules" not in section.value:
        model = values.value.get("model")
        parts = model.value if model is not None and isinstance(model.value, dict) else {}
        encoders = parts["encoders"].value if "encoders" in parts else None
        names = [*(encoders if isinstance(encoders, dict) else ()), "language_model"]
        modules: dict[str, object] = {name: {} for name in (names if "language_model" in parts else ["model"])}
        section = Node({**section.value, "modules": tree_of(modules, section.where)}, section.where)
    return ("parallel",), section
