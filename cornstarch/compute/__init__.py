"""How one device computes quickly, and how much: what a step multiplies."""
