"""Config files: YAML, `key.path=value` on the command line, and defaults become a `RunConfig`, and back; no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cornstarch.config import yaml_tree as tree
from cornstarch.config.json_schema import PLACES, canonical_schema, locate, resolve_aliases, resolve_path
from cornstarch.config.run import RunConfig
from cornstarch.config.yaml_tree import Node
from cornstarch.errors import ConfigError
from cornstarch.plan import validation
from cornstarch.plan.plan import WHOLE_MODEL, ModulePlan
from cornstarch.plan.schema_words import leaves, names_at
from cornstarch.plan.validation import COMMAND_LINE, Mistake, Where, as_data, join_path, shorten

if TYPE_CHECKING:
    from cornstarch.plan.predict import Prediction

_BEGINNING = re.compile(r"`([\w.]+)`")

PLAN_SECTIONS = ("parallel", "loop")
"""The sections of a plan file, which `cornstarch plan` writes."""
UNDECIDED = (
    "parallel: auto: the plan is chosen when the run is started.\n  To see it: cornstarch plan CONFIG --cluster "
    "2x8xH100 --output plan.yaml."
)
"""The message where a plan is needed that has not been chosen yet."""


@dataclasses.dataclass(frozen=True)
class ConfigReading:
    """A config that was read, or its mistakes, and where every value was written."""

    config: RunConfig | None
    mistakes: list[Mistake]
    values: Node
    """The values as far as they could be read, with misspelt keys corrected."""


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    plan: str | Path | None = None,
) -> RunConfig:
    """Return the config in a YAML file.

    path: The file; None: `base` and `overrides` alone.
    overrides: `key.path=value`, as on the command line; they win over the file.
    base: Values under the file's; mappings are merged key by key, everything else is replaced.
    plan: A plan file, which `cornstarch plan` writes; its plan replaces the file's, and its `loop` wins over the file.

    Raises ConfigError that names every mistake at once, each with its line.
    """
    reading = read_config(path, overrides, base, plan)
    validation.raise_mistakes(reading.mistakes)
    assert reading.config is not None
    return reading.config


def read_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    plan: str | Path | None = None,
) -> ConfigReading:
    """Read as `load_config` does, and return the mistakes instead of raising them."""
    start = Node({}, COMMAND_LINE) if base is None else tree.tree_of(base, Where("defaults"))
    # Other names are resolved in each source alone, so that the upper source wins whichever name it uses.
    mistakes = resolve_aliases(start)
    values, found = (start, []) if path is None else read_yaml_file(Path(path))
    mistakes, is_readable = [*mistakes, *found], values is not None
    if values is not None and values is not start:
        mistakes += resolve_aliases(values)
    values = tree.merge(start, values) if values is not None else start
    if plan is not None:
        values, found = _apply_plan_file(values, Path(plan))
        mistakes += found
    _write_out_short_forms(values)
    overridden = set()
    for override in overrides:
        set_path, found = _apply_override(override, values)
        mistakes += found
        overridden.add(set_path)
        _write_out_short_forms(values)
    _replace_length(values, overridden)
    if not is_readable:  # everything else would be "missing"
        return ConfigReading(None, mistakes, values)
    config, found = _validate(values)
    mistakes += found
    return ConfigReading(config if not mistakes else None, mistakes, values)


def _validate(values: Node) -> tuple[RunConfig | None, list[Mistake]]:
    """Return the config, or every mistake with its line; misspelt keys are corrected in `values`."""
    config, mistakes, renames = validation.validate_data(
        # JSON and strict: a list may be a tuple and a text a path, but `true` and "5" are no numbers.
        lambda data: RunConfig.model_validate_json(json.dumps(data), strict=True),
        values.plain(),
        canonical_schema(),
        "a run's config",
        tree.find_broken(values),
        _advise,
    )
    unknown = {mistake.path: tree.descend(values, mistake.path) for mistake in mistakes}
    for path, meant in renames:
        section = tree.descend(values, path[:-1])
        assert section is not None and isinstance(section.value, dict)
        node = section.value.pop(str(path[-1]))
        if meant is not None:
            section.value[meant] = node
    placed = []
    for one in mistakes:
        found = unknown[one.path] or tree.descend(values, one.path)
        around = [tree.descend(values, one.path[:length]) for length in range(len(one.path))]
        nearest_node = next(node for node in (_find_named(one, values), found, *reversed(around)) if node is not None)
        if found is None or not found.broken:  # else already reported
            placed.append(
                Mistake(one.path, found.format_value() if found is not None else None, one.text, nearest_node.where)
            )
    return config, placed


def _find_named(mistake: Mistake, values: Node) -> Node | None:
    """Return what is given for the key that a conflict between several keys begins with."""
    named = None if mistake.path else _BEGINNING.match(mistake.text)
    return None if named is None else tree.descend(values, tuple(named[1].split(".")))


def _advise(path: tree.Path) -> str | None:
    """Return what to write instead of an unknown key that has no similar name in its section."""
    *parent, last = path
    name = str(last)
    steps = tuple(name.split("."))
    if len(steps) > 1 and locate((*parent, *steps)) is not None:
        return f"In a file, nest it: one line for each of {', '.join(f'`{step}:`' for step in steps)}"
    if not parent and name.lower() in PLACES:
        return f"Here that is {PLACES[name.lower()]}."
    if validation.nearest(name, names_at(canonical_schema(), tuple(parent))) is not None:
        return None
    wanted = {name, validation.OTHER_NAMES.get(name.lower(), name)}
    paths = sorted((found for found in leaves(canonical_schema()) if found[-1] in wanted), key=len)
    elsewhere = list(dict.fromkeys(map(join_path, paths)))[:3]
    return f"Did you mean `{'` or `'.join(elsewhere)}`?" if elsewhere else None


# ------------------------------------------------------------------------------------------------ reading


def read_yaml_file(
    path: Path, made_by: str = "cornstarch init", keys: str = "`model:` and `data:`"
) -> tuple[Node | None, list[Mistake]]:
    """Return the values of a YAML file, None if it cannot be read, and what is wrong with it."""

    def unreadable(text: str, line: int | None = None) -> tuple[None, list[Mistake]]:
        return None, [Mistake((), None, text, Where(str(path), line))]

    try:
        with path.open("rb") as file:
            content = file.read(tree.LARGEST_FILE + 1)
    except IsADirectoryError:
        return unreadable("It is a folder; expected a YAML file.")
    except FileNotFoundError:
        return unreadable(f"There is no such file (seen from {os.getcwd()}).\nTo make one: {made_by}.")
    except (OSError, ValueError) as error:
        return unreadable(f"It cannot be read: {getattr(error, 'strerror', None) or error}.")
    if len(content) > tree.LARGEST_FILE:
        return unreadable(f"It has more than {tree.LARGEST_FILE} bytes; expected the config of a run.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return unreadable(f"Byte {content[error.start]:#04x} is not UTF-8.\nSave the file as UTF-8.", line)
    values, mistakes = tree.read_yaml(text, Where(str(path)))
    if values is not None and not isinstance(values.value, dict):
        kind = "a list" if isinstance(values.value, list) else "a single value"
        return unreadable(f"It holds {kind}; expected keys such as {keys}.", values.where.line)
    return values, mistakes


def _apply_plan_file(values: Node, path: Path) -> tuple[Node, list[Mistake]]:
    """Return values with a plan file on top, and the mistakes in that file."""
    found, mistakes = read_yaml_file(path, "cornstarch plan CONFIG --output PLAN", "`parallel:` and `loop:`")
    if found is None or not isinstance(found.value, dict) or not isinstance(values.value, dict):
        return values, mistakes
    mistakes += resolve_aliases(found)
    for name, node in found.value.items():
        if name not in PLAN_SECTIONS:
            text = f"A plan says nothing about it.\nExpected {' and '.join(f'`{one}`' for one in PLAN_SECTIONS)} only."
            mistakes.append(Mistake((name,), node.format_value(), text, node.where))
    kept = {name: node for name, node in found.value.items() if name in PLAN_SECTIONS}
    without = {name: node for name, node in values.value.items() if not (name == "parallel" and name in kept)}
    return tree.merge(Node(without, values.where), Node(kept, found.where)), mistakes


def _write_out_short_forms(values: Node) -> None:
    """Write short forms out, so that overrides find their way: `parallel: auto`, one source, a path as a source."""
    parallel, data = (tree.descend(values, (name,)) for name in ("parallel", "data"))
    if parallel is not None and parallel.value == "auto":
        parallel.value = {"auto": Node(True, parallel.where, "true")}
    sections = data.value if data is not None and isinstance(data.value, dict) else {}
    for key in ("train", "evaluation"):
        node = sections.get(key)
        if node is not None and node.value is not None:
            many = node.value if isinstance(node.value, list) else [node]
            sources = [Node({"path": one}, one.where) if isinstance(one.value, str) else one for one in many]
            sections[key] = Node([*sources], node.where)


# ------------------------------------------------------------------------------------------------ overrides


def _replace_length(values: Node, overridden: Set[tree.Path]) -> None:
    """Let `loop.steps=100` replace the file's `epochs`, and the other way round: only one of them can be meant."""
    loop = values.value.get("loop") if isinstance(values.value, dict) else None
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        is_meant = ("loop", given) in overridden and ("loop", other) not in overridden
        if is_meant and loop is not None and isinstance(loop.value, dict) and loop.value[given].value is not None:
            loop.value.pop(other, None)


