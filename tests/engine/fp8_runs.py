"""Small runs in fp8 on a CPU, which can multiply in 8 bits slowly, in one process or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from cornstarch.kernels.compile import compile_layers
from cornstarch.kernels.fp8 import Fp8Linear
from cornstarch.parallel import distributed
from tests.trainer.tiny import tiny_config, trainer_of

NO_DROPOUT = (
    "model.encoders.vision.config.attention_dropout=0",
    "model.language_model.config.attention_dropout=0",
)


@contextmanager
def small_on_cpu() -> Iterator[None]:
    """Let a CPU and small layers pass, within this block."""
    can = mock.patch("cornstarch.engine.acceleration.explain_no_fp8", lambda device: None)
    # Traces and differentiates as the default does; of kernels written in C++ for a CPU no run in fp8 has any.
    traced = mock.patch("cornstarch.engine.acceleration.compile_layers", partial(compile_layers, backend="aot_eager"))
    with can, traced, mock.patch("cornstarch.kernels.fp8.MIN_DIM", 16):
        yield


def train_run(folder: str, output: str, *overrides: str) -> dict[str, Any]:
    """Train in bf16; return the losses of the steps over all processes, what was in 8 bits, and what was told."""
    config = tiny_config(Path(folder), f"output={output}", "precision=bf16", *NO_DROPOUT, *overrides)
    with small_on_cpu():
        trainer = trainer_of(config, allow_changes=True)
        trainer.setup()
        losses = [float(trainer.step(batch).loss) for batch in trainer.batches()]
        trainer.save()
    together = distributed.sum_over_ranks(losses)
    return {
        "losses": [step / trainer.replica.loss_copies for step in together],
        "layers": sum(isinstance(module, Fp8Linear) for module in trainer.model.modules()),
        "told": trainer.run_model.acceleration.fp8,
        "notes": trainer.run_model.acceleration.notes,
        "compiled": trainer.run_model.acceleration.describe_compilation(),
        "parameters": {name: str(p.dtype) for part in trainer.run_model.parts for name, p in part.parameters.items()},
    }
