"""`cornstarch estimate`: what it prints, and every mistake as a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.small_runs import Command

RUN = """\
model:
  language_model:
    tokenizer: none/none
    config: {model_type: llama, vocab_size: 1000, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
             num_attention_heads: 4, num_key_value_heads: 2}
data: {train: none.json, max_length: 128}
loop: {batch_size: 16, steps: 1}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a config whose data and tokenizer are nowhere: only shapes matter."""
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def rows(out: str) -> dict[str, list[str]]:
    """Return the cells of the tables by the first of their row."""
    lines = [[cell.strip().replace("\u00a0", " ") for cell in line.strip("│┃").split("│")] for line in out.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) > 1}


def test_every_kind_of_data_parallelism_is_listed(run: Path, command: Command) -> None:
    code, out, err = command("estimate", run, "parallel.data.kind=zero1", "--gpu", "H100", "--world", "4")
    assert code == 0 and err == ""
    found = rows(out)
    assert found["language model"] == ["LlamaForCausalLM", "202,048", "202,048", "789.2 KiB"]
    assert list(found)[-5:] == ["ddp", "zero1 *", "zero2", "zero3 = fsdp2", "hsdp, 2 copies"]
    assert found["ddp"][:4] == ["789.2 KiB", "789.2 KiB", "1.5 MiB", "0 B"] and found["ddp"][-1] == "yes"
    assert found["zero3 = fsdp2"][:2] == ["197.3 KiB", "197.3 KiB"]
    summary = "75.1\u00a0GiB usable on each; 4 samples of 128 tokens per rank and microbatch, in bf16"
    assert f"4 ranks on H100, {summary}" in out
    assert out.splitlines()[-1].startswith("The config's kind, zero1, fits on H100: 75.1\u00a0GiB are left.")


def test_a_narrow_terminal_cuts_no_figures(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = command("estimate", run, "--gpu", "cpu")
    assert code == 0 and "activations" in out and "…" not in out


def test_a_network_is_estimated(run: Path, command: Command) -> None:
    code, out, err = command("estimate", run, "--gpu", "H100", "--world", "4", "--network", "100Mbit")
    assert code == 0 and err == ""
    found = rows(out)
    assert "4 ranks with 100 Mbit/s each; 202,048 trained parameters (789.2\u00a0KiB)" in out
    sent = 2 * 3 / 4 * 202_048 * 4  # the ring of an all-reduce
    assert found["ddp"][0] == f"{sent / 2**20:.1f} MiB" and found["ddp"][2] == "1.00 ×"
    step = float(found["ddp"][1].removesuffix(" ms"))
    assert step == pytest.approx(1000 * sent / 12.5e6, rel=0.05)  # next to nothing is computed
    chosen = [name for name in rows(out.split("100 Mbit/s each")[1]) if name.endswith(" *")]
    assert len(chosen) == 1 and out.splitlines()[-1].startswith(f"{chosen[0].removesuffix(' *')}: a step would be")


def test_recommended_settings_are_valid(run: Path, command: Command) -> None:
    arguments = ["--gpu", "H100", "--world", "2", "--network", "10Mbit"]
    _, out, _ = command("estimate", run, *arguments)
    advised = out.splitlines()[-1].split("in the config: ")[1].rstrip(".").split()
    assert any(setting.startswith("parallel.data.") for setting in advised)
    code, _, err = command("validate", run, *advised)
    assert "parallel.data" not in err, (code, err)


def test_a_fast_network_needs_no_compression(run: Path, command: Command) -> None:
    wide = ["model.language_model.config.hidden_size=512", "model.language_model.config.intermediate_size=2048"]
    rows_of = ["data.max_length=4096", "loop.batch_size=64"]
    arguments = ["--gpu", "H100", "--world", "2", "--network", "3600Gbit", "--latency", "3.4us"]
    code, out, _ = command("estimate", run, *wide, *rows_of, *arguments)
    assert code == 0 and out.splitlines()[-1].startswith("ddp is about as fast as anything here")


WRONG = [
    (["--gpu", "H1000"], "Did you mean H100?"),
    (["--gpu", "A100"], "Did you mean A100-80 or A100-40?"),
    (["--gpu", "H100", "--world", "0"], "world = 0"),
    (["parallel.modules.model.tp=3", "--gpu", "H100", "--world", "4"], "multiples of 3"),
    (["loop.batch_sise=3"], "batch_size"),
    (["--gpu", "H100", "--world", "2", "--network", "fast"], "such as 100Mbit, 1Gbit or 12.5MB/s"),
    (["--gpu", "H100", "--world", "2", "--network", "1Gbit", "--latency", "1 m"], "latency '1 m'"),
    (["--gpu", "H100", "--network", "1Gbit"], "--world"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_mistakes_are_messages(arguments: list[str], said: str, run: Path, command: Command) -> None:
    code, _, err = command("estimate", run, *arguments)
    assert code == 2 and said in err
