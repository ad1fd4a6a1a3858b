"""The process group of a run: rendezvous, start, and a check that all ranks run the same. torch is imported late."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.launch.failure_report import record_failure
from cornstarch.launch.launcher import World, parse_number
from cornstarch.launch.local_launcher import STORE_SOCKET

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
GLOO_FOR_ALL = "cpu:gloo,cuda:gloo"
"""The backend of a group in which gloo also carries GPU tensors. With the plain name "gloo", some versions of torch
create NCCL groups beside it."""
_LEAVE_SECONDS = 10.0  # how long rank 0, which hosts the store, waits for the others at the end

_MAX_DIFFERENCES = 10
_MAX_VALUE = 60  # characters of a value that differs


class RendezvousError(ConfigError):
    """The processes of a run did not find each other, or lost one another before training: a restart may help."""


@contextmanager
def start_process_group(
    world: World,
    device_type: str = "cpu",
    timeout: float = 1800.0,
    *,
    rendezvous_timeout: float = 300.0,
    backend: Literal["auto", "nccl", "gloo"] = "auto",
) -> Iterator[torch.device]:
    """Join the process group of the run while a block runs; yield the device of this process.

    An error in the block is recorded before the group is destroyed: the others fail as soon as it is, and the launcher
    must know which process was first.

    Args:
        world: The rank of this process.
        device_type: "cpu" (gloo), or "cuda" (see `backend`; CPU tensors still use gloo).
        timeout: Seconds until a collective fails that some ranks have not joined.
        rendezvous_timeout: Seconds in which all processes must have arrived.
        backend: The backend for GPU tensors. "auto" is NCCL, or gloo, which is slow, where a machine has more
            processes than GPUs: NCCL refuses to share a GPU.
    """
    import torch

    # Defaults of its functions are the world as it is when the module is imported. If that happens later (torch._dynamo
    # imports it), they keep the group and its threads until the interpreter ends, where threads of gloo abort at times.
    import torch.distributed.nn.functional
    from torch import distributed

    if device_type not in _BACKENDS:
        raise ConfigError(f"device type {device_type!r}: expected one of {', '.join(_BACKENDS)}.")
    if distributed.is_initialized():
        raise ConfigError("This process is already in a process group; destroy that group first.")
    device, is_slow = torch.device(device_type), False
    if device_type == "cuda":
        device, is_slow = _choose_gpu(world, backend)
        torch.cuda.set_device(device)
    rendezvous = _Rendezvous(world, rendezvous_timeout, without_nccl=is_slow)
    store = rendezvous.join()
    store.set_timeout(timedelta(seconds=timeout))
    name = GLOO_FOR_ALL if rendezvous.without_nccl else _BACKENDS[device_type]
    if world.rank == 0 and rendezvous.without_nccl and backend == "auto":
        warnings.warn(
            "There are more processes than GPUs. Processes share GPUs and communicate through gloo and CPU memory, "
            "because NCCL refuses shared GPUs. This works, but is slow.",
            stacklevel=3,
        )
    try:
        distributed.init_process_group(
            name,
            store=distributed.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"Rank {world.rank} of {world.size} ({socket.gethostname()}) found the other ranks but cannot communicate "
            f"with them: {str(error).splitlines()[0]}\n"
            "  If this machine has several networks, name the right one: GLOO_SOCKET_IFNAME=<interface>"
            f"{', NCCL_SOCKET_IFNAME=<interface>' if 'nccl' in name else ''}."
        ) from error
    try:
        yield device
    except BaseException as error:
        if isinstance(error, Exception):
            record_failure(error)
        # NCCL would wait here for messages that never come. The process is about to end, which closes everything.
        if "nccl" not in name:
            distributed.destroy_process_group()
        raise
    # Rank 0 leaves last: it hosts the store, which threads of the others may still read.
    with suppress(RuntimeError):  # the store is gone already: under torchrun it may live in another process
        left = store.add("left", 1)
        if world.rank == 0 and left < world.size:
            _wait_until(lambda: store.add("left", 0) >= world.size, _LEAVE_SECONDS)
    distributed.destroy_process_group()


def _choose_gpu(world: World, backend: str) -> tuple[torch.device, bool]:
    """Return the GPU of this process, and whether NCCL cannot or must not be used."""
    import torch

    count = torch.cuda.device_count()
    if count == 0 or (backend == "nccl" and world.local_size > count):
        raise ConfigError(
            f"Process {world.local_rank} of {world.local_size} on {socket.gethostname()} needs a GPU"
            f"{' of its own' if count else ''}, and there are {count} (torch.cuda.device_count). "
            f"{f'Start at most {count}, or share GPUs: backend=auto' if count else 'Train on the CPU: device=cpu'}."
        )
    return torch.device("cuda", world.local_rank % count), backend == "gloo" or world.local_size > count


class _Rendezvous:
    """Where the processes of a run find one another: a TCP store at MASTER_ADDR and MASTER_PORT.

    torch's own rendezvous is not used: its errors are pages long, it waits twice as long as its timeout, and for
    ever if something else answers at that port.
    """

    def __init__(self, world: World, seconds: float, without_nccl: bool = False) -> None:
        self._world, self._seconds = world, seconds
        self.without_nccl = without_nccl
        """Whether this process must do without NCCL; after `join`, whether any process must."""
        self._end = time.monotonic() + seconds
        self._host = os.environ.get("MASTER_ADDR", "")
        self._port = parse_number("MASTER_PORT", os.environ.get("MASTER_PORT") or "0")
        if world.size > 1 and not (self._host and self._port):
            raise ConfigError(f"{world.size} processes need MASTER_ADDR and MASTER_PORT to find one another.")

    def join(self) -> Store:
        from torch import distributed

        if self._world.size == 1 and not self._host:
            return distributed.HashStore()
        hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if self._world.rank == 0 and not hosted_by_torchrun:
            tcp_store = self._host_store()
        else:
            self._wait_for_port()
            tcp_store = self._connect_store()
        # After a restart by torchrun, a process must not read what its predecessor wrote.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = distributed.PrefixStore(f"attempt_{attempt}", tcp_store)
        try:
            self._wait_for_all(store)
        except RuntimeError as error:
            raise self._build_error(f"rank 0 disappeared ({str(error).splitlines()[0]})") from error
        return store

    def _host_store(self) -> Store:
        from torch import distributed

        store_socket = os.environ.pop(STORE_SOCKET, None)  # used once: from here on the socket belongs to the store
        try:
            return distributed.TCPStore(
                self._host,
                self._port,
                None,
                True,
                timeout=timedelta(seconds=self._seconds),
                wait_for_workers=False,
                master_listen_fd=None if store_socket is None else int(store_socket),
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise self._build_error(str(error).splitlines()[0]) from error
            raise ConfigError(
                f"Port {self._port} of {socket.gethostname()} is in use, usually by another run. Choose another port: "
                f"`torchrun --master-port` or, with several machines, `--rdzv-endpoint={self._host}:<port>`."
            ) from error

    def _wait_for_port(self) -> None:
        reason = "no answer"

        def is_open() -> bool:
            nonlocal reason
            try:
                socket.create_connection((self._host, self._port), timeout=max(0.1, self._seconds_left())).close()
            except OSError as error:
                reason = (error.strerror or str(error) or reason).lower()
                return False
            return True

        if not _wait_until(is_open, self._seconds_left()):
            raise self._build_error(reason)

    def _connect_store(self) -> Store:
        from torch import distributed

        answer: list[Any] = []

        def connect() -> None:
            try:
                left = timedelta(seconds=max(1.0, self._seconds_left()))
                answer.append(
                    distributed.TCPStore(self._host, self._port, None, False, timeout=left, wait_for_workers=False)
                )
            except RuntimeError as error:
                answer.append(error)

        # In a thread: TCPStore waits for ever if another program listens at the port.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(max(1.0, self._seconds_left()))
        if not answer:
            raise self._build_error("another program answers there, not the run's rank 0")
        if isinstance(answer[0], RuntimeError):
            raise self._build_error(str(answer[0]).splitlines()[0]) from answer[0]
        return answer[0]

    def _wait_for_all(self, store: Store) -> None:
        """Wait for all ranks; if some are missing, every rank that has arrived raises and names them."""
        world = self._world
        store.add("without_nccl", int(self.without_nccl))
        store.set(f"arrived/{world.rank}", socket.gethostname())
        if world.rank == 0:
            missing = set(range(world.size))

            def is_complete() -> bool:
                missing.difference_update([rank for rank in missing if store.check([f"arrived/{rank}"])])
                return not missing

            _wait_until(is_complete, self._seconds_left())
            store.set("missing", json.dumps(sorted(missing)))
        # Twice the time: rank 0 may have begun to wait later than this rank.
        elif not _wait_until(lambda: store.check(["missing"]), self._seconds_left() + self._seconds):
            raise self._build_error("rank 0 did not arrive")
        absent = json.loads(store.get("missing"))
        if absent:
            store.add("informed", 1)
            if world.rank == 0:  # the store ends with rank 0: the others must read first
                _wait_until(lambda: store.add("informed", 0) >= world.size - len(absent), _LEAVE_SECONDS)
            raise RendezvousError(
                f"{format_ranks(absent).capitalize()} of {world.size} did not arrive within {self._seconds:g} s. "
                "Did every machine start its processes, with the same world size and the same MASTER_ADDR?"
            )
        self.without_nccl = store.add("without_nccl", 0) > 0

    def _seconds_left(self) -> float:
        return self._end - time.monotonic()

    def _build_error(self, reason: str) -> RendezvousError:
        return RendezvousError(
            f"Rank {self._world.rank} of {self._world.size} ({socket.gethostname()}) could not reach rank 0 at "
            f"{self._host}:{self._port} within {self._seconds:g} s: {reason}.\n"
            "  Is rank 0 running? MASTER_ADDR must be its host name or address as seen from here, and MASTER_PORT must "
            "be open."
        )


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll, less and less often, until the condition holds; return False after `seconds`. Signals get through."""
    end, pause = time.monotonic() + seconds, 0.005
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(pause * 1.5, 0.25)
    return True


