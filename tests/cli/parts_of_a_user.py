"""Parts that a user registers with `cornstarch --import`: an optimizer, a storage and a launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cornstarch.checkpoint.storage import Chunks, LocalStorage, register_storage
from cornstarch.engine.optimizer import register_optimizer
from cornstarch.launch import World, register_launcher


class SignSGD(torch.optim.SGD):
    """Step by the signs of gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sign_()
        return super().step(closure)


class LoggedStorage(LocalStorage):
    """Local folders, with a list of the files that were written."""

    def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
        with open(os.environ["USER_LOG"], "a") as log:
            log.write(json.dumps({"wrote": str(path)}) + "\n")
        return super().write(path, chunks)


class EnvironmentLauncher:
    """A scheduler with variables of its own."""

    def is_active(self, environment: Mapping[str, str]) -> bool:
        return "USER_LOG" in environment

    def read_world(self, environment: Mapping[str, str]) -> World:
        rank, size = int(environment.get("USER_RANK", "0")), int(environment.get("USER_SIZE", "1"))
        return World(rank=rank, size=size, local_rank=rank, local_size=size)

    def launch(
        self, command: Sequence[str], nproc: int | str, logs: Path, environment: Mapping[str, str], console: Any
    ) -> int:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        shared = {"USER_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with open(environment["USER_LOG"], "a") as log:
            log.write(json.dumps({"launched": nproc}) + "\n")
        started = [
            subprocess.Popen(command, env={**environment, **shared, "USER_RANK": str(rank)})
            for rank in range(int(nproc))
        ]
        return max(process.wait() for process in started)


register_optimizer("sign_sgd", SignSGD)
register_storage("logged", LoggedStorage)
register_launcher("environment", EnvironmentLauncher())
