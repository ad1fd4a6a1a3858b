"""Data parallelism: who holds which part of parameters, gradients and optimizer states, and what is sent when."""

from __future__ import annotations

from collections.abc import Iterator

from cornstarch.explain.holdings import LEGEND, Moment, Sharing, marked, moment_step, resting, with_parts
from cornstarch.explain.story import NUMBER_BYTES, Formula, Step, Story, byte_count, same_or_range
from cornstarch.plan.communication import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from cornstarch.plan.plan import DataPlan


def ddp_story(ranks: int, parameters: int) -> Story:
    """Return DDP: everything everywhere."""
    sharing = Sharing(DataPlan("ddp"), parameters, ranks)
    start = resting(sharing)
    steps = [
        moment_step(
            sharing,
            "Before",
            "Every rank holds the whole model and all states of the optimizer, the same on all.",
            start,
        ),
        *_own_gradients(sharing, start),
        moment_step(
            sharing,
            "Step",
            "Every rank steps all parameters by itself; as all had the same numbers and the same gradients, they stay "
            "the same without a message.",
            start,
        ),
    ]
    return _story(
        sharing,
        "ddp",
        "DDP: data parallelism",
        "Every rank has the whole model and other samples; gradients are averaged, so that all take the same step.",
        steps,
        "2 (N − 1) / N × 4 Ψ",
        2,
        ["Gradients of the last layers are sent while backward still computes those of the first ones."],
    )


def zero1_story(ranks: int, parameters: int) -> Story:
    """Return ZeRO-1: each rank has the states of some parameters."""
    sharing = Sharing(DataPlan("zero1"), parameters, ranks)
    start = resting(sharing)
    steps = [
        moment_step(
            sharing,
            "Before",
            "Every rank holds the whole model, but the optimizer's states only for the layers that it owns: they are "
            "the largest part, and nobody else needs them.",
            start,
        ),
        *_own_gradients(sharing, start),
        moment_step(
            sharing, "Step", "Every rank steps only the layers that it owns; its other layers are old now.", start
        ),
        moment_step(
            sharing,
            "Share parameters",
            "Every owner hands its new layers to all others, so that all have the same model again; together this is "
            "as much as an all-gather.",
            start,
            sent=all_gather_bytes(NUMBER_BYTES * parameters, ranks),
        ),
    ]
    return _story(
        sharing,
        "zero1",
        "ZeRO-1: states of the optimizer are shared out",
        "As DDP, but each rank keeps the states of the optimizer for its own part of the parameters only.",
        steps,
        "3 (N − 1) / N × 4 Ψ",
        3,
        [
            "Here whole parameters are dealt out, the largest first to whoever has least, and gradients are averaged "
            "by DDP. Where gradients are only reduce-scattered, it is 2 (N − 1) / N.",
        ],
    )


def zero2_story(ranks: int, parameters: int) -> Story:
    """Return ZeRO-2 as it is run here: gathered once for forward and backward."""
    sharing = Sharing(DataPlan("zero2"), parameters, ranks)
    start = resting(sharing)
    size = NUMBER_BYTES * parameters
    gathered = with_parts(start, parameters="gathered")
    steps = [
        moment_step(
            sharing,
            "Before",
            "Every rank holds a slice of every layer, with the states of the optimizer for it.",
            start,
        ),
        moment_step(
            sharing,
            "Forward",
            "Layer by layer all slices are gathered, and stay: backward will need the same parameters again.",
            gathered,
            all_gather_bytes(size, ranks),
        ),
        moment_step(
            sharing,
            "Backward",
            "Every rank computes gradients from its own samples; those of a layer are whole for a moment only.",
            with_parts(gathered, gradients="own", layer=ranks - 1),
        ),
        moment_step(
            sharing,
            "Reduce-scatter",
            "The gradients of each layer are summed over the ranks as soon as they are there, and every rank keeps the "
            "slice that it will step; gathered parameters are freed.",
            with_parts(start, gradients="slice"),
            reduce_scatter_bytes(size, ranks),
        ),
        _last(sharing, start),
    ]
    return _story(
        sharing,
        "zero2",
        "ZeRO-2: gradients are shared out, too",
        "Each rank keeps gradients and states of the optimizer for its slices only; parameters are whole from forward "
        "to backward.",
        steps,
        "2 (N − 1) / N × 4 Ψ",
        2,
        ["In the original ZeRO-2 parameters are whole all the time. Here they are slices between steps."],
    )


