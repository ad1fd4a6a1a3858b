"""What the tests of loading by slice let several processes do; each function runs in every one of them."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import cornstarch.parallel.loading
import cornstarch.parallel.tensor.shard_boxes
from cornstarch.errors import ConfigError
from cornstarch.parallel import full_read_reason, load_partial, load_sharded, shard_tensors
from cornstarch.parallel.loading import drop_parameters
from tests import zoo
from tests.parallel.tensor.forms import forms
from tests.parallel.tensor.work import ROWS, build, loss_of

LARGE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 256,
}  # fmt: skip


def mesh_of(ranks: int) -> DeviceMesh:
    """Return the ranks."""
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def compare(name: str, folder: str, ranks: int, how: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Load a model by slice, and whole before it is cut; return what is not the same to the bit, and the reason."""
    kind: Any = type(build(name) if name in {*zoo.LANGUAGE_MODELS, *zoo.ENCODERS} else forms()[name]())
    mesh = mesh_of(ranks)
    expected = kind.from_pretrained(folder, **options)
    shard_tensors(expected, mesh, **how)
    found = load_sharded(kind, folder, mesh, **how, **options)
    wrong = [*differences(found, expected)]
    if name in {*zoo.LANGUAGE_MODELS, *zoo.ENCODERS}:
        losses = [loss_of(name, model.train()).detach() for model in (found, expected)]
    else:
        batch = zoo.text_batch(ROWS)
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        losses = [model.train()(**inputs)[0].detach() for model in (found, expected)]
    if not torch.equal(*losses):
        wrong.append("loss")
    return {
        "wrong": wrong,
        "reason": full_read_reason(found),
        "cut": sum(isinstance(p, DTensor) for p in found.parameters()),
    }


