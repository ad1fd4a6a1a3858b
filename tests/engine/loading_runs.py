"""Runs of models that are stored, in one process or several; each function runs in every process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from cornstarch.engine.sharded_loading import ShardedLoading, tensor_cuts
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.parallel.loading import build_partial_model, full_read_reason
from cornstarch.parallel.mesh import DeviceMeshes
from cornstarch.parallel.passes import build_tensor_sharder, explain_full_reads
from cornstarch.plan.layout import Layout
from cornstarch.tasks.build_model import build_model
from cornstarch.tasks.task import Task
from cornstarch.train import Trainer, load_config
from cornstarch.trainer.recording_trainer import gather_parameters
from tests import zoo
from tests.models import local_processors
from tests.parallel.tensor.loading_work import MemoryPeak, counted_reads, differences
from tests.parity.pool import Pool
from tests.trainer.tiny import merge, quiet, trainer_of, write_data


def store_parts(folder: Path, language_model: str = "llama", encoder: str = "clip") -> None:
    """Write a language model, an encoder, a tokenizer and data."""
    zoo.LANGUAGE_MODELS[language_model].build().save_pretrained(folder / language_model, max_shard_size="40KB")
    zoo.ENCODERS[encoder].build().save_pretrained(folder / encoder)
    local_processors.tokenizer().save_pretrained(folder / "tokenizer")
    write_data(folder, 12)


def describe_run(folder: Path, language_model: str = "llama", encoder: str = "clip", **sections: Any) -> dict[str, Any]:
    """Return the description of a run of a few steps with these."""
    base = {
        "device": "cpu",
        "threads": 1,
        "precision": "fp32",
        "model": {
            "encoders": {
                "vision": {
                    "token": "<image>",
                    "train": "full",
                    "path": str(folder / encoder),
                    "processor_config": {
                        "class_name": "CLIPImageProcessor",
                        "size": {"height": zoo.IMAGE, "width": zoo.IMAGE},
                        "do_center_crop": False,
                    },
                }
            },
            "language_model": {"tokenizer": str(folder / "tokenizer"), "path": str(folder / language_model)},
        },
        "data": {"train": [{"path": str(folder / "train.json")}], "max_length": 64},
        "optimizer": {"learning_rate": 2e-3, "eps": 1e-6},
        "loop": {"steps": 3, "batch_size": 4},
        "logging": {"progress": "none", "samples": 0},
    }
    return merge(base, sections)


def train_run(described: dict[str, Any], output: str, by_slice: bool = True) -> dict[str, Any]:
    """Do the steps of a run; return what they came to, and what was read by slice, unless that is not to be."""
    described = merge(described, {"output": output, "parallel": {"verify": "never"}})
    reads_whole = mock.patch("cornstarch.engine.sharded_loading.build_tensor_sharder", lambda *arguments: None)
    cuts = nullcontext() if by_slice else reads_whole
    with counted_reads() as reads, cuts:
        trainer = trainer_of(load_config(None, base=described))
        trainer.setup()
    losses = []
    for batch in trainer.batches():
        loss = float(trainer.step(batch).loss)
        losses.append(distributed.sum_over_ranks([loss])[0] / trainer.replica.loss_copies)
    whole = gather_parameters(trainer.model, trainer.task.wrapped)
    return {
        "losses": losses,
        "parameters": {name: value.float().numpy() for name, value in whole.items()},
        "dtypes": {name: str(value.dtype) for name, value in whole.items()},
        "reads": reads,
        "reasons": explain_full_reads(trainer.model, trainer.context.layout),
        "traits": getattr(trainer.model, "traits", None),
    }


class Alone:
    """Runs, and what one process makes of each; it is asked once, however many tests compare with it."""

    def __init__(self, workers: Pool, folder: Path, store: Callable[[Path, str], None]) -> None:
        self._workers, self._folder, self._store = workers, folder, store
        self._outcomes: dict[str, dict[str, Any]] = {}

    def __call__(self, language_model: str, **sections: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the description of a run, and what it comes to."""
        folder = self._folder / language_model
        if not folder.exists():
            folder.mkdir()
            self._store(folder, language_model)
        run = describe_run(folder, language_model, **sections)
        key = json.dumps(run, sort_keys=True)
        if key not in self._outcomes:
            self._workers.renew()  # torch remembers meshes of groups that have ended
            output = str(folder / f"alone {len(self._outcomes)}")
            (self._outcomes[key],) = self._workers.run(1, train_run, run, output)
            self._workers.renew()
        return run, self._outcomes[key]


