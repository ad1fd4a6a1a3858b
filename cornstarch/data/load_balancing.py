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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from cornstarch.config import RunConfig
from cornstarch.config.run_folder import RunFolder
from cornstarch.cost.flops import StepFlops
from cornstarch.data.collate import ChatCollator, sampling_rate
from cornstarch.data.formats import DataSource
from cornstarch.data.loader import Collator
from cornstarch.data.media import feature_frames, image_size, sound_length
from cornstarch.data.sample import Media, Sample, SampleError, as_sample_errors
from cornstarch.data.sampler import EpochOrder
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import PrecomputedFeatureExtractor
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.parallel import distributed
from cornstarch.plan import balancing
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL

COSTS = "sample_costs.npz"
_WITHOUT_EFFECT = {"evaluation", "workers", "prefetch", "balance", "packing", "balance_encoders"}  # on the costs
_GAIN_STEPS = 8
_LENGTHS = 32  # row lengths for which the language model's work is counted; between them it is interpolated
_ALIKE = 32  # item sizes with equal work, after which an encoder is assumed to resize all items to one size
_HEAD = 64  # tokens of the row from which the work of the head is derived

CountFlops = Callable[[Mapping[str, Any]], StepFlops | None]
"""Counts the FLOPs of forward and backward of a batch: `step` of `FlopCounter`, or of a run's `RunFlops`."""


@dataclass(frozen=True, eq=False)
class LoadBalancer:
    costs: balancing.SampleCosts  # [phases, samples of the source]
    padded: bool  # whether rows are padded to the longest of their microbatch

    def __call__(self, numbers: np.ndarray, ranks: int, microbatches: int) -> balancing.SampleAssignment:
        return balancing.balance(self.costs[:, numbers], ranks, microbatches, self.padded)

    def gain(self, steps: Sequence[np.ndarray], ranks: int, microbatches: int) -> tuple[float, float]:
        """Return the slowest replica's work over the mean, for samples in order and balanced, over some steps."""
        mean = in_order = balanced = 0.0
        for numbers in steps:
            costs = self.costs[:, numbers]
            mean += float(costs.sum()) / ranks
            as_given = balancing.assign_in_order(len(numbers), ranks, microbatches)
            in_order, balanced = (
                work + balancing.compute_step_work(balancing.compute_loads(costs, assignment, self.padded))
                for work, assignment in ((in_order, as_given), (balanced, self(numbers, ranks, microbatches)))
            )
        return (in_order / mean, balanced / mean) if mean else (1.0, 1.0)


def build_balancer(
    config: RunConfig, collator: Collator, source: DataSource, step: CountFlops, layout: Layout, folder: RunFolder
) -> LoadBalancer | None:
    """Return the load balancer of a run; None if samples come in order. All ranks must call it."""
    if config.data.balance == "off" or layout.dp * config.loop.gradient_accumulation_steps == 1:
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