def _apply_override(override: str, values: Node) -> tuple[tree.Path, list[Mistake]]:
    """Set the value of one `key.path=value`; return the path that it was set at, and the mistakes in it."""
    key, equals, text = override.partition("=")
    steps = tuple(key.strip().split("."))
    if not equals or not all(steps) or not key.isprintable():  # half characters of a shell are not printable
        expected = "Expected `key.path=value`, for example `optimizer.learning_rate=1e-4`."
        return (), [Mistake((override,), None, expected, COMMAND_LINE)]
    written = tuple(int(step) if step.isascii() and step.isdigit() and len(step) < 9 else step for step in steps)
    node, mistakes = _parse_value(text.strip(), written)
    path = resolve_path(written, node)
    if path is not None and (problem := _set(values, path, node)):
        mistakes = [*mistakes, Mistake(written, node.format_value(), problem, COMMAND_LINE)]
    return path or (), mistakes


def _parse_value(text: str, path: tree.Path) -> tuple[Node, list[Mistake]]:
    """Return the value of an override: lists, mappings and quoted texts as in YAML, all else one plain scalar."""
    # `data.system=Answer: yes or no # really` is a text on a command line, though it would not be one in a file, and so
    # is a Jinja template: no mapping that we read begins with `{{` or `{%`.
    if text[:1] in ("[", "{", '"', "'") and text[:2] not in ("{{", "{%", "{#"):
        node, mistakes = tree.read_yaml(text, COMMAND_LINE, path)
        return node or Node(None, COMMAND_LINE, text, broken=True), mistakes
    try:
        return Node(tree.scalar(text, path), COMMAND_LINE, text), []
    except ValueError as error:
        broken = Node(None, COMMAND_LINE, text, broken=True)
        return broken, [Mistake(path, shorten(text), str(error), COMMAND_LINE)]


