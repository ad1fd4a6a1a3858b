"""Records of steps, and how far two of them are apart."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from cornstarch.verify.twin_trial import TOLERANCE, compare_records

PARTS = {"encoder": ["e.a", "e.b"], "language model": ["l.a", "l.b"]}


def write(folder: Path, loss: float = 2.0, **changes: Tensor | None) -> Path:
    numbers: dict[str, Tensor] = {}
    for place, name in enumerate(name for names in PARTS.values() for name in names):
        numbers[f"gradient 0 {name}"] = torch.arange(1.0, 5.0) + place
        numbers[f"parameter {name}"] = torch.ones(4)
    for name, value in changes.items():
        key = f"gradient 0 {name.replace('_', '.')}"
        if value is None:
            del numbers[key]
        else:
            numbers[key] = value
    folder.mkdir()
    save_file(numbers, folder / "numbers.safetensors")
    (folder / "record.json").write_text(json.dumps({"losses": [loss], "norms": [None], "parts": PARTS}))
    return folder


def test_equal_is_zero(tmp_path: Path) -> None:
    found = compare_records(write(tmp_path / "a"), write(tmp_path / "b"))
    assert found.is_equal and found.loss == 0 and found.begins is None
    assert all(one.gradients == one.parameters == 0 for one in found.parts)


def test_a_wrong_gradient_is_found_where_it_begins(tmp_path: Path) -> None:
    wrong = write(tmp_path / "a", e_b=torch.arange(2.0, 6.0) * 1.01, l_a=torch.arange(3.0, 7.0) * 2)
    found = compare_records(wrong, write(tmp_path / "b"))
    assert not found.is_equal
    assert [one.begins for one in found.parts] == ["e.b", "l.a"]
    assert found.begins == "l"  # the backward pass meets it first
    assert found.parts[0].gradients > TOLERANCE and found.parts[0].parameters == 0


def test_a_gradient_that_is_not_there(tmp_path: Path) -> None:
    found = compare_records(write(tmp_path / "a", e_a=None), write(tmp_path / "b"))
    assert not found.is_equal and found.parts[0].missing == ("gradient 0 e.a",)


def test_a_wrong_loss(tmp_path: Path) -> None:
    assert not compare_records(write(tmp_path / "a", loss=2.001), write(tmp_path / "b")).is_equal
