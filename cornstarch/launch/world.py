"""Which process this is, and its process group. torch is imported late."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
# Launchers that start several processes without torchrun's variables: how many there are, and which one this is. The
# variables of SLURM's steps are set by srun only, not in a batch script.
_OTHER_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)

STORE_SOCKET = "CORNSTARCH_STORE_SOCKET"
"""A variable that `cornstarch.launch.local` gives to rank 0: the socket on which it holds MASTER_PORT for it."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's variable: the file in which a process says why and when it failed."""

_BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
GLOO_FOR_ALL = "cpu:gloo,cuda:gloo"
"""What a group is called in which gloo carries also what is on a GPU. By the name "gloo" alone some versions of torch
would make groups of NCCL beside it."""
_RECORDED = "cornstarch_recorded"  # an attribute of errors
_LEAVING = 10.0  # seconds that rank 0, which has the store, waits for the others at the end


@dataclass(frozen=True)
class World:
    """The processes of a run, as one of them sees it."""

    rank: int = 0
    """This process, counted from 0 over all machines."""
    local_rank: int = 0
    """This process, counted from 0 on its machine."""
    size: int = 1
    """Processes on all machines."""
    local_size: int = 1
    """Processes on this machine."""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise ConfigError(
                f"rank {self.rank} of {self.size}, on its machine {self.local_rank} of {self.local_size}: that cannot "
                "be. Ranks count from 0 to size - 1, and a machine has no more processes than there are."
            )


def current_world(environment: Mapping[str, str] | None = None) -> World:
    """Return this process's place as torchrun's variables tell it; without them it is alone.

    Raises ConfigError if only some of the variables are set, if they contradict one another, or if another launcher has
    started several processes that know nothing of one another.
    """
    variables = os.environ if environment is None else environment
    if not any(name in variables for name in _NUMBERS):
        _refuse_other_launchers(variables)
        return World()
    missing = [name for name in (*_NUMBERS, *_MASTER) if not variables.get(name)]
    if missing:
        there = ", ".join(f"{name}={variables[name]}" for name in (*_NUMBERS, *_MASTER) if variables.get(name))
        raise ConfigError(
            f"{', '.join(missing)} not set, beside {there or 'empty variables'}. torchrun and --nproc set all of them; "
            "for a single process unset them all."
        )
    numbers = {name: _number(name, variables[name]) for name in (*_NUMBERS, "MASTER_PORT")}
    if not 0 < numbers["MASTER_PORT"] < 2**16:
        raise ConfigError(f"MASTER_PORT={numbers['MASTER_PORT']}: a port is a number from 1 to 65535.")
    try:
        return World(numbers["RANK"], numbers["LOCAL_RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"])
    except ConfigError as error:
        found = ", ".join(f"{name}={numbers[name]}" for name in _NUMBERS)
        raise ConfigError(f"{found}: {error}") from None