def farthest(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference of two sets of parameters."""
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in found)


def make_ready(runs: list[dict[str, Any]], output: str) -> int:
    """Make a run ready, after a small one has imported everything; return the most memory that it took."""
    small, large = (
        merge(run, {"output": f"{output} {number}", "parallel": {"verify": "never"}})
        for number, run in enumerate(runs)
    )
    trainer_of(load_config(None, base=small)).setup()
    with MemoryPeak() as peak:
        trainer = trainer_of(load_config(None, base=large))
        trainer.setup()
    assert trainer.model is not None
    return peak.bytes


def built(run: dict[str, Any]) -> dict[str, Any]:
    """Build the model of a run with two ranks; return what its encoder is, and what was read."""
    layout = Layout.of(load_config(None, base=run).parallel, 2, 2)
    config = load_config(None, base=run).model
    with counted_reads() as reads:
        model = build_model(config, get_shard=tensor_cuts(layout, DeviceMeshes(layout, "cpu")))
    expected = build_model(config)
    cut = build_tensor_sharder(layout, DeviceMeshes(layout, "cpu"), "audio", True)
    assert cut is not None
    cut(expected.encoders["audio"].module)
    return {
        "kind": type(model.encoders["audio"].module).__name__,
        "wrong": differences(model.encoders["audio"].module, expected.encoders["audio"].module),
        "reads": reads,
        "reasons": explain_full_reads(model, layout),
    }


def collect_refusal(run: dict[str, Any], output: str) -> str:
    """Make a run ready that cannot be; return what is said."""
    try:
        trainer_of(load_config(None, base={**run, "output": output})).setup()
    except ConfigError as error:
        return str(error)
    return "not refused"


def measure_held_by_stage(run: dict[str, Any], output: str) -> dict[str, int]:
    """Make a run ready whose model is made whole; return the bytes of its parameters before and after it is cut."""
    found: dict[str, int] = {}

    class MeasuredTrainer(Trainer):
        """Measures the model when it was built, and when it is on its device and not split yet."""

        def build_task(self, loading: ShardedLoading) -> Task:
            task = super().build_task(loading)
            found["whole"] = _bytes(task.model)
            return task

        def verify_plan(self, model: nn.Module) -> None:
            found["before"] = _bytes(self.model)

    with mock.patch.object(ShardedLoading, "cuts", lambda *arguments: None):
        config = load_config(None, base={**run, "output": output})
        trainer = MeasuredTrainer(config, console=quiet())
        trainer.setup()
    return {**found, "after": _bytes(trainer.model)}


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)


def make_anew(name: str) -> dict[str, Any]:
    """Make a model with random weights, a half of whose layers are in this process; compare with all of it."""
    kind = type(zoo.LANGUAGE_MODELS[name].build())
    config = zoo.LANGUAGE_MODELS[name].build().config
    torch.manual_seed(5)
    expected = kind(config)
    following = torch.rand(3)

    def own(model: nn.Module) -> set[str]:
        parameters = list(model.parameters())
        middle = len(parameters) // 2
        half = {id(p) for p in (parameters[:middle] if distributed.rank() == 0 else parameters[middle:])}
        return {key for key, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in half}

    torch.manual_seed(5)
    found = build_partial_model(lambda: kind(config), own)
    draws_on_alike = torch.equal(torch.rand(3), following)
    theirs = dict(expected.named_parameters(remove_duplicate=False))
    ours = dict(found.named_parameters(remove_duplicate=False))
    here = {key: parameter for key, parameter in ours.items() if not parameter.is_meta}
    wrong = [key for key, parameter in here.items() if not torch.equal(parameter, theirs[key])]
    wrong += [key for key in own(expected) if key not in here]
    wrong += [key for key, buffer in found.named_buffers() if not torch.equal(buffer, expected.get_buffer(key))]
    return {
        "wrong": wrong,
        "reason": full_read_reason(found),
        "draws_on_alike": draws_on_alike,
        "held": len(here),
        "all": len(theirs) if ours.keys() == theirs.keys() else -1,
    }


def resume(run: dict[str, Any], output: str) -> dict[str, Any]:
    """Do two steps of a run, and the rest of it in a new trainer."""
    run = merge(run, {"output": output})
    first = trainer_of(load_config(None, base=run))
    first.setup()
    for batch in first.batches():
        if first.step(batch).step == 2:
            break
    first.save()
    first.close()
    found = train_run(run, output)
    return {**found, "begins_at": 3 - len(found["losses"])}