def zero3_story(ranks: int, parameters: int) -> Story:
    """Return ZeRO-3, pass by pass."""
    sharing = Sharing(DataPlan("zero3"), parameters, ranks)
    start = resting(sharing)
    size = NUMBER_BYTES * parameters
    gather, last = all_gather_bytes(size, ranks), ranks - 1
    in_forward = with_parts(start, parameters="gathered", layer=last)
    in_backward = with_parts(with_parts(start, parameters="gathered", layer=0), gradients="own", layer=0)
    for layer in range(1, ranks):
        in_backward = with_parts(in_backward, gradients="slice", layer=layer)
    steps = [
        moment_step(sharing, "Before", "Every rank holds a slice of everything: nothing is there twice.", start),
        moment_step(
            sharing,
            "Forward",
            "Each layer is gathered right before it computes and freed right after it; the picture shows the last one.",
            in_forward,
            gather,
        ),
        moment_step(
            sharing,
            "Backward",
            "Layers are gathered once more, from the last to the first, because they were freed; gradients of a layer "
            "are whole until they are summed. The picture shows the first layer.",
            in_backward,
            gather,
        ),
        moment_step(
            sharing,
            "Reduce-scatter",
            "The gradients of each layer have been summed over the ranks; every rank keeps the slice that it steps.",
            with_parts(start, gradients="slice"),
            reduce_scatter_bytes(size, ranks),
        ),
        _last(sharing, start),
    ]
    return _story(
        sharing,
        "zero3",
        "ZeRO-3: parameters are shared out, too",
        "Each rank keeps a slice of parameters, gradients and states; a layer is whole only while it computes. "
        "The topic fsdp shows it layer by layer.",
        steps,
        "3 (N − 1) / N × 4 Ψ",
        3,
        ["It sends half as much again as DDP, and holds 1 / N of everything, and one or two whole layers."],
    )


def fsdp_story(ranks: int, parameters: int) -> Story:
    """Return FSDP, layer by layer."""
    sharing = Sharing(DataPlan("fsdp2"), parameters, ranks)
    start = resting(sharing)
    steps = [
        moment_step(
            sharing,
            "Before",
            "Every parameter is cut along its first dimension, and each rank holds one slice of it.",
            start,
        ),
        *_fsdp_forward(sharing, start),
        moment_step(
            sharing, "Loss", "The last layer is freed, too, and every rank computes the loss of its own samples.", start
        ),
        *_fsdp_backward(sharing, start),
        _last(sharing, start),
    ]
    return _story(
        sharing,
        "fsdp",
        "FSDP: fully sharded data parallelism",
        "ZeRO-3 as torch runs it: unit by unit, mostly layers. A unit's parameters are gathered together, and while "
        "one unit computes the next one is already coming.",
        steps,
        "3 (N − 1) / N × 4 Ψ",
        3,
        ["The picture leaves out the unit that comes while another computes: with it two are whole at a time."],
    )


def _fsdp_forward(sharing: Sharing, start: Moment) -> Iterator[Step]:
    for layer, size in enumerate(sharing.layers):
        yield moment_step(
            sharing,
            f"Forward of layer {layer}",
            f"Layer {layer} is gathered because its forward needs all of it"
            + (f"; layer {layer - 1} is freed, its slice stays." if layer else "."),
            with_parts(start, parameters="gathered", layer=layer),
            all_gather_bytes(size.bytes, sharing.ranks),
        )


