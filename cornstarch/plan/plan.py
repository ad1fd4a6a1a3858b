"""What a parallel run is meant to be: plain data, made before any process starts; no torch.

    Plan.from_data({"modules": {"vision": {"tp": 2}, "language_model": {"tp": 4, "stages": 3}}})

The names are the same in YAML and in Python. How many ranks there are is no part of a plan: `Layout.of(plan, world)`
infers the number of data-parallel replicas.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from cornstarch.plan.exchange import Asynchronous, Compression, Gossip, Local, compression_mistakes, described
from cornstarch.plan.mistakes import (
    Fields,
    FieldType,
    Mistake,
    Path,
    nearest,
    parts_of,
    raise_mistakes,
    read_fields,
    shown,
    suggestion,
)
from cornstarch.plan.options import conflicts, rank_conflicts
from cornstarch.schedule.policies import Policy

Precision = Literal["fp32", "bf16", "fp16"]
DataKind = Literal["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "local_sgd", "diloco", "async", "gossip"]
Ranks = Literal["auto", "shared", "own", "colocated", "first_stage"]

LANGUAGE_MODEL = "language_model"
"""The module at which all encoders meet."""
WHOLE_MODEL = "model"
"""The module of a model that is not taken apart."""

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class ModulePlan:
    """How one module is spread: an encoder with its projector, the language model, or a whole model."""

    tp: int = field(default=1, metadata={"least": 1})
    """Ranks that each matrix is cut over (tensor parallelism)."""
    cp: int = field(default=1, metadata={"least": 1})
    """Ranks that each sequence is cut over (context parallelism)."""
    cp_mode: Literal["ring_attn", "all_to_all", "gather"] = "ring_attn"
    """How attention sees the tokens of the other ranks: keys and values sent round in a ring, heads exchanged for
    tokens, or all keys and values gathered."""
    cp_distribution: Literal["uniform", "zigzag", "makespan_min", "auto"] = "auto"
    """Which tokens each rank gets: equal runs, runs from both ends, what balances the work of the mask, or what fits
    the mask best."""
    stages: int = field(default=1, metadata={"least": 1})
    """Pipeline stages: sets of ranks that hold some of the layers each."""
    virtual_stages: int = field(default=1, metadata={"least": 1})
    """Parts of the layers that each of these sets holds: they are cut into stages × virtual_stages parts, which are
    dealt out in turn (interleaving)."""
    layers: tuple[int, ...] | None = field(default=None, metadata={"least": 1})
    """How many layers each of these parts has, in order; the head of a language model counts as one. Default: parts
    that weigh the same."""
    zero: Literal[0, 1, 2, 3] | None = None
    """The ZeRO stage of this module alone; 0: nothing is sharded. Default: what the plan's `data.kind` says."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    precision: Precision | None = None
    """What the module is computed in. Default: the run's."""
    tp_sequence: bool = False
    """Cut activations between attention and feed-forward layers, too, along tokens (sequence parallelism)."""
    tp_vocabulary: bool = False
    """Cut the table of embeddings and the head of a language model, too, by words."""

    def __post_init__(self) -> None:
        raise_mistakes(_module_mistakes(read_fields(ModulePlan, vars(self), ("ModulePlan",)), ("ModulePlan",)))
        if self.layers is not None:  # a list is welcome, but would not be frozen
            object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def ranks(self) -> int:
        """The ranks of one replica of the module."""
        return self.stages * self.cp * self.tp

    def describe(self) -> str:
        """Return the sizes, and what differs from the defaults, on one line."""
        sizes = [f"{self.stages} stages"] if self.stages > 1 else []
        sizes = [f"{sizes[0]} of {self.virtual_stages} parts"] if self.virtual_stages > 1 else sizes
        sizes = [f"{sizes[0]} ({' + '.join(map(str, self.layers))} layers)"] if sizes and self.layers else sizes
        sizes += [f"cp {self.cp} ({self.cp_mode}, {self.cp_distribution})"] if self.cp > 1 else []
        further = [word for word in ("sequence", "vocabulary") if getattr(self, f"tp_{word}")]
        sizes += [f"tp {self.tp}" + (f" ({', '.join(further)})" if further else "")] if self.tp > 1 else []
        words = [" × ".join(sizes) or "one rank"]
        words += [f"ZeRO-{self.zero}"] if self.zero is not None else []
        words += ["activation checkpointing"] if self.activation_checkpointing else []
        words += [self.precision] if self.precision is not None else []
        return ", ".join(words)


