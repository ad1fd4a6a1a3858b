"""Whether all processes of a run do the same thing with the same software. torch is imported late."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from os.path import commonprefix
from typing import Any

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.launch.world import named_ranks

_SHOWN = 10
_WIDTH = 60
_ABSENT = "nothing"


def agree(value: Any) -> None:
    """Raise the same ConfigError in every process if they differ in `value` or in the versions they run.

    All processes of the group must call it. Only if their fingerprints differ do they send one another the whole.

    Args:
        value: What must be the same everywhere, as JSON can say it: a config, say.
    """
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    said = _encoded({"config": value, "versions": versions()})
    if len(set(_gathered(hashlib.sha256(said).digest()))) == 1:
        return
    hosts = [host.decode() for host in _gathered(socket.gethostname().encode())]
    statements = [json.loads(text) for text in _gathered(said)]
    raise ConfigError(disagreement(statements, hosts))


def versions() -> dict[str, str]:
    """Return what must be the same on every machine."""
    import torch

    return {
        "cornstarch": __version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _encoded(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _gathered(text: bytes) -> list[bytes]:
    """Return what every process says, by rank. Bytes, and not torch's gathering of objects, which unpickles them."""
    import torch
    from torch import distributed

    size = distributed.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    distributed.all_gather(lengths, torch.tensor([len(text)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    distributed.all_gather(texts, padded)
    return [bytes(text[: int(length)].tolist()) for text, length in zip(texts, lengths, strict=True)]


# ---------------------------------------------------------------------------------------------------- the difference


def disagreement(statements: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> str:
    """Return what to tell the user about statements that differ, one of each rank."""
    configs = [dict(_leaves(statement["config"])) for statement in statements]
    programs = [{f"version of {name}": text for name, text in one["versions"].items()} for one in statements]
    lines = [*_differences(programs, hosts), *_differences(configs, hosts)]
    more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    advice = "Start every process with the same config file and the same command."
    if any(programs[0] != other for other in programs):
        advice = "Install the same versions on every machine."
    return "\n".join(["The processes of this run differ:", *lines[:_SHOWN], *more, advice])


def _differences(flat: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a line for each key in which the ranks differ: who says what, the most common first."""
    for key in dict.fromkeys(key for leaves in flat for key in leaves):
        ranks: dict[str, list[int]] = {}
        for rank, leaves in enumerate(flat):
            ranks.setdefault(leaves.get(key, _ABSENT), []).append(rank)
        if len(ranks) > 1:
            start = max(0, len(commonprefix(list(ranks))) - _WIDTH // 3)
            opinions = [
                f"{_cut(value, start)} on {named_ranks(group)}{_places(group, hosts)}"
                for value, group in sorted(ranks.items(), key=lambda item: -len(item[1]))
            ]
            yield f"  {key}: {'; '.join(opinions)}"


def _cut(value: str, start: int) -> str:
    """Return a value, or of a long one the part where it differs from the others."""
    if len(value) <= _WIDTH:
        return value
    end = start + _WIDTH
    return f"{'…' if start else ''}{value[start:end]}{'…' if end < len(value) else ''}"


def _places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the machines' names, if there are several."""
    if len(set(hosts)) == 1:
        return ""
    names = sorted({hosts[rank] for rank in ranks})
    return f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value as JSON) of every value in a nest."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path or "value", json.dumps(value, sort_keys=True)