def _set(values: Node, path: tree.Path, node: Node) -> str:
    """Put `node` at `path` and create the sections on the way; return the problem, or an empty text."""
    here = values
    for depth, step in enumerate(path):
        last = depth == len(path) - 1
        if here.broken:  # already reported
            return ""
        if here.value is None:
            here.value = [] if isinstance(step, int) else {}
        if isinstance(here.value, list):
            if not isinstance(step, int) or step > len(here.value):
                name, length = join_path(path[:depth]), len(here.value)
                position = f"`{name}.0` is the first, `{name}.{length}` a new one"
                return f"`{name}` is a list of {length}.\nGive a position: {position}."
            if step == len(here.value):
                here.value.append(Node(None, COMMAND_LINE))
            if last:
                here.value[step] = node
            here = here.value[step]
        elif isinstance(here.value, dict):
            here.value[str(step)] = node if last else here.value.get(str(step), Node(None, COMMAND_LINE))
            here = here.value[str(step)]
        else:
            return f"`{join_path(path[:depth])}` is the value {here.format_value()}, which has no keys."
    return ""


# ------------------------------------------------------------------------------------------------ writing


_ABSENT = object()


class _Dumper(yaml.SafeDumper):
    """Writes texts so that `tree.scalar` reads the same texts again, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        # Beside line feeds, YAML folds U+0085, U+2028 and U+2029; in double quotes all are escaped.
        plain = tree.scalar(text) == text and text != "<<" and text.isprintable()
    except ValueError:
        plain = False
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump_config(config: RunConfig) -> str:
    """Return the config, with all defaults, as YAML that loads to an equal one."""
    data = as_data(config)
    if config.parallel.modules == {WHOLE_MODEL: ModulePlan()}:
        # The default is left open: an override such as parallel.modules.vision.tp=2 names other modules.
        data["parallel"]["modules"] = {}
    return write_data(data)


def write_data(data: Any, flow: bool = False) -> str:
    """Return mappings, lists and scalars as YAML; `flow`: on one line."""
    style, width = (True, float("inf")) if flow else (False, 100)
    try:
        text = yaml.dump(
            data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=style
        )
    except yaml.YAMLError as error:
        raise ConfigError(f"the config cannot be written as YAML: {error}") from error
    return text.removesuffix("...\n")


def config_difference(a: RunConfig, b: RunConfig) -> list[str]:
    """Return the differences between two configs, a line each: `loop.steps: 100 → 200`."""
    return _difference(as_data(a), as_data(b), ())


def _difference(a: Any, b: Any, path: tree.Path) -> list[str]:
    def show(value: Any) -> str:
        return "absent" if value is _ABSENT else shorten(json.dumps(value, ensure_ascii=False, default=str), 200)

    if isinstance(a, list) and isinstance(b, list):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(key, a.get(key, _ABSENT), b.get(key, _ABSENT)) for key in dict.fromkeys([*a, *b])]
        return [line for key, left, right in pairs for line in _difference(left, right, (*path, key))]
    return [] if type(a) is type(b) and a == b else [f"{join_path(path)}: {show(a)} → {show(b)}"]


# ------------------------------------------------------------------------------------------------ plan files


def plan_sections(best: Prediction, config: RunConfig) -> dict[str, Any]:
    """Return the sections of a config for a predicted plan: `parallel`, and some keys of `loop`."""
    choice = best.candidate
    usual, modules = as_data(ModulePlan()), {}
    for name, plan in choice.modules:
        starts = best.starts[name]
        ends = (*starts[1:], best.layers[name])
        layers = tuple(end - start for start, end in zip(starts, ends, strict=True)) if len(starts) > 1 else None
        data = as_data(dataclasses.replace(plan, layers=layers))
        modules[name] = {option: value for option, value in data.items() if value != usual[option]}
    copies = {} if choice.replicate is None else {"replicate": choice.replicate}
    parallel: dict[str, Any] = {"modules": modules, "data": {"kind": choice.kind, **copies}}
    if len(modules) > 1:
        parallel["ranks"] = choice.ranks
    if choice.is_pipeline:
        parallel["schedule"] = choice.schedule
    if config.parallel.verify != "auto":
        parallel["verify"] = config.parallel.verify
    machines = {"cluster": config.parallel.cluster, "costs": config.parallel.costs}
    parallel |= {name: value for name, value in machines.items() if value is not None and config.parallel.cluster}
    loop: dict[str, Any] = {"batch_size": config.loop.batch_size, "gradient_accumulation_steps": choice.microbatches}
    if config.loop.activation_checkpointing:  # the modules of the plan have it
        loop["activation_checkpointing"] = False
    if config.loop.activation_bytes is not None:
        loop["activation_budget"] = 1.0
    return {"parallel": parallel, "loop": loop}


def with_plan(config: RunConfig, best: Prediction) -> RunConfig:
    return replace_sections(config, plan_sections(best, config))


def replace_sections(config: RunConfig, sections: dict[str, Any]) -> RunConfig:
    """Return a config with the sections of a plan."""
    data = as_data(config)
    return RunConfig.model_validate({**data, "parallel": sections["parallel"], "loop": data["loop"] | sections["loop"]})


def write_plan(best: Prediction, config: RunConfig, comments: list[str]) -> str:
    """Return a plan file that `cornstarch train CONFIG --plan FILE` takes, with comments at its top."""
    return "".join(f"# {line}\n" for line in comments) + write_data(plan_sections(best, config))
