"""The number of worker processes of a run's loader: `data.workers`, or what `auto` chooses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cornstarch.data.collate import ChatCollator
from cornstarch.data.loader import Collator, RunData
from cornstarch.data.worker_count import NodeResources, WorkerCount, bytes_of, choose_worker_count, classify_work
from cornstarch.parallel import distributed
from cornstarch.parallel.mesh import Replica

_MEASURED = 4  # samples of a source, to know the size of a batch


def choose_workers(
    run: RunData, collator: Collator, replica: Replica, device: torch.device, log: Callable[[str], None]
) -> int:
    """Return `data.workers`, or what `auto` chooses for this machine and these samples, which is logged."""
    loop, data, on_gpu = run.config.loop, run.config.data, device.type == "cuda"
    if data.workers != "auto":
        return data.workers

    def measure_ahead() -> int:
        # Preparing samples here also fills the collator's tables before they are copied to the workers.
        batch = run.peek_batch(collator, _MEASURED)
        if batch is None:
            return 0
        per_sample = bytes_of(batch.inputs) / max(len(batch.sample_ids), 1)
        return int(per_sample * loop.batch_size / replica.count * data.prefetch)

    # Data made in Python may be changed by reading them, or depend on this process.
    files = [s for s, one in zip(run.train.sources, data.train, strict=True) if one.format != "given"]
    ranks = distributed.ranks_per_node()
    chosen = choose_worker_count(classify_work(files), on_gpu, ranks, NodeResources.here(), measure_ahead)
    if chosen.count and on_gpu and isinstance(collator, ChatCollator) and collator.runs_encoders:
        chosen = WorkerCount(0, "the encoder itself is run to count the tokens of an item")
    log(str(chosen))
    return chosen.count
