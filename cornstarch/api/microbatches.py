"""The batches of replicas and their microbatches: split a batch, count its tokens, and join outputs again.

All ranks of a replica read the same batches, other replicas other ones (`distribute_loader`).

A processor concatenates the items of all samples (`pixel_values` [images, …]), or even the patches of all images. The
text says which items belong to which sample: each sample has as many placeholder tokens as its items have features.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import data
from transformers.utils import ModelOutput

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel, merge
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX, EncoderFeatures
from cornstarch.models.multimodal_language_model.preprocessing.token_count import FeatureCounter
from cornstarch.models.multimodal_language_model.unwrap import unwrap

Batch = Mapping[str, Any]

_TEXT = ("input_ids", "inputs_embeds", "labels", "attention_mask")
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")  # losses of transformers that predict the next token


class _EncoderInputs(NamedTuple):
    """The inputs of an encoder, known before the model is split into stages."""

    names: tuple[str, ...]  # keys of a batch that the encoder takes
    triggers: tuple[str, ...]  # keys of which at least one must be there for the encoder to run
    counter: FeatureCounter


class _BatchItems(NamedTuple):
    """The items of one modality in a batch."""

    modality: str
    starts: list[int]  # the first item of each sample, and the number of all items
    patches: list[int] | None  # the patches of each item, if they are concatenated


class MicrobatchSplitter:
    """Splits batches into `microbatches` parts, or parts of `size` samples. Built from the whole model."""

    def __init__(self, model: nn.Module, microbatches: int | None, size: int | None) -> None:
        self._model, self._microbatches, self._size = model, microbatches, size
        self._encoders: dict[str, _EncoderInputs] = {}
        if isinstance(model, MultimodalModel):
            # The copy of a counter has shapes only: weights of other stages are freed.
            self._encoders = {
                name: _EncoderInputs(encoder.input_names, encoder.trigger_names, copy.copy(FeatureCounter(encoder)))
                for name, encoder in model.encoders.items()
            }

    def split(self, batch: Any) -> list[dict[str, Any]]:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"A batch is a {type(batch).__name__}; expected a dictionary: the model is called with model(**batch)."
            )
        given = {key: value for key, value in batch.items() if value is not None}
        samples = count_samples(given)
        size = self._microbatch_size(samples)
        if size == samples:
            return [given]
        items = {name: self._find_items(name, given, samples) for name in self.modalities(given)}
        parts = [slice(start, start + size) for start in range(0, samples, size)]
        return [self._slice_batch(given, items, samples, part) for part in parts]

    def modalities(self, batch: Batch) -> list[str]:
        return [
            name
            for name, encoder in self._encoders.items()
            if isinstance(batch.get(name), Mapping) or any(batch.get(key) is not None for key in encoder.triggers)
        ]

    def _microbatch_size(self, samples: int) -> int:
        many, size = self._microbatches, self._size
        if many is not None and size is not None and many * size != samples:
            raise ConfigError(
                f"num_microbatches = {many} and microbatch_size = {size} take batches of {many * size} samples; this "
                f"one has {samples}. Give one of the two, or let the dataloader make such batches "
                f"(batch_size={many * size}, drop_last=True)."
            )
        name, number = ("num_microbatches", many) if many is not None else ("microbatch_size", size)
        assert number is not None
        if not samples or samples % number:
            fitting = [str(n) for n in range(1, samples + 1) if samples % n == 0]
            advice = f"Use {' or '.join(fitting[-6:])}, or another" if fitting else "Use another"
            raise ConfigError(
                f"{name} = {number}: a batch of {samples} samples does not divide by it. {advice} batch_size "
                "(drop_last=True leaves out a last batch that is smaller)."
            )
        return samples // number if many is not None else number

    def _find_items(self, name: str, batch: Batch, samples: int) -> _BatchItems:
        assert isinstance(self._model, MultimodalModel)
        known = self._model.modality_token_ids
        if name not in known:
            raise ConfigError(
                f"The batch has {name} items, and the model does not know their token: make the processor with "
                "model=…, or call set_modality_token_ids."
            )
        ids = batch.get("input_ids")
        tokens = None if ids is None else merge.find_placeholders(ids, {name: known[name]})[name]
        if isinstance(nested := batch.get(name), Mapping):
            inputs = {key: value for key, value in nested.items() if value is not None}
        else:
            inputs = {key: batch[key] for key in self._encoders[name].names if key in batch}
        grid = next((value for key, value in inputs.items() if key.endswith("grid_thw")), None)
        patches = None if grid is None else torch.as_tensor(grid).prod(-1).tolist()
        counter = self._encoders[name].counter
        try:
            lengths = counter.lengths(counter.arguments(inputs))
        except ConfigError as error:  # lengths depend on values; then only one item per sample is unambiguous
            first = next((value for value in inputs.values() if isinstance(value, Tensor | list)), [])
            if len(first) != samples or (tokens is not None and not all(tokens.sum(-1))):
                raise ConfigError(
                    f"The batch cannot be cut: it is unknown which {name} items belong to which sample ({error}) "
                    "Have one item in each sample, or cut into one microbatch."
                ) from error
            return _BatchItems(name, list(range(samples + 1)), patches)
        if tokens is None:
            raise ConfigError(
                f"The batch cannot be cut: without input_ids it is unknown which {name} items belong to which sample."
            )
        merge.check_placeholders(name, tokens, EncoderFeatures(torch.empty(sum(lengths), 0), list(lengths)))
        # The counts are known to match: a sample ends with the item that has its last token.
        ends = [0, *accumulate(lengths)]
        starts = [0, *(bisect_left(ends, tokens_so_far) for tokens_so_far in accumulate(tokens.sum(-1).tolist()))]
        starts[-1] = len(lengths)
        return _BatchItems(name, starts, patches)

    def _slice_batch(self, batch: Batch, items: Mapping[str, _BatchItems], samples: int, part: slice) -> dict[str, Any]:
        owners = {key: items[name] for name in items for key in (*self._encoders[name].names, name) if key in batch}
        found: dict[str, Any] = {}
        for key, value in batch.items():
            if key not in owners or key in _TEXT:
                found[key] = _slice_rows(key, value, samples, part)
                continue
            own = owners[key]
            if own.starts[part.start] == own.starts[part.stop]:
                continue  # no item in these samples: the encoder does not run
            if isinstance(value, Mapping):
                found[key] = {k: _slice_items(f"{key}.{k}", one, own, samples, part) for k, one in value.items()}
            else:
                found[key] = _slice_items(key, value, own, samples, part)
        return found


def count_samples(batch: Batch) -> int:
    values = (*(batch.get(key) for key in _TEXT), *batch.values())
    found = next((value for value in values if isinstance(value, Tensor) and value.dim()), None)
    if found is None:
        raise ConfigError(f"The batch has no tensor whose rows are samples; it has {', '.join(batch) or 'nothing'}.")
    return len(found)


def _slice_rows(key: str, value: Any, samples: int, part: slice) -> Any:
    """Return the part of some samples in an input that is not an encoder's."""
    if key == "position_ids" and isinstance(value, Tensor) and value.dim() == 3:
        return value[:, part]  # mRoPE: [axes, samples, tokens]
    if isinstance(value, Tensor) and value.dim():
        if len(value) == samples:
            return value[part]
        if key == "position_ids" and len(value) == 1:
            return value
        raise ConfigError(
            f"The batch cannot be cut: {key} has shape {list(value.shape)} beside {samples} samples, so it is unknown "
            "which part belongs to which sample. Cut into one microbatch, or let its first dimension be samples."
        )
    return value[part] if isinstance(value, list | tuple) and len(value) == samples else value


