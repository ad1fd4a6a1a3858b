"""Load balancing: assign the samples of a step to replicas by cost.

Costs are measured once, by all ranks together, from texts and headers of media, and stored in the run's folder. So each
rank finds its own samples without communication, and reads no others.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cornstarch.config import RunConfig
from cornstarch.config.run_folder import RunFolder
from cornstarch.cost.flops import StepFlops
from cornstarch.data.collate import ChatCollator
from cornstarch.data.formats import DataSource
from cornstarch.data.loader import Collator, RunData
from cornstarch.data.sample import Sample, SampleError
from cornstarch.data.token_lengths import SampleTokenCounter, TokenCount
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.parallel import distributed
from cornstarch.plan import balancing
from cornstarch.plan.balancing import SampleAssignment
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL

COSTS = "sample_costs.npz"
_WITHOUT_EFFECT = {  # on the costs
    "evaluation", "workers", "prefetch", "balance", "packing", "balance_encoders", "packing_buffer", "tokens_per_step",
}  # fmt: skip
_GAIN_STEPS = 8
_LENGTHS = 32  # row lengths for which the language model's work is counted; between them it is interpolated
_HEAD = 64  # tokens of the row from which the work of the head is derived

CountFlops = Callable[[Mapping[str, Any]], StepFlops | None]
"""Counts the FLOPs of forward and backward of a batch: `step` of `FlopCounter`, or of a run's `RunFlops`."""


@dataclass(frozen=True, eq=False)
class LoadBalancer:
    costs: balancing.SampleCosts  # [phases, samples of the source]
    padded: bool  # whether rows are padded to the longest of their microbatch

    def __call__(self, numbers: np.ndarray, ranks: int, microbatches: int) -> SampleAssignment:
        return balancing.balance(self.costs[:, numbers], ranks, microbatches, self.padded)

    def deal_rows(self, rows: Sequence[np.ndarray], ranks: int, microbatches: int, size: int) -> SampleAssignment:
        """Return the rows of each replica by microbatch, at most `size` in each; a row costs as much as its samples."""
        costs = np.zeros((len(self.costs), ranks * microbatches * size))  # places without a row cost nothing
        costs[:, : len(rows)] = self._row_costs(rows)
        dealt = balancing.balance(costs, ranks, microbatches, least=size)
        return tuple(tuple(places[places < len(rows)] for places in own) for own in dealt)

    def _row_costs(self, rows: Sequence[np.ndarray]) -> balancing.SampleCosts:
        return np.stack([self.costs[:, row].sum(1) for row in rows], axis=1)

    def gain(self, steps: Sequence[np.ndarray], ranks: int, microbatches: int) -> tuple[float, float]:
        """Return the slowest replica's work over the mean, for samples in order and balanced, over some steps."""
        dealt = [self(numbers, ranks, microbatches) for numbers in steps]
        return self._compare([self.costs[:, numbers] for numbers in steps], dealt, ranks, microbatches)

    def gain_of_rows(
        self, steps: Sequence[Sequence[np.ndarray]], ranks: int, microbatches: int, size: int
    ) -> tuple[float, float]:
        """Return the same as `gain`, for the packed rows of some steps."""
        dealt = [self.deal_rows(rows, ranks, microbatches, size) for rows in steps]
        return self._compare([self._row_costs(rows) for rows in steps], dealt, ranks, microbatches)

    def _compare(
        self,
        steps: Sequence[balancing.SampleCosts],
        dealt: Sequence[SampleAssignment],
        ranks: int,
        microbatches: int,
    ) -> tuple[float, float]:
        mean = in_order = balanced = 0.0
        for costs, assignment in zip(steps, dealt, strict=True):
            mean += float(costs.sum()) / ranks
            as_given = balancing.assign_in_order(costs.shape[1], ranks, microbatches)
            in_order += balancing.compute_step_work(balancing.compute_loads(costs, as_given, self.padded))
            balanced += balancing.compute_step_work(balancing.compute_loads(costs, assignment, self.padded))
        return (in_order / mean, balanced / mean) if mean else (1.0, 1.0)


def build_balancer(
    config: RunConfig, collator: Collator, source: DataSource, step: CountFlops, layout: Layout, folder: RunFolder
) -> LoadBalancer | None:
    """Return the load balancer of a run; None if samples come in order. All ranks must call it."""
    if config.data.balance == "off" or layout.dp * config.loop.microbatches == 1:
        return None
    if not isinstance(collator, ChatCollator):
        raise ConfigError(
            "data.balance = cost: only conversations and documents are weighed, not the samples of this task.\n"
            "  Set it to off."
        )
    sizer = SampleSizer(collator, step)
    costs = _share_costs(sizer, source, config, folder)
    # The work of a phase is divided over the ranks of its module in a replica.
    modules = layout.plan.modules
    ranks = [layout.mesh(phase).size / layout.dp if phase in modules else 1.0 for phase in sizer.phases]
    costs = costs / np.array(ranks)[:, None]
    # Balanced encoders are even for any assignment: only the language model, the last phase, is left.
    balances_encoders = config.data.balance_encoders and layout.dp > 1
    return LoadBalancer(costs[-1:] if balances_encoders else costs, not config.data.packing)


