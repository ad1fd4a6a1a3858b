"""`cornstarch plan`: what it prints and writes, that `train` takes it, and every mistake as a message."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cornstarch.cli import write_file
from cornstarch.cli.plan import parse_sizes
from cornstarch.config.config_file import load_config
from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Cluster
from cornstarch.plan.data_statistics import DataStatistics, write_data_statistics
from cornstarch.planner import write_costs
from cornstarch.planner.search_run import cost_of
from tests.cli.small_runs import Command

RUN = """\
name: seeing
model:
  encoders:
    vision:
      train: projector
      config: {model_type: clip_vision_model, image_size: 32, patch_size: 16, hidden_size: 64, intermediate_size: 128,
               num_hidden_layers: 3, num_attention_heads: 4}
      processor_config: {class_name: CLIPImageProcessor}
  language_model:
    tokenizer: none/none
    config: {model_type: llama, vocab_size: 1000, hidden_size: 512, intermediate_size: 1024, num_hidden_layers: 4,
             num_attention_heads: 8, num_key_value_heads: 4}
data: {train: none.json, max_length: 512}
loop: {batch_size: 64, steps: 1}
"""
# Devices with so little memory that little fits, and with nothing else to write to.
TIGHT = """\
name: tight
per_node: 2
device: {name: H100, memory: %s}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a config whose data and tokenizer are nowhere: only shapes matter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def rows(out: str) -> dict[str, list[str]]:
    """Return the first lines of the rows of the tables, by their first cell."""
    lines = [[cell.strip().replace("\u00a0", " ") for cell in line.strip("│").split("│")] for line in out.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) > 2 and line[0]}


def test_the_best_plan_is_explained(run: Path, command: Command) -> None:
    code, out, err = command("plan", run, "--cluster", "2x8xH100", "--top", 3)
    assert code == 0 and err == ""
    assert out.startswith("2x8xH100: 2 nodes of 8 × H100, 79.1 GiB each")
    assert "seeing: 64 samples of 512 tokens per step, in bf16; layer costs estimated" in out
    found = rows(out)
    assert list(found) == ["best", "2", "3", "4"]
    assert all(found[name][1].startswith("+") or "as fast" in found[name][1] for name in ("2", "3", "4"))
    assert found["best"][0].endswith("s") and found["best"][4].endswith("iB")
    assert "lost: " in out and "• vision " in out and "Where the time of the busiest device goes: " in out


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("1xH100", "cornstarch train {run} loop.batch_size=32 --plan plan.yaml"),
        ("4xH100", "cornstarch train {run} loop.batch_size=32 --plan plan.yaml --nproc 4"),
        ("2x2xH100", "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500 "
                     "-m cornstarch train {run} loop.batch_size=32 --plan plan.yaml"),
    ],
)  # fmt: skip
def test_the_printed_command_trains_as_planned(run: Path, command: Command, cluster: str, expected: str) -> None:
    code, out, _ = command("plan", run, "loop.batch_size=32", "--cluster", cluster, "--output", "plan.yaml", "--top", 0)
    assert code == 0 and out.splitlines()[-1] == f"plan.yaml: {expected.format(run=run)}"
    assert f"# To train with it: {expected.split(' -m')[0].split(' {run}')[0]}" in Path("plan.yaml").read_text()


def test_train_and_layout_accept_the_plan_file(run: Path, command: Command, tmp_path: Path) -> None:
    code, out, _ = command("plan", run, "loop.batch_size=32", "--cluster", "4xH100", "--output", "plan.yaml", "--quiet")
    assert code == 0 and len(out.splitlines()) == 1 and out.startswith("parallel: auto: vision ")
    planned = load_config(run, plan=tmp_path / "plan.yaml")
    assert planned.loop.batch_size == 32 and set(planned.parallel.modules) == {"vision", "language_model"}
    code, out, _ = command("layout", "plan.yaml", "--world", 4)
    assert code == 0 and "4 ranks" in out
    code, _, err = command("train", run, "--plan", "plan.yaml")
    assert code == 2 and "none.json" in err and "plan.yaml" not in err  # the data is all that is missing


