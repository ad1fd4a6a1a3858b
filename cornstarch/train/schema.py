"""The run's description as JSON schema, and what that schema expects in words; no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from cornstarch.train import config as descriptions
from cornstarch.train.config import RunConfig

Schema = dict[str, Any]


@cache
def run_schema() -> Schema:
    """Return the JSON schema of a run; descriptions are the documentation of the fields."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    documents = field_documents()
    for section in (schema, *schema["$defs"].values()):
        for name, field in section.get("properties", {}).items():
            document = _inherited(documents, section["title"], name)
            if document:
                field["description"] = document
    # Pydantic checks these names, its schema only describes those that match.
    schema["$defs"]["ModelConfig"]["properties"]["encoders"]["additionalProperties"] = False
    sources = schema["$defs"]["DataConfig"]["properties"]
    for name in ("train", "evaluation"):
        sources[name] = _one_or_many(sources[name])
    plan = schema["properties"]["parallel"]
    schema["properties"]["parallel"] = {"anyOf": [{"const": "auto"}, {"$ref": plan.pop("$ref")}], **plan}
    return schema


def _one_or_many(field: Schema) -> Schema:
    """Return the schema of a list of sources as DataConfig takes it: also one source, also a path only."""
    one = [{"type": "string"}, field["items"]]
    many = {key: field[key] for key in ("type", "minItems") if key in field} | {"items": {"anyOf": one}}
    rest = {key: value for key, value in field.items() if key not in ("type", "minItems", "items")}
    return rest | {"anyOf": [*one, many]}


@cache
def field_documents() -> dict[str, dict[str, str]]:
    """Return {class: {field: the text under it}}; Python itself does not keep these texts."""
    files = sorted(Path(descriptions.__file__).parent.glob("*.py"))
    bodies = [ast.parse(file.read_text(encoding="utf-8")).body for file in files]
    documents: dict[str, dict[str, str]] = {}
    for section in chain.from_iterable(bodies):
        if not isinstance(section, ast.ClassDef):
            continue
        found = documents.setdefault(section.name, {})
        for field, text in zip(section.body, section.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(document))):
                    found[name] = " ".join(document.split())
    return documents


def _inherited(documents: dict[str, dict[str, str]], section: str, name: str) -> str:
    parents = getattr(descriptions, section).__mro__
    return next((documents[p.__name__][name] for p in parents if name in documents.get(p.__name__, {})), "")


# ------------------------------------------------------------------------------------------------ finding


def alternatives(schema: Schema) -> Iterator[Schema]:
    """Yield the plain schemas that `schema` allows, references and choices resolved."""
    if "$ref" in schema:
        yield from alternatives(run_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema:
        for choice in schema["anyOf"]:
            yield from alternatives(choice)
    else:
        yield schema


def locate(path: tuple[str | int, ...]) -> Schema | None:
    """Return the schema of the value at `path`; None where the description knows none."""
    schema: Schema | None = run_schema()
    for step in path:
        if schema is None:
            return None
        schema = next((child for choice in alternatives(schema) if (child := _child(choice, step)) is not None), None)
    return schema


def _child(schema: Schema, step: str | int) -> Schema | None:
    if isinstance(step, int):
        items = schema.get("prefixItems", [])
        return items[step] if step < len(items) else schema.get("items")
    if step in schema.get("properties", {}):
        return schema["properties"][step]
    others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    return next((other for other in others if isinstance(other, dict)), None)


def names_at(path: tuple[str | int, ...]) -> list[str]:
    """Return the keys that the section at `path` knows."""
    schema = locate(path)
    choices = alternatives(schema) if schema is not None else iter(())
    return [name for choice in choices for name in choice.get("properties", {})]


def leaves(schema: Schema | None = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every named value and section, outermost first; lists and free names are passed over."""
    for choice in alternatives(run_schema() if schema is None else schema):
        for name, child in choice.get("properties", {}).items():
            yield (*path, name)
            yield from leaves(child, (*path, name))


# ------------------------------------------------------------------------------------------------ words


def describe(schema: Schema) -> str:
    """Return what a schema expects, in words: "a whole number above 0, or null"."""
    choices = list(alternatives(schema))
    null = {"type": "null"} in choices
    fixed = [value for choice in choices for value in _fixed(choice)]
    words = [_listed([f"`{value}`" for value in fixed])] if fixed else []
    words += [_describe_one(c) for c in choices if not _fixed(c) and c.get("type") != "null"]
    return ", or ".join([*dict.fromkeys(words), *(["null"] if null else [])])


def _fixed(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _describe_one(schema: Schema) -> str:
    match schema.get("type"):
        case "integer":
            return f"a whole number{_bounds(schema)}"
        case "number":
            return f"a number{_bounds(schema)}"
        case "boolean":
            return "true or false"
        case "string":
            if "examples" in schema:
                return f"a text such as `{schema['examples'][0]}`"
            return f"a text that matches {schema['pattern']}" if "pattern" in schema else "a text"
        case "array":
            return _describe_list(schema)
        case "object":
            names = list(schema.get("properties", {}))
            return f"a section with the keys {', '.join(names)}" if names else "a section (`key: value` lines)"
        case _:
            return "any value"


def _describe_list(schema: Schema) -> str:
    if "prefixItems" in schema:
        each = list(dict.fromkeys(describe(item) for item in schema["prefixItems"]))
        return f"a list of {len(schema['prefixItems'])} values, each {', '.join(each)}"
    least = f" with at least {schema['minItems']} item" if "minItems" in schema else ""
    return f"a list{least}, each item {describe(schema.get('items', {}))}"


def _bounds(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    said = [
        f"{word} {bound:g}"
        for word, bound in (("of at least", low), ("above", above), ("of at most", high), ("below", below))
        if bound is not None
    ]
    return f" {' and '.join(said)}" if said else ""
