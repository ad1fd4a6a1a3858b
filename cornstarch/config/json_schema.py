"""The keys of a config: its JSON schema with the documentation of every field, and other names of keys; no torch.

Keys of a section have their other names in the section's class (`Also`). Training arguments of Transformers, Accelerate
and Lightning may also be given flat, at the top of a config: `learning_rate: 1e-4`, `bf16: true`.
"""

from __future__ import annotations

import ast
import copy
from functools import cache
from itertools import chain
from pathlib import Path as FilePath
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from cornstarch import config as sections
from cornstarch.config.fields import Section, aliases_of
from cornstarch.config.run import RunConfig
from cornstarch.config.yaml_tree import Node, descend
from cornstarch.plan import data_options, plan, schema_words
from cornstarch.plan.schema_words import Path, Schema, alternatives, describe, leaves, resolve_references
from cornstarch.plan.validation import Mistake

# By section: the keys that are accepted at the top of a config, too.
_FLAT = {
    "optimizer": (
        "learning_rate", "lr", "weight_decay", "max_grad_norm", "gradient_clip_val", "adam_epsilon", "optim",
    ),
    "schedule": ("lr_scheduler_type", "warmup_steps", "warmup_ratio", "min_lr_ratio"),
    "loop": (
        "max_steps", "num_train_epochs", "num_epochs", "max_epochs", "global_batch_size", "gradient_accumulation_steps",
        "accumulate_grad_batches", "eval_steps", "gradient_checkpointing", "ema_decay",
    ),
    "checkpoint": ("save_steps", "save_total_limit"),
    "logging": ("logging_steps", "log_every_n_steps", "report_to"),
    "data": ("dataloader_num_workers", "num_workers", "dataloader_prefetch_factor", "max_seq_length", "packing"),
}  # fmt: skip
_SECTION_OF = {name: section for section, names in _FLAT.items() for name in names}
FLAT_NAMES = (*_SECTION_OF, "bf16", "fp16", "mixed_precision")
"""Every key that is accepted at the top of a config and moved into a section."""

