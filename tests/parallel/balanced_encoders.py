"""What several processes lend one another in the tests here; each function runs in every one of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cornstarch import ModalEncoderModule
from cornstarch.errors import ConfigError
from cornstarch.parallel import attach_encoder_balancing, balance_encoders
from tests import zoo
from tests.parallel.context.special import Normed
from tests.parallel.context.work import difference, gradients, summed


def mesh() -> DeviceMesh:
    """Return the mesh of all processes."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def compose_model(name: str, trained: bool) -> ModalEncoderModule:
    """Return an encoder of the zoo with a projector; of some, a callback sees all that is put out."""
    width = zoo.MERGED if name.startswith("qwen") else zoo.ENCODER_HIDDEN
    looked_at = (lambda inputs, output: output) if name in ("clip", "qwen3_vl") else None
    with zoo.reproducible(0):
        encoder = ModalEncoderModule(
            zoo.ENCODERS[name].build(), nn.Linear(width, 8), postprocess_module_callback=looked_at
        )
    encoder.set_trainable(trained, True)
    return encoder


def seen_by(encoder: nn.Module) -> list[int]:
    """Return a list that will have how many items, or patches in one row, each call of the encoder is given."""
    seen: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(len(next(iter(kwargs.values()))))

    encoder.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def passed(name: str, counts: Sequence[int], trained: bool) -> tuple[str, list[int]]:
    """Encode so many items on each rank, alone and lent; return what differs, and what this rank encoded each time."""
    encoder, inputs = compose_model(name, trained), zoo.ENCODERS[name].inputs
    rank = dist.get_rank()
    weights = torch.randn(10_000, generator=zoo.generator(8 + rank))

    def encoded(lent: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
        with balance_encoders(encoder) if lent else nullcontext():
            if counts[rank]:
                tokens = encoder.features(inputs(counts[rank], seed=rank)).tokens
                loss = (tokens.square().mean(1) * weights[: len(tokens)]).sum()
            else:
                tokens = encoder.stand_in_features(inputs(1, seed=9)).tokens[:0]
                loss = tokens.sum()
            return tokens.detach(), summed(gradients(encoder, loss))

    plain, expected = encoded(lent=False)
    attach_encoder_balancing(encoder, mesh())
    seen = seen_by(encoder.module)
    alone, _ = encoded(lent=False)
    found, summed_up = encoded(lent=True)
    if not torch.equal(plain, alone):
        return "other features although nothing is lent", seen
    if not torch.allclose(found, plain, rtol=1e-5, atol=1e-5):
        return f"other features: {float((found - plain).abs().max()):.1e}", seen
    return difference(summed_up, expected, 1e-5), seen


def every(cases: Sequence[tuple[str, Sequence[int], bool]]) -> list[tuple[str, list[int]]]:
    """Do it for several encoders."""
    return [passed(*case) for case in cases]


# ------------------------------------------------------------------------------------------------ what goes wrong


class Odd(nn.Module):
    """An encoder that does not do as others do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.habit = ""

    def forward(self, pixel_values: Tensor, sizes: Tensor | None = None, names: Any = None) -> Tensor:
        """Encode."""
        if self.habit == "raises":
            raise ValueError("no memory")
        made = self.linear(pixel_values)
        if self.habit == "mixes":
            return made.repeat(1, len(made), 1)
        return made[0] if self.habit == "merges" else made


def odd_one() -> Odd:
    """Return it, always with the same weights."""
    with zoo.reproducible(0):
        return Odd()


def said(call: Callable[[], Any]) -> str:
    """Return what a call raises; "" if nothing."""
    try:
        call()
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


def collect_refusal() -> dict[str, str]:
    """Let one rank have something that cannot be lent; all must end."""
    rank = dist.get_rank()
    odd = odd_one()
    attach_encoder_balancing(odd, mesh())
    images = torch.randn(6 if rank == 0 else 1, 2, 3, generator=zoo.generator(rank))

    def call(**more: Any) -> str:
        with balance_encoders(odd):
            return said(lambda: odd(pixel_values=images, **more))

    found = {
        "fine": call(),
        "unknown input": call(**({"sizes": torch.zeros(3)} if rank == 0 else {})),
        "list": call(**({"names": ["a"]} if rank == 0 else {})),
        "trained input": call(**({"sizes": torch.zeros(6, requires_grad=True)} if rank == 0 else {})),
    }
    for habit in ("raises", "mixes", "merges"):
        odd.habit = habit if rank == 1 or habit == "mixes" else ""
        found[habit] = call()
    odd.habit = ""
    found["fine again"] = call()
    if rank == 0:  # outside nobody is waited for
        found["outside"] = said(lambda: odd(pixel_values=images))
    found["mesh"] = said(lambda: attach_encoder_balancing(Odd(), None))  # type: ignore[arg-type]
    found["batch norm"] = said(lambda: attach_encoder_balancing(Normed().train(), mesh()))
    found["frozen"] = said(lambda: attach_encoder_balancing(Normed().eval(), mesh()))
    return found


def differently_shaped() -> tuple[list[int], list[str]]:
    """Give ranks items of which only some have the same shape; return what each encodes, and what was warned of."""
    rank = dist.get_rank()
    odd = odd_one()
    attach_encoder_balancing(odd, mesh())
    seen = seen_by(odd)
    images = torch.randn((1, 8, 3)[rank], (2, 5, 2)[rank], 3, generator=zoo.generator(rank))
    with warnings.catch_warnings(record=True) as warned, balance_encoders(odd):
        warnings.simplefilter("always")
        for _ in range(2):
            made = odd(pixel_values=images)
            assert torch.allclose(made, odd.linear(images), atol=1e-6)
    return seen, [str(one.message) for one in warned]


def many(counts: Sequence[int]) -> list[int]:
    """Return how many items each rank encodes, of more than one message can tell of."""
    odd = ModalEncoderModule(odd_one())
    attach_encoder_balancing(odd, mesh())
    seen = seen_by(odd.module)
    images = torch.randn(counts[dist.get_rank()], 2, 3, generator=zoo.generator(dist.get_rank()))
    with balance_encoders(odd):
        made = odd(pixel_values=images)
    assert torch.allclose(made, odd_one().linear(images), atol=1e-6)
    return seen
