"""`parallel: auto` with one process and two: from the choice of a plan to a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Cluster
from cornstarch.plan.validation import as_data
from cornstarch.planner.search_run import build_cluster, choose_plan
from cornstarch.train import Trainer, load_config
from tests import warm
from tests.cli.small_runs import write_config
from tests.cli.started import start, together
from tests.trainer.tiny import losses, quiet, tiny_config, trainer_of

SLOW = "name: slow\nper_node: 2\ndevice: {name: H100}\ninside: {bandwidth: 20 kB/s, latency: 1 us}\n"
TINY = "name: tiny-devices\nper_node: 1\ndevice: {name: H100, memory: 8 kB}\n"


def test_a_run_chooses_prints_and_stores_its_plan(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "loop.gradient_accumulation_steps=4", parallel="auto")
    console = quiet()
    trainer = Trainer(config, console=console)
    trainer.fit()
    assert not trainer.config.parallel.auto and set(trainer.config.parallel.modules) == {"vision", "language_model"}
    stored = load_config(tmp_path / "run" / "config.yaml")
    assert stored == trainer.config
    assert load_config(None, base=as_data(config), plan=tmp_path / "run" / "plan.yaml").parallel == stored.parallel
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("parallel: auto: vision one rank, language_model one rank") == 1 and "Predicted for 1xcpu" in said
    assert len(losses(tmp_path / "run")) == 6


def test_a_resumed_run_keeps_its_plan(tmp_path: Path) -> None:
    first = trainer_of(tiny_config(tmp_path, "loop.steps=3", parallel="auto"))
    first.fit()
    second = trainer_of(tiny_config(tmp_path, "loop.steps=3", parallel="auto"))
    second.setup()  # would be refused if the config had changed
    assert second.position.step == 3 and second.config == first.config


def test_the_cluster_has_the_config_s_devices_and_one_per_process(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "parallel.cluster=4x8xH200", parallel="auto")
    found = build_cluster(config, ranks=4, per_node=2)
    assert (found.nodes, found.per_node, found.name) == (2, 2, "2x2xH200")
    assert found.device == Cluster.parse("H200").device
    here = build_cluster(tiny_config(tmp_path, parallel="auto"), ranks=2, per_node=2)
    assert here.name == "2xcpu" and here.device == Cluster.parse("2xcpu").device
    with pytest.raises(ConfigError, match="3 processes, 2 on this machine"):
        build_cluster(config, ranks=3, per_node=2)


def test_a_run_that_fits_no_cluster_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    config = tiny_config(tmp_path, f"parallel.cluster={tmp_path / 'tiny.yaml'}", parallel="auto")
    with pytest.raises(ConfigError, match="No plan of this run fits 1xH100"):
        choose_plan(config, 1, 1)
    assert not (tmp_path / "run").exists()


def test_two_processes_get_one_plan(tmp_path: Path) -> None:
    """As torchrun starts them. On so slow a link, only the encoder's few tokens are worth sending."""
    (tmp_path / "slow.yaml").write_text(SLOW)
    write_config(tmp_path, "parallel.cluster=slow.yaml", parallel="auto", loop={"steps": 2})
    ended = together("train", "run.yaml", folder=tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    stored = load_config(tmp_path / "run" / "config.yaml")
    assert not stored.parallel.auto and (tmp_path / "run" / "plan.yaml").exists()
    assert stored.parallel.ranks == "own" and stored.loop.gradient_accumulation_steps > 1
    assert len(losses(tmp_path / "run")) == 2
    assert sum("parallel: auto:" in text for _, text in ended) == 1


def test_both_processes_report_why_there_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    write_config(tmp_path, "parallel.cluster=tiny.yaml", parallel="auto")
    ended = together("train", "run.yaml", folder=tmp_path)
    assert [code for code, _ in ended] == [2, 2], ended
    assert all("No plan of this run fits 2xH100" in text and "Traceback" not in text for _, text in ended)


def test_nproc_chooses_the_plan_before_processes_start(tmp_path: Path) -> None:
    write_config(tmp_path, "output=run", parallel="auto", loop={"steps": 2})
    (tmp_path / "tiny.yaml").write_text(TINY)

    def train(*more: str) -> tuple[int, str]:
        command = ("train", "run.yaml", "--nproc", "2", *more)
        return start(*command, folder=tmp_path, python=warm.interpreter()).ended()

    code, said = train("parallel.cluster=tiny.yaml")
    assert code == 2 and "No plan of this run fits 2xH100" in said
    assert not (tmp_path / "run").exists()  # nothing was started
    code, said = train()
    assert code == 0, said
    assert said.count("parallel: auto: ") == 1 and "in 2 processes" in said
    assert "Predicted for 2xcpu" in said
    stored = load_config(tmp_path / "run" / "config.yaml")
    assert stored.parallel == load_config(tmp_path / "run.yaml", plan=tmp_path / "run" / "plan.yaml").parallel
