"""Data parallelism: which rank holds which part of parameters, gradients and optimizer states, and what is sent when.

Bytes are those of `cornstarch.plan.memory`. The model has as many equal layers as there are ranks, in float32, and is
trained by Adam.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from cornstarch.explain import story
from cornstarch.explain.story import NUMBER_BYTES, DiagramBox, DiagramRow, Formula, Story, StoryStep, Tone
from cornstarch.plan.communication import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from cornstarch.plan.memory import Memory, ModelSize, ParameterSize, StateSize, memory_of
from cornstarch.plan.plan import DataPlan

_ADAM = {(NUMBER_BYTES, False): StateSize(per_element=8)}  # two averages in float32
_GROUPS = ("parameters", "gradients", "optimizer states")
_GAP = 0.4  # between groups, in boxes

Part = Literal["", "whole", "slice", "gathered", "own"]
"""Of a layer on a rank: nothing, all of it permanently, its slice, all of it temporarily, or gradients that are not
summed over the ranks yet."""
Parts = tuple[Part, ...]
"""By layer."""

_TONES: dict[Part, Tone] = {"": "n", "whole": "c6", "slice": "c1", "gathered": "c2", "own": "c4"}
_MEANINGS: dict[Part, str] = {
    "": "not here",
    "whole": "whole",
    "slice": "this rank's slice",
    "gathered": "whole for a moment",
    "own": "from this rank's samples only",
}
_STEP_SLICES = "Every rank steps its slices by itself: all that a slice needs is on the same rank. Gradients are freed."


@dataclass(frozen=True)
class ShardState:
    """The parts of every layer on the ranks, which all have the same parts of parameters and of gradients."""

    parameters: Parts
    gradients: Parts
    optimizer: tuple[Parts, ...]
    """By rank."""

    def replace(self, parameters: Part = "", gradients: Part = "", layer: int | None = None) -> ShardState:
        """Return a state with other parts: of one layer, or of all."""

        def change(parts: Parts, part: Part) -> Parts:
            return tuple(part if part and layer in (None, at) else old for at, old in enumerate(parts))

        return ShardState(change(self.parameters, parameters), change(self.gradients, gradients), self.optimizer)


@dataclass(frozen=True)
class ShardedModel:
    """A model under one kind of data parallelism."""

    plan: DataPlan
    parameters: int
    ranks: int

    @property
    def bytes(self) -> int:
        return NUMBER_BYTES * self.parameters

    @cached_property
    def layers(self) -> tuple[ParameterSize, ...]:
        """One parameter for each rank, as even as possible."""
        bounds = [self.parameters * layer // self.ranks for layer in range(self.ranks + 1)]
        sizes = [end - begin for begin, end in pairwise(bounds)]
        return tuple(ParameterSize((size,), NUMBER_BYTES, True, unit) for unit, size in enumerate(sizes))

    def memory(self, rank: int) -> Memory:
        """Return the bytes of a rank after a backward pass."""
        return memory_of(ModelSize(self.layers, states=_ADAM), self.plan, self.ranks, rank)

    def count_bytes(self, rank: int, state: ShardState) -> int:
        """Return a rank's bytes in a state; a gathered layer exists beside the rank's slice of it."""

        def measure(layer: int, part: Part) -> Memory:
            one = ModelSize((self.layers[layer],), states=_ADAM)
            if part == "":
                return Memory(0, 0, 0)
            if part == "slice":
                return memory_of(one, DataPlan("zero3"), self.ranks, rank)
            return memory_of(one, DataPlan("ddp"), ranks=1)

        total = 0
        for layer in range(self.ranks):
            parameters = state.parameters[layer]
            total += measure(layer, parameters).parameters
            total += measure(layer, "slice").parameters if parameters == "gathered" else 0
            total += measure(layer, state.gradients[layer]).gradients
            if self.plan.kind != "zero1":
                total += measure(layer, state.optimizer[rank][layer]).optimizer
        # ZeRO-1 divides a flat buffer of all layers, not each layer.
        return total + (self.memory(rank).optimizer if self.plan.kind == "zero1" else 0)

    def build_resting_state(self) -> ShardState:
        """Return the state between two steps, without gradients."""
        part: Part = "whole" if self.plan.kind in ("ddp", "zero1") else "slice"
        nothing: Part = ""
        parts = (part,) * self.ranks
        optimizer: tuple[Parts, ...] = (parts,) * self.ranks
        if self.plan.kind == "zero1":
            own: Part = "slice"
            optimizer = ((own,) * self.ranks,) * self.ranks
        return ShardState(parts, (nothing,) * self.ranks, optimizer)

    def build_step(self, title: str, description: str, state: ShardState, sent: float = 0.0) -> StoryStep:
        """Return a step that leads to a state; `sent` is in bytes, by each rank."""
        starts = [group * (self.ranks + _GAP) for group in range(len(_GROUPS))]
        texts = {"": "", "own": "own", "slice": f"1/{self.ranks}"}
        rows = []
        for rank in range(self.ranks):
            groups = (state.parameters, state.gradients, state.optimizer[rank])
            boxes = [
                DiagramBox(start + layer, start + layer + 1, texts.get(part, "all"), _TONES[part],
                           f"{name} of layer {layer}: {_MEANINGS[part]}")
                for start, name, parts in zip(starts, _GROUPS, groups, strict=True)
                for layer, part in enumerate(parts)
            ]  # fmt: skip
            beside = f"holds {story.format_byte_count(self.count_bytes(rank, state))}"
            rows.append(DiagramRow(f"rank {rank}", boxes, beside))
        head = [DiagramBox(start, start + self.ranks, name) for start, name in zip(starts, _GROUPS, strict=True)]
        return StoryStep(title, description, rows, head, [sent] * self.ranks if sent else ())

    def build_all_reduce(self) -> list[StoryStep]:
        """DDP: gradients of a rank's own samples, then of the whole batch."""
        start, sent = self.build_resting_state(), all_reduce_bytes(self.bytes, self.ranks)
        own = "Every rank computes gradients from its own samples: they differ from rank to rank."
        summed = "Gradients are summed over the ranks, so that every rank has those of the whole batch."
        return [
            self.build_step("Forward and backward", own, start.replace(gradients="own")),
            self.build_step("All-reduce", summed, start.replace(gradients="whole"), sent),
        ]


