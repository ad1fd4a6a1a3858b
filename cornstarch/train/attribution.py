"""Which part of a model each moment of a profile belongs to. No torch.

A trace is read as torch's profiler writes it: ranges and operations of threads, and kernels of a GPU, each with what
launched it. A range says which part computes. What the backward pass does belongs to the part whose forward made it: a
node of the graph has the number of the operation that made it, so compiled layers and layers that are computed again
need nothing of their own.

Every moment counts once, so that rows add up to the step. On a CPU it is a moment of the thread that trains; on a GPU,
of the GPU: what several kernels share is divided among them, communication beside computing is hidden and does not
count, and what is left is idle. A step of a GPU lasts from the end of the kernels before it to the end of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

RANGE = "cornstarch: "  # before the name of every range of ours
WINDOW, STEP = "profile", "step"
MERGING, HEAD, LOSS = "merging", "head and loss", "loss"
CLIPPING, OPTIMIZER, TELLING = "clipping gradients", "optimizer", "writing metrics"
COMMUNICATION, COPIES, DATA, COUNTING = "communication", "copying batches", "waiting for data", "counting FLOPs"
IDLE, OTHER = "GPU idle", "other"
ATTENTION, PRODUCTS = "attention", "matrix products"
_WORK = (CLIPPING, OPTIMIZER, COMMUNICATION, COPIES, DATA, COUNTING, TELLING, IDLE, OTHER)

_NODE = "autograd::engine::evaluate_function"
_EXCHANGES = ("gloo:", "nccl:", "mpi:", "ucc:")
_COMMUNICATES = (
    *_EXCHANGES, "c10d::", "_c10d_functional::", "record_param_comms", "FSDP::", "fsdp::", "FullyShardedDataParallel._",
    "torch::distributed::reducer", "torch.distributed.ddp.reducer", "ncclDevKernel", "ncclKernel",
)  # fmt: skip
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa|attn", re.IGNORECASE)
_PRODUCTS = re.compile(
    r"gemm|nvjet|cutlass|xmma|convol|conv[123]d|einsum|::linear\b|matmul|(?:^|[:_])(?:add|b|baddb)?mm(?:_|\b)",
    re.IGNORECASE,
)
_HOST, _DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_GAP = 100.0  # microseconds without any operation: Python itself is quicker, so something is waited for

Trace = Mapping[str, Any]


class Label(NamedTuple):
    """What a moment is spent on."""

    part: str
    phase: str = ""
    """forward or backward."""
    kind: str = ""
    """ATTENTION, PRODUCTS, or something else."""
    is_busy: bool = False
    """Whether an operation runs, and not only the Python around it."""
    is_known: bool = False
    """Whether it is inside a node of the backward pass whose forward was found."""


class Segment(NamedTuple):
    """A stretch of time, in microseconds."""

    start: float
    end: float
    label: Label


Spent = dict[tuple[str, str, str], float]
"""Microseconds, by part, phase and kind."""


def attribute(trace: Trace, parts: Sequence[str], steps: int) -> dict[str, Any]:
    """Return where the time of a mean step went.

    Args:
        trace: What torch's profiler has exported, with ranges of ours in it.
        parts: Names of ranges that have a forward and a backward, in the order of the table.
        steps: So many were recorded.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    window = next(one for one in events if one["name"] == RANGE + WINDOW and one.get("cat") == "user_annotation")
    begin, end = window["ts"], window["ts"] + window["dur"]
    host = _Host(events, _thread(window), frozenset(parts))
    main = list(_waits_told(host.main, _exchanges(events, _thread(window))))
    kernels = list(_kernels(events, host))
    if kernels:
        begin, end = _behind(kernels, begin), _behind(kernels, end)
        spent, hidden = _of_device(kernels, main, begin, end)
    else:
        spent, hidden = _summed(_clipped(main, begin, end)), 0.0
    return {
        "seconds": (end - begin) / steps / 1e6,
        "hidden_communication": hidden / steps / 1e6,
        "rows": _rows(spent, parts, steps),
    }


