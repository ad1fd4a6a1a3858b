"""Every causal language model and every encoder of transformers: supported or refused with a reason, never wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from cornstarch.errors import ConfigError
from tests.models import sweep
from tests.models.sweep import NOT_BUILT, REFUSED, SUPPORTED, WRONG, Verdict

SHARES = 4  # so that several workers finish together
# What each share must at least reach: a change of transformers, of the shrinker or of the package that makes the sweep
# quietly smaller fails here.
LANGUAGE_MODELS_BUILT, LANGUAGE_MODELS_SUPPORTED = 0.8, 0.65
ENCODERS_BUILT, ENCODERS_SUPPORTED = 0.5, 0.35


def check_share(verdicts: list[Verdict], built: float, supported: float) -> None:
    """No verdict is wrong, refusals have a reason, and enough models were tried."""
    count = {status: [v for v in verdicts if v.status == status] for status in (SUPPORTED, REFUSED, NOT_BUILT, WRONG)}
    assert not count[WRONG], "\n" + "\n".join(f"{v.model}: {v.reason}" for v in count[WRONG])
    assert all(len(v.reason) > 20 for v in count[REFUSED])
    skipped = "\n" + "\n".join(f"{v.model}: {v.reason}" for v in (*count[NOT_BUILT], *count[REFUSED]))
    assert len(verdicts) - len(count[NOT_BUILT]) >= built * len(verdicts), skipped
    assert len(count[SUPPORTED]) >= supported * len(verdicts), skipped


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_language_model(share: int) -> None:
    names = sorted(sweep.language_model_names())
    assert len(names) >= 170
    verdicts = [sweep.judge_language_model(name) for name in names[share::SHARES]]
    check_share(verdicts, LANGUAGE_MODELS_BUILT, LANGUAGE_MODELS_SUPPORTED)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_encoder(share: int) -> None:
    classes = sweep.encoder_classes(sweep.encoder_names()[share::SHARES])
    assert len(classes) >= 40
    verdicts = [sweep.judge_encoder(model_class) for model_class in classes]
    check_share(verdicts, ENCODERS_BUILT, ENCODERS_SUPPORTED)


def refuse() -> None:
    """Stand for a model that the package refuses."""
    raise ConfigError("the reason")


def crash() -> None:
    """Stand for a model that the package does not understand."""
    raise IndexError("list index out of range")


def hang() -> None:
    """Stand for a model that never ends."""
    while True:
        pass


@pytest.mark.parametrize(
    ("check", "status", "reason"),
    [
        (lambda: None, SUPPORTED, ""),
        (refuse, REFUSED, "the reason"),
        (crash, WRONG, "IndexError: list index out of range"),
        (hang, WRONG, "TimeoutError: took more than 0.2 s"),
    ],
)
def test_the_judge(check: Callable[[], None], status: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SECONDS_PER_MODEL", 0.2)
    verdict = sweep.judge("a model", check)
    assert (verdict.status, verdict.reason) == (status, reason)


@pytest.mark.parametrize("sabotage", ["position", "order", "scale", "leak"])
def test_the_sweep_detects_a_wrong_composition(sabotage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that finds nothing must be able to find something."""
    merge = sweep.MultimodalModel.merge

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs, spec = merge(self, *args, **kwargs)
        embeddings = inputs.get("inputs_embeds")
        if embeddings is not None:
            inputs["inputs_embeds"] = DEFECTS[sabotage](embeddings)
        return inputs, spec

    monkeypatch.setattr(sweep.MultimodalModel, "merge", wrong)
    assert sweep.judge_language_model("LlamaForCausalLM").status == WRONG


DEFECTS: dict[str, Callable[[Any], Any]] = {
    "position": lambda embeddings: embeddings.roll(1, dims=1),
    "order": lambda embeddings: embeddings.flip(0),
    "scale": lambda embeddings: 1.01 * embeddings,
    "leak": lambda embeddings: embeddings + 0.1 * embeddings.mean(1, keepdim=True),
}


def chosen(names: Iterable[str], *wanted: str) -> bool:
    """Whether all wanted names are among the names."""
    return set(wanted) <= set(names)


def test_the_sweep_includes_common_models() -> None:
    assert chosen(sweep.language_model_names(), "LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel")
    assert chosen(sweep.encoder_names(), "CLIPVisionModel", "Qwen2AudioEncoder", "Qwen3VLVisionModel", "Wav2Vec2Model")
