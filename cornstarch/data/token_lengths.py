"""The lengths of samples before they are decoded, from texts and headers of media; counted once, and stored.

Rows are packed by these lengths. A sample whose text and headers do not tell its length is prepared, as for training.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from cornstarch.config import SourceConfig
from cornstarch.data.collate import ChatCollator, sampling_rate
from cornstarch.data.formats import DataSource
from cornstarch.data.media import feature_frames, image_size, sound_length
from cornstarch.data.sample import Media, Sample, SampleError, as_sample_errors
from cornstarch.errors import ConfigError
from cornstarch.files import replace_file
from cornstarch.models.multimodal_language_model import PrecomputedFeatureExtractor
from cornstarch.parallel import distributed

_ALIKE = 32  # item sizes with equal work, after which an encoder is assumed to resize all items to one size
_UNKNOWN = -1
_AT_ONCE = 64  # samples that a worker counts at a time
_FEW = 256  # samples that are not worth starting workers
_WITHOUT_EFFECT = {
    "train", "evaluation", "workers", "prefetch", "balance", "balance_encoders", "packing", "packing_buffer",
    "tokens_per_step", "shuffle", "skip_limit", "pad_to",
}  # fmt: skip


@dataclass(frozen=True)
class TokenCount:
    tokens: int  # in the language model, including the tokens of items, before truncation
    trained: int  # tokens that are learned
    items: Mapping[str, int]  # by encoder
    item_tokens: Mapping[str, int]  # by encoder, of all its items


class SampleTokenCounter:
    """Counts the tokens of samples; each item size is measured once, on a blank item."""

    def __init__(self, collator: ChatCollator) -> None:
        self._collator, self.data = collator, collator.data
        self._names = tuple(collator.processor.encoder_processors)
        self._items: dict[str, dict[Any, tuple[int, float]]] = {}  # tokens and work, by name and size
        self._placeholder_ids = torch.tensor(list(collator.processor.modality_token_ids.values()))

    def count(self, sample: Sample) -> tuple[TokenCount, dict[str, float]]:
        """Return the tokens of a sample, and the work of each encoder (`measure_work`)."""
        ids, trained = self._collator.tokenize(sample)
        counts, tokens = dict.fromkeys(self._names, 0), dict.fromkeys(self._names, 0)
        work = dict.fromkeys(self._names, 0.0)
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
        return TokenCount(length, learned, counts, tokens), work

    def count_packed(self, sample: Sample) -> int:
        """Return the tokens that a sample takes in a packed row; 0 if it cannot be used."""
        try:
            length = self.count(sample)[0].tokens
        except SampleError:  # unusable; or a blank item does not tell its length
            try:
                return len(self._collator.prepare(sample).input_ids)
            except (SampleError, ConfigError):  # raised again, and reported, when its turn comes
                return 0
        if length <= self.data.max_length:
            return length
        return self.data.max_length if self.data.too_long == "cut" else 0

    def measure_work(self, name: str, inputs: Mapping[str, Any]) -> float:
        """Return the work of an encoder for its inputs; lengths do not depend on it."""
        return 0.0

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
            known[key] = sum(lengths), self.measure_work(name, inputs)
        return known[key]


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


class TokenLengths:
    """The lengths of the samples of a source in packed rows, counted as far as they are asked for.

    Called with indices of samples, it returns the tokens of each; 0 for those that cannot be used. `workers` processes
    count. `file` keeps the lengths for the next run of the same data, tokenizer and processor.
    """

    def __init__(self, source: DataSource, collator: ChatCollator, workers: int = 0, file: Path | None = None) -> None:
        self._source, self._counter, self._workers, self._file = source, SampleTokenCounter(collator), workers, file
        self._lengths = np.full(len(source), _UNKNOWN, np.int64)
        self._is_shared = False

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        missing = np.unique(numbers[self._lengths[numbers] == _UNKNOWN])
        if len(missing):
            self._lengths[missing] = self._count_shared(missing) if self._is_shared else self._count(missing)
        return self._lengths[numbers]

    @property
    def known(self) -> np.ndarray:
        """The lengths that are known, of usable samples."""
        return self._lengths[self._lengths > 0]

    @property
    def are_all_known(self) -> bool:
        return bool((self._lengths != _UNKNOWN).all())

    @contextmanager
    def share(self) -> Iterator[None]:
        """Let all ranks count together within a block, in which they must ask for the same samples; store the rest."""
        is_main = distributed.rank() == 0
        stored = self._load() if is_main else None
        if distributed.sum_over_ranks([stored is not None])[0] > 0:
            lengths = self._lengths if stored is None else stored
            own = lengths if is_main else np.zeros_like(lengths)
            self._lengths = np.array(distributed.sum_over_ranks(own.tolist())).astype(np.int64)
        before = int((self._lengths == _UNKNOWN).sum())
        self._is_shared = True
        try:
            yield
        finally:
            self._is_shared = False
        if is_main and self._file is not None and int((self._lengths == _UNKNOWN).sum()) < before:
            self._store(self._file)

    def _count_shared(self, numbers: np.ndarray) -> np.ndarray:
        rank, size = distributed.rank(), distributed.world_size()
        counted = np.zeros(len(numbers))
        counted[rank::size] = self._count(numbers[rank::size])
        return np.array(distributed.sum_over_ranks(counted.tolist())).astype(np.int64)

    def _count(self, numbers: np.ndarray) -> np.ndarray:
        parts = [numbers[begin : begin + _AT_ONCE].tolist() for begin in range(0, len(numbers), _AT_ONCE)]
        counts = _CountDataset(self._source, self._counter, parts)
        workers = self._workers if len(numbers) > _FEW else 0
        if not workers:
            return np.array([one for part in range(len(parts)) for one in counts[part]], np.int64)
        # Its own generator: drawing from the global one would change the dropout of a resumed run.
        loader = DataLoader(counts, batch_size=None, num_workers=workers, generator=torch.Generator())
        try:
            return np.array([one for part in loader for one in part], np.int64)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise ConfigError(f"A process that counts tokens has died: {error}. Use fewer `data.workers`.") from error

    def _load(self) -> np.ndarray | None:
        if self._file is not None:
            with suppress(OSError, ValueError, EOFError):  # missing, or damaged: counted again
                found = np.load(self._file, allow_pickle=False)
                if found.shape == self._lengths.shape and found.dtype == np.int64:
                    return found
        return None

    def _store(self, file: Path) -> None:
        content = io.BytesIO()
        np.save(content, self._lengths)
        with suppress(OSError):  # without room, or a home folder: the next run counts again
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, content.getvalue())


class _CountDataset(Dataset[list[int]]):
    """Counts the tokens of some samples, in a worker."""

    def __init__(self, source: DataSource, counter: SampleTokenCounter, parts: Sequence[list[int]]) -> None:
        self._source, self._counter, self._parts = source, counter, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, part: int) -> list[int]:
        return [self._count(number) for number in self._parts[part]]

    def _count(self, number: int) -> int:
        try:
            return self._counter.count_packed(self._source[number])
        except SampleError:
            return 0


def find_lengths_file(
    collator: ChatCollator, sources: Sequence[SourceConfig], model: Mapping[str, Any], note: str = ""
) -> Path | None:
    """Return the file of the lengths of sources; None for data that is made in Python, which has no fingerprint."""
    stats = []
    for source in sources:
        path = Path(source.path)
        if source.format in ("given", "callable") or not path.exists():
            return None
        files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
        stats.append([(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in files])
    processor = collator.processor
    tokenizer = processor.llm_tokenizer
    described = {
        "sources": [source.model_dump(mode="json") for source in sources],
        "files": stats,
        "model": dict(model),
        "data": collator.data.model_dump(mode="json", exclude=_WITHOUT_EFFECT),
        "tokenizer": [tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)],
        "template": repr(tokenizer.chat_template),
        "processors": {name: repr(one) for name, one in processor.encoder_processors.items()},
        "tokens": dict(processor.modality_token_ids),
        "transformers": transformers.__version__,
        "note": note,
    }
    key = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "cornstarch" / "lengths" / f"{key[:32]}.npy"
