"""Saving and loading a whole model: `save_pretrained` and `from_pretrained` in `pretrained`."""
