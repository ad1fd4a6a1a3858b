"""Compose every language model and every encoder that transformers can build tiny, and judge the result.

A verdict is one of four words. *supported*: the composed model computes what the bare parts compute when they are run
by hand, sample by sample; *refused*: the package said why it cannot; *not built*: `shrink` found no small working
model; anything else is *wrong*, and a defect.

`HF_HUB_OFFLINE=1 python -m tests.models.sweep` prints the page docs/supported_models.md.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from tests.models import reference
from tests.models.shrink import tiny_models
from tests.models.stimuli import MAKERS, Stimuli, first_argument, stimuli, tokens_of
from tests.zoo import (
    ENCODERS,
    EOS,
    LANGUAGE_MODELS,
    MODALITY_TOKEN,
    RAGGED,
    TEXT_ONLY,
    VOCABULARY,
    Inputs,
    generator,
    item_count,
    text_batch,
)

SUPPORTED, REFUSED, NOT_BUILT, WRONG = "supported", "refused", "not built", "wrong"
SECONDS_PER_MODEL = 60
# Samples run alone take other kernels than a padded batch: equal up to rounding.
ROUNDING: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}


@dataclass(frozen=True)
class Verdict:
    """What came of composing one model."""

    model: str
    status: str
    reason: str = ""
    seconds: float = 0.0


class WrongError(Exception):
    """The composed model computes something else than its parts."""


class NotBuiltError(Exception):
    """This harness has no small working model of the class."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in a block that computes too long; the time that other processes take does not count."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def judge(name: str, check: Callable[[], None]) -> Verdict:
    """Run one check and put what it says into a verdict."""
    start = time.perf_counter()
    status, reason = SUPPORTED, ""
    try:
        with time_limit(SECONDS_PER_MODEL), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    except NotBuiltError as error:
        status, reason = NOT_BUILT, str(error)
    except ConfigError as error:
        status, reason = REFUSED, str(error)
    except Exception as error:
        status, reason = WRONG, f"{type(error).__name__}: {error}"
    return Verdict(name, status, reason, time.perf_counter() - start)


# ---------------------------------------------------------------------------------------- language models