def _rows(spent: Spent, parts: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Return a row for everything that took time, of a mean step."""
    into = {LOSS: HEAD} if HEAD in parts else {}
    found: dict[str, dict[str, Any]] = {}
    for (part, phase, kind), microseconds in spent.items():
        seconds = microseconds / steps / 1e6
        name = into.get(part, part)
        row = found.setdefault(name, {"name": name, "seconds": 0.0})
        row["seconds"] += seconds
        if name in parts or name == LOSS:
            row[phase] = row.get(phase, 0.0) + seconds
            if kind:
                row.setdefault(kind, {})[phase] = row.get(kind, {}).get(phase, 0.0) + seconds
    order = [*parts, LOSS, *_WORK]
    return sorted(found.values(), key=lambda row: order.index(row["name"]) if row["name"] in order else len(order))


# ------------------------------------------------------------------------------------------------ threads


def _thread(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


class _Host:
    """What threads of the process were doing when."""

    def __init__(self, events: Sequence[Mapping[str, Any]], main: tuple[Any, Any], parts: frozenset[str]) -> None:
        self._parts = parts
        self._made_by: dict[int, str] = {}  # the part of the operation that a node of the graph has the number of
        by_thread = defaultdict(list)
        for event in events:
            if event.get("cat") in _HOST:
                by_thread[_thread(event)].append(event)
        # First the thread that trains: a GPU's backward is on another one, and asks what made its nodes.
        self.main = self._segments(by_thread.pop(main, []))
        self._threads = {main: self.main} | {thread: self._segments(own) for thread, own in by_thread.items()}
        self._starts = {thread: [one.start for one in own] for thread, own in self._threads.items()}

    def at(self, thread: tuple[Any, Any], moment: float) -> Label:
        """Return what a thread was doing at a moment."""
        number = bisect_right(self._starts.get(thread, []), moment) - 1
        if number < 0 or moment > self._threads[thread][number].end:
            return Label(OTHER)
        return self._threads[thread][number].label

    def _segments(self, events: list[Mapping[str, Any]]) -> list[Segment]:
        """Return the time of a thread, flat: each stretch with what the innermost event says."""
        found: list[Segment] = []
        open_until: list[tuple[float, Label]] = []
        last = OTHER  # part of the backward pass: what adds up a gradient follows the node that has made it
        at = 0.0

        def until(moment: float) -> None:
            nonlocal at
            if moment > at:
                if open_until:
                    found.append(Segment(at, moment, open_until[-1][1]))
                at = moment

        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1][0] <= event["ts"]:
                until(open_until[-1][0])
                open_until.pop()
            until(event["ts"])
            outer = open_until[-1][1] if open_until else Label(OTHER)
            label = self._label(event, outer, last)
            last = label.part if label.is_known else last
            end = event["ts"] + event["dur"]
            open_until.append((min(end, open_until[-1][0]) if open_until else end, label))
        while open_until:
            until(open_until[-1][0])
            open_until.pop()
        return found

    def _label(self, event: Mapping[str, Any], outer: Label, last: str) -> Label:
        name, arguments = event["name"], event.get("args", {})
        if name.startswith(RANGE):
            return self._range(name.removeprefix(RANGE), outer)
        if outer.part == COMMUNICATION or name.startswith(_COMMUNICATES):
            return Label(COMMUNICATION, is_busy=True)
        if event["cat"] != "cpu_op":
            return outer
        number, is_node = arguments.get("Sequence number"), bool(arguments.get("Fwd thread id"))
        if is_node or name.startswith(_NODE):
            part = self._made_by.get(number) if is_node else None
            if outer.is_known or (part is None and outer.phase == "backward"):
                return outer._replace(is_busy=True)
            return Label(part or last, "backward", kind_of(name), is_busy=True, is_known=part is not None)
        if number is not None and outer.phase != "backward":
            self._made_by[number] = outer.part  # the last to begin with a number is the one that makes the node
        return outer._replace(kind=outer.kind or kind_of(name), is_busy=True)

    def _range(self, name: str, outer: Label) -> Label:
        if name == WINDOW or name.startswith(STEP):
            return Label(OTHER)
        if name in self._parts or name == LOSS:
            is_again = outer.phase == "backward"  # activations that are computed again
            return Label(name, "backward" if is_again else "forward", is_known=outer.is_known)
        return Label(name)


@lru_cache(maxsize=10_000)
def kind_of(name: str) -> str:
    """Return what an operation or a kernel computes, told by its name; nothing if it is nothing special."""
    return ATTENTION if _ATTENTION.search(name) else PRODUCTS if _PRODUCTS.search(name) else ""


# ------------------------------------------------------------------------------------------------ waiting


def _exchanges(events: Iterable[Mapping[str, Any]], main: tuple[Any, Any]) -> list[tuple[float, float]]:
    """Return when messages were on their way, as other threads tell it."""
    found: list[tuple[float, float]] = []
    away = [event for event in events if event["name"].startswith(_EXCHANGES) and event.get("cat") in _HOST]
    for event in sorted((event for event in away if _thread(event) != main), key=lambda event: event["ts"]):
        start, end = event["ts"], event["ts"] + event["dur"]
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _waits_told(segments: Sequence[Segment], exchanges: Sequence[tuple[float, float]]) -> Iterator[Segment]:
    """Yield segments; where nothing runs for long while messages are on their way, they are waited for."""
    ends = [end for _, end in exchanges]
    for segment in segments:
        start, end, label = segment
        if label.is_busy or label.part == DATA or end - start < _GAP or not exchanges:
            yield segment
            continue
        for number in range(bisect_right(ends, start), len(exchanges)):
            begin, finish = exchanges[number]
            if begin >= end:
                break
            if begin > start:
                yield Segment(start, begin, label)
            waited = min(finish, end)
            yield Segment(max(start, begin), waited, Label(COMMUNICATION))
            start = waited
        if end > start:
            yield Segment(start, end, label)


# ------------------------------------------------------------------------------------------------ a CPU


def _clipped(segments: Iterable[Segment], begin: float, end: float) -> Iterator[Segment]:
    for segment in segments:
        start, stop = max(segment.start, begin), min(segment.end, end)
        if stop > start:
            yield Segment(start, stop, segment.label)


def _summed(segments: Iterable[Segment]) -> Spent:
    spent: Spent = defaultdict(float)
    for start, end, label in segments:
        spent[label.part, label.phase, label.kind] += end - start
    return spent


# ------------------------------------------------------------------------------------------------ a GPU


class _Kernel(NamedTuple):
    launched: float
    start: float
    end: float
    label: Label
    rank: int
    """What counts where kernels run beside each other: 0 computing, 1 communication, 2 copies from and to the CPU."""


def _kernels(events: Iterable[Mapping[str, Any]], host: _Host) -> Iterator[_Kernel]:
    """Yield what ran on the GPU, each with what the thread was doing that launched it."""
    events = list(events)
    launches = {
        event["args"]["correlation"]: (_thread(event), event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") not in _DEVICE:
            continue
        name, start, end = event["name"], event["ts"], event["ts"] + event["dur"]
        launch = launches.get(event.get("args", {}).get("correlation"))
        label = Label(OTHER) if launch is None else host.at(*launch)
        times = (start if launch is None else launch[1], start, end)
        if event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            yield _Kernel(*times, Label(COPIES), 2)
        elif label.part == COMMUNICATION or name.startswith(_COMMUNICATES):
            yield _Kernel(*times, Label(COMMUNICATION), 1)
        else:
            yield _Kernel(*times, label._replace(kind=label.kind or kind_of(name)), 0)


def _behind(kernels: Iterable[_Kernel], moment: float) -> float:
    """Return when the GPU was done with what it was given before a moment of the process."""
    return max((one.end for one in kernels if one.launched < moment and one.rank < 2), default=moment)


def _of_device(kernels: Sequence[_Kernel], main: Sequence[Segment], begin: float, end: float) -> tuple[Spent, float]:
    """Return where the time of a GPU went, and how much communication was hidden behind computing."""
    spent: Spent = defaultdict(float)
    kernels = [one for one in kernels if min(one.end, end) > max(one.start, begin)]
    moments = [(max(one.start, begin), 1, number) for number, one in enumerate(kernels)]
    moments += [(min(one.end, end), 0, number) for number, one in enumerate(kernels)]
    running: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    idle: list[tuple[float, float]] = []
    at, hidden = begin, 0.0
    for moment, begins, number in sorted([*moments, (end, 0, -1)]):
        lasts = min(moment, end) - at
        if lasts > 0:
            counted = next((one for one in running if one), None)
            for other in counted or ():
                label = kernels[other].label
                spent[label.part, label.phase, label.kind] += lasts / len(counted or ())
            if counted is None:
                idle.append((at, at + lasts))
            hidden += lasts if running[1] and counted is not running[1] else 0.0
            at += lasts
        if number >= 0:
            own = running[kernels[number].rank]
            own.add(number) if begins else own.discard(number)
    for start, stop, label in _overlaid(idle, main):
        spent[label.part if label.part in (DATA, COMMUNICATION) else IDLE, "", ""] += stop - start
    return spent, hidden


def _overlaid(stretches: Sequence[tuple[float, float]], segments: Sequence[Segment]) -> Iterator[Segment]:
    """Yield stretches of time, in their order, cut where what a thread does changes."""
    ends = [segment.end for segment in segments]
    for start, end in stretches:
        for number in range(bisect_right(ends, start), len(segments)):
            segment = segments[number]
            if segment.start >= end:
                break
            if segment.start > start:
                yield Segment(start, segment.start, Label(OTHER))
            stop = min(segment.end, end)
            yield Segment(max(start, segment.start), stop, segment.label)
            start = stop
        if end > start:
            yield Segment(start, end, Label(OTHER))


__all__ = [
    "ATTENTION", "CLIPPING", "COMMUNICATION", "COPIES", "COUNTING", "DATA", "HEAD", "IDLE", "LOSS", "MERGING",
    "OPTIMIZER", "OTHER", "PRODUCTS", "RANGE", "STEP", "TELLING", "WINDOW", "Label", "attribute", "kind_of",
]  # fmt: skip