@dataclass(frozen=True)
class DataPlan:
    """Data parallelism, the same for every module."""

    kind: DataKind = "ddp"
    """ddp: everything whole on every rank; zero1: optimizer states sharded; zero2: gradients too; zero3, fsdp1, fsdp2:
    parameters too; hsdp: fsdp2 within each of several copies. Ranks that are not in step (docs/slow_networks.md):
    local_sgd: weights are averaged every few steps; diloco: an outer optimizer applies the mean change; async: changes
    are applied when they arrive; gossip: weights are averaged with neighbours."""
    replicate: int | None = field(default=None, metadata={"least": 1})
    """hsdp: the number of copies; each is sharded over dp / replicate replicas. Default: as many as make a copy lie
    within a node."""
    param_dtype: Precision | None = None
    """What sharded parameters are gathered and computed in. Default: what they are kept in."""
    reduce_dtype: Precision | None = None
    """What gradients are summed over the ranks in. Default: what they are computed in."""
    buffer_dtype: Precision | None = None
    """fsdp1: what buffers are cast to. Default: they are left as they are."""
    bucket_mb: float | Literal["auto"] | None = field(default=None, metadata={"least": 0.001})
    """ddp, zero1: megabytes of gradients that are summed together; auto: as many as suit the link that joins the
    replicas, which is measured when the run begins. Default: torch's."""
    static_graph: bool = False
    """ddp, zero1: every step uses the same parameters in the same order."""
    gradient_as_bucket_view: bool = True
    """ddp, zero1: gradients lie in the buckets, instead of being copied there."""
    find_unused: bool = True
    """ddp, zero1: look for parameters that a step did not use (experts without a token, say), instead of failing on
    them; false saves that walk where every step uses all. With `static_graph` it is not needed."""
    offload: bool = False
    """Shards, and the optimizer, wait in the CPU's memory."""
    reshard_after_forward: bool | int | None = None
    """Whether gathered parameters are freed after forward, and gathered again for backward; a number: kept sharded over
    so many ranks in between. Default: freed, but for zero2."""
    prefetch: int = field(default=0, metadata={"least": 0})
    """Units whose parameters are gathered ahead of the one that computes, beyond what torch does by itself."""
    wrap: Literal["auto", "none"] | tuple[str, ...] = "auto"
    """The units whose parameters are gathered together: auto: found by themselves; none: the whole model is one; or the
    names of their classes."""
    wrap_min_parameters: int | None = field(default=None, metadata={"least": 1})
    """Units with fewer parameters stay with what is around them."""
    compression: Compression = field(default=Compression(), metadata={"mistakes": compression_mistakes})
    """ddp, zero1: of gradients; hsdp: of those that travel between copies; local_sgd, diloco: of changes of weights."""
    local: Local = Local()
    """local_sgd, diloco: how often weights are brought together, and how."""
    asynchronous: Asynchronous = Asynchronous()
    """async: how far ranks may be apart."""
    gossip: Gossip = Gossip()
    """gossip: who the neighbours are."""

    def __post_init__(self) -> None:
        read = read_fields(DataPlan, vars(self), ("DataPlan",))
        raise_mistakes(_data_mistakes(read, ("DataPlan",)))
        for name in parts_of(DataPlan):  # a mapping is welcome, too
            object.__setattr__(self, name, read.values[name])
        if self.wrap not in ("auto", "none"):  # a list is welcome, but would not be frozen
            object.__setattr__(self, "wrap", tuple(self.wrap))

    def describe(self) -> str:
        """Return the kind, and what differs from the defaults, on one line."""
        given = [(name, value) for name, value in vars(self).items() if name != "kind" and value != _DATA[name]]
        said = (f"{name} {described(value) if name in parts_of(DataPlan) else shown(value)}" for name, value in given)
        return ", ".join([self.kind, *said])


_MODULE = {f.name: f.default for f in dataclasses.fields(ModulePlan)}
_DATA = {f.name: f.default for f in dataclasses.fields(DataPlan)}