def language_model_names() -> dict[str, str]:
    """Return every causal language model of transformers: class name to config name."""
    return {class_name: model_type for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


def build_language_model(class_name: str) -> PreTrainedModel:
    """Build a tiny language model that runs on text."""
    model_class = getattr(transformers, class_name)
    config_class = CONFIG_MAPPING[language_model_names()[class_name]]
    ids = torch.randint(EOS + 1, VOCABULARY, (2, 9), generator=generator(5))
    problems: list[str] = []
    with harness(class_name):
        for model in tiny_models(model_class, config_class, {"is_decoder": True}, problems):
            try:
                logits = model(input_ids=ids).logits
                reference.backward(logits.mean(), model=model)
            except Exception as error:
                problems.append(f"does not run on text: {error}")
                continue
            if logits.shape[:2] == ids.shape and logits.isfinite().all():
                return model
            problems.append(f"puts out logits of shape {tuple(logits.shape)} for ids of shape {tuple(ids.shape)}")
    raise NotBuiltError(problems[0])


@contextlib.contextmanager
def harness(class_name: str) -> Iterator[None]:
    """Blame what goes wrong, or takes too long, before the package is involved on this harness."""
    try:
        yield
    except Exception as error:
        raise NotBuiltError(f"{class_name}: {error}") from error


def judge_language_model(class_name: str) -> Verdict:
    """Compose CLIP with one language model."""
    return judge(class_name, lambda: check_language_model(build_language_model(class_name)))


def check_language_model(language_model: PreTrainedModel) -> None:
    """Raise unless the model, composed with CLIP, is right in every way or says what it does not do."""
    part = ENCODERS["clip"]
    model = MultimodalModel({"vision": part.build().eval()}, language_model)
    model.set_modality_token_ids({"vision": MODALITY_TOKEN})
    items = part.inputs(item_count(RAGGED))
    lengths = part.feature_lengths(item_count(RAGGED))

    def features() -> Tensor:
        return reference.project(part, model.vision_encoder.module, model.vision_encoder.projector.projection, items)

    check_against_parts(model, text_batch(RAGGED, lengths), items, features)
    check_rows(model, text_batch(RAGGED, lengths), items, features)
    check_text_only(model)
    check_causal(model)
    # Left padding is for generation; a model that cannot have it must say so.
    with contextlib.suppress(ConfigError):
        check_rows(model, text_batch(RAGGED, lengths, padding="left"), items, features)


def check_against_parts(model: MultimodalModel, batch: Inputs, items: Inputs, features: Callable[[], Tensor]) -> None:
    """Logits, loss and every gradient are those of the language model on embeddings merged by hand."""
    parts = {"encoders": nn.ModuleDict(model.encoders), "language_model": model.language_model}
    output = model(**batch, **items)
    found = reference.backward(output.loss, **parts)
    expected = reference.run_batch(model.language_model, batch, features(), MODALITY_TOKEN)
    must_be_close("logits", output.logits, expected.logits)
    must_be_close("loss", output.loss, expected.loss)
    gradients = reference.backward(expected.loss, **parts)
    if reference.missing(found) != reference.missing(gradients):
        raise WrongError(
            f"other parameters have gradients: {set(reference.missing(found)) ^ set(reference.missing(gradients))}"
        )
    for name, gradient in gradients.items():
        if gradient is not None:
            must_be_close(f"gradient of {name}", found[name], gradient)


def check_rows(model: MultimodalModel, batch: Inputs, items: Inputs, features: Callable[[], Tensor]) -> None:
    """Each sample is computed as if it were alone, and the loss is the cross entropy of the next token."""
    with torch.no_grad():
        output = model(**batch, **items)
        alone = reference.run_rows(model.language_model, batch, features(), MODALITY_TOKEN)
    losses = []
    side = "right" if batch["attention_mask"][:, 0].all() else "left"
    for row, (found, expected) in enumerate(
        zip(reference.rows_of(output.logits, batch["attention_mask"]), alone, strict=True)
    ):
        must_be_close(f"logits of sample {row} padded on the {side}, against the sample alone", found, expected)
        keep = batch["attention_mask"][row].bool()
        labels = batch["labels"][row].masked_fill(batch["input_ids"][row] == MODALITY_TOKEN, reference.IGNORED)[keep]
        losses.append(nn.functional.cross_entropy(expected[:-1].float(), labels[1:], reduction="none"))
        losses[-1] = losses[-1][labels[1:] != reference.IGNORED]
    must_be_close("loss, against the cross entropy of the next token", output.loss, torch.cat(losses).mean())


def check_text_only(model: MultimodalModel) -> None:
    """A batch without items is the plain language model."""
    batch = text_batch(TEXT_ONLY)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        must_be_close("logits of plain text", model(**batch).logits[real], model.language_model(**batch).logits[real])


def check_causal(model: MultimodalModel) -> None:
    """An image changes the text behind it, not the text before it, and no other sample."""
    part = ENCODERS["clip"]
    length = part.feature_lengths(1)[0]
    batch, items = text_batch(("tttt*tttt", "ttttt*tt"), [length, length]), part.inputs(2)
    other = {"pixel_values": items["pixel_values"] * torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1)}
    with torch.no_grad():
        difference = (model(**batch, **items).logits - model(**batch, **other).logits).abs().amax(-1)
    if difference[0, :4].max() > 1e-5:
        raise WrongError("text before an image sees it: the language model is not causal")
    if difference[0, 4 + length] == 0:
        raise WrongError("text behind an image does not see it")
    if difference[1].max() > 1e-5:
        raise WrongError("an image changed another sample")


def must_be_close(what: str, found: Tensor | None, expected: Tensor) -> None:
    """Raise `WrongError` with the largest difference unless two tensors agree."""
    if found is None or found.shape != expected.shape:
        raise WrongError(f"{what}: {None if found is None else tuple(found.shape)} instead of {tuple(expected.shape)}")
    if not torch.allclose(found, expected, **ROUNDING):
        raise WrongError(f"{what} differ by up to {(found - expected).abs().max().item():.2g}")


# ------------------------------------------------------------------------------------------------ encoders


def encoder_names() -> list[str]:
    """Return every class that may be an encoder: base models, and the towers inside multimodal models."""
    names: set[str] = set()
    for mapping in (MODEL_MAPPING_NAMES, MODEL_FOR_IMAGE_MAPPING_NAMES):
        for entry in mapping.values():
            names.update([entry] if isinstance(entry, str) else entry)
    tower = re.compile(r"(?!Auto).*(Vision|Audio|Image|Video|Speech)\w*(Model|Transformer|Backbone)|(?!Auto).*Encoder")
    names.update(name for name in dir(transformers) if tower.fullmatch(name) and "PreTrained" not in name)
    return sorted(names)


def is_encoder(model_class: Any) -> bool:
    """Whether a class reads images or sound, and nothing but them."""
    if not isinstance(model_class, type) or PreTrainedModel not in model_class.__mro__:
        return False  # also what stands in for a class whose library is not installed
    arguments = inspect.signature(model_class.forward).parameters
    also_reads = {"input_ids", "decoder_input_ids", "decoder_input_values"}
    return first_argument(model_class) in MAKERS and not also_reads.intersection(arguments)


