"""The parallel plan: the one schema of `parallel:` in a config, of plan files and of Python; no torch.

    Plan.from_data({"modules": {"vision": {"tp": 2}, "language_model": {"tp": 4, "stages": 3}}})

The names are the same in YAML and in Python. A plan does not say how many ranks there are: `Layout.of(plan, world)`
infers the number of data-parallel replicas.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, PlainSerializer, TypeAdapter, model_validator

from cornstarch.plan import data_options, validation
from cornstarch.plan.data_options import LANGUAGE_MODEL, WHOLE_MODEL, Asynchronous, Compression, DataKind, Gossip, Local
from cornstarch.plan.expert_options import find_expert_conflicts
from cornstarch.plan.schema_words import schema_of
from cornstarch.plan.validation import Mistake, NotNegative, Path, Positive, Switch, format_value, nearest, section
from cornstarch.schedule.policies import SCHEDULES, Policy

T = TypeVar("T")

_MODULE_NAME = re.compile(r"[A-Za-z_]\w*")


@section
class ModulePlan:
    """How one module is parallelized: an encoder with its projector, the language model, or a whole model."""

    tp: Positive = 1
    """Ranks that each matrix is sharded over (tensor parallelism)."""
    cp: Positive = 1
    """Ranks that each sequence is sharded over (context parallelism)."""
    cp_mode: Annotated[data_options.CpMode, validation.or_registered(data_options.REGISTERED["cp_mode"])] = "ring_attn"
    """How attention sees the tokens of the other ranks: keys and values sent round in a ring, heads exchanged for
    tokens, or all keys and values gathered."""
    cp_distribution: data_options.CpDistribution = "auto"
    """Which tokens each rank gets: uniform: equal runs; zigzag: runs from both ends; makespan_min: balanced by the work
    of the mask; auto: the best for the mask."""
    ep: Positive = 1
    """Ranks that the experts of each layer are shared out over (expert parallelism): a part of the dp × cp ranks that
    have tokens of their own. Tokens are sent to their experts."""
    stages: Positive = 1
    """Pipeline stages: sets of ranks with some of the layers each."""
    virtual_stages: Positive = 1
    """Parts of the layers in each of these sets: the layers are split into stages × virtual_stages parts, which are
    assigned in turn (interleaving)."""
    layers: Annotated[tuple[Positive, ...], Field(min_length=1), validation.as_tuple] | None = None
    """How many layers each of these parts has, in order; the head of a language model counts as one. Default: parts
    of equal weight."""
    zero: Annotated[Literal[0, 1, 2, 3] | None, validation.not_bool] = None
    """The ZeRO stage of this module alone; 0: nothing is sharded. Default: that of the plan's `data.kind`."""
    activation_checkpointing: Switch = False
    """Recompute activations in the backward pass instead of keeping them."""
    precision: data_options.Precision | None = None
    """The precision that the module is computed in. Default: the run's."""
    tp_sequence: Switch = False
    """Shard activations between attention and feed-forward layers, too, along tokens (sequence parallelism)."""
    tp_vocabulary: Switch = False
    """Shard the embeddings and the head of a language model, too, along the vocabulary."""

    _check = model_validator(mode="after")(validation.check_conflicts)

    def conflicts(self, broken: Set[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
        """Yield (path, message) for every option that makes no sense beside the others."""

        def are_sound(*names: str) -> bool:
            return not any((name,) in broken for name in names)

        for option in ("tp_sequence", "tp_vocabulary"):
            if are_sound(option, "tp") and getattr(self, option) and self.tp == 1:
                text = "It goes with tensor parallelism, and tp is 1: nothing is cut.\nSet tp, or leave it out."
                yield (option,), text
        if are_sound("virtual_stages", "stages") and self.virtual_stages > 1 and self.stages == 1:
            text = "One set of ranks holds all layers, in one part or in several.\nSet stages, or leave it out."
            yield ("virtual_stages",), text
        parts = self.stages * self.virtual_stages
        if are_sound("layers", "virtual_stages", "stages") and self.layers is not None and len(self.layers) != parts:
            many = f"{self.stages} stages" + (f" × {self.virtual_stages}" if self.virtual_stages > 1 else "")
            text = f"There are {len(self.layers)} numbers for {many}.\nGive one for each part, or leave it out."
            yield ("layers",), text
        is_balanced = self.cp_distribution in ("zigzag", "makespan_min")
        if are_sound("cp_mode", "cp_distribution") and self.cp_mode == "all_to_all" and is_balanced:
            text = (
                "With all_to_all every rank attends over all tokens, for some of the heads: there is nothing to "
                "balance.\nUse uniform or auto, or the mode ring_attn or gather."
            )
            yield ("cp_distribution",), text

    @property
    def ranks(self) -> int:
        return self.stages * self.cp * self.tp

    def describe(self) -> str:
        """Return the sizes, and the options that differ from their defaults, on one line."""
        sizes = [f"{self.stages} stages"] if self.stages > 1 else []
        sizes = [f"{sizes[0]} of {self.virtual_stages} parts"] if self.virtual_stages > 1 else sizes
        sizes = [f"{sizes[0]} ({' + '.join(map(str, self.layers))} layers)"] if sizes and self.layers else sizes
        sizes += [f"cp {self.cp} ({self.cp_mode}, {self.cp_distribution})"] if self.cp > 1 else []
        further = [word for word in ("sequence", "vocabulary") if getattr(self, f"tp_{word}")]
        sizes += [f"tp {self.tp}" + (f" ({', '.join(further)})" if further else "")] if self.tp > 1 else []
        words = [" × ".join(sizes) or "one rank"]
        words += [f"experts over ep {self.ep}"] if self.ep > 1 else []
        words += [f"ZeRO-{self.zero}"] if self.zero is not None else []
        words += ["activation checkpointing"] if self.activation_checkpointing else []
        words += [self.precision] if self.precision is not None else []
        return ", ".join(words)


def _check_different(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(names) or len({*names}) != len(names):
        raise ValueError("expected a list of different names")
    return names


ClassNames = Annotated[
    tuple[str, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True}), AfterValidator(_check_different),
    validation.as_tuple,
]  # fmt: skip


def explain_uncompiled(schedule: str | None) -> str | None:
    """Return why layers are not compiled under a schedule; None if they are. `schedule`: None without a pipeline."""
    return "the schedule takes the backward pass of its layers apart" if schedule in ("zero_bubble", "auto") else None


@section
class DataPlan:
    """Data parallelism, the same for every module."""

    kind: DataKind = "ddp"
    """ddp: full parameters on every rank; zero1: optimizer states sharded; zero2: gradients too; zero3, fsdp1, fsdp2:
    parameters too; hsdp: fsdp2 within each of several copies. Ranks that are not in step (docs/slow_networks.md):
    local_sgd: weights are averaged every few steps; diloco: an outer optimizer applies the mean change; async: changes
    are applied when they arrive; gossip: weights are averaged with neighbours."""
    replicate: Positive | None = None
    """hsdp: the number of copies; each is sharded over dp / replicate replicas. Default: as many as keep a copy within
    a node."""
    param_dtype: data_options.Precision | None = None
    """The precision that sharded parameters are gathered and computed in. Default: that of the parameters."""
    reduce_dtype: data_options.Precision | None = None
    """The precision that gradients are reduced in. Default: that of the gradients."""
    buffer_dtype: data_options.Precision | None = None
    """fsdp1: the precision that buffers are cast to. Default: they are not cast."""
    bucket_mb: Annotated[float, Field(strict=True, ge=0.001, allow_inf_nan=False)] | Literal["auto"] | None = None
    """ddp, zero1: megabytes of gradients that are reduced together; auto: chosen for the link between the replicas,
    which is measured when the run begins. Default: torch's."""
    static_graph: Switch = False
    """ddp, zero1 with compression: every step uses the same parameters in the same order."""
    gradient_as_bucket_view: Switch = True
    """ddp, zero1 with compression: gradients lie in the buckets, instead of being copied there."""
    find_unused: Switch = True
    """ddp, zero1 with compression: look for parameters that a step did not use (experts without a token, say), instead
    of failing on them; false saves that search where every step uses all. With `static_graph` it is not needed."""
    offload: Switch = False
    """Keep the shards and the optimizer state in CPU memory."""
    reshard_after_forward: Switch | Annotated[int, Field(strict=True, lt=2**63)] | None = None
    """Whether gathered parameters are freed after forward, and gathered again for backward; a number: kept sharded over
    that many ranks in between. Default: freed, except with zero2. In a pipeline, what is not freed stays gathered until
    the last backward pass of a step; there fsdp2 and hsdp free nothing by default, zero3 does."""
    prefetch: NotNegative = 0
    """Units whose parameters are gathered ahead of the one that computes, beyond torch's own prefetching."""
    wrap: Literal["auto", "none"] | ClassNames = "auto"
    """The units whose parameters are gathered together: auto: the layers; none: the whole model; or the names of their
    classes."""
    wrap_min_parameters: Positive | None = None
    """Units with fewer parameters are gathered with the module around them."""
    compression: Compression = Compression()
    """ddp, zero1: of gradients; hsdp: of gradients between copies; local_sgd, diloco: of changes of weights."""
    local: Local = Local()
    """local_sgd, diloco: how often weights are averaged, and how."""
    asynchronous: Asynchronous = Asynchronous()
    """async: how stale a change may be."""
    gossip: Gossip = Gossip()
    """gossip: who the neighbours are."""

    _check = model_validator(mode="after")(validation.check_conflicts)

    def conflicts(self, broken: Set[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
        """Yield (path, message) for every option that makes no sense beside the others."""
        names = {path[0] for path in broken}
        values = {name: value for name, value in vars(self).items() if name not in names}
        for option, text in data_options.data_conflicts(values, _DATA_DEFAULTS):
            yield (option,), text

    @property
    def is_unsynchronized(self) -> bool:
        """Whether every rank has parameters of its own between exchanges."""
        return self.kind in data_options.UNSYNCHRONIZED

    def describe(self) -> str:
        """Return the kind, and the options that differ from their defaults, on one line."""
        words: list[str] = [self.kind]
        for name, value in vars(self).items():
            if name != "kind" and value != _DATA_DEFAULTS[name]:
                is_section = dataclasses.is_dataclass(value)
                words.append(f"{name} {data_options.describe_options(value) if is_section else format_value(value)}")
        return ", ".join(words)


_DATA_DEFAULTS = {field.name: field.default for field in dataclasses.fields(DataPlan)}


@section
class Plan:
    """How a model is parallelized. Plans with their modules in another order are not equal."""

    SHOWN_AS: ClassVar[Path] = ()

    modules: Annotated[Mapping[str, ModulePlan], PlainSerializer(dict)] = dataclasses.field(
        default_factory=lambda: {WHOLE_MODEL: ModulePlan()}
    )
    """By name: encoders in their order, then `language_model`, which is put last; or `model` alone for a model that is
    not split into these."""
    data: DataPlan = DataPlan()
    """Data parallelism of every module."""
    ranks: data_options.RankPlacement = "auto"
    """shared: every rank has all modules, which then have one stage; a module whose tp or cp is smaller than the
    largest, which it must divide, is there several times. own: each module has its own ranks and sizes (modality
    parallelism). colocated: the encoders share ranks, and the language model has its own. first_stage: the encoders
    are placed on the ranks of the language model's first stage, and run inside it. auto: shared where all have one
    stage and the same tp and cp, else own."""
    schedule: Annotated[Policy, validation.or_registered(SCHEDULES)] = "1f1b"
    """In which order the stages of a pipeline work (docs/schedules.md)."""

    def __post_init__(self) -> None:
        ordered = sorted(self.modules.items(), key=lambda item: item[0] == LANGUAGE_MODEL)  # stable
        object.__setattr__(self, "modules", MappingProxyType(dict(ordered)))

    _check = model_validator(mode="after")(validation.check_conflicts)

    def conflicts(self, broken: Set[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
        """Yield (path, message) for every mistake in the modules, data parallelism, ranks and schedule together."""
        if not any(path[0] == "modules" and len(path) <= 2 for path in broken):
            yield from _name_conflicts(list(self.modules))
        sizes = {name: vars(module) for name, module in self.modules.items()}
        if not any(path[0] == "modules" and path[-1] in ("modules", *sizes, *_SIZES) for path in broken):
            text = _rank_conflicts(self.ranks, sizes) if ("ranks",) not in broken else None
            if text is not None:
                yield ("ranks",), text
            is_interleaved = ("schedule",) not in broken and self.schedule == "interleaved"
            if is_interleaved and all(module.virtual_stages == 1 for module in self.modules.values()):
                text = "No module has virtual_stages of more than 1: there is nothing to interleave.\n"
                yield ("schedule",), f"{text}Set them, or use 1f1b."
        yield from self._expert_conflicts(broken)
        if ("data",) in broken:
            return
        for name, module in self.modules.items():
            kind, computed = self.data.kind, self.data.param_dtype
            if module.zero is not None and kind in ("fsdp1", "hsdp") and ("data", "kind") not in broken:
                text = f"data.kind is {kind}, which has no stages of ZeRO.\nLeave it out, or use the kind fsdp2."
                yield ("modules", name, "zero"), text
            if None not in (module.precision, computed) and module.precision != computed:
                text = f"data.param_dtype = {computed} holds for every module.\nGive one of them."
                yield ("modules", name, "precision"), text

    def _expert_conflicts(self, broken: Set[Path]) -> Iterator[tuple[Path, str]]:
        data = None if any(path[0] == "data" for path in broken) else self.data
        schedule = "1f1b" if ("schedule",) in broken else self.schedule
        stages = max((module.stages for module in self.modules.values()), default=1)
        for name, module in self.modules.items():
            if module.ep > 1 and not any(path[:2] == ("modules", name) for path in broken):
                for text in find_expert_conflicts(module, data, schedule, max(stages, len(self.sharing))):
                    yield ("modules", name, "ep"), text

    @property
    def shared(self) -> bool:
        everywhere = self.ranks != "first_stage" or len(self.modules) == 1 or not self.is_pipeline
        return len(self.sharing) == 1 and everywhere

    @property
    def is_pipeline(self) -> bool:
        """Whether a replica has several sets of ranks that work one after the other."""
        return len(self.sharing) > 1 or any(module.stages > 1 for module in self.modules.values())

    @property
    def replica(self) -> int:
        return sum(prod(self.sizes(modules)) for modules in self.sharing)

    @property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """The modules, grouped by the ranks that they are placed on."""
        sizes = {(module.stages, module.cp, module.tp) for module in self.modules.values()}
        are_alike = len(self.modules) == 1 or (len(sizes) == 1 and all(stages == 1 for stages, _, _ in sizes))
        return group_by_ranks(list(self.modules), "shared" if self.ranks == "auto" and are_alike else self.ranks)

    def sizes(self, modules: Sequence[str]) -> tuple[int, int, int]:
        """Return the stages, cp and tp of the ranks that modules share: the largest of each."""
        stages, cp, tp = (max(getattr(self.modules[name], axis) for name in modules) for axis in ("stages", "cp", "tp"))
        return stages, cp, tp

    def kind(self, module: str) -> DataKind:
        """Return the data parallelism of one module."""
        zero = self.modules[module].zero
        return self.data.kind if zero is None else data_options.ZERO_KINDS[zero]

    def describe(self) -> str:
        """Return the plan as a few lines of text."""
        width = max(map(len, self.modules))
        ranks = "1 rank" if self.replica == 1 else f"{self.replica:,} ranks"
        where = {"colocated": ", the encoders on the same ranks", "first_stage": ", the encoders in the first stage"}
        placed = " on the same ranks" if self.shared else where.get(self.ranks, " on ranks of their own")
        many = f"{len(self.modules)} modules{placed}" if len(self.modules) > 1 else "1 module"
        lines = [f"{many}, {ranks} in a replica"]
        lines += [f"  {name:{width}}  {module.describe()}" for name, module in self.modules.items()]
        lines += [f"data parallelism: {self.data.describe()}"]
        return "\n".join([*lines, *([f"schedule: {self.schedule}"] if self.is_pipeline else [])])

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that mappings, lists and scalars describe, as they are read from YAML.

        Raises ConfigError that names every mistake at once.
        """
        plan, mistakes = read_plan(data)
        validation.raise_mistakes(mistakes)
        assert plan is not None
        return plan

    def as_data(self) -> dict[str, Any]:
        """Return the plan as mappings, lists and scalars, with all defaults; `from_data` returns its equal."""
        data: dict[str, Any] = validation.as_data(self)
        return data

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._values() == other._values() and list(self.modules) == list(other.modules)

    def __hash__(self) -> int:
        return hash((tuple(self.modules.items()), self._values()[1:]))

    def __reduce__(self) -> tuple[Any, ...]:  # a MappingProxyType cannot be pickled
        return type(self), (dict(self.modules), *self._values()[1:])

    def __repr__(self) -> str:
        values = [dict(self.modules), *self._values()[1:]]
        pairs = zip(dataclasses.fields(self), values, strict=True)
        return f"{type(self).__name__}({', '.join(f'{field.name}={value!r}' for field, value in pairs)})"


def group_by_ranks(modules: Sequence[T], ranks: data_options.RankPlacement) -> tuple[tuple[T, ...], ...]:
    """Return modules, encoders first, grouped by the ranks that they are placed on; `auto` counts as `own`."""
    if ranks in ("shared", "first_stage"):
        return (tuple(modules),)
    if ranks == "colocated" and len(modules) > 1:
        return tuple(modules[:-1]), tuple(modules[-1:])
    return tuple((module,) for module in modules)


_SIZES = ("stages", "virtual_stages", "cp", "tp")


def _name_conflicts(names: list[str]) -> Iterator[tuple[Path, str]]:
    path = ("modules",)
    if not names:
        yield path, f"There is no module.\nName one: `{WHOLE_MODEL}` stands for the whole model."
    for name in names:
        if not _MODULE_NAME.fullmatch(name):
            yield (*path, name), "It cannot be the name of a module.\nUse letters, digits and _, a letter first."
    if len(names) > 1 and WHOLE_MODEL in names:
        others = ", ".join(name for name in names if name != WHOLE_MODEL)
        text = f"`{WHOLE_MODEL}` stands for the whole model, so it stands alone; beside it there is {others}."
        yield (*path, WHOLE_MODEL), text
    elif len(names) > 1 and LANGUAGE_MODEL not in names:
        meant = next((name for name in names if nearest(name, [LANGUAGE_MODEL])), None)
        advice = f"Is `{meant}` meant to be it?" if meant is not None else "Add it."
        yield path, f"Encoders meet at `{LANGUAGE_MODEL}`, which is not there.\n{advice}"


def _rank_conflicts(ranks: Any, modules: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return why modules of these sizes cannot be placed as `ranks` says; None if they can."""
    encoders = {name: module for name, module in modules.items() if name != LANGUAGE_MODEL}
    if len(modules) == 1 or ranks not in ("shared", "colocated", "first_stage"):
        return None
    placed = modules if ranks == "shared" else encoders
    around = placed  # the modules whose largest cp and tp must be multiples of the others'
    stages = {module["stages"] for module in placed.values()}
    if ranks == "shared":
        rule = "Modules on the same ranks have one stage each, and a cp and a tp that divide the largest."
    elif ranks == "colocated":
        rule = "Encoders on the same ranks have the same number of stages, and a cp and a tp that divide the largest."
    else:
        rule = (
            "Encoders in the language model's first stage have one stage each, and a cp and a tp that divide its own."
        )
        around = {LANGUAGE_MODEL: modules[LANGUAGE_MODEL]} if LANGUAGE_MODEL in modules else modules
    largest = {axis: max(module[axis] for module in around.values()) for axis in ("cp", "tp")}
    divide = all(size % module[axis] == 0 for axis, size in largest.items() for module in placed.values())
    if divide and (len(stages) == 1 if ranks == "colocated" else stages == {1}):
        return None
    sizes = "; ".join(f"{name}: {m['stages']} × cp {m['cp']} × tp {m['tp']}" for name, m in modules.items())
    return f"{rule}\nFound {sizes}.\nUse ranks: own."


_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


def read_plan(data: Any) -> tuple[Plan | None, list[Mistake]]:
    """Read as `Plan.from_data` does, and return the mistakes, each with its path, instead of raising them."""
    schema = schema_of(Plan)
    if not isinstance(data, Mapping):
        text = f"Expected a mapping with some of these keys: {', '.join(schema['properties'])}."
        return None, [Mistake(("plan",), format_value(data), text)]
    found = validation.validate_data(lambda one: _PLAN.validate_python(fill_empty(one)), _with_text_keys(data), schema)
    plan, mistakes, renames = found
    written = {(*path[:-1], meant): path[-1] for path, meant in renames if meant is not None}
    steps = [tuple(written.get(one.path[: depth + 1], step) for depth, step in enumerate(one.path)) for one in mistakes]
    return plan, [dataclasses.replace(one, path=path) for one, path in zip(mistakes, steps, strict=True)]


def fill_empty(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a plan without sections that have nothing behind the colon."""
    filled = {name: value for name, value in data.items() if not (name in ("modules", "data") and value is None)}
    if isinstance(modules := filled.get("modules"), Mapping):
        filled["modules"] = {name: {} if value is None else value for name, value in modules.items()}
    return filled


def _with_text_keys(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _with_text_keys(value) for key, value in data.items()}
    return [_with_text_keys(value) for value in data] if isinstance(data, list) else data