@dataclass(frozen=True, eq=False)
class Plan:
    """How a model is spread over ranks. Plans with their modules in another order are not equal."""

    modules: Mapping[str, ModulePlan] = field(default_factory=lambda: {WHOLE_MODEL: ModulePlan()})
    """By name: encoders in their order, then `language_model`, which is put last; or `model` alone for a model that is
    not taken apart."""
    data: DataPlan = field(default_factory=DataPlan)
    """Data parallelism of every module."""
    ranks: Ranks = "auto"
    """shared: every rank holds all modules, which then have one stage; a module whose tp or cp is smaller than the
    largest, which it must divide, is there several times. own: each module has ranks of its own, and its own sizes
    (modality parallelism). colocated: the encoders share ranks, and the language model has its own. first_stage: the
    encoders stand on the ranks of the language model's first stage, and run inside it. auto: shared where all have one
    stage and the same tp and cp, else own."""
    schedule: Policy = "1f1b"
    """In which order the stages of a pipeline work (docs/schedules.md)."""

    def __post_init__(self) -> None:
        ordered = sorted(self.modules.items(), key=lambda item: item[0] == LANGUAGE_MODEL)  # stable
        object.__setattr__(self, "modules", MappingProxyType(dict(ordered)))
        raise_mistakes([*_name_mistakes(list(self.modules)), *_type_mistakes(self.modules, self.data)])
        modules = {name: vars(module) for name, module in self.modules.items()}
        joint = _joint_mistakes(modules, vars(self.data), self.ranks, self.schedule)
        raise_mistakes([*_choice_mistakes(self.ranks, self.schedule), *joint])

    # ---------------------------------------------------------------------------------------- what follows from it

    @property
    def shared(self) -> bool:
        """Whether every rank holds all modules."""
        everywhere = self.ranks != "first_stage" or len(self.modules) == 1 or not self.is_pipeline
        return len(self.sharing) == 1 and everywhere

    @property
    def is_pipeline(self) -> bool:
        """Whether a replica has several sets of ranks that work one after the other."""
        return len(self.sharing) > 1 or any(module.stages > 1 for module in self.modules.values())

    @property
    def replica(self) -> int:
        """The ranks of one data-parallel replica of the whole model."""
        return sum(prod(self.sizes(modules)) for modules in self.sharing)

    @property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """The modules, those together that stand on the same ranks."""
        *encoders, last = self.modules
        if self.ranks in ("shared", "first_stage") or (self.ranks == "auto" and self._are_alike):
            return (tuple(self.modules),)
        if self.ranks == "colocated" and encoders:
            return tuple(encoders), (last,)
        return tuple((name,) for name in self.modules)

    @property
    def _are_alike(self) -> bool:
        sizes = {(module.stages, module.cp, module.tp) for module in self.modules.values()}
        return len(self.modules) == 1 or (len(sizes) == 1 and all(stages == 1 for stages, _, _ in sizes))

    def sizes(self, modules: Sequence[str]) -> tuple[int, int, int]:
        """Return the stages, cp and tp of the ranks on which some modules stand together: the largest of each."""
        stages, cp, tp = (max(getattr(self.modules[name], axis) for name in modules) for axis in ("stages", "cp", "tp"))
        return stages, cp, tp

    def kind(self, module: str) -> DataKind:
        """Return the data parallelism of one module."""
        zero = self.modules[module].zero
        kinds: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3")
        return self.data.kind if zero is None else kinds[zero]

    def describe(self) -> str:
        """Return the plan as a few lines of text."""
        width = max(map(len, self.modules))
        ranks = "1 rank" if self.replica == 1 else f"{self.replica:,} ranks"
        many = f"{len(self.modules)} modules" if len(self.modules) > 1 else "1 module"
        lines = [f"{many}{self._where()}, {ranks} in a replica"]
        lines += [f"  {name:{width}}  {module.describe()}" for name, module in self.modules.items()]
        lines += [f"data parallelism: {self.data.describe()}"]
        return "\n".join([*lines, *([f"schedule: {self.schedule}"] if self.is_pipeline else [])])

    def _where(self) -> str:
        if len(self.modules) == 1:
            return ""
        if self.shared:
            return " on the same ranks"
        where = {"colocated": ", the encoders on the same ranks", "first_stage": ", the encoders in the first stage"}
        return where.get(self.ranks, " on ranks of their own")

    # ---------------------------------------------------------------------------------------- plain data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that mappings, lists and scalars describe, as they are read from YAML.

        Raises ConfigError that names every mistake at once.
        """
        plan, mistakes = read_plan(data)
        raise_mistakes(mistakes)
        assert plan is not None
        return plan

    def as_data(self) -> dict[str, Any]:
        """Return the plan as mappings, lists and scalars, every default written out; `from_data` returns its equal."""
        parts = {name: dict(vars(getattr(self.data, name))) for name in parts_of(DataPlan)}
        data = {**vars(self.data), **parts}
        data["wrap"] = list(self.data.wrap) if isinstance(self.data.wrap, tuple) else self.data.wrap
        modules = {name: dict(vars(module)) for name, module in self.modules.items()}
        for module in modules.values():
            module["layers"] = None if module["layers"] is None else list(module["layers"])
        return {"modules": modules, "data": data, "ranks": self.ranks, "schedule": self.schedule}

    def _key(self) -> tuple[Any, ...]:
        return tuple(self.modules.items()), self.data, self.ranks, self.schedule

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:  # a MappingProxyType cannot be pickled
        return Plan, (dict(self.modules), self.data, self.ranks, self.schedule)

    def __repr__(self) -> str:
        modules = dict(self.modules)
        return f"Plan(modules={modules!r}, data={self.data!r}, ranks={self.ranks!r}, schedule={self.schedule!r})"


# ------------------------------------------------------------------------------------------------ mistakes


def read_plan(data: Any) -> tuple[Plan | None, list[Mistake]]:
    """Read as `Plan.from_data` does, and return the mistakes, each with its path, instead of raising them."""
    keys = ("modules", "data", "ranks", "schedule")
    if not isinstance(data, Mapping):
        return None, [
            Mistake(("plan",), shown(data), f"Expected a mapping with some of these keys: {', '.join(keys)}.")
        ]
    mistakes: list[Mistake] = []
    given: dict[str, Any] = {}
    written: dict[str | int, str] = {}  # how a misspelt key stands in the data
    for key, value in data.items():
        name: str | None = str(key)
        if name not in keys:
            name, text = suggestion(str(key), list(keys), ())
            mistakes.append(Mistake((str(key),), shown(value), text))
            if name is None or name in data or name in given:
                continue
            written[name] = str(key)
        given[name] = value

    ranks, schedule = given.get("ranks", "auto"), given.get("schedule", "1f1b")
    options = read_fields(DataPlan, given.get("data"), ("data",))
    modules, further = _read_modules(given.get("modules"))
    mistakes += [*_choice_mistakes(ranks, schedule), *further, *_data_mistakes(options, ("data",))]
    sound = {name: _sound(fields, _MODULE) for name, fields in modules.items()}
    mistakes += _joint_mistakes(sound, _sound(options, _DATA), ranks, schedule)
    if mistakes:
        return None, [m._replace(path=(written.get(m.path[0], m.path[0]), *m.path[1:])) for m in mistakes]
    plans = {name: ModulePlan(**fields.values) for name, fields in modules.items()}
    return Plan(plans, DataPlan(**options.values), ranks, schedule), []


def _sound(read: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values, given or default, but those that are wrong."""
    return {name: value for name, value in {**defaults, **read.values}.items() if name not in read.broken}


