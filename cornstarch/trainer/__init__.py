"""The training loop and its parts: evaluation, checkpoints, callbacks, signals."""