def encoder_classes(names: list[str]) -> list[type[PreTrainedModel]]:
    """Return the encoders among the named classes."""
    found: list[Any] = [getattr(transformers, name, None) for name in names]
    return [model_class for model_class in found if is_encoder(model_class)]


def judge_encoder(model_class: type[PreTrainedModel]) -> Verdict:
    """Compose one encoder with Llama."""
    return judge(model_class.__name__, lambda: check_encoder(model_class))


def check_encoder(model_class: type[PreTrainedModel]) -> None:
    """Raise unless the encoder, composed with Llama, hands over every item's features."""
    encoder, items = build_encoder(model_class)
    model = MultimodalModel({"seen": encoder}, LANGUAGE_MODELS["llama"].build().eval())
    model.set_modality_token_ids({"seen": MODALITY_TOKEN})
    projection = model.seen_encoder.projector.projection

    def tokens() -> list[Tensor | None]:
        return [tokens_of(encoder(**item), projection.in_features) for item in items.apart]

    def features() -> Tensor:
        return torch.cat([projection(token) for token in tokens()])

    with torch.no_grad():
        lengths = [1 if token is None else len(token) for token in tokens()]
    check_against_parts(model, text_batch(RAGGED, lengths), items.together, features)


def build_encoder(model_class: type[PreTrainedModel]) -> tuple[PreTrainedModel, Stimuli]:
    """Build a tiny encoder, and items that it can read, together and one by one."""
    problems: list[str] = []
    with harness(model_class.__name__):
        for model in tiny_models(model_class, model_class.config_class, {}, problems):
            for make in MAKERS[first_argument(model_class)]:
                try:
                    items = stimuli(model, make, item_count(RAGGED))
                    with torch.no_grad():
                        outputs = [model(**inputs)[0] for inputs in (items.together, items.together, *items.apart)]
                except Exception as error:
                    problems.append(f"does not run: {error}")
                    continue
                if torch.is_tensor(outputs[0]) and not torch.equal(outputs[0], outputs[1]):
                    raise NotBuiltError("puts out something else each time")
                return model, items
    raise NotBuiltError(problems[0])


# ---------------------------------------------------------------------------------------------- the report

PAGE = """# Supported models

Cornstarch can compose any Hugging Face encoder with any causal language model, without code for individual models. This
page shows the measured result. Every causal language model, vision encoder and audio encoder that transformers
{version} can build as a tiny model from its config is composed: language models with CLIP, encoders with Llama. The
logits, the loss and every gradient are compared with the same parts run by hand. A model is *supported* if they agree.
It is *refused*, with the reason, if it cannot be composed. The sweep test fails on any other outcome.

[Another page](models.md) shows which of these models can be split over processes.

`HF_HUB_OFFLINE=1 python -m tests.models.sweep > docs/supported_models.md` writes this page.

{sections}"""

SECTION = """## {title}

{counts}

**Supported.** {supported}

**Refused.**

| model | reason |
|---|---|
{refused}

**Not tested**: no small working model could be built from the config alone. These models may work. {not_built}
"""


def section(title: str, verdicts: list[Verdict]) -> str:
    """Write one part of the page."""
    counts = Counter(verdict.status for verdict in verdicts)
    reasons = [(verdict.model, verdict.reason) for verdict in verdicts if verdict.status in (REFUSED, WRONG)]
    return SECTION.format(
        title=title,
        counts=", ".join(
            f"{counts[status]} {status}" for status in (SUPPORTED, REFUSED, WRONG, NOT_BUILT) if counts[status]
        ),
        supported=list_classes(verdicts, SUPPORTED),
        refused="\n".join(f"| `{model}` | {cell(reason)} |" for model, reason in reasons),
        not_built=list_classes(verdicts, NOT_BUILT),
    )


def list_classes(verdicts: list[Verdict], status: str) -> str:
    """Write the names of all models with one verdict."""
    return ", ".join(f"`{verdict.model}`" for verdict in verdicts if verdict.status == status)


def cell(reason: str) -> str:
    """Write the first sentence of a reason so that it fits into a table."""
    first = re.split(r"(?<=[.)]) (?=[A-Z])", " ".join(reason.split()))[0]
    return first.replace("|", "\\|")


def main() -> None:
    """Judge every model and print the page; a wrong one makes it fail."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    language_models = [judge_language_model(name) for name in sorted(language_model_names())]
    encoders = [judge_encoder(model_class) for model_class in encoder_classes(encoder_names())]
    sections = section("Language models", language_models), section("Encoders", encoders)
    print(PAGE.format(version=transformers.__version__, sections="\n".join(sections)), end="")
    if any(verdict.status == WRONG for verdict in (*language_models, *encoders)):
        raise SystemExit("some models are wrong: see the page")


if __name__ == "__main__":
    main()