def _slice_items(key: str, value: Any, items: _BatchItems, samples: int, part: slice) -> Any:
    """Return the part of an encoder's input that belongs to the items of some samples."""
    first, last, count = items.starts[part.start], items.starts[part.stop], items.starts[-1]
    if not isinstance(value, Tensor | list | tuple) or (isinstance(value, Tensor) and not value.dim()):
        return value  # an option
    if len(value) == count:
        return value[first:last]
    if items.patches is not None and len(value) == sum(items.patches):
        return value[sum(items.patches[:first]) : sum(items.patches[:last])]
    if len(value) == samples:
        return value[part]
    raise ConfigError(
        f"The batch cannot be cut: {key} has {len(value)} rows beside {count} {items.modality} items of "
        f"{samples} samples, so it is unknown which belong to which item. Cut into one microbatch."
    )


class TokenCounter:
    """Counts the tokens over which a model's own loss is the mean. It is built from the whole model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        inner: Any = unwrap(model.language_model if isinstance(model, MultimodalModel) else model)
        is_encoder_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        self._shifts = not is_encoder_decoder and getattr(inner, "loss_type", None) in (None, *_SHIFTED)

    def __call__(self, inputs: Batch) -> int:
        """Return the tokens of a microbatch; 0 without labels."""
        labels: Any = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return 0
        model = self._model
        if isinstance(model, MultimodalModel):  # ignore what the model ignores: placeholders, tokens without context
            ids, mask, documents = (inputs.get(name) for name in ("input_ids", "attention_mask", "documents"))
            if ids is not None and not model.trains_on_placeholders:
                for places in merge.find_placeholders(ids, model.modality_token_ids).values():
                    labels = labels.masked_fill(places, IGNORE_INDEX)
            if documents is not None:
                documents = documents if mask is None else documents * (mask != 0)
            elif model.positions_from_mask and mask is not None and mask.dim() == 2 and not bool(mask[:, 0].all()):
                documents = mask
            if documents is not None:
                labels = merge.mask_context_free_labels(labels, documents)
        if labels.dim() > 1 and self._shifts:
            labels = labels[:, 1:]
        return int((labels != IGNORE_INDEX).sum()) if not labels.is_floating_point() else len(labels)


def detach_output(output: Any) -> Any:
    """Return an output without its autograd graph and without the key/value cache."""
    if isinstance(output, ModelOutput):
        output = type(output)(**{key: value for key, value in output.items() if key != "past_key_values"})
    return _map_tensors([output], lambda tensors: tensors[0].detach())


def join_outputs(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    """Return the outputs of microbatches, which have `sizes` samples, as one."""
    # Tensors with a row for each sample are concatenated; scalars, such as losses, are averaged with the weights of the
    # microbatches. Anything else stays a list with an entry for each microbatch.

    def join(tensors: Sequence[Tensor]) -> Any:
        if not tensors[0].dim():
            total = sum(weights) or 1.0
            return sum(tensor * (weight / total) for tensor, weight in zip(tensors, weights, strict=True))
        fit = all(len(tensor) == size for tensor, size in zip(tensors, sizes, strict=True))
        if fit and len({tensor.shape[1:] for tensor in tensors}) == 1:
            return torch.cat(list(tensors))
        return list(tensors)

    return _map_tensors(outputs, join)


def _map_tensors(outputs: Sequence[Any], change: Any) -> Any:
    """Return one output whose tensors are made from those at the same place in all outputs."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return change(outputs)
    if isinstance(first, Mapping):  # a ModelOutput is one, too
        values = {key: _map_tensors([one[key] for one in outputs], change) for key in first}
        return type(first)(**values) if isinstance(first, ModelOutput) else values
    if type(first) in (list, tuple):
        return type(first)(_map_tensors(list(ones), change) for ones in zip(*outputs, strict=True))
    return first if len(outputs) == 1 or all(one is first or one == first for one in outputs) else list(outputs)