def _read_modules(data: Any) -> tuple[dict[str, Fields], list[Mistake]]:
    """Return what the data says about each module, and what is wrong with it."""
    if data is None:
        return {WHOLE_MODEL: Fields({}, set(), [])}, []
    if not isinstance(data, Mapping):
        text = "Expected a mapping: the names of the modules, and the sizes of each."
        return {}, [Mistake(("modules",), shown(data), text)]
    modules = {}
    mistakes = _name_mistakes([str(name) for name in data])
    for name, value in data.items():
        path: Path = ("modules", str(name))
        modules[str(name)] = read_fields(ModulePlan, value, path)
        mistakes += _module_mistakes(modules[str(name)], path)
    return modules, mistakes


def _name_mistakes(names: list[str]) -> list[Mistake]:
    path = ("modules",)
    found = []
    if not names:
        return [Mistake(path, None, f"There is no module.\nName one: `{WHOLE_MODEL}` stands for the whole model.")]
    for name in names:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            text = "It cannot be the name of a module.\nUse letters, digits and _, a letter first."
            found.append(Mistake((*path, str(name)), None, text))
    if len(names) > 1 and WHOLE_MODEL in names:
        text = f"`{WHOLE_MODEL}` stands for the whole model, so it stands alone; beside it there is "
        others = ", ".join(name for name in names if name != WHOLE_MODEL)
        found.append(Mistake((*path, WHOLE_MODEL), None, f"{text}{others}."))
    elif len(names) > 1 and LANGUAGE_MODEL not in names:
        meant = next((name for name in names if nearest(name, [LANGUAGE_MODEL])), None)
        advice = f"Is `{meant}` meant to be it?" if meant is not None else "Add it."
        found.append(Mistake(path, None, f"Encoders meet at `{LANGUAGE_MODEL}`, which is not there.\n{advice}"))
    return found


