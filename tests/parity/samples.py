"""What the rows of the matrix are trained on: samples that are all alike, and samples of every kind.

A string says what a sample has: `i` an image, `s` a sound, `.` text alone, `x` something that cannot be used. The text
around it is of ragged length, unless all samples are to be alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from cornstarch.data.sample import Media, Message, Sample

WORDS = "a and cat dog is it loud look now or sound the this what".split()

# Steps of 16 samples in two microbatches. Of 2 processes each gets one half of a microbatch, of 4 a quarter. The last
# step is one short microbatch.
MIXED = (
    # The first processes have no item at all while the last have several; then the other way round.
    ". . . . ii i s is".split() + "i is ss . x . . .".split(),
    # Nobody has an item.
    ". . . x . . . .".split() + ". . . . . . . .".split(),
    # The last process has not a single sample, of 4 only the first two have any.
    "i . s x x".split(),
)
PORTION = 8

MakeSample = Callable[[int, str, int], Sample]
"""Of a number, what it has, and how long it is."""


def alike(make: MakeSample, count: int) -> list[Sample]:
    """Return samples that have one item of every kind each, and the same length."""
    return [make(number, "is", 4) for number in range(count)]


def mixed(make: MakeSample) -> list[Sample]:
    """Return the steps of `MIXED`, one after the other."""
    return of_kinds(make, [kind for step in MIXED for kind in step])


def of_kinds(make: MakeSample, kinds: Sequence[str]) -> list[Sample]:
    """Return samples of ragged length."""
    return [make(number, kind, 1 + number * 5 % 7) for number, kind in enumerate(kinds)]


# ------------------------------------------------------------------------------------------------ kinds of samples


def asking(*kinds: str) -> MakeSample:
    """Return what makes conversations about these kinds of items; others are left out."""

    def make(number: int, has: str, length: int) -> Sample:
        drawn = random.Random(number)
        media = [_image(number, n) if sign == "i" else _sound(number, n) for n, sign in enumerate(has) if sign in kinds]
        question = (f"{_words(drawn, length)} ", *media, " what is it")
        answer = Message("assistant", (_words(drawn, 1 + length // 2),))
        # Without an answer there is nothing to train on.
        return Sample(f"sample {number}", (Message("user", question), *([answer] if has != "x" else [])))

    return make


def longer(make: MakeSample, times: int) -> MakeSample:
    """Return what makes the same samples with so many times as much text."""

    def made(number: int, has: str, length: int) -> Sample:
        return make(number, has, times * length)

    return made


def numbers(number: int, has: str, length: int) -> Sample:
    """Return a row of numbers and what is to be computed from them."""
    if has == "x":
        return Sample(f"sample {number}")  # without fields
    drawn = np.random.default_rng(number)
    x = drawn.standard_normal(6).astype(np.float32)
    return Sample(f"sample {number}", fields={"x": x, "y": np.array([x.sum(), (x**2).sum()], dtype=np.float32)})


def _words(drawn: random.Random, count: int) -> str:
    return " ".join(drawn.choices(WORDS, k=count))


def _image(number: int, place: int) -> Media:
    pixels = np.random.default_rng([number, place]).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Media("image", Image.fromarray(pixels))


def _sound(number: int, place: int) -> Media:
    """Return features of a sound, computed beforehand: [frames, features]."""
    return Media("audio", np.random.default_rng([number, place, 1]).standard_normal((16, 4)).astype(np.float32))


__all__ = ["MIXED", "PORTION", "WORDS", "MakeSample", "alike", "asking", "longer", "mixed", "numbers", "of_kinds"]
