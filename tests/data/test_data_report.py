"""What `data check` reports, against data whose faults are known."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cornstarch.cli.main import make_app
from cornstarch.data.collate import ChatCollator
from cornstarch.data.data_report import SampleInspector, check_data, render
from cornstarch.tasks.conversation import preview_chat
from tests.data.small_data import data_config, mixed_rows, processor_for, write_rows


def look(processor: Any, data: Any) -> SampleInspector:
    return preview_chat(ChatCollator(processor, data))


def print_report(report: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(render(report))
    return stream.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = mixed_rows(tmp_path, 8)
    rows.append({"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "x"}]})
    return write_rows(tmp_path / "d.jsonl", rows)


def test_report_without_processor_counts_characters(path: Path) -> None:
    report = check_data(data_config(path, skip_limit=0.2))
    (source,) = report.sources
    assert (source.samples, source.checked, len(source.lengths)) == (9, 9, 8)
    assert source.items == {"image": 6, "audio": 2} and "sharegpt" in source.description
    assert [sample.id for sample in source.broken] == ["d.jsonl:9"] and report.problems == []
    assert len(report.excerpts) == 5 and report.unit == "characters"
    assert report.excerpts[1][1][-2] == ("dog sound", True)
    text = print_report(report)
    assert "d.jsonl:9: the text has 1 <image> for 0 images" in text and "⟦dog sound⟧" in text


def test_report_with_processor_counts_tokens(path: Path) -> None:
    processor, _ = processor_for(vision="clip", audio="whisper")
    report = check_data(data_config(path), look(processor, data_config(path)))
    (source,) = report.sources
    assert source.items == {"vision": 6, "audio": 2} and report.unit == "tokens"
    # BOS, "user:", 5 of the image, 2 words, "assistant:", the 2 of the answer, EOS
    assert source.lengths[1] == 13 and source.trained[1] == 3
    assert ("<vision>×5", False) in report.excerpts[1][1]
    assert report.excerpts[1][1][-1] == ("dog sound </s>", True)
    assert report.problems == ["data.train.0: 1 of 9 samples are broken, more than `data.skip_limit` = 0.05 allows."]
    assert "<vision>×5" in print_report(report)


def test_report_lists_every_problem(tmp_path: Path, path: Path) -> None:
    data = data_config(path, max_length=12, too_long="error")
    data = data.model_copy(
        update={"evaluation": [data.train[0].model_copy(update={"path": str(tmp_path / "no.json")})]}
    )
    patient = data.model_copy(update={"too_long": "skip"})
    report = check_data(data, look(processor_for(vision="clip", audio="whisper")[0], patient))
    assert "no.json does not exist" in report.problems[0] and "max_length is 12" in report.problems[1]
    assert report.sources[0].too_long and "no.json" in print_report(report)
    gone = write_rows(tmp_path / "gone.jsonl", [{"image": "gone.png", "text": "x"}] * 30)
    report = check_data(data_config(gone))
    assert report.problems == ["data.train.0: none of 30 samples can be used."]
    assert "… and 10 more of data.train.0" in print_report(report)


def test_report_of_evenly_spaced_samples(path: Path) -> None:
    (source,) = check_data(data_config(path), most=3).sources
    assert (source.samples, source.checked) == (9, 3)
    assert [sample.id for sample in source.broken] == ["d.jsonl:9"]


def test_data_check_command_prints_the_report(tmp_path: Path, path: Path) -> None:
    app = make_app()
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{whole: {{path: x}}}}\ndata: {{train: {path}, skip_limit: 0.2}}\n")
    ran = CliRunner().invoke(app, ["data", "check", str(config), "--rows"])
    assert ran.exit_code == 0, ran.output
    assert "d.jsonl:9" in ran.output and "sharegpt" in ran.output
    ran = CliRunner().invoke(app, ["data", "check", str(config), "data.skip_limit=0", "--samples", "3", "--rows"])
    assert ran.exit_code == 2 and "1 of 3 samples are broken" in ran.output
