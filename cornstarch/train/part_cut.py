"""What of a part a process has while it is read: pieces of matrices, and the parameters of its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cornstarch.parallel.apply import TensorCut
from cornstarch.parallel.loading import drop_parameters
from cornstarch.train.config import EncoderConfig, PartConfig


@dataclass(frozen=True)
class PartCut:
    """What of a part this process has."""

    tensors: TensorCut | None = None
    """How its matrices are cut over ranks."""
    held: frozenset[str] | None = None
    """The names of the parameters that this process's stages have, without adapters. None: all."""

    @property
    def sequence(self) -> bool:
        """Whether activations are cut along tokens."""
        return self.tensors is not None and self.tensors.sequence

    def cut(self, part: PartConfig, model: Any) -> None:
        """Cut the matrices of a part's model, as it is stored; of an encoder with a decoder, the decoder goes."""
        if isinstance(part, EncoderConfig) and model.config.is_encoder_decoder:
            encoder = model.get_encoder()
            within = set(encoder.modules())
            for module in model.modules():
                if not within.intersection(module.modules()):
                    drop_parameters(module)
            model = encoder
        if self.tensors is not None:
            self.tensors(model)

    def names(self, part: PartConfig, model: Any) -> Collection[str]:
        """Return the names that the held parameters of a part have in its model, as it is stored."""
        assert self.held is not None
        if not (isinstance(part, EncoderConfig) and model.config.is_encoder_decoder):
            return self.held
        encoder = model.get_encoder()
        prefix = next(name for name, module in model.named_modules() if module is encoder)
        return {f"{prefix}.{name}" for name in self.held}


Cuts = Callable[[str, bool], PartCut | None]
"""What of a part this process has, by the part's name and whether it is an encoder. None: all of it."""

__all__ = ["Cuts", "PartCut"]
