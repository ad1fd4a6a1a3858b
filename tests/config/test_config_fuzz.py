"""Two thousand broken configs: a run's description or a ConfigError comes out, nothing else, and soon."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cornstarch.errors import ConfigError
from cornstarch.plan.validation import as_data
from cornstarch.train import RunConfig, dump_config, load_config

RUNS = 1100
SECONDS_EACH = 20.0  # of this process; a moment on a free machine

GOOD = """\
# A run.
name: first
output: runs/first
seed: 3
precision: bf16
model:
  encoders:
    vision: {path: clip, train: projector, projector: mlp, token: "<image>", attention: item}
    audio:
      config: {model_type: whisper, d_model: 64, id2label: {0: a, 1: b}}
      train: lora
      lora: {rank: 4, alpha: 8, targets: [q_proj, v_proj]}
  language_model:
    path: llm
    train: full
    learning_rate: 1e-5
data:
  train:
    - path: a.json
      weight: 0.5
    - {path: b.jsonl, media: pictures, limit: 1_000}
  evaluation: c.json
  max_length: 4096
  system: "Answer: shortly."
  chat_template: |
    {% for message in messages %}{{ message.content }}
    {% endfor %}
optimizer:
  name: adamw
  learning_rate: 2e-4
  betas: [0.9, 0.95]
  clip: null