def describe_gain(balancer: LoadBalancer, data: RunData, ranks: int) -> str:
    """Return a line about the predicted gain of balancing in the first steps."""
    loop = data.config.loop
    if data.packed is not None:
        rows = [data.packed.step(0, number) for number in range(_GAIN_STEPS)]
        rows = [one for one in rows if one]
        size = data.packed.rows_per_microbatch(ranks, loop.microbatches)
        before, after = balancer.gain_of_rows(rows, ranks, loop.microbatches, size)
        count = len(rows)
    else:
        numbers = data.order.order(0)[: _GAIN_STEPS * loop.batch_size]
        steps = [numbers[start : start + loop.batch_size] for start in range(0, len(numbers), loop.batch_size)]
        before, after = balancer.gain(steps, ranks, loop.microbatches)
        count = len(steps)
    return (
        f"Samples are balanced by cost: the slowest replica has {after:.2f} × the mean work, not {before:.2f} × "
        f"(predicted, first {count} steps)."
    )


def measure_costs(sizer: SampleSizer, source: DataSource, numbers: Sequence[int]) -> balancing.SampleCosts:
    """Return the costs of samples, [phases, samples]; 0 for samples that will be skipped."""
    data, costs = sizer.data, np.zeros((len(sizer.phases), len(numbers)))
    for place, number in enumerate(numbers):
        with suppress(SampleError):
            size = sizer(source[number])
            if size.tokens <= data.max_length or data.too_long == "cut":
                costs[:, place] = [size.work[phase] for phase in sizer.phases]
    return costs


def _share_costs(sizer: SampleSizer, source: DataSource, config: RunConfig, folder: RunFolder) -> balancing.SampleCosts:
    """Return the costs of all samples: from the run's folder, or measured by all ranks together."""
    rank, size = distributed.rank(), distributed.world_size()
    shape = (len(sizer.phases), len(source))
    data = config.data.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
    described = {"model": config.model.model_dump(mode="json"), "data": data, "recomputes": config.recomputes}
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    costs, is_found = np.zeros(shape), False
    if rank == 0:
        with (
            suppress(OSError, ValueError, KeyError, EOFError),  # missing, or damaged: measured again
            np.load(folder / COSTS, allow_pickle=False) as file,
        ):
            stored, found = file["costs"], str(file["key"])
            if found == key and stored.shape == shape:  # of the same model and data
                costs, is_found = stored, True
    is_stored = distributed.sum_over_ranks([is_found])[0] > 0
    if not is_stored:
        costs[:, rank::size] = measure_costs(sizer, source, range(rank, len(source), size))
    # Each cost is nonzero on one rank alone: the sum is exact.
    costs = np.array(distributed.sum_over_ranks(costs.ravel().tolist())).reshape(shape)
    if rank == 0 and not is_stored:
        content = io.BytesIO()
        np.savez_compressed(content, costs=costs, key=np.array(key))
        folder.write(COSTS, content.getvalue())
    return costs


@dataclass(frozen=True)
class SampleSize(TokenCount):
    work: Mapping[str, float] = field(default_factory=dict)
    """By phase (each encoder, the language model): the FLOPs of forward and backward."""


class SampleSizer(SampleTokenCounter):
    """Predicts sizes and work of samples from texts and headers of media."""

    def __init__(self, collator: ChatCollator, step: CountFlops) -> None:
        super().__init__(collator)
        self._step = step
        self.phases = (*collator.processor.encoder_processors, LANGUAGE_MODEL)  # encoders, then the language model
        placeholders = set(collator.processor.modality_token_ids.values())
        self._word = next(number for number in range(len(placeholders) + 1) if number not in placeholders)
        self._rows: tuple[np.ndarray, np.ndarray, float] | None = None

    def __call__(self, sample: Sample) -> SampleSize:
        count, work = self.count(sample)
        row = self._row_work(min(count.tokens, self.data.max_length), count.trained)
        return SampleSize(count.tokens, count.trained, count.items, count.item_tokens, {**work, LANGUAGE_MODEL: row})

    def measure_work(self, name: str, inputs: Mapping[str, Any]) -> float:
        parts = self._count({**self._text(1), name: inputs}).parts
        own = [parts[part] for part in (f"{name} encoder", f"{name} projector") if part in parts]
        return sum(part.total + part.recomputed for part in own)

    def _row_work(self, tokens: int, trained: int) -> float:
        if self._rows is None:
            lengths = np.unique(np.geomspace(1, self.data.max_length, _LENGTHS).round().astype(int))
            # With items, so that the gradient to the encoders is counted.
            items = self._collator.processor.stand_ins()
            work = np.array([self._language_model_work({**self._text(int(n)), **items}) for n in lengths])
            learned = self._language_model_work({**self._text(_HEAD, learned=True), **items})
            head = (learned - self._language_model_work({**self._text(_HEAD), **items})) / (_HEAD - 1)
            self._rows = lengths, work, head
        lengths, work, head = self._rows
        return float(np.interp(tokens, lengths, work)) + head * trained

    def _language_model_work(self, batch: Mapping[str, Any]) -> float:
        part = self._count(batch).parts["language model"]
        return part.total + part.recomputed

    def _text(self, tokens: int, learned: bool = False) -> dict[str, Any]:
        ids = torch.full((1, tokens), self._word)
        labels = ids if learned else torch.full_like(ids, IGNORE_INDEX)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def _count(self, batch: Mapping[str, Any]) -> StepFlops:
        found = self._step(batch)
        if found is None:
            raise ConfigError(
                "What this model computes for a sample cannot be counted, so samples cannot be weighed. Leave "
                "`data.balance` off."
            )
        return found
