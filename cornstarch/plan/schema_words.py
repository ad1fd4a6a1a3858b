"""JSON schemas of sections: what is at a path, and what a schema expects, in words; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import TypeAdapter

Path = tuple[str | int, ...]
"""The way to a value: names of keys, positions in lists."""
Schema = dict[str, Any]
"""A JSON schema without references."""


@cache
def schema_of(kind: type) -> Schema:
    """Return the JSON schema of a section, without references."""
    return resolve_references(TypeAdapter(kind).json_schema())


def resolve_references(schema: Schema) -> Schema:
    """Return a schema with every reference replaced by what it refers to; what stands beside it wins."""
    definitions = schema.get("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(one) for one in part]
        if not isinstance(part, dict):
            return part
        beside = {key: resolve(value) for key, value in part.items() if key not in ("$ref", "$defs")}
        if "$ref" not in part:
            return beside
        return {**resolve(definitions[part["$ref"].rpartition("/")[2]]), **beside}

    resolved: Schema = resolve(schema)
    return resolved


def alternatives(schema: Schema) -> Iterator[Schema]:
    """Yield the plain schemas that a choice of schemas allows."""
    if "anyOf" in schema:
        for choice in schema["anyOf"]:
            yield from alternatives(choice)
    else:
        yield schema


def locate(schema: Schema | None, path: Path) -> Schema | None:
    """Return the schema of the value at `path`; None if there is none."""
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


def names_at(schema: Schema, path: Path) -> list[str]:
    found = locate(schema, path)
    return [name for choice in alternatives(found or {}) for name in choice.get("properties", {})]


def leaves(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every named value and section, outermost first; lists and free names are passed over."""
    for choice in alternatives(schema):
        for name, child in choice.get("properties", {}).items():
            yield (*path, name)
            yield from leaves(child, (*path, name))


def describe(schema: Schema) -> str:
    """Return what a schema expects, in words: "a whole number of at least 1, or null"."""
    choices = list(alternatives(schema))
    fixed = [str(value) for choice in choices for value in constants(choice)]
    words = [f"{', '.join(fixed[:-1])} or {fixed[-1]}" if len(fixed) > 1 else fixed[0]] if fixed else []
    words += [_describe_one(one) for one in choices if not constants(one) and one.get("type") != "null"]
    return ", or ".join([*dict.fromkeys(words), *(["null"] if {"type": "null"} in choices else [])])


def constants(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _describe_one(schema: Schema) -> str:
    match schema.get("type"):
        case "integer" | "number" as kind:
            return f"a {'whole ' if kind == 'integer' else ''}number{_bounds(schema)}"
        case "boolean":
            return "true or false"
        case "string":
            if "examples" in schema:
                return f"a text such as `{schema['examples'][0]}`"
            return f"a text that matches {schema['pattern']}" if "pattern" in schema else "a text"
        case "array" if "prefixItems" in schema:
            each = list(dict.fromkeys(describe(item) for item in schema["prefixItems"]))
            return f"a list of {len(schema['prefixItems'])} values, each {', '.join(each)}"
        case "array":
            least = f" with at least {schema['minItems']} item" if "minItems" in schema else ""
            different = ", all different" if schema.get("uniqueItems") else ""
            return f"a list{least}{different}, each item {describe(schema.get('items', {}))}"
        case "object":
            names = list(schema.get("properties", {}))
            return f"a mapping with some of these keys: {', '.join(names)}" if names else "a mapping of names to values"
        case _:
            return "any value"


def _bounds(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if below is not None and below >= 2**63:  # what fits in 64 bits is not worth a word
        below = None
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    bounds = (("of at least", low), ("above", above), ("of at most", high), ("below", below))
    words = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    return f" {' and '.join(words)}" if words else ""
