"""Checks that a parallel plan computes what one process computes."""
