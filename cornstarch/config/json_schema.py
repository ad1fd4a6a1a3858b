"""The JSON schema of a run's config, with the documentation of every field; no torch."""

from __future__ import annotations

import ast
import copy
from functools import cache
from itertools import chain
from pathlib import Path as FilePath

from cornstarch import config as sections
from cornstarch.config.aliases import FLAT_NAMES
from cornstarch.config.fields import Section, aliases_of
from cornstarch.config.run import RunConfig
from cornstarch.plan import data_options, plan, schema_words
from cornstarch.plan.schema_words import Path, Schema, alternatives, describe, leaves, resolve_references


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
            if document := _document(section["title"], name):
                field["description"] = document
    # Pydantic checks these names, but its schema only describes those that match.
    schema["$defs"]["ModelConfig"]["properties"]["encoders"]["additionalProperties"] = False
    sources = schema["$defs"]["DataConfig"]["properties"]
    for name in ("train", "evaluation"):
        sources[name] = _one_or_many(sources[name])
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


def _one_or_many(field: Schema) -> Schema:
    """Return the schema of a list of sources as DataConfig takes it: also one source, also a path only."""
    one = [{"type": "string"}, field["items"]]
    many = {key: field[key] for key in ("type", "minItems") if key in field} | {"items": {"anyOf": one}}
    rest = {key: value for key, value in field.items() if key not in ("type", "minItems", "items")}
    return rest | {"anyOf": [*one, many]}


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


def _document(section: str, name: str) -> str:
    kind = getattr(sections, section, None) or getattr(plan, section)
    found = (field_documents().get(parent.__name__, {}) for parent in kind.__mro__)
    return next((documents[name] for documents in found if name in documents), "")


__all__ = ["alternatives", "canonical_schema", "describe", "field_documents", "leaves", "locate", "run_schema"]