# Values that other tools write, by the path of the key.
_VALUES: dict[Path, dict[Any, Any]] = {
    ("precision",): {
        "no": "fp32", "32": "fp32", 32: "fp32", "32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16",
        "16": "fp16", 16: "fp16", "16-mixed": "fp16", "16-true": "fp16",
    },
    ("optimizer", "name"): {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"},
    ("schedule", "name"): {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    ("loop", "steps"): {-1: None},
}  # fmt: skip

_PER_DEVICE = (
    "`loop.batch_size` is the batch of a step over all processes: the batch of a device × gradient_accumulation_steps "
    "× the number of devices"
)
_RESUME = "`output: FOLDER`: the same command resumes from the newest checkpoint there"
PLACES = {
    "per_device_train_batch_size": _PER_DEVICE,
    "train_batch_size": _PER_DEVICE,
    "resume_from_checkpoint": _RESUME,
    "resume": _RESUME,
    "deepspeed": "`parallel.data.kind: zero1, zero2 or zero3`",
    "fsdp": "`parallel.data.kind: fsdp2`",
    "fsdp_config": "`parallel.data`",
    "ddp": "`parallel.data.kind: ddp`",
    "strategy": "`parallel.data.kind`",
    "accelerator": "`device`",
}
"""Keys of other tools that have no equal here, and what to write instead."""


@cache
def run_schema() -> Schema:
    """Return the JSON schema of a run for editors: with documentation, and with the other names of keys."""
    schema = copy.deepcopy(_build_schema())
    for section in (schema, *schema["$defs"].values()):
        kind = getattr(sections, section["title"], None)
        for alias, name in aliases_of(kind).items() if isinstance(kind, type) and issubclass(kind, Section) else ():
            field = section["properties"][name]
            section["properties"][alias] = field | {"description": f"Another name of `{name}`.", "deprecated": True}
    for name in FLAT_NAMES:
        schema["properties"].setdefault(name, {"description": "A training argument of Transformers or Lightning."})
    return schema


@cache
def _build_schema() -> Schema:
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for section in (schema, *schema["$defs"].values()):
        for name, field in section.get("properties", {}).items():
            kind = getattr(sections, section["title"], None) or getattr(plan, section["title"])
            texts = (field_documents().get(parent.__name__, {}).get(name) for parent in kind.__mro__)
            if document := next(filter(None, texts), ""):
                field["description"] = document
    # Pydantic checks these names, but its schema only describes those that match.
    schema["$defs"]["ModelConfig"]["properties"]["encoders"]["additionalProperties"] = False
    sources = schema["$defs"]["DataConfig"]["properties"]
    for name in ("train", "evaluation"):  # also one source, also a path only
        field = sources[name]
        one = [{"type": "string"}, field.pop("items")]
        many = {key: field.pop(key) for key in ("type", "minItems") if key in field} | {"items": {"anyOf": one}}
        field["anyOf"] = [*one, many]
    parallel = schema["properties"]["parallel"]
    schema["properties"]["parallel"] = {"anyOf": [{"const": "auto"}, {"$ref": parallel.pop("$ref")}], **parallel}
    return schema


@cache
def canonical_schema() -> Schema:
    """Return the schema of a run without references and other names."""
    return resolve_references(_build_schema())


def locate(path: Path) -> Schema | None:
    """Return the schema of the value at `path` of a config; None if there is none."""
    return schema_words.locate(canonical_schema(), path)


@cache
def field_documents() -> dict[str, dict[str, str]]:
    """Return {class: {field: the text under it}}, from the sources: Python does not keep these texts."""
    files = [*sorted(FilePath(sections.__file__).parent.glob("*.py")), FilePath(plan.__file__)]
    files += [FilePath(data_options.__file__)]
    documents: dict[str, dict[str, str]] = {}
    for section in chain.from_iterable(ast.parse(file.read_text(encoding="utf-8")).body for file in files):
        if not isinstance(section, ast.ClassDef):
            continue
        found = documents.setdefault(section.name, {})
        for field, text in zip(section.body, section.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(document))):
                    found[name] = " ".join(document.split())
    return documents


def resolve_aliases(values: Node) -> list[Mistake]:
    """Move every value with another name to its own place; return the pairs that say different things."""
    mistakes: list[Mistake] = []
    if isinstance(values.value, dict):
        _nest_flat_keys(values.value, mistakes)
        _rename_keys(values, RunConfig, (), mistakes)
        for path, meanings in _VALUES.items():
            node = descend(values, path)
            if node is not None and isinstance(node.value, str | int) and node.value in meanings:
                node.value, node.written = meanings[node.value], None
    return mistakes


def _nest_flat_keys(root: dict[str, Node], mistakes: list[Mistake]) -> None:
    for name in ("bf16", "fp16"):  # `bf16: false` says nothing: another key may choose
        if name in root and isinstance(root[name].value, bool):
            node = root.pop(name)
            if node.value:
                node.value, node.written = name, name
                _put(root, "precision", node, (name,), mistakes)
    if "mixed_precision" in root:
        _put(root, "precision", root.pop("mixed_precision"), ("mixed_precision",), mistakes)
    for name in [name for name in root if name in _SECTION_OF]:
        section = root.setdefault(_SECTION_OF[name], Node({}, root[name].where))
        if section.value is None:
            section.value = {}
        if isinstance(section.value, dict):
            _put(section.value, name, root.pop(name), (name,), mistakes)


def _rename_keys(node: Node, kind: Any, path: Path, mistakes: list[Mistake]) -> None:
    """Rename the keys of every section in a value of type `kind`."""
    if get_origin(kind) in (Union, UnionType, Annotated):
        for option in get_args(kind):
            _rename_keys(node, option, path, mistakes)
    elif get_origin(kind) is list and isinstance(node.value, list):
        for index, item in enumerate(node.value):
            _rename_keys(item, get_args(kind)[0], (*path, index), mistakes)
    elif get_origin(kind) is dict and isinstance(node.value, dict):
        for name, item in node.value.items():
            _rename_keys(item, get_args(kind)[1], (*path, name), mistakes)
    elif isinstance(kind, type) and issubclass(kind, Section) and isinstance(node.value, dict):
        for alias in [name for name in node.value if name in aliases_of(kind)]:
            given = node.value.pop(alias)
            if alias == "report_to" and isinstance(given.value, str):
                given.value = [Node(given.value, given.where)] if given.value != "none" else []
            _put(node.value, aliases_of(kind)[alias], given, (*path, alias), mistakes)
        for name, field in kind.model_fields.items():
            if name in node.value:
                _rename_keys(node.value[name], field.annotation, (*path, name), mistakes)


def _put(section: dict[str, Node], name: str, node: Node, written: Path, mistakes: list[Mistake]) -> None:
    other = section.setdefault(name, node)
    if other.plain() != node.plain():
        text = f"It is another name of `{name}`, which is {other.format_value()} ({other.where}).\nKeep one of them."
        mistakes.append(Mistake(written, node.format_value(), text, node.where))


def resolve_path(path: Path, node: Node) -> Path | None:
    """Return the path at which an override sets its value; None if it says nothing. The value may be converted."""
    if not all(isinstance(step, str) for step in path):
        return path
    tree = node
    for step in reversed(path):
        tree = Node({str(step): tree}, node.where)
    resolve_aliases(tree)
    found: list[str] = []
    while tree is not node and isinstance(tree.value, dict) and tree.value:
        [(name, tree)] = tree.value.items()
        found.append(name)
    return tuple(found) if tree is node else None


__all__ = ["alternatives", "canonical_schema", "describe", "field_documents", "leaves", "locate", "run_schema"]
