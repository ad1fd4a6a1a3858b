"""Frozen encoders: the feature cache stores their outputs; the encoder prefetch runs them for several microbatches.

Both need encoders that give an item the same features beside any other: `check_task` and `check_encoder` refuse others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cornstarch.config import RunConfig
from cornstarch.data import feature_store
from cornstarch.data.feature_store import FeatureStore
from cornstarch.data.loader import StepBatch
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.encoder import MultimodalProjector
from cornstarch.models.multimodal_language_model.facts import (
    CACHED_FEATURES,
    fresh_lengths,
    get_token_states,
    split_items,
)
from cornstarch.models.multimodal_language_model.merge import route_batch
from cornstarch.models.multimodal_language_model.preprocessing import modality_processors
from cornstarch.models.multimodal_language_model.unwrap import is_sharded
from cornstarch.parallel.device import DevicePlacement, pin_batch
from cornstarch.tasks.conversation import ConversationTask
from cornstarch.tasks.task import Task

_MAX_PENDING = 1 << 30  # bytes that wait to be written before training waits, too


@contextmanager
def use_feature_cache(task: Task, config: RunConfig, placement: DevicePlacement) -> Iterator[FeatureCache | None]:
    """Cache the outputs of a task's encoders, if the run asks for it; all are written at the end of the block."""
    if not config.features.cache:
        yield None
        return
    with closing(FeatureCache(check_task(task), config, placement)) as cache:
        yield cache


class FeatureCache:
    """The cached features of a run's encoders: lookups by the collator, and a thread that writes new ones."""

    # Built when the model is on its device, in its precision, and not sharded yet: the key has a digest of weights.
    def __init__(self, task: ConversationTask, config: RunConfig, placement: DevicePlacement) -> None:
        self.folder = config.features.folder or config.folder.absolute().parent / "feature_cache"
        self._space = feature_store.CacheFolder(self.folder, config.features.limit_bytes)
        self._task = task
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="features")  # joined at exit by the interpreter
        self._pending: deque[tuple[Future[None], int]] = deque()
        self.hits = self.misses = 0
        """Items whose features were cached, and items that were encoded."""
        self.problem: str | None = None
        """Why features are no longer written: a full disk, for example. Training goes on without them."""
        self.stores: dict[str, FeatureStore] = {}
        """By modality."""
        # An item that is refused when it is read must be refused when it is cached, too.
        reading = {"max_pixels": config.data.max_pixels, "too_long": config.data.too_long}
        for name, encoder in task.model.encoders.items():
            check_encoder(task, name, placement)
            processor = task.collator.processor.encoder_processors[name]
            key = feature_store.encoder_key(encoder.module, processor, reading, placement)
            self.stores[name] = FeatureStore(self._space, key)
        for name, encoder in task.model.encoders.items():  # once all were checked
            encoder.keep = _Recorder(self, self.stores[name], placement)
        task.collator.features = self.stores

    @property
    def used(self) -> int:
        return self._space.used

    def describe(self) -> dict[str, Any]:
        """Return the statistics for the run's summary: items since the start, and the folder as it is now."""
        counts = {"hits": self.hits, "misses": self.misses, "bytes": self.used, "limit": self._space.limit}
        return {"folder": str(self.folder), **counts, "problem": self.problem}

    def write_later(self, write: Callable[[], None], size: int) -> None:
        """Queue a write for the thread; wait first if too many bytes are pending."""
        if self.problem is not None:
            return
        pending = sum(bytes_waiting for _, bytes_waiting in self._pending)
        while self._pending and (self._pending[0][0].done() or pending + size > _MAX_PENDING):
            future, written = self._pending.popleft()
            future.result()
            pending -= written
        self._pending.append((self._executor.submit(self._try, write), size))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            if self.problem is None:
                write()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def wait(self) -> None:
        while self._pending:
            self._pending.popleft()[0].result()

    def stop_lookups(self) -> None:
        """Look nothing up from now on: all items are encoded."""
        self._task.collator.features = None

    def close(self) -> None:
        """Write the pending features, and detach the cache from the model and the collator."""
        self.stop_lookups()
        for encoder in self._task.model.encoders.values():
            encoder.keep = None
        self._executor.shutdown()