# Options of a loader that is rebuilt with another sampler.
_KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
_SEED = 1024


class ReplicaSampler(data.DistributedSampler[Any]):
    """The sample indices of one replica; if shuffled, each epoch has another order without `set_epoch`."""

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


class ReplicaBatches:
    """Every `count`-th batch of a loader that yields the same batches on all ranks; an incomplete round is dropped."""

    def __init__(self, loader: Iterable[Any], index: int, count: int) -> None:
        self.loader, self.index, self.count = loader, index, count

    def __iter__(self) -> Iterator[Any]:
        rounds = zip(*[iter(self.loader)] * self.count, strict=False)
        return (batches[self.index] for batches in rounds)

    def __len__(self) -> int:
        return len(self.loader) // self.count  # type: ignore[arg-type]


def build_replica_loader(
    dataset: data.Dataset[Any], index: int, count: int, shuffle: bool, seed: int, options: dict[str, Any]
) -> data.DataLoader[Any]:
    """Return a loader for one of `count` replicas; `options` are those of a `DataLoader`."""
    drops = bool(options.get("drop_last"))
    sampler = ReplicaSampler(dataset, count, index, shuffle=shuffle, seed=seed, drop_last=drops)
    # The workers of all ranks of a replica draw the same random numbers.
    generator = torch.Generator().manual_seed(seed + index)
    return data.DataLoader(dataset, sampler=sampler, generator=generator, **options)


def distribute_loader(loader: Any, index: int, count: int) -> Any:
    """Return a loader that yields the batches of one of `count` replicas, unless it already does."""
    # Samples of a `DataLoader` with torch's own sampler are distributed; of any other loader, batches are.
    if not isinstance(loader, data.DataLoader):
        return loader if count == 1 else ReplicaBatches(loader, index, count)
    sampler: Any = loader.sampler
    if isinstance(sampler, data.DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (count, index):
            raise ConfigError(
                f"The dataloader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}; this is "
                f"replica {index} of {count}. Leave the sampler out: boost distributes the samples."
            )
        return loader
    shuffles = type(sampler) is data.RandomSampler
    is_plain = (shuffles or type(sampler) is data.SequentialSampler) and type(loader.batch_sampler) is data.BatchSampler
    draws_all_once = not shuffles or (not sampler.replacement and sampler.num_samples == len(sampler.data_source))
    if not is_plain or isinstance(loader.dataset, data.IterableDataset) or not draws_all_once:
        return loader if count == 1 else ReplicaBatches(loader, index, count)
    if count == 1 and not shuffles:
        return loader
    given = getattr(sampler, "generator", None) or loader.generator
    seed = _SEED if given is None else given.initial_seed()
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return build_replica_loader(loader.dataset, index, count, shuffles, seed, options)