def build_ddp(ranks: int, parameters: int) -> Story:
    """Return DDP: everything on every rank."""
    model = ShardedModel(DataPlan("ddp"), parameters, ranks)
    start, step = model.build_resting_state(), model.build_step
    steps = [
        step("Before", "Every rank holds the whole model and all states of the optimizer, the same on all.", start),
        *model.build_all_reduce(),
        step("Step", "Every rank steps all parameters by itself; as all had the same numbers and the same gradients, "
             "they stay the same without a message.", start),
    ]  # fmt: skip
    lead = "Every rank has the whole model and other samples; gradients are averaged, so that all take the same step."
    remark = "Gradients of the last layers are sent while backward still computes those of the first ones."
    return _build_story(model, "ddp", "DDP: data parallelism", lead, steps, 2, remark)


def build_zero1(ranks: int, parameters: int) -> Story:
    """Return ZeRO-1: each rank has the optimizer states of a slice of the parameters."""
    model = ShardedModel(DataPlan("zero1"), parameters, ranks)
    start, step = model.build_resting_state(), model.build_step
    steps = [
        step("Before", "Every rank holds the whole model, but the optimizer's states only for its slice: they are the "
             "largest part, and no other rank needs them.", start),
        step("Forward and backward", "Every rank computes gradients from its own samples: they differ from rank to "
             "rank.", start.replace(gradients="own")),
        step("Reduce-scatter", "Gradients are summed over the ranks, and every rank keeps the slice that it steps.",
             start.replace(gradients="slice"), reduce_scatter_bytes(model.bytes, ranks)),
        step("Step", "Every rank steps its slice of the parameters; its other slices are old now.", start),
        step("All-gather", "Every rank sends its new slice to all others, so that all have the same model again.",
             start, all_gather_bytes(model.bytes, ranks)),
    ]  # fmt: skip
    lead = "As DDP, but each rank keeps the states of the optimizer for its own slice of the parameters only."
    remark = (
        "An all-reduce is a reduce-scatter and an all-gather, so it sends as much as DDP. The slices are those of flat "
        "buffers of many parameters: a border may lie inside of a parameter."
    )
    return _build_story(model, "zero1", "ZeRO-1: sharded optimizer states", lead, steps, 2, remark)