def _fsdp_backward(sharing: Sharing, start: Moment) -> Iterator[Step]:
    now = start
    for layer in reversed(range(sharing.ranks)):
        size = sharing.layers[layer].bytes
        yield moment_step(
            sharing,
            f"Backward of layer {layer}",
            f"Layer {layer} is gathered once more, and every rank computes its gradients from its own samples.",
            with_parts(with_parts(now, parameters="gathered", layer=layer), gradients="own", layer=layer),
            all_gather_bytes(size, sharing.ranks),
        )
        now = with_parts(now, gradients="slice", layer=layer)
        yield moment_step(
            sharing,
            f"Reduce-scatter of layer {layer}",
            f"Its gradients are summed over the ranks, each keeps its slice; layer {layer} is freed.",
            now,
            reduce_scatter_bytes(size, sharing.ranks),
        )


# ------------------------------------------------------------------------------------------------ steps


def _own_gradients(sharing: Sharing, start: Moment) -> Iterator[Step]:
    """DDP and ZeRO-1: gradients of one's own samples, then of all."""
    yield moment_step(
        sharing,
        "Forward and backward",
        "Every rank computes gradients from its own samples: they differ from rank to rank.",
        with_parts(start, gradients="own"),
    )
    yield moment_step(
        sharing,
        "All-reduce",
        "Gradients are summed over the ranks, so that every rank has those of the whole batch.",
        with_parts(start, gradients="whole"),
        all_reduce_bytes(NUMBER_BYTES * sharing.parameters, sharing.ranks),
    )


def _last(sharing: Sharing, start: Moment) -> Step:
    return moment_step(
        sharing,
        "Step",
        "Every rank steps its slices by itself: all that a slice needs is on the same rank. Gradients are freed.",
        start,
    )


def _story(
    sharing: Sharing,
    topic: str,
    title: str,
    lead: str,
    steps: list[Step],
    symbols: str,
    factor: int,
    remarks: list[str],
) -> Story:
    ranks, parameters = sharing.ranks, sharing.parameters
    size = NUMBER_BYTES * parameters
    counted = tuple(sum(step.sent[rank] for step in steps if step.sent) for rank in range(ranks))
    result = {2: all_reduce_bytes, 3: _thrice}[factor](size, ranks)
    held = tuple(float(sharing.memory(rank).held) for rank in range(ranks))
    by_kind = {
        "ddp": ("(4 + 4 + 8) Ψ", 16 * parameters),
        "zero1": ("(4 + 4) Ψ + 8 Ψ / N", 8 * parameters + 8 * parameters / ranks),
    }
    formula, bytes_held = by_kind.get(sharing.plan.kind, ("(4 + 4 + 8) Ψ / N", 16 * parameters / ranks))
    used = {box.tone for step in steps for row in step.rows for box in row.boxes}
    values = f"Ψ = {parameters:,}, N = {ranks}"
    return Story(
        topic,
        title,
        lead,
        tuple(marked(steps)),
        (
            Formula(
                "Bytes that each rank sends in a step", symbols, values, byte_count(result), same_or_range(counted)
            ),
            Formula(
                "Bytes that each rank holds with its gradients",
                formula,
                values,
                byte_count(bytes_held),
                same_or_range(held),
            ),
        ),
        (
            *remarks,
            f"The model: {parameters:,} parameters in float32 (4 bytes, gradients 4, Adam's averages 8), in {ranks} "
            "equal layers. In the picture each group has a box for each layer.",
        ),
        tuple((tone, meaning) for tone, meaning in LEGEND.items() if tone in used),
    )


def _thrice(size: float, ranks: int) -> float:
    """Return the bytes of two all-gathers and a reduce-scatter, or of an all-reduce and an all-gather."""
    return all_reduce_bytes(size, ranks) + all_gather_bytes(size, ranks)
