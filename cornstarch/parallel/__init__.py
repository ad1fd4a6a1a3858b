"""How one stage of a model is spread over its ranks."""

from cornstarch.parallel.clipping import clip_gradients
from cornstarch.parallel.data import apply_data_parallel
from cornstarch.parallel.mesh import data_mesh
from cornstarch.parallel.units import wrapping_units
from cornstarch.parallel.zero1 import OwnedParameters

__all__ = ["OwnedParameters", "apply_data_parallel", "clip_gradients", "data_mesh", "wrapping_units"]