class _Recorder:
    def __init__(self, cache: FeatureCache, store: FeatureStore, placement: DevicePlacement) -> None:
        self._cache, self._store = cache, store
        # Autocast rounds tokens for the projector's first matrix product: rounding them before gives the same result.
        self._dtype = None if placement.precision == "fp32" else placement.dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        return self  # files and a thread are not copied with a model

    def __call__(self, known: Mapping[str, Any], fresh: Tensor | None) -> None:
        """Count the items, and write those that were encoded."""
        hits = sum(known["is_known"])
        self._cache.hits += hits
        self._cache.misses += len(known["is_known"]) - hits
        if fresh is None:
            return
        digests = [d for d, is_known in zip(known["digests"], known["is_known"], strict=True) if not is_known]
        tokens = fresh.detach() if self._dtype is None else fresh.detach().to(self._dtype)
        arrived = None
        if tokens.device.type == "cuda":
            copy = tokens.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            copy = tokens.cpu().clone()  # the encoder's own output: something may change it in place later
        lengths = fresh_lengths(known)

        def write() -> None:
            if arrived is not None:
                arrived.synchronize()
            for digest, item in zip(digests, copy.split(lengths), strict=True):
                self._store.save(digest, item)

        self._cache.write_later(write, tokens.nbytes)


_FEW = 8  # items of a microbatch: with more, one microbatch alone keeps an encoder busy
_MAX_ITEMS = 32  # encoded together: limits the encoder's activation memory


def build_encoder_prefetch(task: Task, config: RunConfig, placement: DevicePlacement) -> EncoderPrefetch | None:
    """Return the encoder prefetch of a model that is ready to train; None if the run cannot use one."""
    if not config.features.ahead or config.features.cache or config.loop.microbatches == 1:
        return None
    if config.parallel.is_pipeline:  # encoders have stages of their own
        return None
    try:
        checked = check_task(task)
        for name, encoder in checked.model.encoders.items():
            if is_sharded(encoder):  # other ranks take part in each run of the encoder: all must run it equally often
                return None
            check_encoder(checked, name, placement)
    except ConfigError:
        return None
    return EncoderPrefetch(checked, placement)


