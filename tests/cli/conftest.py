"""What tests of commands share."""

from __future__ import annotations

from typing import Any

import pytest

from cornstarch.cli.main import main
from tests.cli.small_runs import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `cornstarch` in this process and returns the exit code, stdout and stderr."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return int(ended.value.code or 0), captured.out, captured.err

    return run
