"""What torch compiles of the layers of a run: which layer, how often, why again, and which layers it gave up on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cornstarch.compat.compiler import CompiledFrame, count_frames, read_frames


@dataclass(frozen=True)
class Compilation:
    """One compilation of the forward of a kind of layer, or of a function that it is split into by graph breaks."""

    part: str
    layer: str
    """The class of the layer. Layers of the same class share compiled variants."""
    variant: int
    """1 for the first compilation of a function; each further one is a recompilation."""
    with_gradients: bool
    reason: str | None
    """The guard that failed, if it is a recompilation."""
    seconds: float

    @property
    def is_again(self) -> bool:
        return self.variant > 1

    def describe(self) -> str:
        """Return the compilation in a sentence's words."""
        mode = "with" if self.with_gradients else "without"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.part}: {self.layer} {mode} gradients, variant {self.variant}, {self.seconds:.1f} s{reason}"


@dataclass
class CompileLog:
    """The compilations of a run on this rank, in their order."""

    layers: Counter[str] = field(default_factory=Counter)
    """By part: layers that were to be compiled."""
    eager: Counter[str] = field(default_factory=Counter)
    """By part: those of them that run eagerly, because torch could not compile them or gave up."""
    compilations: list[Compilation] = field(default_factory=list)
    _variants: Counter[tuple[str, str, str]] = field(default_factory=Counter, repr=False)
    _read: int = 0

    def run(self, part: str, layer: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a compiled function, and record what torch compiles for it."""
        before = count_frames()
        try:
            return function(*args, **kwargs)
        finally:
            if (after := count_frames()) != before:
                for frame in read_frames(after - before):
                    self._add(part, layer, frame)

    def _add(self, part: str, layer: str, frame: CompiledFrame) -> None:
        if frame.failed:
            return
        key = part, layer, frame.function
        self._variants[key] += 1
        self.compilations.append(
            Compilation(
                part, layer, self._variants[key], torch.is_grad_enabled(), shorten_guard(frame.reason), frame.seconds
            )
        )

    def variants(self) -> dict[tuple[str, str], int]:
        """Return, by part and class of layer, the largest number of variants of one of its functions."""
        found: dict[tuple[str, str], int] = {}
        for (part, layer, _), count in self._variants.items():
            found[part, layer] = max(found.get((part, layer), 0), count)
        return found

    def read_new(self) -> list[Compilation]:
        """Return the compilations since the last call."""
        new, self._read = self.compilations[self._read :], len(self.compilations)
        return new

    @property
    def recompilations(self) -> int:
        return sum(one.is_again for one in self.compilations)

    def describe(self) -> list[dict[str, Any]]:
        """Return, for the report, the layers of each part with the variants of each class."""
        variants = self.variants()
        return [
            {
                "part": part,
                "compiled": count - self.eager[part],
                "eager": self.eager[part],
                "variants": {layer: number for (owner, layer), number in variants.items() if owner == part},
                "seconds": sum(one.seconds for one in self.compilations if one.part == part),
            }
            for part, count in self.layers.items()
        ]


def shorten_guard(reason: str | None) -> str | None:
    """Return the guard that failed, without the numbers of compilations and the source lines that torch adds."""
    if reason is None:
        return None
    line = reason.strip().splitlines()[0] if reason.strip() else ""
    prefix, found, rest = line.partition(": ")
    guard = rest if found and prefix.replace("/", "").isdigit() else line
    return guard.split("  # ")[0].strip()[:300]
