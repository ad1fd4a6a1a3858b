"""Attributes each moment of a profile to a part of the model. Importing this module does not import torch.

The trace is one that torch's profiler exports: ranges and operations of threads, and GPU kernels with the call that
launched them. Ranges name the part that computes. The backward pass belongs to the part whose forward created its
autograd nodes: a node has the sequence number of the operation that created it, so that compiled and checkpointed
layers need no special handling.

Every moment counts once, so that rows add up to the step. On a CPU these are moments of the training thread. On a GPU,
concurrent kernels divide their time, communication that overlaps computation is hidden and does not count, and the rest
is idle time. A GPU step lasts from the end of the previous step's kernels to the end of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

RANGE = "cornstarch: "  # the prefix of the package's own ranges
WINDOW, STEP = "profile", "step"
MERGING, HEAD, LOSS = "merging", "head and loss", "loss"
CLIPPING, OPTIMIZER, LOGGING = "clipping gradients", "optimizer", "writing metrics"
COMMUNICATION, COPIES, DATA, COUNTING = "communication", "copying batches", "waiting for data", "counting FLOPs"
IDLE, OTHER = "GPU idle", "other"
ATTENTION, PRODUCTS = "attention", "matrix products"
_WORK = (CLIPPING, OPTIMIZER, COMMUNICATION, COPIES, DATA, COUNTING, LOGGING, IDLE, OTHER)

_NODE = "autograd::engine::evaluate_function"
_TRANSFERS = ("gloo:", "nccl:", "mpi:", "ucc:")
_COMMUNICATES = (
    *_TRANSFERS, "c10d::", "_c10d_functional::", "record_param_comms", "FSDP::", "fsdp::", "FullyShardedDataParallel._",
    "torch::distributed::reducer", "torch.distributed.ddp.reducer", "ncclDevKernel", "ncclKernel",
)  # fmt: skip
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa|attn", re.IGNORECASE)
_PRODUCTS = re.compile(
    r"gemm|nvjet|cutlass|xmma|convol|conv[123]d|einsum|::linear\b|matmul|(?:^|[:_])(?:add|b|baddb)?mm(?:_|\b)",
    re.IGNORECASE,
)
_HOST, _DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_GAP = 100.0  # microseconds without any operation: longer than Python takes, so the thread waits for something

TraceEvent = Mapping[str, Any]
Thread = tuple[Any, Any]
TimeSpent = dict[tuple[str, str, str], float]
"""Microseconds, by part, phase and kind."""


class Label(NamedTuple):
    """What a moment is spent on."""

    part: str
    phase: str = ""
    """forward or backward."""
    kind: str = ""
    """ATTENTION, PRODUCTS or empty."""
    is_busy: bool = False
    """Whether an operation runs, and not only the Python code around it."""
    is_known: bool = False
    """Whether the moment is inside a backward node whose forward was found."""


class Segment(NamedTuple):
    """A span of time, in microseconds."""

    start: float
    end: float
    label: Label


def attribute(trace: Mapping[str, Any], parts: Sequence[str], steps: int) -> dict[str, Any]:
    """Return where the time of an average step went, of the `steps` recorded in a trace of torch's profiler."""
    # `parts` names the ranges that have a forward and a backward, in the order of the table.
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    window = next(one for one in events if one["name"] == RANGE + WINDOW and one.get("cat") == "user_annotation")
    begin, end, thread = window["ts"], window["ts"] + window["dur"], _thread(window)
    host, transfers, main = _Host(events, thread, frozenset(parts)), _transfers(events, thread), []
    for start, stop, label in host.main:
        # Long gaps between operations are communication while messages are in flight.
        if label.is_busy or label.part == DATA or stop - start < _GAP or not transfers:
            main.append(Segment(start, stop, label))
        else:
            main += _overlay(start, stop, transfers, label)
    spent: TimeSpent = defaultdict(float)
    hidden = 0.0
    if kernels := list(_kernels(events, host)):
        begin, end = _end_of_work(kernels, begin), _end_of_work(kernels, end)
        hidden = _add_device_time(spent, kernels, main, begin, end)
    else:
        for start, stop, label in _overlay(begin, end, main, Label(OTHER)):
            spent[label.part, label.phase, label.kind] += stop - start
    return {
        "seconds": (end - begin) / steps / 1e6,
        "hidden_communication": hidden / steps / 1e6,
        "rows": _rows(spent, parts, steps),
    }


