"""Changes that make a file hostile: damage, values of other kinds, paths that lead elsewhere, code, scripts."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

SCRIPT = "<script>alert('hostile')</script>"
TEXTS = [
    "os:system", "os.system", "subprocess:run", "builtins:exec", "pickle:loads", "../outside", "../../../outside",
    "/outside/of/it", "..", ".", "/", "", "\x00", "a\x1b]0;owned\x07", "\ud800", "\u202e", "{{ 7*7 }}", "{% for %}",
    SCRIPT, '" onmouseover="alert(1)', "javascript:alert(1)", "</script><script>alert(1)", "%n%s", "x" * 10_000,
    "file:///etc/passwd", "http://127.0.0.1:9/x", "s3://bucket/x", "__import__('os').system('true')", "evil.Evil",
]  # fmt: skip
VALUES: list[Any] = [
    *TEXTS, None, True, False, 0, 1, -1, 2**31, 2**63, 10**40, 1e308, -1.5, float("nan"), float("inf"), [], {}, [[]],
    [None], {"a": {}}, [1, "a"], {"": None}, {"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}},
    {"function": "os:system", "arguments": {"command": "touch executed"}}, {"trust_remote_code": True},
]  # fmt: skip
WHOLE = [b"", b"\0", b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"#!/bin/sh\ntouch executed"]


def list_places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if len(path) > 12:
        return []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in [(*path, key), *list_places(value, (*path, key))]]


def change_data(data: Any, chance: random.Random) -> Any:
    """Return a copy with a few places replaced, removed, renamed or added."""
    data = copy.deepcopy(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        found = list_places(data)
        if not found or chance.random() < 0.02:
            return chance.choice(VALUES)
        *way, key = chance.choice(found)
        parent = data
        for step in way:
            parent = parent[step]
        kind = chance.random()
        if kind < 0.6:
            parent[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind < 0.75:
            del parent[key]
        elif kind < 0.9 and isinstance(parent, dict):
            parent[chance.choice([*TEXTS, "auto_map", "function", "path", "sha256"])] = copy.deepcopy(parent[key])
        else:
            for _ in range(chance.choice([3, 60, 300])):
                parent[key] = [parent[key]]
    return data


def change_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return bytes that are flipped, cut off, repeated, zeroed, nested or replaced."""
    damaged = bytearray(content)
    kind = chance.randrange(6)
    if kind == 0:
        for _ in range(chance.randint(1, 20)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    elif kind == 1:
        del damaged[chance.randrange(len(damaged)) :]
    elif kind == 2:
        start = chance.randrange(len(damaged))
        damaged[start : start + chance.choice([1, 16, 512])] = bytes(chance.choice([1, 16, 512]))
    elif kind == 3:
        start = chance.randrange(len(damaged))
        damaged[start:start] = damaged[start : start + 64] * chance.choice([1, 10, 1000])
    elif kind == 4:
        place = chance.randrange(max(1, len(damaged) - 4))
        damaged[place : place + 4] = chance.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4), b"\0\0\0\x80"])
    else:
        return chance.choice(WHOLE)
    return bytes(damaged)


def encode(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=True).encode()


def change_json(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    damage = chance.random() < 0.3
    path.write_bytes(change_bytes(content, chance) if damage else encode(change_data(json.loads(content), chance)))
