"""What only torch can say about a machine: run as a script by `cornstarch doctor`, in a process that may die.

Every finding is printed at once as a line of JSON, so that those before a crash or a hang are not lost.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def torch_import() -> str:
    """Import torch."""
    import torch

    return f"torch {torch.__version__} imports"


def gloo() -> str:
    """Sum a tensor over a group of one process."""
    return _all_reduce("gloo", "cpu")


def cuda() -> str:
    """Multiply two matrices on every GPU."""
    import torch

    if not torch.cuda.is_available():
        raise LookupError("no CUDA device")
    names = []
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        if float((ones @ ones).sum()) != 64.0**3:
            raise RuntimeError(f"GPU {index} multiplies wrongly")
        free, total = torch.cuda.mem_get_info(index)
        names.append(f"{torch.cuda.get_device_name(index)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    return "; ".join(names)


def nccl() -> str:
    """Sum a tensor over a group of one process on a GPU."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        raise LookupError("no CUDA device")
    if not dist.is_nccl_available():
        raise LookupError("this build of torch has no NCCL")
    return _all_reduce("nccl", "cuda:0")


def _all_reduce(backend: str, device: str) -> str:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    start = time.perf_counter()
    # Port 0: the store itself finds a free one, so that nobody can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30))
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        value = torch.ones(1024, device=device)
        dist.all_reduce(value)
        if float(value.sum()) != 1024.0:
            raise RuntimeError(f"the sum of 1024 ones is {float(value.sum())}")
    finally:
        dist.destroy_process_group()
    return f"a group of one process sums in {time.perf_counter() - start:.1f} s, port {store.port}"


PROBES: dict[str, Callable[[], str]] = {"torch": torch_import, "gloo": gloo, "cuda": cuda, "nccl": nccl}


def findings() -> Iterator[dict[str, Any]]:
    """Yield what each probe found: `ok`, `absent` or `fail`."""
    for name, probe in PROBES.items():
        try:
            yield {"name": name, "status": "ok", "detail": probe()}
        except LookupError as error:
            yield {"name": name, "status": "absent", "detail": str(error)}
        except Exception as error:  # whatever is broken, the next probe may still tell something
            text = " ".join(str(error).split())[:300]
            yield {"name": name, "status": "fail", "detail": f"{type(error).__name__}: {text}"}


if __name__ == "__main__":
    for finding in findings():
        print(json.dumps(finding))
        sys.stdout.flush()
