"""The doctor: it tells what is broken, and survives it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from cornstarch.cli import doctor
from cornstarch.cli.doctor import Finding
from cornstarch.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
Usage = namedtuple("Usage", "total used free")


def found(check: Callable[[], object], name: str) -> Finding:
    findings: list[Finding] = list(check())  # type: ignore[call-overload]
    return next(finding for finding in findings if finding.name == name)


def installed(versions: dict[str, str]) -> Callable[[str], str | None]:
    return lambda name: versions.get(name)


def test_a_healthy_machine_passes() -> None:
    statuses = {finding.name: finding.status for finding in doctor.examine()}
    assert "fail" not in statuses.values(), statuses
    assert {"python", "torch", "transformers", "peft", "torchvision", "gloo probe", "cuda probe", "nccl probe",
            "shared memory", "disk", "ports"} <= set(statuses)  # fmt: skip


def test_the_supported_versions_are_those_of_the_package() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    for name, (least, below) in doctor.SUPPORTED.items():
        numbers = [".".join(map(str, version)) for version in (least, below)]
        assert f"{name}>={numbers[0]},<{numbers[1]}" in asked
    names = {name.split(">")[0] for name in asked}
    assert names == {*doctor.SUPPORTED, *doctor.CORE}


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, "fail"), ("2.10.1", "fail"), ("2.11.0+cu130", "ok"), ("2.15.9", "ok"), ("2.16.0", "fail"), ("odd", "fail")],
)
def test_unsupported_versions_fail(monkeypatch: pytest.MonkeyPatch, version: str | None, status: str) -> None:
    monkeypatch.setattr(doctor, "get_version", installed({"torch": version} if version else {}))
    finding = found(doctor.check_packages, "torch")
    assert finding.status == status
    assert bool(finding.advice) == (status == "fail")


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "get_version", installed({}))
    assert found(doctor.check_packages, "pyyaml") == Finding("pyyaml", "fail", "not installed", "pip install pyyaml")
    assert found(doctor.check_packages, "peft").status == "ok"
    assert list(doctor.check_process_groups_and_devices()) == []


def test_a_broken_torchvision_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "torchaudio.py").write_text("import os; os.abort()")
    (tmp_path / "torchcodec.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "get_version", lambda name: "0.28.0")
    findings = {finding.name: finding for finding in doctor.check_fragile_packages()}
    assert {name: finding.status for name, finding in findings.items()} == {
        "torchvision": "fail", "torchaudio": "fail", "torchcodec": "ok",
    }  # fmt: skip
    assert "libcudart" in findings["torchvision"].detail
    assert "pip uninstall torchvision" in findings["torchvision"].advice


PROBES = [
    ("raise ImportError('no libtorch')", "torch probe"),
    ("import os; os._exit(3)", "torch probe"),
    ("import os, sys; os.kill(os.getpid(), 11)", "torch probe"),
]


@pytest.mark.parametrize(("code", "name"), PROBES)
def test_a_torch_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, name: str) -> None:
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = found(doctor.check_process_groups_and_devices, name)
    assert finding.status == "fail"
    assert "Install torch again" in finding.advice


def test_a_probe_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # torch imports and then hangs at the first group: what was found before is kept.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.13.0'")
    (tmp_path / "torch/distributed.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for seconds in (2, 20, 200):  # a busy machine may take longer until torch is imported
        monkeypatch.setattr(doctor, "PROBE_SECONDS", seconds)
        findings = {finding.name: finding for finding in doctor.check_process_groups_and_devices()}
        if findings["torch probe"].status == "ok":
            break
    assert findings["torch probe"].status == "ok"
    assert findings["gloo probe"].status == "fail"
    assert f"longer than {seconds} s" in findings["gloo probe"].detail


@pytest.mark.parametrize(("free", "status"), [(0.5, "fail"), (5, "warn"), (50, "ok")])
def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch, free: float, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free * doctor.GIB))
    assert found(doctor.check_disk, "disk").status == status


def test_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 64 * 2**20))
    assert found(doctor.check_shared_memory, "shared memory").status == "warn"
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert found(doctor.check_shared_memory, "shared memory").status == "warn"


def test_unusable_ports_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no loopback")

    monkeypatch.setattr("socket.create_server", refuse)
    assert found(doctor.check_ports, "ports").status == "fail"


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd_machine() -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(doctor, "CHECKS", [odd_machine, doctor.check_python])
    statuses = [(finding.name, finding.status) for finding in doctor.examine()]
    assert statuses == [("odd machine", "warn"), ("python", "ok")]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_code_says_whether_something_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    finding = Finding("thing [bold]", status, "found this [/x]", "do that")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "CHECKS", [lambda: iter([finding])])
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert (ended.value.code or 0) == code
    out = capsys.readouterr().out
    assert status in out and "thing [bold]" in out and "found this [/x]" in out and "do that" in out


def test_the_doctor_itself_does_not_import_torch() -> None:
    code = "import sys\nfrom cornstarch.cli import doctor\nlist(doctor.examine())\nprint('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout.strip() == "False", ended.stderr


@pytest.mark.parametrize(
    ("is_kept", "may_write", "status"), [(True, False, "ok"), (False, True, "ok"), (False, False, "warn")]
)
def test_sources_that_are_compiled_at_every_start_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_kept: bool, may_write: bool, status: str
) -> None:
    cached = tmp_path / "torch.pyc"
    if is_kept:
        cached.touch()
    spec = namedtuple("spec", "cached")(str(cached))
    monkeypatch.setattr(doctor, "find_spec", lambda name: spec if name == "torch" else None)
    monkeypatch.setattr(sys, "dont_write_bytecode", not may_write)
    (finding,) = doctor.check_bytecode()
    assert (finding.name, finding.status) == ("torch bytecode", status)
    assert ("PYTHONDONTWRITEBYTECODE" in finding.advice) == (status == "warn")
