"""Real process groups: the local launcher and torchrun, errors on one rank, equal configs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.launch.launched_script import PATIENCE, ROOT, Launched, start

_REDUCES = """
    import torch
    from torch import distributed
    from cornstarch.launch import current_world, start_process_group

    world = current_world()
    with start_process_group(world, "cpu", timeout=120, rendezvous_timeout=120):
        number = torch.tensor(world.rank + 1.0)
        distributed.all_reduce(number)
        assert distributed.get_backend() in ("gloo", "cpu:gloo"), distributed.get_backend()
        assert "CORNSTARCH_STORE_SOCKET" not in os.environ
"""


def start_warm(folder: Path, script: str) -> Launched:
    """Start a script in two processes that need not import torch first."""
    # A process that may have asked for GPUs cannot be forked.
    before = "" if torch.cuda.is_available() else f"sys.executable = {warm.interpreter()!r}"
    return start(folder, script, 2, before=before)


def test_ranks_compare_configs_and_versions(tmp_path: Path) -> None:
    script = (
        _REDUCES
        + """
        from cornstarch.errors import ConfigError
        from cornstarch.launch import process_group

        def said(value):
            try:
                process_group.agree(value)
            except ConfigError as error:
                return str(error)

        answers = [number.item(), said({"a": [1, "ä" * 1000]}), said({"a": world.rank, "b": "x" * world.rank * 10_000})]
        if world.rank == 1:
            real = process_group.get_versions()
            process_group.get_versions = lambda: {**real, "transformers": "5.0.0"}
        answers.append(said({}))
    publish(f"answers_{rank}", repr(answers))
    """
    )
    code, _, stderr = start_warm(tmp_path, script).wait()
    assert code == 0, stderr
    texts = [(tmp_path / f"answers_{rank}").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1]
    total, same, config, versions = eval(texts[0])
    assert (total, same) == (3.0, None)
    assert "  a: 0 on rank 0; 1 on rank 1\n" in config
    assert '  b: "" on rank 0; "xxxx' in config
    assert len(config) < 400
    assert "5.0.0 on rank 1\nInstall the same versions" in versions


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
def test_no_thread_outlives_the_group(tmp_path: Path) -> None:
    script = (
        _REDUCES
        + """
        import torch._dynamo  # whatever is imported meanwhile
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    publish(f"threads_{rank}", repr([name for name in threads if "gloo" in name]))
    """
    )
    code, _, stderr = start_warm(tmp_path, script).wait()
    assert code == 0, stderr
    assert [(tmp_path / f"threads_{rank}").read_text() for rank in (0, 1)] == ["[]", "[]"]


def test_the_error_of_the_first_rank_is_shown(tmp_path: Path) -> None:
    script = (
        _REDUCES
        + """
        if world.rank == 1:
            raise ValueError("the cause")
        distributed.barrier()
    """
    )
    launched = start_warm(tmp_path, script)
    code, _, stderr = launched.wait()
    assert code == 1
    assert stderr.startswith("rank 1 of 2 failed with exit code 1; the others were stopped.\n  Traceback")
    assert "  ValueError: the cause\n" in stderr
    assert "barrier" not in stderr
    assert "barrier" in launched.log(0)


def test_a_restart_by_torchrun_gets_a_fresh_store(tmp_path: Path) -> None:
    script = """
    import os, signal, sys
    from pathlib import Path
    """ + (
        _REDUCES
        + """
        if world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)  # the next must not find what this one has left in the store
        distributed.all_reduce(number)
    Path(sys.argv[1], f"sum_{world.rank}").write_text(str(number.item()))
    """
    )
    (tmp_path / "worker.py").write_text(textwrap.dedent(script))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    ran = subprocess.run(
        [*torchrun, "--monitor-interval=0.1", str(tmp_path / "worker.py"), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHON_EXEC": warm.interpreter(),  # what torchrun starts its processes with
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr
    assert [(tmp_path / f"sum_{rank}").read_text() for rank in (0, 1)] == ["6.0", "6.0"]


@pytest.mark.gpu
def test_a_group_has_one_gpu_per_process(tmp_path: Path) -> None:
    """One process for each GPU; CPU tensors still travel."""
    script = """
        import torch
        from torch import distributed
        from cornstarch.launch import agree, current_world, start_process_group

        world = current_world()
        with start_process_group(world, "cuda", timeout=60) as device:
            assert device.index == torch.cuda.current_device() == world.local_rank
            for place in (device, torch.device("cpu")):
                number = torch.tensor(world.rank + 1.0, device=place)
                distributed.all_reduce(number)
                assert number.item() == world.size * (world.size + 1) / 2
            agree({"a": 1})
            publish(f"size_{rank}", str(world.size))
            if sys.argv[1:]:
                raise ValueError("the cause")
    """
    environment = {"PYTHONPATH": str(ROOT)}
    assert start(tmp_path, script, "auto", environment=environment).wait() == (0, "", "")
    assert (tmp_path / "size_0").read_text() == str(torch.cuda.device_count())
    code, _, stderr = start(tmp_path, script, "auto", "fail", environment=environment).wait()
    assert code == 1
    assert "ValueError: the cause" in stderr


def test_processes_share_a_gpu_through_gloo(tmp_path: Path) -> None:
    """Two processes and one GPU, or what says that it is one: all use gloo, and rank 0 says so."""
    script = """
        import torch
        from torch import distributed
        from cornstarch.launch import current_world, start_process_group

        torch.cuda.device_count = lambda: 1
        if not torch.cuda.is_available():
            torch.cuda.set_device = lambda device: None
        with start_process_group(current_world(), "cuda", timeout=60) as device:
            place = device if torch.cuda.is_available() else torch.device("cpu")
            number = torch.tensor(rank + 1.0, device=place)
            distributed.all_reduce(number)
            publish(f"found_{rank}", f"{device} {distributed.get_backend_config()} {number.item()}")
    """
    code, _, stderr = start_warm(tmp_path, script).wait()
    assert code == 0, stderr
    assert "more processes than GPUs" in stderr
    assert {(tmp_path / f"found_{rank}").read_text() for rank in (0, 1)} == {"cuda:0 cpu:gloo,cuda:gloo 3.0"}