schedule: {name: linear, warmup: 100}
loop: {steps: 1000, batch_size: 16, accumulation: 4, evaluate_every: 50, early_stopping: {patience: 2}}
checkpoint: {every: 100, keep: 3}
logging: {every: 5, to: [tensorboard]}
"""

GOOD_DATA = yaml.safe_load(GOOD)

VALUES: list[Any] = [
    None, True, False, 0, -1, 10**18, 10**40, -(10**4000), 1.5, -0.0, float("nan"), float("inf"), "", "x", "no",
    "1e-5", "010", "\u202e\u0000\u2028", "\U0001f33d" * 50, "ünïcode", "a" * 5000, [], {}, [[]], [None], {"": None},
    {"path": 1}, [1, "a", {}], {"a": {"b": {"c": []}}}, "{{", "&a", "*a", "!!x", "../..", "\ud83c",
]  # fmt: skip
PIECES = [
    "\t", "\n", ":", ": ", "- ", "[", "]", "{", "}", '"', "'", "|", ">", "&a ", "*a", "!", "!!int ", "%", "@", "`", "#",
    "? ", "<<: ", "---\n", "...\n", "\x00", "\x85", "\u2028", "\ufeff", "\U0001f33d", "1e999", "0x", "~", "yes",
    "\\", ",",
]  # fmt: skip
KEYS = ["", "Path", "pth", "train", "<<", "é", "a.b", "[key]", "0", "x" * 300, "on", "learning-rate", "\n", "\ud800"]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in [(*path, key), *places(value, (*path, key))]]


def parent_of(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        data = data[step]
    return data


def nested(value: Any, depth: int, chance: random.Random) -> Any:
    for _ in range(depth):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def in_data(change: Callable[[Any, Any, random.Random], None]) -> Callable[[str, random.Random], bytes]:
    """Return a mutation of the text out of changes of a few places in its data."""

    def mutate(text: str, chance: random.Random) -> bytes:
        data = copy.deepcopy(GOOD_DATA)
        for _ in range(chance.randint(1, 4)):
            path = chance.choice(places(data) or [("name",)])
            change(parent_of(data, path), path[-1], chance)
        written: str = yaml.dump(data, sort_keys=False, allow_unicode=chance.random() < 0.5)
        return written.encode("utf-8", "surrogatepass")

    return mutate


def delete(parent: Any, key: Any, chance: random.Random) -> None:
    if isinstance(parent, dict):
        parent.pop(key, None)
    else:
        del parent[key]


def rename(parent: Any, key: Any, chance: random.Random) -> None:
    if isinstance(parent, dict) and key in parent:
        letters = list(str(key)) or ["a"]
        chance.shuffle(letters)
        parent[chance.choice([*KEYS, "".join(letters), str(key)[:-1], 5, None, True])] = parent.pop(key)


def replace(parent: Any, key: Any, chance: random.Random) -> None:
    parent[key] = chance.choice(VALUES)


def nest(parent: Any, key: Any, chance: random.Random) -> None:
    value = parent.get(key) if isinstance(parent, dict) else parent[key]
    parent[key] = nested(value, chance.choice([1, 2, 40]), chance)


def noise(text: str, chance: random.Random) -> bytes:
    data = bytearray(text.encode())
    for _ in range(chance.randint(1, 20)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def truncate(text: str, chance: random.Random) -> bytes:
    return text.encode()[: chance.randrange(len(text))]


def repeat_lines(text: str, chance: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    for _ in range(chance.randint(1, 5)):
        lines.insert(chance.randrange(len(lines)), chance.choice(lines))
    return "".join(lines).encode()


def shift_lines(text: str, chance: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    for _ in range(chance.randint(1, 5)):
        index = chance.randrange(len(lines))
        lines[index] = chance.choice([" " + lines[index], lines[index].lstrip(), "\t" + lines[index], "\n"])
    return "".join(lines).encode()


def insert_pieces(text: str, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 6)):
        index = chance.randrange(len(text))
        text = text[:index] + chance.choice(PIECES) * chance.choice([1, 1, 1, 2, 500]) + text[index:]
    return text.encode()


def huge_numbers(text: str, chance: random.Random) -> bytes:
    digits = "".join(chance.choices("0123456789", k=chance.choice([18, 19, 20, 40, 400, 5000, 50_000])))
    form = chance.choice(["{}", "-{}", "{}.0", "1e{}", "0x{}", "{}.{}x", "{}_000", "1.{}e-5"]).format(digits, digits)
    lines = text.splitlines(keepends=True)
    index = chance.randrange(len(lines))
    lines[index] = f"{lines[index].split(':')[0]}: {form}\n"
    return "".join(lines).encode()


def deep(text: str, chance: random.Random) -> bytes:
    opening = chance.choice(["[", "{a: ", "- ", "? ", "[{", "&a [", "!!x [", '["'])
    return (text + "extra: " + opening * chance.choice([5, 30, 31, 32, 33, 100, 5000])).encode()


MUTATIONS: list[Callable[[str, random.Random], bytes]] = [
    in_data(delete), in_data(rename), in_data(replace), in_data(nest),
    noise, truncate, repeat_lines, shift_lines, insert_pieces, huge_numbers, deep,
]  # fmt: skip
OVERRIDES = [
    "seed=1", "data.train.0.path=x", "loop.steps=", "model.encoders.vision=null", "a.b.c=1", "x", "output={", "=",
    "data.train.9.path=1", "optimizer.betas.0=0.5", "name=" + "9" * 400, "data=5", "model.encoders.0.path=x",
]  # fmt: skip


def test_the_unbroken_config_is_right(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert as_data(load_config(path))["data"]["train"][1]["limit"] == 1000


@pytest.mark.timeout(240)
def test_broken_configs_give_a_run_or_a_config_error(tmp_path: Path) -> None:
    chance = random.Random(20_240)
    path, again = tmp_path / "run.yaml", tmp_path / "again.yaml"
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for number in range(RUNS):
        content = MUTATIONS[number % len(MUTATIONS)](GOOD, chance)
        path.write_bytes(content)
        overrides = chance.sample(OVERRIDES, chance.choice([0, 0, 0, 1, 3]))
        start = time.process_time()
        try:
            config = load_config(path, overrides)
        except ConfigError as error:
            outcomes["refused"] += 1
            message = str(error)
            assert message and len(message) < 60_000, content
            message.encode("utf-8")  # it can be printed
        else:
            outcomes["read"] += 1
            assert isinstance(config, RunConfig)
            if number % 5 == 0:
                again.write_text(dump_config(config), encoding="utf-8")
                assert repr(load_config(again)) == repr(config), content  # repr: not-a-number differs from itself
        slowest = max(slowest, time.process_time() - start)
    assert slowest < SECONDS_EACH
    # Both roads were walked: a fuzz test whose configs are all refused at the first line finds nothing.
    assert outcomes["refused"] > RUNS // 2 and outcomes["read"] > RUNS // 20, outcomes
