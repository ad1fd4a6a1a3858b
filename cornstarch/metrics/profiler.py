"""Named ranges of a profile, and the table of time by part of the model.

Ranges are recorded only in the few steps that are profiled: around the forwards of encoders, projectors and the
language model, and around the work of the training loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

from rich.table import Table
from torch import nn
from torch.profiler import record_function

from cornstarch.metrics.attribution import HEAD, MERGING, RANGE
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.report.time_breakdown import ProfileBreakdown, format_milliseconds

Batch = TypeVar("Batch")
Result = TypeVar("Result")
Given = ParamSpec("Given")
_is_recording = False


def record_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that is a range of the profile; it does nothing when no profile is recorded."""
    return record_function(RANGE + name) if _is_recording else nullcontext()


def record_calls(name: str, function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a function whose calls are ranges of the profile."""

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with record_range(name):
            return function(*args, **kwargs)

    return call


def record_waits(name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches; the time to get each is a range of the profile."""
    iterator = iter(batches)
    while True:
        with record_range(name):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def trace_name(rank: int, ranks: int) -> str:
    return "profile-trace.json.gz" if ranks == 1 else f"profile-trace-{rank}.json.gz"


def list_parts(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules whose forwards are ranges, each with the name of its part, in the order of the table."""
    found: list[tuple[str, nn.Module]] = []
    for model in models:
        for name, encoder in model.encoders.items() if isinstance(model, MultimodalModel) else ():
            found += [(f"{name} encoder", encoder), (f"{name} encoder", unwrap(encoder.module))]
            if encoder.projector is not None:
                found.append((f"{name} projector", unwrap(encoder.projector)))
    found += [pair for model in models for pair in _body_and_head(model)]
    first_names: dict[nn.Module, str] = {}
    for name, module in found:
        first_names.setdefault(module, name)
    return [(name, module) for module, name in first_names.items()]


def _body_and_head(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, ModalEncoderModule):
        return  # listed with the multimodal model that it belongs to
    name = "model"
    if isinstance(model, MultimodalModel):
        if model.encoders:
            yield MERGING, model
        model, name = model.language_model, "language model"
    whole = unwrap(model)
    body = getattr(whole, "base_model", None)  # of a transformers model: the model without its head
    if isinstance(body, nn.Module) and body is not whole:
        yield name, body
        yield HEAD, whole
    else:
        yield name, whole


@contextmanager
def record_forwards(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Make the forwards of modules ranges, and enable `record_range`, while a block runs."""
    # Forwards are replaced rather than hooked, because adapters call a model's forward past its hooks.
    global _is_recording
    with ExitStack() as restore:
        for name, module in modules:
            own = {key: value for key, value in vars(module).items() if key == "forward"}
            restore.callback(vars(module).update, own)
            restore.callback(vars(module).pop, "forward")  # runs before the update: callbacks are last in, first out
            vars(module)["forward"] = record_calls(name, module.forward)
        _is_recording = True
        try:
            yield
        finally:
            _is_recording = False


def build_time_table(read: ProfileBreakdown) -> Table:
    """Return a table of where the time goes."""
    several = len(read.ranks) > 1
    notes = "\n".join(read.notes)
    title = f"where the time goes: {read.title()}"
    table = Table(title=title, title_justify="left", caption=notes or None, caption_justify="left")
    table.add_column("ms per step", no_wrap=True)
    for name in ("forward", "backward", "total", "share", *(("least", "most") if several else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in read.rows():
        extremes = [format_milliseconds(one) or "0" for one in read.extremes(row.name)] if several else []
        table.add_row(row.name, *row.format_phases(), f"{row.seconds / read.seconds:.1%}", *extremes)
        for kind in row.kinds.values():
            table.add_row(f"  {kind.name}", *kind.format_phases(), style="dim")
    table.add_section()
    table.add_row("a step", "", "", format_milliseconds(read.seconds), "")
    return table