def _rows(spent: TimeSpent, parts: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Return the table: one row for each part or kind of work that took time."""
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


def _overlay(start: float, end: float, segments: Sequence[Segment], between: Label) -> Iterator[Segment]:
    """Yield a span of time, cut where segments begin and end; time between segments is labelled `between`."""
    for number in range(bisect_right(segments, start, key=lambda segment: segment.end), len(segments)):
        segment = segments[number]
        if segment.start >= end:
            break
        if segment.start > start:
            yield Segment(start, segment.start, between)
        stop = min(segment.end, end)
        yield Segment(max(start, segment.start), stop, segment.label)
        start = stop
    if end > start:
        yield Segment(start, end, between)


def _thread(event: TraceEvent) -> Thread:
    return event["pid"], event["tid"]


class _Host:
    """What the threads of the process did, over time."""

    def __init__(self, events: Sequence[TraceEvent], main: Thread, parts: frozenset[str]) -> None:
        self._parts = parts
        self._created_by: dict[int, str] = {}  # the part, by the sequence number of an operation
        by_thread = defaultdict(list)
        for event in events:
            if event.get("cat") in _HOST:
                by_thread[_thread(event)].append(event)
        # The training thread first: on a GPU, backward runs in another thread and needs the forward's numbers.
        self.main = self._segments(by_thread.pop(main, []))
        self._threads = {main: self.main} | {thread: self._segments(events) for thread, events in by_thread.items()}

    def label_at(self, thread: Thread, moment: float) -> Label:
        segments = self._threads.get(thread, [])
        number = bisect_right(segments, moment, key=lambda segment: segment.start) - 1
        return segments[number].label if number >= 0 and moment <= segments[number].end else Label(OTHER)

    def _segments(self, events: list[TraceEvent]) -> list[Segment]:
        """Return the time of a thread as flat segments, each labelled by its innermost event."""
        found: list[Segment] = []
        open_until: list[tuple[float, Label]] = []
        last = OTHER  # the part of the last backward node: gradient accumulation follows the node it belongs to
        at = 0.0

        def advance(moment: float) -> None:
            nonlocal at
            if moment > at:
                if open_until:
                    found.append(Segment(at, moment, open_until[-1][1]))
                at = moment

        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1][0] <= event["ts"]:
                advance(open_until[-1][0])
                open_until.pop()
            advance(event["ts"])
            outer = open_until[-1][1] if open_until else Label(OTHER)
            label = self._label(event, outer, last)
            last = label.part if label.is_known else last
            end = event["ts"] + event["dur"]
            open_until.append((min(end, open_until[-1][0]) if open_until else end, label))
        while open_until:
            advance(open_until[-1][0])
            open_until.pop()
        return found

    def _label(self, event: TraceEvent, outer: Label, last: str) -> Label:
        name, arguments = event["name"], event.get("args", {})
        if name.startswith(RANGE):
            name = name.removeprefix(RANGE)
            if name in self._parts or name == LOSS:
                phase = "backward" if outer.phase == "backward" else "forward"  # backward: recomputed activations
                return Label(name, phase, is_known=outer.is_known)
            return Label(OTHER if name == WINDOW or name.startswith(STEP) else name)
        if outer.part == COMMUNICATION or name.startswith(_COMMUNICATES):
            return Label(COMMUNICATION, is_busy=True)
        if event["cat"] != "cpu_op":
            return outer
        number, is_node = arguments.get("Sequence number"), bool(arguments.get("Fwd thread id"))
        if is_node or name.startswith(_NODE):
            part = self._created_by.get(number) if is_node else None
            if outer.is_known or (part is None and outer.phase == "backward"):
                return outer._replace(is_busy=True)
            return Label(part or last, "backward", classify_operation(name), is_busy=True, is_known=part is not None)
        if number is not None and outer.phase != "backward":
            self._created_by[number] = outer.part  # the last operation to start with a number creates the node
        return outer._replace(kind=outer.kind or classify_operation(name), is_busy=True)


@lru_cache(maxsize=10_000)
def classify_operation(name: str) -> str:
    """Return ATTENTION, PRODUCTS or an empty string for the name of an operation or a kernel."""
    return ATTENTION if _ATTENTION.search(name) else PRODUCTS if _PRODUCTS.search(name) else ""


def _transfers(events: Iterable[TraceEvent], main: Thread) -> list[Segment]:
    """Return when messages were in flight, as recorded by other threads."""
    found: list[Segment] = []
    others = [e for e in events if e["name"].startswith(_TRANSFERS) and e.get("cat") in _HOST and _thread(e) != main]
    for event in sorted(others, key=lambda event: event["ts"]):
        start, end = event["ts"], event["ts"] + event["dur"]
        if found and start <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(end, found[-1].end))
        else:
            found.append(Segment(start, end, Label(COMMUNICATION)))
    return found


class _Kernel(NamedTuple):
    launched: float
    start: float
    end: float
    label: Label
    priority: int
    """Of concurrent kernels the lowest counts: 0 computation, 1 communication, 2 copies from and to the CPU."""


def _kernels(events: Sequence[TraceEvent], host: _Host) -> Iterator[_Kernel]:
    """Yield the work of the GPU, labelled by what the launching thread was doing."""
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
        label = Label(OTHER) if launch is None else host.label_at(*launch)
        times = (start if launch is None else launch[1], start, end)
        if event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            yield _Kernel(*times, Label(COPIES), 2)
        elif label.part == COMMUNICATION or name.startswith(_COMMUNICATES):
            yield _Kernel(*times, Label(COMMUNICATION), 1)
        else:
            yield _Kernel(*times, label._replace(kind=label.kind or classify_operation(name)), 0)


def _end_of_work(kernels: Iterable[_Kernel], moment: float) -> float:
    """Return when the GPU had finished the kernels that were launched before a moment."""
    return max((one.end for one in kernels if one.launched < moment and one.priority < 2), default=moment)


def _add_device_time(
    spent: TimeSpent, kernels: Sequence[_Kernel], main: Sequence[Segment], begin: float, end: float
) -> float:
    """Add the time of a GPU to `spent`; return how much communication was hidden behind computation."""
    kernels = [one for one in kernels if min(one.end, end) > max(one.start, begin)]
    moments = [(max(one.start, begin), 1, number) for number, one in enumerate(kernels)]
    moments += [(min(one.end, end), 0, number) for number, one in enumerate(kernels)]
    running: tuple[set[int], set[int], set[int]] = (set(), set(), set())  # by priority
    now, hidden = begin, 0.0
    for moment, starts, number in sorted([*moments, (end, 0, -1)]):
        duration = min(moment, end) - now
        if duration > 0:
            counted = next((one for one in running if one), None)
            for other in counted or ():
                label = kernels[other].label
                spent[label.part, label.phase, label.kind] += duration / len(counted or ())
            if counted is None:
                for start, stop, label in _overlay(now, now + duration, main, Label(OTHER)):
                    spent[label.part if label.part in (DATA, COMMUNICATION) else IDLE, "", ""] += stop - start
            hidden += duration if running[1] and counted is not running[1] else 0.0
            now += duration
        if number >= 0:
            own = running[kernels[number].priority]
            own.add(number) if starts else own.discard(number)
    return hidden
