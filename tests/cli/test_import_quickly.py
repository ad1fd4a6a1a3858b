"""Imports of large packages run without garbage collections, in a process that has not imported them yet."""

from __future__ import annotations

import gc
import subprocess
import sys

from cornstarch.cli import import_quickly

FRESH = """
import gc, sys
from cornstarch.cli import import_quickly
assert "torch" not in sys.modules and gc.get_freeze_count() == 0
try:
    with import_quickly():
        assert not gc.isenabled()
        raise ImportError
except ImportError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 10_000
"""


def test_a_fresh_process_collects_no_garbage_while_it_imports() -> None:
    ended = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_process_that_has_imported_torch_keeps_its_collections() -> None:
    before = gc.get_freeze_count()
    with import_quickly():
        assert gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_training_imports_no_package_that_only_some_runs_need() -> None:
    names = ("matplotlib", "datasets", "pandas", "scipy", "sklearn", "torchvision", "peft", "cornstarch.explain")
    code = f"import sys; from cornstarch.train import Trainer; print([name for name in {names} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