class EncoderPrefetch:
    """Runs frozen encoders once for the items of several microbatches of a step that have few items each."""

    def __init__(self, task: ConversationTask, placement: DevicePlacement) -> None:
        self._model, self._placement = task.model, placement

    def __call__(self, batch: StepBatch) -> StepBatch:
        """Replace items by features; projectors, which may be trained, run with their microbatch."""
        inputs = [dict(one.inputs) for one in batch.microbatches]
        for name in self._model.encoders:
            for group in self._groups(name, inputs):
                self._encode(name, [inputs[number] for number in group])
        microbatches = []
        for one, own in zip(batch.microbatches, inputs, strict=True):
            is_unchanged = own.keys() == one.inputs.keys() and all(own[key] is one.inputs[key] for key in own)
            microbatches.append(one if is_unchanged else replace(one, inputs=own))
        return replace(batch, microbatches=microbatches)

    def _groups(self, name: str, inputs: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
        """Yield the numbers of microbatches whose items are encoded together."""
        group: list[int] = []
        items, form = 0, None
        for number, microbatch in enumerate(inputs):
            own = route_batch(self._model.encoders, microbatch)[0].get(name)
            if own is None or CACHED_FEATURES in own or (count := count_items(own)) > _FEW:
                continue
            if group and (items + count > _MAX_ITEMS or _form(own) != form):
                yield group
                group, items = [], 0
            group, items, form = [*group, number], items + count, _form(own)
        yield group

    def _encode(self, name: str, microbatches: Sequence[dict[str, Any]]) -> None:
        """Replace the items in the inputs of microbatches by an encoder's features."""
        if len(microbatches) < 2:
            return
        encoder = self._model.encoders[name]
        given = [route_batch(self._model.encoders, one)[0][name] for one in microbatches]
        joined = {
            key: torch.cat([own[key] for own in given]) if isinstance(value, Tensor) and value.dim() else value
            for key, value in given[0].items()
        }
        moved = self._placement.move_batch(pin_batch(joined) if self._placement.device.type == "cuda" else joined)
        with self._placement.forward_context():
            found = encoder.tokens(moved, joined)
        counts = [count_items(own) for own in given]
        if found.lengths is None or len(found.lengths) != sum(counts):
            return  # it is unknown which tokens belong to which item
        first = start = 0
        for microbatch, count in zip(microbatches, counts, strict=True):
            lengths = found.lengths[first : first + count]
            tokens = found.tokens[start : start + sum(lengths)]
            first, start = first + count, start + sum(lengths)
            if not isinstance(microbatch.get(name), Mapping):
                for key in encoder.input_names:
                    microbatch.pop(key, None)
            known = {"lengths": lengths, "is_known": [True] * count, "digests": [""] * count, "tokens": tokens}
            microbatch[name] = {CACHED_FEATURES: known}


def count_items(inputs: Mapping[str, Any]) -> int:
    """Return the number of items in an encoder's inputs: of its size tensors, or else the first dimension."""
    sizes = [value for key, value in inputs.items() if key.endswith(("grid_thw", "image_sizes"))]
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    return len((sizes or tensors)[0])


def _form(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the properties that inputs must share to be concatenated."""
    return [
        (key, (value.shape[1:], value.dtype) if isinstance(value, Tensor) and value.dim() else repr(value))
        for key, value in sorted(inputs.items())
    ]


_CALLBACKS = ("preprocess_callback", "postprocess_module_callback", "postprocess_projector_callback")
_TOKENWISE = ("linear", "mlp")  # projectors that treat each token alone
# The largest difference between an item alone and in a batch, relative to the largest number: kernels round differently
# for other sizes, and a larger difference is not rounding.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-8}


def check_task(task: Task) -> ConversationTask:
    """Return a task whose encoders may be cached; ConfigError for others."""
    if not isinstance(task, ConversationTask) or not task.model.encoders:
        raise ConfigError(f"features.cache stores the outputs of a multimodal model's encoders; {task.name} has none.")
    if task.model.preprocess_llm_callback is not None:
        raise ConfigError(
            "features.cache: the language model's preprocess_llm_callback may ask for encoders' inputs, which do not "
            "exist for cached items. Leave the cache out."
        )
    for name in task.model.encoders:
        reason = _find_obstacle(task.model, name)
        if reason is not None:
            raise ConfigError(f"features.cache: the outputs of the {name} encoder cannot be cached: {reason}.")
    return task


def _find_obstacle(model: MultimodalModel, name: str) -> str | None:
    encoder = model.encoders[name]
    if type(encoder) is not ModalEncoderModule:
        return "it belongs to a whole model, whose own method runs encoder and projector as one"
    if any(parameter.requires_grad for parameter in encoder.module.parameters()):
        return "it is trained. Set its `train` to projector or frozen"
    if encoder.module.training:
        return "it is in train mode, where dropout changes every pass. Freeze it by model.train(encoders_mode=…)"
    if callback := next((name for name in _CALLBACKS if getattr(encoder, name) is not None), None):
        return f"it has a {callback}, and changes of a Python function cannot be detected"
    projector = encoder.projector
    if not isinstance(projector, MultimodalProjector) or projector.config.projection_type not in _TOKENWISE:
        return "its projector is a module of your own, which may look at several tokens at once; use linear or mlp"
    return None


def check_encoder(task: ConversationTask, name: str, placement: DevicePlacement) -> None:
    """Encode two items together and alone; ConfigError unless each gives the same features."""
    items = _build_noise_items(task.collator.processor.encoder_processors[name])
    where = f"features.cache: the outputs of the {name} encoder cannot be cached:"
    try:
        first, second = _process(task, name, items), _process(task, name, items)
        together = _encode(task, name, items, placement)
        alone = [_encode(task, name, [item], placement)[0] for item in items]
    except ConfigError:
        raise
    except Exception as error:  # processors and encoders may raise anything
        raise ConfigError(f"{where} it was tried on noise, and {type(error).__name__}: {error}") from error
    if not _are_equal(first, second):
        raise ConfigError(f"{where} its processor is random: it returns other inputs for the same item every time.")
    for one, other in zip(alone, together, strict=True):
        largest = other.abs().max().clamp(min=1e-30)
        if one.shape != other.shape or (one - other).abs().max() / largest > _ROUNDING.get(placement.dtype, 0.0):
            raise ConfigError(
                f"{where} an item gives other features beside another item (by padding, or by a norm over all items), "
                "so the features of one batch are wrong in the next."
            )


def _build_noise_items(processor: Any) -> list[Any]:
    """Return two items of noise of different sizes for a processor."""
    first = modality_processors.build_noise_item(processor)
    random = np.random.default_rng(1)
    if modality_processors.get_item_kind(modality_processors.get_item_argument(processor)) == "images":
        return [first, Image.fromarray(random.integers(0, 256, (96, 72, 3), dtype=np.uint8))]
    if modality_processors.get_item_dimensions(processor) == 2:
        return [first, first[:1] + 1]
    return [first, random.standard_normal(len(first) * 5 // 8).astype(np.float32)]


def _process(task: ConversationTask, name: str, items: list[Any]) -> dict[str, Any]:
    return task.collator.encoder_inputs({name: [feature_store.CachedItem("", item, None) for item in items]})[0][name]


def _encode(task: ConversationTask, name: str, items: list[Any], placement: DevicePlacement) -> list[Tensor]:
    encoder = task.model.encoders[name]
    inputs = placement.move_batch(_process(task, name, items))
    known = inputs.pop(CACHED_FEATURES)
    with torch.no_grad(), placement.forward_context():
        arguments = encoder.rename_inputs(inputs)
        tokens = split_items(encoder.module, arguments, get_token_states(encoder.encode(arguments))).tokens
    return list(tokens.float().split(known["lengths"]))


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other))