def _type_mistakes(modules: Mapping[str, Any], data: Any) -> list[Mistake]:
    """Return what is no part of a plan, though Python let it pass."""
    found = [
        Mistake(("modules", name), shown(module), "Expected a ModulePlan; `Plan.from_data` takes plain data.")
        for name, module in modules.items()
        if not isinstance(module, ModulePlan)
    ]
    if not isinstance(data, DataPlan):
        found.append(Mistake(("data",), shown(data), "Expected a DataPlan; `Plan.from_data` takes plain data."))
    return found


def _choice_mistakes(ranks: Any, schedule: Any) -> list[Mistake]:
    given = [("ranks", ranks, FieldType(Ranks, None)), ("schedule", schedule, FieldType(Policy, None))]
    problems = [(name, value, kind.problem(value)) for name, value, kind in given]
    return [Mistake((name,), shown(value), problem) for name, value, problem in problems if problem is not None]


def _module_mistakes(read: Fields, path: Path) -> list[Mistake]:
    """Return what is wrong with the options of a module, alone and together."""
    values = _sound(read, _MODULE)
    found = list(read.mistakes)
    for option in ("tp_sequence", "tp_vocabulary"):
        if values.get(option) and values.get("tp") == 1:
            text = "It goes with tensor parallelism, and tp is 1: nothing is cut.\nSet tp, or leave it out."
            found.append(Mistake((*path, option), "true", text))
    if values.get("virtual_stages", 1) > 1 and values.get("stages") == 1:
        text = "One set of ranks holds all layers, in one part or in several.\nSet stages, or leave it out."
        found.append(Mistake((*path, "virtual_stages"), shown(values["virtual_stages"]), text))
    layers, parts = values.get("layers"), values.get("stages", 1) * values.get("virtual_stages", 1)
    if layers is not None and {"stages", "virtual_stages"} <= {*values} and len(layers) != parts:
        many = f"{values['stages']} stages" + (f" × {values['virtual_stages']}" if values["virtual_stages"] > 1 else "")
        text = f"There are {len(layers)} numbers for {many}.\nGive one for each part, or leave it out."
        found.append(Mistake((*path, "layers"), shown(layers), text))
    distribution = values.get("cp_distribution")
    if values.get("cp_mode") != "all_to_all" or distribution not in ("zigzag", "makespan_min"):
        return found
    text = (
        "With all_to_all every rank attends over all tokens, for some of the heads: there is nothing to balance.\n"
        "Use uniform or auto, or the mode ring_attn or gather."
    )
    return [*found, Mistake((*path, "cp_distribution"), shown(distribution), text)]


def _data_mistakes(read: Fields, path: Path) -> list[Mistake]:
    """Return what is wrong with the options of data parallelism, alone and together."""
    values = _sound(read, _DATA)
    found = [Mistake((*path, name), shown(values[name]), text) for name, text in conflicts(values, _DATA)]
    return [*read.mistakes, *found]


def _joint_mistakes(
    modules: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any], ranks: Any, schedule: Any
) -> list[Mistake]:
    """Return what is wrong with the modules, the data parallelism, the ranks and the schedule taken together."""
    found = []
    all_sizes = all({"stages", "virtual_stages", "cp", "tp"} <= {*module} for module in modules.values())
    if all_sizes and modules and (text := rank_conflicts(ranks, modules, LANGUAGE_MODEL)) is not None:
        found.append(Mistake(("ranks",), shown(ranks), text))
    if schedule == "interleaved" and all_sizes and all(m["virtual_stages"] == 1 for m in modules.values()):
        text = "No module has virtual_stages of more than 1: there is nothing to interleave.\nSet them, or use 1f1b."
        found.append(Mistake(("schedule",), "interleaved", text))
    for name, module in modules.items():
        zero, precision, computed = module.get("zero"), module.get("precision"), data.get("param_dtype")
        if zero is not None and data.get("kind") in ("fsdp1", "hsdp"):
            text = f"data.kind is {data['kind']}, which has no stages of ZeRO.\nLeave it out, or use the kind fsdp2."
            found.append(Mistake(("modules", name, "zero"), shown(zero), text))
        if None not in (precision, computed) and precision != computed:
            text = f"data.param_dtype = {computed} holds for every module.\nGive one of them."
            found.append(Mistake(("modules", name, "precision"), precision, text))
    return found