def _refuse_other_launchers(variables: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that would each train by itself, in the same folder."""
    for launcher, size, rank in _OTHER_LAUNCHERS:
        count = variables.get(size, "")
        if not count.isdecimal() or int(count) < 2:
            continue
        raise ConfigError(
            f"{launcher} has started {count} processes ({size}={count}, {rank}={variables.get(rank, '?')}), and each "
            "would be a run of its own: only torchrun's variables are read.\n"
            "  On one machine start one task: srun --ntasks=1 cornstarch train run.yaml --nproc 8\n"
            "  On several start one task each: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
            "--nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500 --rdzv-id=$SLURM_JOB_ID "
            "-m cornstarch train run.yaml\n"
            f"  If runs of their own are meant: env -u {size} cornstarch train …"
        )


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a whole number.") from None


# ---------------------------------------------------------------------------------------------------- process group


@contextmanager
def start_process_group(
    world: World,
    device_type: str = "cpu",
    timeout: float = 1800.0,
    *,
    rendezvous_timeout: float = 300.0,
    backend: Literal["auto", "nccl", "gloo"] = "auto",
) -> Iterator[torch.device]:
    """Be one of a group of processes while a block runs; yield the device that is this process's.

    An error in the block is written down first (see ERROR_FILE): ending the group makes the others fail too, and
    whoever started them must know who was first.

    Args:
        world: Which process this is.
        device_type: "cpu" (gloo), or "cuda" (see `backend`, and gloo for what is on the CPU).
        timeout: Seconds after which an operation of the group that not all take part in fails.
        rendezvous_timeout: Seconds in which all processes must have come.
        backend: What carries tensors between GPUs. "auto": NCCL; or gloo, which is slow, where a machine has more
            processes than GPUs and they share them: NCCL refuses that.
    """
    import torch
    from torch import distributed

    if device_type not in _BACKENDS:
        raise ConfigError(f"device type {device_type!r}: expected one of {', '.join(_BACKENDS)}.")
    if distributed.is_initialized():
        raise ConfigError("This process is in a process group already; end that one first.")
    device, is_slow = torch.device(device_type), False
    if device_type == "cuda":
        device, is_slow = _cuda_device(world, backend)
        torch.cuda.set_device(device)
    meeting = _Meeting(world, rendezvous_timeout, without_nccl=is_slow)
    store = meeting.held()
    store.set_timeout(timedelta(seconds=timeout))
    name = GLOO_FOR_ALL if meeting.without_nccl else _BACKENDS[device_type]
    if world.rank == 0 and meeting.without_nccl and backend == "auto":
        warnings.warn(
            "There are more processes than GPUs. They share them, and talk through gloo and the CPU's memory: NCCL "
            "refuses that. It works, and is slow.",
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
        raise ConfigError(
            f"Rank {world.rank} of {world.size} ({socket.gethostname()}) has met the others but cannot talk to them: "
            f"{str(error).splitlines()[0]}\n"
            "  If this machine has several networks, name the right one: GLOO_SOCKET_IFNAME=<interface>"
            f"{', NCCL_SOCKET_IFNAME=<interface>' if 'nccl' in name else ''}."
        ) from error
    try:
        yield device
    except BaseException as error:
        if isinstance(error, Exception):
            record_failure(error)
        # NCCL waits here for what the others will never send. The process is about to end; that closes everything.
        if "nccl" not in name:
            distributed.destroy_process_group()
        raise
    _leave_together(store, world)
    distributed.destroy_process_group()


def _cuda_device(world: World, backend: str) -> tuple[torch.device, bool]:
    """Return the GPU of this process, and whether NCCL cannot or must not be used."""
    import torch

    count = torch.cuda.device_count()
    if count == 0 or (backend == "nccl" and world.local_size > count):
        raise ConfigError(
            f"Process {world.local_rank} of {world.local_size} on {socket.gethostname()} needs a GPU"
            f"{' of its own' if count else ''}, and there are {count} (torch.cuda.device_count). "
            f"{f'Start at most {count}, or let them share: backend=auto' if count else 'Train on the CPU: device=cpu'}."
        )
    return torch.device("cuda", world.local_rank % count), backend == "gloo" or world.local_size > count


def record_failure(error: BaseException) -> None:
    """Write why and when this process failed where torchrun, or our own launcher, looks for it: once for an error."""
    path = os.environ.get(ERROR_FILE)
    if not path or _RECORDED in error.__dict__:
        return
    error.__dict__[_RECORDED] = True
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    record = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(record, file)


def _leave_together(store: Store, world: World) -> None:
    """Let rank 0 be the last to go: the store is in its process, and the others' threads may still look there."""
    with suppress(RuntimeError):  # it is gone already: under torchrun it may be in another process
        here = store.add("left", 1)
        if world.rank == 0 and here < world.size:
            _until(lambda: store.add("left", 0) >= world.size, _LEAVING)


# ---------------------------------------------------------------------------------------------------- rendezvous


class _Meeting:
    """Where the processes of a run meet: a store at MASTER_ADDR and MASTER_PORT.

    torch's own rendezvous is not used because its errors are pages long, because it waits twice as long as it is told
    to, and for ever if something else answers at that port.
    """

    def __init__(self, world: World, seconds: float, without_nccl: bool = False) -> None:
        self._world, self._seconds = world, seconds
        self.without_nccl = without_nccl
        """Whether a process must do without NCCL: this one; after the meeting, any."""
        self._end = time.monotonic() + seconds
        self._host = os.environ.get("MASTER_ADDR", "")
        self._port = _number("MASTER_PORT", os.environ.get("MASTER_PORT") or "0")
        if world.size > 1 and not (self._host and self._port):
            raise ConfigError(f"{world.size} processes need MASTER_ADDR and MASTER_PORT, to find one another.")

    def held(self) -> Store:
        """Return the store once all are there."""
        from torch import distributed

        if self._world.size == 1 and not self._host:
            return distributed.HashStore()
        # A process that torchrun has started again must not read what the one before it wrote.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = distributed.PrefixStore(f"attempt_{attempt}", self._joined())
        try:
            self._call_roll(store)
        except RuntimeError as error:
            raise self._failure(f"rank 0 went away again ({str(error).splitlines()[0]})") from error
        return store

    def _joined(self) -> Store:
        hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if self._world.rank == 0 and not hosted_by_torchrun:
            return self._opened()
        self._wait_for_master()
        return self._connected()

    def _opened(self) -> Store:
        """Return the store, in this process."""
        from torch import distributed

        held = os.environ.pop(STORE_SOCKET, None)  # once: from then on it is the store's
        try:
            return distributed.TCPStore(
                self._host,
                self._port,
                None,
                True,
                timeout=timedelta(seconds=self._seconds),
                wait_for_workers=False,
                master_listen_fd=None if held is None else int(held),
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise self._failure(str(error).splitlines()[0]) from error
            raise ConfigError(
                f"Port {self._port} of {socket.gethostname()} is taken, most often by another run. Choose another: "
                f"`torchrun --master-port` or, with several machines, `--rdzv-endpoint={self._host}:<port>`."
            ) from error

    def _wait_for_master(self) -> None:
        """Wait until something listens there."""
        trouble = "nobody answers"

        def listens() -> bool:
            nonlocal trouble
            try:
                socket.create_connection((self._host, self._port), timeout=max(0.1, self._left())).close()
            except OSError as error:
                trouble = (error.strerror or str(error) or trouble).lower()
                return False
            return True

        if not _until(listens, self._left()):
            raise self._failure(trouble)

    def _connected(self) -> Store:
        from torch import distributed

        answer: list[Any] = []

        def connect() -> None:
            try:
                left = timedelta(seconds=max(1.0, self._left()))
                answer.append(
                    distributed.TCPStore(self._host, self._port, None, False, timeout=left, wait_for_workers=False)
                )
            except RuntimeError as error:
                answer.append(error)

        # In a thread: it waits without end if what listens there is something else.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(max(1.0, self._left()))
        if not answer:
            raise self._failure("something answers there that is not the run's rank 0")
        if isinstance(answer[0], RuntimeError):
            raise self._failure(str(answer[0]).splitlines()[0]) from answer[0]
        return answer[0]

    def _call_roll(self, store: Store) -> None:
        """Come back when all are there; else all say who is missing."""
        world = self._world
        store.add("without_nccl", int(self.without_nccl))
        store.set(f"here/{world.rank}", socket.gethostname())
        if world.rank == 0:
            missing = set(range(world.size))

            def complete() -> bool:
                missing.difference_update([rank for rank in missing if store.check([f"here/{rank}"])])
                return not missing

            _until(complete, self._left())
            store.set("missing", json.dumps(sorted(missing)))
        # Rank 0 may have begun to wait later than this one.
        elif not _until(lambda: store.check(["missing"]), self._left() + self._seconds):
            raise self._failure("rank 0 has not come")
        absent = json.loads(store.get("missing"))
        if absent:
            store.add("told", 1)
            if world.rank == 0:  # the store goes with it: let the others read first
                _until(lambda: store.add("told", 0) >= world.size - len(absent), _LEAVING)
            raise ConfigError(
                f"{named_ranks(absent).capitalize()} of {world.size} did not come within {self._seconds:g} s. "
                "Did every machine start its processes, with the same size and the same address of the first?"
            )
        self.without_nccl = store.add("without_nccl", 0) > 0

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _failure(self, trouble: str) -> ConfigError:
        return ConfigError(
            f"Rank {self._world.rank} of {self._world.size} ({socket.gethostname()}) could not reach rank 0 at "
            f"{self._host}:{self._port} within {self._seconds:g} s: {trouble}.\n"
            "  Is the first machine's process running? MASTER_ADDR must be its name or address as seen from here, and "
            "MASTER_PORT must be open."
        )


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Ask until it holds, less and less often; False when the time is over. Signals are heeded between the asking."""
    end, pause = time.monotonic() + seconds, 0.005
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(pause * 1.5, 0.25)
    return True


def named_ranks(ranks: list[int]) -> str:
    """Return ranks as a reader would say them: "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
