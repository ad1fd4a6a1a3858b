"""`cornstarch layout`: what it prints and draws, every mistake with its line, and that it never waits for torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cornstarch.cli import main as command_line
from cornstarch.cli.layout import read_plan_file
from cornstarch.errors import ConfigError
from cornstarch.plan import DataPlan, ModulePlan, Plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = """\
modules:
  vision: {tp: 2}
  audio:
  language_model: {tp: 4, cp: 2, stages: 3}
data:
  kind: fsdp2
"""
RUN = """\
model:
  language_model: {path: some/llm}
  encoders:
    vision: {path: some/encoder}
data:
  train: train.jsonl
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `cornstarch layout` in a folder with a plan; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(EXAMPLE)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            command_line.main(["layout", *arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return int(ended.value.code or 0), captured.out, captured.err

    return run_command


def test_the_layout_of_the_example_is_printed(run: Run) -> None:
    code, out, err = run("plan.yaml", "--world", "54")
    assert code == 0 and err == ""
    assert out.startswith("3 modules on ranks of their own, 27 ranks in a replica\n  vision          tp 2\n")
    assert "54 ranks on 7 nodes of 8: 2 replicas of 27" in out
    assert "6     48–49  vision          0      0    0   0–1" in out
    assert "cannot be run yet" not in out


def test_a_world_size_that_does_not_fit_is_refused(run: Run) -> None:
    code, out, err = run("plan.yaml", "--world", "40")
    assert code == 2 and out == ""
    assert err == (
        "ConfigError: 40 ranks do not divide evenly: a replica takes 27 (vision 2 + audio 1 + language_model "
        "3 stages × cp 2 × tp 4 = 24).\nSizes that work are multiples of 27: 27 or 54.\n"
    )


def test_nodes_can_be_smaller(run: Run) -> None:
    code, out, _ = run("plan.yaml", "--world", "27", "--ranks-per-node", "2")
    assert code == 0 and "27 ranks on 14 nodes of 2" in out
    assert "warning: language_model: all tensor-parallel groups (tp 4) lie on up to 2 nodes" in out


def test_the_layout_is_drawn_as_svg(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("plan.yaml", "--world", "54", "--svg", "layout.svg")
    assert code == 0 and out.endswith("\nlayout.svg\n")
    assert ElementTree.parse("layout.svg").getroot().tag.endswith("svg")
    code, _, err = run("plan.yaml", "--world", "54", "--svg", "none/layout.svg")
    assert code == 2 and "--svg none/layout.svg: the file cannot be written (No such file or directory)." in err


WRONG = [
    # file, what is said
    ("modules:\n  vision: {tpp: 2, tp: 0}\n  language_model:\ndata: {kind: ddp, offload: true}\n",
     ["3 mistakes:",
      "plan.yaml:2  modules.vision.tpp = 2\n  There is no `tpp` in modules.vision.\n  Did you mean `tp`?",
      "plan.yaml:2  modules.vision.tp = 0\n  Expected a whole number of at least 1.",
      "plan.yaml:4  data.offload = true\n  ddp keeps whole parameters"]),
    ("modulse:\n  model:\n    tp: -1\n", ["plan.yaml:1  modulse\n", "plan.yaml:3  modulse.model.tp = -1"]),
    ("modules: {model: {tp: 2}\n", ["plan.yaml:2", "cannot be read as YAML"]),
    ("modules:\n  model: {activation_checkpointing: yes}\n", ["plan.yaml:2", "Write true"]),
    ("modules: {model: {tp: 2, tp: 4}}\n", ["It is given twice"]),
    ("- tp\n", ["It holds a list; expected keys such as `modules:` and `data:`."]),
    ("  \n", ["plan.yaml\n  It is empty."]),
    ("\xff", ["is not UTF-8."]),
    ("x" * 300_000, ["It has more than 262144 bytes"]),
    (RUN + "parallel:\n  data: {kind: fsdp3}\n", ["plan.yaml:8  parallel.data.kind = fsdp3", "Did you mean `fsdp"]),
    (RUN + "parallel: 4\n", ["plan.yaml:7  parallel", "Expected a mapping with some of these keys"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_mistakes_are_reported_with_their_lines(run: Run, text: str, said: list[str]) -> None:
    Path("plan.yaml").write_bytes(text.encode("latin-1"))
    code, out, err = run("plan.yaml", "--world", "8")
    assert code == 2 and out == "" and err.startswith("ConfigError: ")
    for line in said:
        assert line in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.yaml", "--world", "8"], "none.yaml\n  There is no such file (seen from "),
        ([".", "--world", "8"], "It is a folder; expected a YAML file."),
        (["plan.yaml", "--world", "0"], "world = 0: expected a whole number from 1 to 10,000,000."),
        (["plan.yaml", "--world", "27", "--ranks-per-node", "0"], "ranks_per_node = 0"),
        (["plan.yaml"], "--world"),
        (["plan.yaml", "--world", "many"], "--world"),
    ],
)
def test_invalid_arguments_are_refused(run: Run, arguments: list[str], said: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2 and said in err


CONFIGS = [
    # what a config says, the plan in it
    (RUN, Plan({"vision": ModulePlan(), "language_model": ModulePlan()})),
    (RUN + "parallel:\n", Plan({"vision": ModulePlan(), "language_model": ModulePlan()})),
    (RUN + "parallel: {data: {kind: zero3}}\n",
     Plan({"vision": ModulePlan(), "language_model": ModulePlan()}, DataPlan("zero3"))),
    (RUN + "parallel: {verify: never, modules: {vision: {tp: 2}, language_model: {}}}\n",
     Plan({"vision": ModulePlan(tp=2), "language_model": ModulePlan()})),
    ("model: {whole: {path: some/model}}\nparallel: {data: {kind: fsdp1}}\n", Plan(data=DataPlan("fsdp1"))),
    ("parallel: {data: {kind: fsdp1}}\n", Plan(data=DataPlan("fsdp1"))),
    ("model: {language_model: {path: some/llm}}\n", Plan({"language_model": ModulePlan()})),
    ("data: {kind: fsdp1}\n", Plan(data=DataPlan("fsdp1"))),  # a plan, not a config
]  # fmt: skip


@pytest.mark.parametrize(("text", "plan"), CONFIGS)
def test_a_config_has_a_plan(tmp_path: Path, text: str, plan: Plan) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert read_plan_file(tmp_path / "run.yaml") == plan


def test_a_plan_may_be_json(tmp_path: Path) -> None:
    plan = Plan({"vision": ModulePlan(tp=2), "language_model": ModulePlan()}, DataPlan("fsdp2", wrap=("A", "B")))
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_data()))
    assert read_plan_file(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text("{}")
    assert read_plan_file(tmp_path / "plan.json") == Plan()
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(ConfigError, match="It holds a list"):
        read_plan_file(tmp_path / "plan.json")


@pytest.mark.parametrize("world", ["54", "40"])
def test_no_heavy_package_is_imported(run: Run, world: str) -> None:
    code = (
        "import sys\nfrom cornstarch.cli import main\n"
        f"try:\n    main.main(['layout', 'plan.yaml', '--world', '{world}', '--svg', 'a.svg'])\n"
        "finally:\n    heavy = ('torch', 'transformers', 'matplotlib')\n"
        "    print('imported:', [name for name in heavy if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.returncode == (0 if world == "54" else 2), ended.stderr
    assert "imported: []" in ended.stdout
