"""Checkpoints on disk: whole, checked, in any number, and never half there; for any layout of processes.

A checkpoint is a folder `step_00000100` of safetensors and JSON; nothing in it is code. It is written under another
name, synced, read again and compared, and then renamed, so that a crash at any moment leaves the checkpoints that were
there. `checkpoint.json` is written last and lists every file with its size and SHA-256. A folder that exists is never
written into: the same step saved again is `step_00000100.1`.

Tensors have the names that the caller gives them and say nothing about processes: a file tells which parts of which
tensors it holds, and whoever reads takes the parts it needs, however many processes there were or are.
"""

from cornstarch.train.checkpoint.pieces import Sharded
from cornstarch.train.checkpoint.reading import Checkpoint, Form, TensorReader, read_checkpoint, state_hash
from cornstarch.train.checkpoint.store import CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore", "Form", "Sharded", "TensorReader", "read_checkpoint", "state_hash"]
