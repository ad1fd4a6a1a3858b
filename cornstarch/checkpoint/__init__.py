"""Checkpoints: complete, checksummed, atomic, and independent of the parallel layout.

A checkpoint is a folder `step_00000100` of safetensors and JSON files; nothing in it is code. It is written under a
temporary name, synced, read back and compared, and then renamed, so that a crash at any moment leaves the earlier
checkpoints intact. `checkpoint.json` is written last and lists every file with its size and SHA-256. An existing folder
is never written into: the same step saved again is `step_00000100.1`.

Tensors have the names of the caller, whatever the layout: each file states which shards of which tensors it has, and
each rank reads the parts it needs, for any number of ranks before and now.
"""

from cornstarch.checkpoint.reader import Checkpoint, Form, TensorReader, read_checkpoint, state_hash
from cornstarch.checkpoint.shards import Sharded
from cornstarch.checkpoint.storage import LocalStorage, Storage, register_storage
from cornstarch.checkpoint.store import CheckpointStore

__all__ = [
    "Checkpoint", "CheckpointStore", "Form", "LocalStorage", "Sharded", "Storage", "TensorReader", "read_checkpoint",
    "register_storage", "state_hash",
]  # fmt: skip
