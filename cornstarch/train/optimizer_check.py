"""May each rank step a part of the parameters by itself? That depends on the optimizer, so it is tried.

AdamW, SGD and many others compute the step of a number from that number and its gradients alone. Some look at whole
matrices (Adafactor, Muon, LAMB), others at all parameters together (Prodigy). Where ranks hold pieces, each of them
would look at its own piece, and the run would train something else without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.train.config import RunConfig
from cornstarch.train.optim import SHORT_NAMES, make_plain_optimizer

Build = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Returns a new optimizer of some parameters."""

Scope = Literal["number", "matrix", "all"]
"""What the step of a number depends on: itself alone, its matrix, or other parameters."""

_STEPS = 3
_SAME = 1e-3  # of the largest movement; rounding is far below
_CUTS: tuple[Callable[[Tensor], Sequence[Tensor]], ...] = (
    lambda matrix: matrix.chunk(2, 0),  # fsdp2, tp
    lambda matrix: matrix.chunk(2, 1),  # tp
    lambda matrix: matrix.flatten().chunk(2),  # fsdp1
)


def check_optimizer(config: RunConfig, layout: Layout) -> None:
    """Refuse an optimizer that would do something else on the pieces that ranks hold than on whole parameters.

    No process group is needed: every rank comes to the same answer.
    """
    name = config.optimizer.name
    if name.lower() in SHORT_NAMES or config.parallel.verify == "never":  # tests have tried those
        return

    def build(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return make_plain_optimizer(config.optimizer, parameters)

    try:
        refuse_pieces(build, f"optimizer.name = {name}", layout, _trained_modules(config, layout))
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"optimizer.name = {name}\n  Whether ranks can step parts of the parameters by themselves is tried on a "
            f"small matrix on the CPU, and that failed: {type(error).__name__}: {error}\n  Use ddp without stages and "
            "tp, or another optimizer. To train without this check: parallel.verify=never."
        ) from error


def refuse_pieces(build: Build, said: str, layout: Layout, trained: Collection[str]) -> None:
    """Refuse an optimizer that needs more than the ranks of a layout hold.

    Args:
        build: Makes the optimizer.
        said: How the user asked for it.
        layout: Who holds what.
        trained: The modules whose own parameters, not only those of a projector, are trained.
    """
    cuts = list(_cuts(layout, trained))
    deals = list(_deals(layout))
    if not cuts and not deals:
        return
    scope = find_scope(build)
    if scope == "matrix" and cuts:
        raise ConfigError(
            f"{said}\n  Its step on a matrix is another one than its steps on the two halves of the matrix: it needs "
            f"whole matrices, and this plan cuts them ({', '.join(cuts)}).\n  Use the kind ddp or zero1 and tp = 1, or "
            "an optimizer such as adamw."
        )
    if scope == "all":
        raise ConfigError(
            f"{said}\n  Its step on a parameter depends on the other parameters, and with this plan no rank has all of "
            f"them ({', '.join([*cuts, *deals])}).\n  Use the kind ddp with one stage and tp = 1, or an optimizer such "
            "as adamw."
        )


def _cuts(layout: Layout, trained: Collection[str]) -> Iterator[str]:
    """Yield what cuts trained matrices into pieces."""
    if layout.exchanges_in_passes:
        yield f"parallel.data.kind = {layout.plan.data.kind}"
    for name, plan in layout.plan.modules.items():
        if plan.tp > 1 and name in trained:
            yield f"tp = {plan.tp} for {name}"


def _deals(layout: Layout) -> Iterator[str]:
    """Yield what gives ranks different parameters, each of them whole."""
    kinds = {layout.plan.kind(name) for name in layout.plan.modules if layout.data_shape(name)[1] > 1}
    if "zero1" in kinds:
        yield "zero1"
    if layout.plan.is_pipeline and layout.world > 1:
        yield "several stages"


def _trained_modules(config: RunConfig, layout: Layout) -> set[str]:
    parts = {LANGUAGE_MODEL: config.model.language_model, **config.model.encoders}
    frozen = {name for name, part in parts.items() if part is not None and part.train in ("frozen", "projector")}
    return set(layout.plan.modules) - frozen


# ---------------------------------------------------------------------------------------------------- trying it


def find_scope(build: Build) -> Scope:
    """Step two small matrices together, apart, and cut in two; return what the steps depend on."""
    noise = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=noise) for shape in ((8, 6), (6, 4))]
    # Rows of different sizes: statistics of rows and columns then differ, too.
    sizes = [torch.logspace(-2, 1, len(start))[:, None] for start in starts]
    gradients = [
        [size * torch.randn(start.shape, generator=noise) for _ in range(_STEPS)]
        for start, size in zip(starts, sizes, strict=True)
    ]
    apart = _step_apart(build, starts, gradients)
    if _differ(_step_together(build, starts, gradients), apart, starts):
        return "all"
    for cut in _CUTS:
        pieces, pieces_of_steps = cut(starts[0]), [cut(gradient) for gradient in gradients[0]]
        try:
            found = _step_apart(build, pieces, list(zip(*pieces_of_steps, strict=True)))
        except (RuntimeError, ValueError, TypeError, IndexError):  # Muon takes nothing but matrices
            return "matrix"
        if _differ(found, cut(apart[0]), pieces):
            return "matrix"
    return "number"


def _step_apart(build: Build, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return parameters after some steps, each with an optimizer of its own."""
    return [_step_together(build, [start], [own])[0] for start, own in zip(starts, gradients, strict=True)]


def _step_together(build: Build, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return parameters after some steps of one optimizer."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        optimizer = build(parameters)
        for of_step in zip(*gradients, strict=True):
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _differ(found: Sequence[Tensor], expected: Sequence[Tensor], starts: Sequence[Tensor]) -> bool:
    largest = max(float((one - start).abs().max()) for one, start in zip(expected, starts, strict=True))
    off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return not off <= _SAME * largest  # also where something is no number


__all__ = ["check_optimizer", "find_scope", "refuse_pieces"]