def build_zero2(ranks: int, parameters: int) -> Story:
    """Return ZeRO-2 as it is run here: gathered once for forward and backward."""
    model = ShardedModel(DataPlan("zero2"), parameters, ranks)
    start, step = model.build_resting_state(), model.build_step
    gathered = start.replace(parameters="gathered")
    steps = [
        step("Before", "Every rank holds a slice of every layer, with the states of the optimizer for it.", start),
        step("Forward", "Layer by layer all slices are gathered, and stay: backward will need the same parameters "
             "again.", gathered, all_gather_bytes(model.bytes, ranks)),
        step("Backward", "Every rank computes gradients from its own samples; those of a layer are whole for a moment "
             "only.", gathered.replace(gradients="own", layer=ranks - 1)),
        step("Reduce-scatter", "The gradients of each layer are summed over the ranks as soon as they are there, and "
             "every rank keeps the slice that it will step; gathered parameters are freed.",
             start.replace(gradients="slice"), reduce_scatter_bytes(model.bytes, ranks)),
        step("Step", _STEP_SLICES, start),
    ]  # fmt: skip
    lead = (
        "Each rank keeps gradients and states of the optimizer for its slices only; parameters are whole from forward "
        "to backward."
    )
    remark = "In the original ZeRO-2 parameters are whole all the time. Here they are slices between steps."
    return _build_story(model, "zero2", "ZeRO-2: sharded gradients, too", lead, steps, 2, remark)


def build_zero3(ranks: int, parameters: int) -> Story:
    """Return ZeRO-3, pass by pass."""
    model = ShardedModel(DataPlan("zero3"), parameters, ranks)
    start, step, gather = model.build_resting_state(), model.build_step, all_gather_bytes(model.bytes, ranks)
    in_backward = start.replace(gradients="slice").replace(parameters="gathered", gradients="own", layer=0)
    steps = [
        step("Before", "Every rank holds a slice of everything: nothing is there twice.", start),
        step("Forward", "Each layer is gathered right before it computes and freed right after it; the picture shows "
             "the last one.", start.replace(parameters="gathered", layer=ranks - 1), gather),
        step("Backward", "Layers are gathered once more, from the last to the first, because they were freed; "
             "gradients of a layer are whole until they are summed. The picture shows the first layer.", in_backward,
             gather),
        step("Reduce-scatter", "The gradients of each layer have been summed over the ranks; every rank keeps the "
             "slice that it steps.", start.replace(gradients="slice"), reduce_scatter_bytes(model.bytes, ranks)),
        step("Step", _STEP_SLICES, start),
    ]  # fmt: skip
    lead = (
        "Each rank keeps a slice of parameters, gradients and states; a layer is whole only while it computes. "
        "The topic fsdp shows it layer by layer."
    )
    remark = "It sends half as much again as DDP, and holds 1 / N of everything, and one or two whole layers."
    return _build_story(model, "zero3", "ZeRO-3: sharded parameters, too", lead, steps, 3, remark)