def differences(found: nn.Module, expected: nn.Module) -> list[str]:
    """Return the parameters and buffers that are not the same: names, kinds, ties and every bit."""
    ours, theirs = (dict(model.named_parameters()) for model in (found, expected))
    wrong = [f"{name} is on one side" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if isinstance(a, DTensor) and isinstance(b, DTensor):
            same = (a.placements, a.shape, a.stride()) == (b.placements, b.shape, b.stride())
            same = same and torch.equal(a.to_local(), b.to_local()) and a.to_local().is_contiguous()
        else:
            same = type(a) is type(b) and torch.equal(a, b)
        if not same or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
            wrong.append(name)
    mine, others = (dict(model.named_buffers()) for model in (found, expected))
    wrong += [f"{name} is on one side" for name in mine.keys() ^ others.keys()]
    wrong += [name for name in mine.keys() & others.keys() if not _same_buffer(mine[name], others[name])]
    kinds = [[(name, type(module).__name__) for name, module in model.named_modules()] for model in (found, expected)]
    return wrong if kinds[0] == kinds[1] else [*wrong, "modules"]


def _same_buffer(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) and a.device == b.device


def stored(name: str, folder: Path, **options: Any) -> Path:
    """Write a model of the zoo, or one of the other forms, in several files."""
    model: Any = forms()[name]() if name in forms() and name not in zoo.LANGUAGE_MODELS else build(name, **options)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def load_otherwise(folder: str) -> dict[str, Any]:
    """Load a model whose stored tensors are put together in a way that is not known to take parts."""
    mesh = mesh_of(2)
    kind = type(build("mixtral"))
    expected = shard_tensors(kind.from_pretrained(folder), mesh)
    with mock.patch.object(cornstarch.parallel.tensor.shard_boxes, "find_stored_sharding", lambda *arguments: None):
        found = load_sharded(kind, folder, mesh)
    return {"wrong": differences(found, expected), "reason": full_read_reason(found)}


def load_as(kind: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load a folder as a model of another class than it was written by."""
    model_class, mesh = getattr(transformers, kind), mesh_of(2)
    torch.manual_seed(3)
    expected = shard_tensors(model_class.from_pretrained(folder, **options), mesh)
    torch.manual_seed(3 if dist.get_rank() == 0 else 4)  # the first rank's new weights are everyone's
    found = load_sharded(model_class, folder, mesh, **options)
    return {"wrong": differences(found, expected), "reason": full_read_reason(found)}


def load_anew(folder: str) -> dict[str, Any]:
    """Load a folder into a model of which some weights have another shape, and are to be made anew."""
    kind, mesh = type(build("llama")), mesh_of(2)
    options = {
        "config": kind.config_class.from_pretrained(folder, intermediate_size=96),
        "ignore_mismatched_sizes": True,
    }
    torch.manual_seed(3)
    expected = shard_tensors(kind.from_pretrained(folder, **options), mesh)
    torch.manual_seed(3)
    found = load_sharded(kind, folder, mesh, **options)
    return {"wrong": differences(found, expected), "reason": full_read_reason(found)}


def half_of_the_layers(folder: str, first: bool) -> dict[str, Any]:
    """Load a stage of a model with tied embeddings: a half of its layers, cut over two ranks, and one of its ends."""
    mesh, kind = mesh_of(2), type(build("qwen2"))
    plain = kind.from_pretrained(folder)
    expected = shard_tensors(kind.from_pretrained(folder), mesh)

    def stage(model: Any) -> None:
        shard_tensors(model, mesh)
        drop_parameters(model.model.layers[1 if first else 0])
        drop_parameters(model.lm_head if first else model.model.embed_tokens)

    with counted_reads() as reads:
        found, info = load_partial(kind, folder, stage, output_loading_info=True)
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    head = found.model.embed_tokens.weight if first else found.lm_head.weight
    same = {name: torch.equal(local(p), local(theirs[name])) for name, p in ours.items() if name in theirs}
    return {
        "same": all(same.values()) and torch.equal(head, plain.model.embed_tokens.weight),
        "names": sorted(ours),
        "numbers": sum(local(p).numel() for p in ours.values()),
        "read": sum(reads.values()),
        "told": {key: sorted(map(str, value)) for key, value in info.items() if value},
        "buffers": torch.equal(found.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq),
        "reason": full_read_reason(found),
    }


def local(parameter: Any) -> torch.Tensor:
    """Return what of a parameter is here."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def refusals(cases: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Load what cannot be loaded; return what is said."""
    said = []
    for name, folder, options in cases:
        try:
            load_sharded(type(build(name)), folder, mesh_of(2), **options)
            said.append("not refused")
        except ConfigError as error:
            said.append(str(error))
    return said


# ------------------------------------------------------------------------------------------------ what is read


class Counted:
    """Counts what is read of a stored tensor."""

    def __init__(self, name: str, inner: Any, reads: dict[str, int]) -> None:
        self._name, self._inner, self._reads = name, inner, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> Any:
        part = self._inner[index]
        self._reads[self._name] = self._reads.get(self._name, 0) + part.numel()
        return part


class CountedFile:
    """A file of safetensors of which it is counted what is read."""

    def __init__(self, reads: dict[str, int], *arguments: Any, **options: Any) -> None:
        self._inner: Any = safe_open(*arguments, **options)
        self._reads = reads

    def __enter__(self) -> CountedFile:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def keys(self) -> list[str]:
        return self._inner.keys()

    def get_slice(self, name: str) -> Counted:
        return Counted(name, self._inner.get_slice(name), self._reads)


@contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Count the numbers that are read of each stored tensor, by its name."""
    reads: dict[str, int] = {}

    def opened(*arguments: Any, **options: Any) -> CountedFile:
        return CountedFile(reads, *arguments, **options)

    with mock.patch.object(cornstarch.parallel.loading, "safe_open", opened):
        yield reads


# ------------------------------------------------------------------------------------------------ memory


class MemoryPeak:
    """The most memory of its own that a process has while a block runs, beyond what it had before.

    Anonymous memory: pages of a file that is mapped are the kernel's cache of it, which it takes back when it likes.
    """

    def __enter__(self) -> MemoryPeak:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before, self.bytes = _anonymous(), 0
        self._ended, self._looks = threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self.bytes = max(self.bytes, _anonymous() - self._before)
            self._looks += 1

    def wait(self) -> None:
        """Wait until it has looked."""
        enough = self._looks + 2  # one may be under way
        while self._looks < enough:
            time.sleep(0.001)

    def __exit__(self, *error: Any) -> None:
        self.bytes = max(self.bytes, _anonymous() - self._before)
        self._ended.set()
        self._thread.join()


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def list_mapped_files() -> list[str]:
    """Return the files of weights that are mapped into this process."""
    return sorted({line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith(".safetensors")})


def load_in(load: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Load something; return the most memory it took, and what was read of each tensor."""
    with counted_reads() as reads, MemoryPeak() as peak:
        kept = load(*arguments, **options)
    return {"peak": peak.bytes, "reads": reads, "mapped": list_mapped_files(), "kept": _measure_held(kept)}


def _measure_held(model: nn.Module) -> int:
    return sum(local(parameter).untyped_storage().nbytes() for parameter in model.parameters())


def load_large(name: str, folder: str, how: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Load a model by slice over two ranks."""
    kind = type(build(name))
    mesh = mesh_of(2)
    load_sharded(kind, str(Path(folder).parent / "tiny"), mesh, **how)  # imports, groups, threads
    return load_in(load_sharded, kind, folder, mesh, **how, **options)