def format_ranks(ranks: list[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def agree(value: Any) -> None:
    """Raise the same ConfigError on all ranks if they differ in `value` or in versions. All ranks must call it."""
    from cornstarch.parallel import distributed

    if distributed.is_single_process():
        return
    own = {"config": value, "versions": get_versions()}
    # Hashes first: the whole configs travel only when they differ.
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(distributed.all_gather_json(digest))) == 1:
        return
    hosts = distributed.all_gather_json(socket.gethostname())
    raise ConfigError(describe_differences(distributed.all_gather_json(own), hosts))


def get_versions() -> dict[str, str]:
    import torch

    return {
        "cornstarch": __version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def describe_differences(statements: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> str:
    """Return an error text about configs and versions that differ, one statement per rank."""
    configs = [dict(_flatten(statement["config"])) for statement in statements]
    versions = [{f"version of {name}": text for name, text in one["versions"].items()} for one in statements]
    lines = [*_compare(versions, hosts), *_compare(configs, hosts)]
    more = [f"  … and {len(lines) - _MAX_DIFFERENCES} more"] if len(lines) > _MAX_DIFFERENCES else []
    advice = "Start every process with the same config file and the same command."
    if any(versions[0] != other for other in versions):
        advice = "Install the same versions on every machine."
    return "\n".join(["The processes of this run differ:", *lines[:_MAX_DIFFERENCES], *more, advice])


def _compare(flat: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a line for each key in which ranks differ, with the most common value first."""
    for key in dict.fromkeys(key for values in flat for key in values):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(flat):
            ranks.setdefault(values.get(key, "nothing"), []).append(rank)
        if len(ranks) > 1:
            start = max(0, len(commonprefix(list(ranks))) - _MAX_VALUE // 3)  # long values: show where they differ
            texts = []
            for value, group in sorted(ranks.items(), key=lambda item: -len(item[1])):
                if len(value) > _MAX_VALUE:
                    end = start + _MAX_VALUE
                    value = f"{'…' if start else ''}{value[start:end]}{'…' if end < len(value) else ''}"
                names = sorted({hosts[rank] for rank in group})
                where = f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" if len(set(hosts)) > 1 else ""
                texts.append(f"{value} on {format_ranks(group)}{where}")
            yield f"  {key}: {'; '.join(texts)}"


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, JSON text) of every leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _flatten(item, f"{path}[{index}]")
    else:
        yield path or "value", json.dumps(value, sort_keys=True)
