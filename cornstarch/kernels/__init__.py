"""Faster ways to compute a layer, a loss and an optimizer step on one device."""