def describe_gain(balancer: LoadBalancer, order: EpochOrder, config: RunConfig, ranks: int) -> str:
    """Return a line about the predicted gain of balancing in the first steps."""
    size = config.loop.batch_size
    numbers = order.order(0)[: _GAIN_STEPS * size]
    steps = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    before, after = balancer.gain(steps, ranks, config.loop.gradient_accumulation_steps)
    return (
        f"Samples are balanced by cost: the slowest replica has {after:.2f} × the mean work, not {before:.2f} × "
        f"(predicted, first {len(steps)} steps)."
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
class SampleSize:
    tokens: int  # in the language model, including the tokens of items, before truncation
    trained: int  # tokens that are learned
    items: Mapping[str, int]  # by encoder
    item_tokens: Mapping[str, int]  # by encoder, of all its items
    work: Mapping[str, float]  # by phase (each encoder, the language model): the FLOPs of forward and backward


class SampleSizer:
    """Predicts sizes of samples from texts and headers of media; each item size is measured once, on a blank item."""

    def __init__(self, collator: ChatCollator, step: CountFlops) -> None:
        self._collator, self._step = collator, step
        self.phases = (*collator.processor.encoder_processors, LANGUAGE_MODEL)  # encoders, then the language model
        self.data = collator.data
        self._items: dict[str, dict[Any, tuple[int, float]]] = {}  # tokens and work, by name and size
        placeholders = set(collator.processor.modality_token_ids.values())
        self._placeholder_ids = torch.tensor(list(placeholders))
        self._word = next(number for number in range(len(placeholders) + 1) if number not in placeholders)
        self._rows: tuple[np.ndarray, np.ndarray, float] | None = None

    def __call__(self, sample: Sample) -> SampleSize:
        ids, trained = self._collator.tokenize(sample)
        counts, tokens = dict.fromkeys(self.phases[:-1], 0), dict.fromkeys(self.phases[:-1], 0)
        work = dict.fromkeys(self.phases, 0.0)
        by_name: dict[str, list[Media]] = {}
        for media in sample.media:
            by_name.setdefault(self._collator.modality(media), []).append(media)
        for name, group in by_name.items():
            together = len(group) > 1 and self._collator.counts_together(name)
            for items in [group] if together else [[media] for media in group]:
                taken, cost = self._item_size(name, items)
                counts[name], tokens[name] = counts[name] + len(items), tokens[name] + taken
                work[name] += cost
        learned = int((trained & ~torch.isin(ids, self._placeholder_ids))[1:].sum())
        length = len(ids) + sum(tokens.values()) - sum(counts.values())
        if not learned:
            raise SampleError(f"has no token to train on ({self.data.train_on}, {length} tokens)")
        work[LANGUAGE_MODEL] = self._row_work(min(length, self.data.max_length), learned)
        return SampleSize(length, learned, counts, tokens, work)

    def _item_size(self, name: str, items: list[Media]) -> tuple[int, float]:
        """Return tokens and work of an item, or of several that are counted together."""
        processor = self._collator.processor.encoder_processors[name]
        takes_arrays = isinstance(processor, PrecomputedFeatureExtractor)
        sizes: list[Any] = []  # width and height of an image, the length of a sound
        for media in items:
            if media.kind == "image":
                sizes.append(image_size(media, self.data.max_pixels))
            else:
                length = feature_frames(media) if takes_arrays else sound_length(media, sampling_rate(processor))
                sizes.append(self._collator.check_sound_length(length, processor))
        known = self._items.setdefault(name, {})
        key = tuple(_count_patches(size, processor) or size for size in sizes)
        if key not in known:
            alone = {value for other, value in known.items() if len(other) == 1}
            if len(key) == 1 and len(known) >= _ALIKE and len(alone) == 1:
                return next(iter(alone))
            with as_sample_errors():
                shape = (processor.feature_size,) if takes_arrays else ()
                blanks: list[Any] = [
                    Image.new("RGB", size) if isinstance(size, tuple) else np.zeros((size, *shape), np.float32)
                    for size in sizes
                ]
                inputs, lengths = self._collator.item_inputs(name, blanks)
            parts = self._count({**self._text(1), name: inputs}).parts
            own = [parts[part] for part in (f"{name} encoder", f"{name} projector") if part in parts]
            known[key] = sum(lengths), sum(part.total + part.recomputed for part in own)
        return known[key]

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


def _count_patches(size: Any, processor: Any) -> str | None:
    """Return the number of patches of an image, as a key, where the processor can say it."""
    inner = getattr(processor, "image_processor", processor)
    count = getattr(inner, "get_number_of_image_patches", None)
    # Other processors count crops, whose cut-off parts depend on the size, too.
    if count is None or "image_grid_thw" not in getattr(inner, "model_input_names", ()):
        return None
    try:
        return f"{count(size[1], size[0], {})} patches"
    except Exception:  # a size that the processor refuses: it raises again when it gets the image
        return None