def build_fsdp(ranks: int, parameters: int) -> Story:
    """Return FSDP, layer by layer."""
    model = ShardedModel(DataPlan("fsdp2"), parameters, ranks)
    start, step = model.build_resting_state(), model.build_step
    text = "Every parameter is cut along its first dimension, and each rank holds one slice of it."
    steps = [step("Before", text, start)]
    gathers = [all_gather_bytes(size.bytes, ranks) for size in model.layers]
    for layer, gather in enumerate(gathers):
        freed = f"; layer {layer - 1} is freed, its slice stays." if layer else "."
        text = f"Layer {layer} is gathered because its forward needs all of it{freed}"
        steps.append(step(f"Forward of layer {layer}", text, start.replace(parameters="gathered", layer=layer), gather))
    text = "The last layer is freed, too, and every rank computes the loss of its own samples."
    steps.append(step("Loss", text, start))
    state = start
    for layer in reversed(range(ranks)):
        text = f"Layer {layer} is gathered once more, and every rank computes its gradients from its own samples."
        now = state.replace(parameters="gathered", gradients="own", layer=layer)
        steps.append(step(f"Backward of layer {layer}", text, now, gathers[layer]))
        text = f"Its gradients are summed over the ranks, each keeps its slice; layer {layer} is freed."
        state = state.replace(gradients="slice", layer=layer)
        sent = reduce_scatter_bytes(model.layers[layer].bytes, ranks)
        steps.append(step(f"Reduce-scatter of layer {layer}", text, state, sent))
    steps.append(step("Step", _STEP_SLICES, start))
    lead = (
        "ZeRO-3 as torch runs it: unit by unit, mostly layers. A unit's parameters are gathered together, and while "
        "one unit computes the next one is already coming."
    )
    remark = "The picture leaves out the unit that comes while another computes: with it two are whole at a time."
    return _build_story(model, "fsdp", "FSDP: fully sharded data parallelism", lead, steps, 3, remark)


def _build_story(
    model: ShardedModel, topic: str, title: str, lead: str, steps: list[StoryStep], passes: int, remark: str
) -> Story:
    """Build the formulas; `passes` counts all-gathers and reduce-scatters of all parameters."""
    ranks, parameters = model.ranks, model.parameters
    by_kind: dict[str, tuple[str, float]] = {
        "ddp": ("(4 + 4 + 8) Ψ", 16 * parameters),
        "zero1": ("(4 + 4) Ψ + 8 Ψ / N", 8 * parameters + 8 * parameters / ranks),
    }
    symbols, held = by_kind.get(model.plan.kind, ("(4 + 4 + 8) Ψ / N", 16 * parameters / ranks))
    counted = [float(model.memory(rank).persistent) for rank in range(ranks)]
    values = f"Ψ = {parameters:,}, N = {ranks}"
    formulas = [
        Formula.of_bytes("Bytes that each rank sends in a step", f"{passes} (N − 1) / N × 4 Ψ", values,
                         passes * all_gather_bytes(model.bytes, ranks), story.sum_sent(steps)),
        Formula.of_bytes("Bytes that each rank holds with its gradients", symbols, values, held, counted),
    ]  # fmt: skip
    remarks = [
        remark,
        f"The model: {parameters:,} parameters in float32 (4 bytes, gradients 4, Adam's averages 8), in {ranks} "
        "equal layers. In the picture each group has a box for each layer.",
    ]
    used = {box.tone for step in steps for row in step.rows for box in row.boxes}
    legend = [(_TONES[part], text) for part, text in _MEANINGS.items() if part and _TONES[part] in used]
    # New boxes are marked: those that were absent, partial or not summed in the step before.
    marked = steps[:1]
    for before, step in pairwise(steps):
        rows = []
        for old, row in zip(before.rows, step.rows, strict=True):
            boxes = [
                replace(box, fresh=box.tone not in ("n", was.tone) and was.tone != _TONES["gathered"])
                for was, box in zip(old.boxes, row.boxes, strict=True)
            ]
            rows.append(replace(row, boxes=boxes))
        marked.append(replace(step, rows=rows))
    return Story(topic, title, lead, marked, formulas, remarks, legend)