def test_the_config_is_shown_beside_the_best(run: Path, command: Command) -> None:
    code, out, _ = command("plan", run, "parallel.modules.model.tp=2", "--cluster", "4xH100", "--top", 0)
    assert code == 0 and list(rows(out)) == ["best", "config"]
    code, out, _ = command("plan", run, "parallel.modules.model.tp=4", "--cluster", "2xH100", "--top", 0)
    assert code == 0 and "no prediction: 2 ranks are too few" in " ".join(out.replace("│", "").split())


def test_other_sizes_and_what_they_cost(run: Path, command: Command, tmp_path: Path) -> None:
    arguments = ["--cluster", "2x2xH100", "--what-if", "gpus=1..4", "--price", "2", "--html", "page.html"]
    code, out, _ = command("plan", run, *arguments)
    assert code == 0
    found = rows(out)
    assert [name for name in found if "xH100" in name] == ["1xH100", "2xH100", "2x2xH100"]
    assert found["1xH100"][2] == "100.0 %"
    tokens, dollars = found["1xH100"][1], float(found["1xH100"][5])
    assert dollars == pytest.approx(2 / 3600 / (float(tokens.split()[0]) * 1e6) * 1e6, rel=0.01) and tokens.endswith(
        "M"
    )
    assert out.splitlines()[-1] == "page.html"
    page = (tmp_path / "page.html").read_text()
    assert "seeing" in page and "2x2xH100" in page


@pytest.mark.parametrize(("text", "sizes"), [("gpus=16..512", [16, 32, 64, 128, 256, 512]), ("gpus = 3..10", [3, 6]),
                                             ("gpus=8,24,8", [8, 24]), ("GPUS=7", [7])])  # fmt: skip
