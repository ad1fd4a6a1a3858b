"""What a plan requires of an optimizer and of a loss, found by trying them on small tensors.

**Optimizers.** AdamW, SGD and many others compute the step of a number from that number and its gradients alone. Some
look at whole matrices (Adafactor, Muon, LAMB), others at all parameters together (Prodigy). A rank that holds a shard
would look at its shard alone, and the run would silently train something else.

**Losses.** Only a mean over tokens does not depend on how a batch is divided over ranks. Models with a router may add a
loss over all tokens of a batch (`output_router_logits`), which differs between a batch and its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.config import RunConfig
from cornstarch.engine.optimizer import ELEMENTWISE, make_plain_optimizer
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument, unwrap
from cornstarch.models.twin import add_noise, build_twin_config
from cornstarch.plan.data_options import UNSYNCHRONIZED
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL

Build = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Returns a new optimizer of some parameters."""

_STEPS = 3
_SAME_STEP = 1e-3  # of the largest movement; rounding is far below
_CUTS: tuple[Callable[[Tensor], Sequence[Tensor]], ...] = (
    lambda matrix: matrix.chunk(2, 0),  # fsdp2, tp
    lambda matrix: matrix.chunk(2, 1),  # tp
    lambda matrix: matrix.flatten().chunk(2),  # fsdp1
)


def check_optimizer(config: RunConfig, layout: Layout) -> None:
    """Refuse an optimizer that would do something else on the pieces that ranks hold than on whole parameters."""
    name = config.optimizer.name
    if name.lower() in ELEMENTWISE or config.parallel.verify == "never":  # tests have tried those
        return
    parts = {LANGUAGE_MODEL: config.model.language_model, **config.model.encoders}
    frozen = {name for name, part in parts.items() if part is not None and part.train in ("frozen", "projector")}
    build = partial(make_plain_optimizer, config.optimizer)
    try:
        refuse_pieces(build, f"optimizer.name = {name}", layout, set(layout.plan.modules) - frozen)
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"optimizer.name = {name}\n  Whether ranks can step parts of the parameters by themselves is tried on a "
            f"small matrix on the CPU, and that failed: {type(error).__name__}: {error}\n  Use ddp without stages and "
            "tp, or another optimizer. To train without this check: parallel.verify=never."
        ) from error


def refuse_pieces(build: Build, said: str, layout: Layout, trained: Collection[str]) -> None:
    """Refuse an optimizer, asked for as `said`, that needs more than the ranks of a layout hold.

    `trained` are the modules whose own parameters, not only those of a projector, are trained.
    """
    plan = layout.plan
    cuts = [f"parallel.data.kind = {plan.data.kind}"] if layout.exchanges_in_passes else []  # of trained matrices
    cuts += [f"tp = {one.tp} for {name}" for name, one in plan.modules.items() if one.tp > 1 and name in trained]
    cuts += [f"ep = {one.ep} for {name}" for name, one in plan.modules.items() if one.ep > 1 and name in trained]
    kinds = {plan.kind(name) for name in plan.modules if layout.data_shape(name)[1] > 1}
    deals = ["zero1"] if "zero1" in kinds else []  # give ranks different parameters, each of them whole
    deals += ["several stages"] if plan.is_pipeline and layout.world > 1 else []
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


def needs_whole_parameters(build: Build) -> bool:
    """Return whether an optimizer's step of a number depends on others of its matrix, so that no matrix may be cut."""
    try:
        return find_scope(build) != "number"
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError):  # it could not be tried
        return True


def find_scope(build: Build) -> Literal["number", "matrix", "all"]:
    """Return what an optimizer's step of a number depends on: itself alone, its matrix, or other parameters."""
    # Two small matrices are stepped together, apart, and cut in two.
    noise = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=noise) for shape in ((8, 6), (6, 4))]
    gradients = []
    for start in starts:  # with rows of different sizes: statistics of rows and columns then differ, too
        size = torch.logspace(-2, 1, len(start))[:, None]
        gradients.append([size * torch.randn(start.shape, generator=noise) for _ in range(_STEPS)])
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
    return not off <= _SAME_STEP * largest  # also where something is no number


_ROWS, _TOKENS = 4, 12
_SAME_LOSS = 2e-6  # of the loss; rounding is below 5e-7, a router's loss with a weight of 1e-3 makes more than 1e-5


def check_loss(model: nn.Module, layout: Layout) -> None:
    """Refuse a loss that ranks would compute over other tokens than one process does; the model is not sharded yet."""
    plans = layout.plan.modules.values()
    splits = [f"{layout.dp} replicas"] if layout.dp > 1 and layout.plan.data.kind not in UNSYNCHRONIZED else []
    splits += ["context parallelism"] if any(plan.cp > 1 for plan in plans) else []
    splits += ["several stages"] if any(plan.stages > 1 for plan in plans) else []
    inner = unwrap(model.language_model) if isinstance(model, MultimodalModel) else unwrap(model)
    if not splits or not isinstance(inner, PreTrainedModel) or not depends_on_batch(inner):
        return
    router = getattr(inner.config.get_text_config(), "output_router_logits", False)
    why = " (output_router_logits = True adds a loss over all tokens of a batch)" if router else ""
    advice = "Set output_router_logits to false in the model's config.json" if router else "Use one replica"
    raise ConfigError(
        f"The loss of {type(inner).__name__} is no mean over tokens: of two rows it is another one than of each row by "
        f"itself{why}. With {', '.join(splits)} no rank has all that it is computed from, and the run would train "
        f"something else than one process.\n  {advice}. Replicas that each compute it over their own rows, as most "
        "libraries have it: parallel.verify=never."
    )


def depends_on_batch(model: PreTrainedModel) -> bool:
    """Whether the loss of two rows is another one than the mean over the tokens of each: tried on a tiny twin."""
    if not (accepts_argument(model, "input_ids") and accepts_argument(model, "labels")):
        return False
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            twin = type(model)(build_twin_config(model.config))
            add_noise(twin, scale=1.0)  # a router that is sure of itself
            return _loss_depends_on_rows(twin.train())
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        # There is no twin, or it takes other labels: what transformers calls the option is all that is known.
        return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


@torch.no_grad()
def _loss_depends_on_rows(twin: PreTrainedModel) -> bool:
    words = twin.config.get_text_config().vocab_size
    # Rows of one word each, so that a router sends each to other experts; with different numbers of labels.
    ids = torch.tensor([[words * (row + 1) // (_ROWS + 1)] for row in range(_ROWS)]).expand(_ROWS, _TOKENS)
    # The first label is always ignored: some models shift labels, others do not.
    labels = torch.where(torch.arange(_TOKENS) > torch.arange(_ROWS)[:, None], ids, IGNORE_INDEX)
    options = {"use_cache": False} if accepts_argument(twin, "use_cache") else {}

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return twin(input_ids=ids, labels=labels, **options).loss

    together = loss(ids, labels)
    if not torch.equal(together, loss(ids, labels)):  # noise that the twin's config does not name
        twin.eval()
        together = loss(ids, labels)
    each = torch.stack([loss(*row) for row in zip(ids.split(1), labels.split(1), strict=True)])
    counts = (labels != IGNORE_INDEX).sum(1)
    mean = (each * counts).sum() / counts.sum()
    return bool((together - mean).abs() > _SAME_LOSS * mean.abs())