def test_sizes_are_doubled_or_listed(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["16..32", "gpus=", "nodes=2", "gpus=8..4", "gpus=0..4", "gpus=a"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--what-if .*(expected|is more than)"):
        parse_sizes(text)


WRONG = [
    (["--cluster", "2x8xH1000"], "Did you mean H100?"),
    (["--cluster", "2x8xA100"], "Did you mean A100-80 or A100-40?"),
    (["--cluster", "64xH100"], "write 8x8xH100"),
    (["--cluster", "none.yaml"], "none.yaml"),
    (["--cluster", "2xH100", "loop.batch_sise=3"], "Did you mean `batch_size`?"),
    (["--cluster", "2xH100", "--nproc", "2"], "Use one of them"),
    (["--cluster", "2xH100", "--costs", "a.yaml", "--facts", "b.yaml"], "Use one of them"),
    (["--cluster", "2xH100", "--price", "-1"], "--price -1: expected dollars"),
    (["--cluster", "2xH100", "--output", "none/plan.yaml"], "there is no folder"),
    (["--cluster", "2xH100", "--facts", "none.yaml"], "none.yaml cannot be read"),
    (["--cluster", "2x8xH100", "--what-if", "gpus=12"], "12 devices do not fill nodes of 8; 8 and 16 do"),
    (["--cluster", "2xH100", "--what-if", "nodes=3"], "expected gpus=16..512"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_mistakes_are_messages(arguments: list[str], said: str, run: Path, command: Command) -> None:
    code, out, err = command("plan", run, *arguments)
    assert code == 2 and said in err and out == ""


def test_mistakes_are_reported_before_torch_is_imported(run: Path) -> None:
    code = (
        "import sys\nfrom cornstarch.cli.main import main\n"
        f"try: main(['plan', {str(run)!r}, '--cluster', '2x8xH1000'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "False", ran.stderr


def test_an_impossible_request_names_the_smallest_sufficient_cluster(
    run: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "tight.yaml").write_text(TIGHT % "40 MB")
    code, _, err = command("plan", run, "--cluster", "tight.yaml")
    assert code == 2 and "No plan of this run fits tight" in err
    assert "The smallest cluster of these devices that would do: " in err
    name = err.split("would do: ")[1].split(".\n")[0]
    nodes, per_node = ([1, *map(int, name.split("x")[:-1])])[-2:]
    (tmp_path / "enough.yaml").write_text(
        (TIGHT % "40 MB").replace("per_node: 2", f"nodes: {nodes}\nper_node: {per_node}")
    )
    code, _, err = command("plan", run, "--cluster", "enough.yaml", "--quiet")
    assert code == 0, err


def test_measured_costs_replace_estimates(run: Path, command: Command, tmp_path: Path) -> None:
    machines = Cluster.parse("2xH100")
    counted = cost_of(load_config(run), machines)
    layers = {
        one.name: tuple(replace(layer, forward=layer.forward + 1) for layer in one.layers) for one in counted.modules
    }
    slow = replace(counted, modules=tuple(replace(one, layers=layers[one.name]) for one in counted.modules))
    write_costs("costs.yaml", slow, "H100")
    code, out, _ = command("plan", run, "--cluster", "2xH100", "--costs", "costs.yaml", "--top", 0)
    assert code == 0 and "layer costs measured" in out
    assert float(rows(out)["best"][0].split()[0]) > 5  # one microbatch on each device, and a second for each layer
    code, _, err = command("plan", run, "--cluster", "2xA100-80", "--costs", "costs.yaml")
    assert code == 2 and "H100" in err
    text = RUN.replace("    vision:\n", "    seen:\n")
    (tmp_path / "other.yaml").write_text(text)
    code, _, err = command("plan", "other.yaml", "--cluster", "2xH100", "--costs", "costs.yaml")
    assert code == 2 and "measured for vision, language_model; the run has seen, language_model" in err


def test_facts_about_the_data_change_the_prediction(run: Path, command: Command) -> None:
    def step(*more: str) -> tuple[float, str]:
        code, out, _ = command("plan", run, "--cluster", "2xH100", "--top", 0, *more)
        assert code == 0
        figure, unit = rows(out)["best"][0].split()
        return float(figure) * {"ms": 1.0, "s": 1e3}[unit], out

    facts = DataStatistics(64, {"vision": 1}, {"vision": 5}, 64, {2: 1.25})
    write_data_statistics(Path("facts.yaml"), facts)
    longest, _ = step()
    known, out = step("--facts", "facts.yaml")
    assert known < longest / 1.6  # an eighth of the tokens, and a quarter longer for the slowest of two
    assert "of 64 tokens" in out
    assert "The data is uneven: of 2 replicas the slowest has 1.25 times" in out


def test_this_machine_is_the_default(run: Path, command: Command) -> None:
    code, out, _ = command("plan", run, "device=cpu", "--nproc", 2, "--top", 0)
    assert code == 0 and out.startswith("2xcpu: 1 node of 2 × cpu")
    code, out, _ = command("plan", run, "parallel=auto", "parallel.cluster=2x4xA100-80", "--quiet")
    assert code == 0 and "Predicted for 2x4xA100-80: " in out


def test_a_narrow_terminal_cuts_no_figures(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = command("plan", run, "--cluster", "2xH100")
    assert code == 0 and "tokens/s" in out and "…" not in out


def test_auto_is_not_a_plan_yet(run: Path, command: Command) -> None:
    (run.parent / "auto.yaml").write_text(RUN + "parallel: auto\n")
    (run.parent / "none.json").write_text("[]")
    here = "model.language_model.tokenizer=."
    for arguments in (("layout", "auto.yaml", "--world", 2), ("verify", "auto.yaml", here)):
        code, _, err = command(*arguments)
        assert code == 2 and "cornstarch plan" in err, err


def test_unwritable_page_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--html .*: the file cannot be written"):
        write_file("--html", tmp_path / "none" / "page.html", "a page")
