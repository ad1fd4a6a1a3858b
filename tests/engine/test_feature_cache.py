"""Runs with a feature cache: later epochs do not run the encoder, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from cornstarch.config import RunConfig
from cornstarch.data.collate import ChatCollator, CollatedBatch
from cornstarch.data.loader import StepBatch
from cornstarch.data.sample import Media, Message, Sample
from cornstarch.engine.feature_cache import use_feature_cache
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import StepResult
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel, MultimodalProcessor
from cornstarch.parallel.device import DevicePlacement
from cornstarch.tasks.conversation import ConversationTask
from tests.data.small_data import data_config
from tests.models.local_processors import image, processor_of, sound, tokenizer
from tests.parity.pool import pool
from tests.trainer.tiny import losses, merge, tiny_config, trainer_of
from tests.zoo import ENCODERS, LANGUAGE_MODELS

VISION = ["clip", "siglip2", "pixtral", "qwen2_vl", "qwen2_5_vl"]
AUDIO = ["whisper", "qwen2_audio"]
FP32 = DevicePlacement(torch.device("cpu"), "fp32")
BF16 = DevicePlacement(torch.device("cpu"), "bf16")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}  # against a run without a cache, in fp32


# ---------------------------------------------------------------------------------------------------- one task


def make_task(*encoders: str, projector: str = "mlp", processors: dict[str, Any] | None = None) -> ConversationTask:
    """Return a task with frozen encoders of the zoo."""
    torch.manual_seed(0)
    parts = {ENCODERS[name].modality: ENCODERS[name].build() for name in encoders}
    model = MultimodalModel(dict(parts), LANGUAGE_MODELS["llama"].build(), init_projector_type=projector)
    model.train(encoders_mode=dict.fromkeys(parts, (False, True)), llm_mode=True)
    made = {ENCODERS[name].modality: processor_of(name) for name in encoders}
    processor = MultimodalProcessor({**made, **(processors or {})}, tokenizer(), model=model)
    return ConversationTask("multimodal", model, ChatCollator(processor, data_config("data.json", max_length=512)))


def run_config(folder: Path, **features: Any) -> RunConfig:
    return RunConfig(
        output=folder / "run",
        model={"given": "it"},
        data={"train": "data.json"},
        features={"cache": True, **features},
    )


def samples(modality: str, counts: tuple[int, ...] = (2, 0, 1, 3)) -> list[Sample]:
    """Return samples with so many items each, of several sizes."""
    sizes = [(20, 20), (32, 16), (16, 40), (24, 24), (48, 16), (20, 36)]
    items = iter(
        [Media("image", image(*size, seed=seed)) for seed, size in enumerate(sizes)]
        if modality == "vision"
        else [Media("audio", sound(900 * (seed + 1), seed)) for seed in range(6)]
    )
    return [
        Sample(
            f"x:{number}",
            (
                Message("user", ("what is", *(next(items) for _ in range(count)), "now")),
                Message("assistant", ("a cat or a dog",)),
            ),
        )
        for number, count in enumerate(counts)
    ]


def run_step(task: ConversationTask, batch: CollatedBatch, placement: DevicePlacement = FP32) -> dict[str, Tensor]:
    """Return the loss and every gradient of a batch."""
    task.model.zero_grad()
    with placement.forward_context():
        loss = task.loss(placement.move_batch(batch.inputs))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def count_calls(task: ConversationTask) -> Iterator[dict[str, int]]:
    """Count how often each encoder runs."""
    counts = dict.fromkeys(task.model.encoders, 0)

    def counting(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[name] += 1

        return count

    hooks = [e.module.register_forward_hook(counting(name)) for name, e in task.model.encoders.items()]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", VISION + AUDIO)
def test_cached_items_are_not_encoded_and_change_nothing(name: str, tmp_path: Path) -> None:
    task, modality = make_task(name), ENCODERS[name].modality
    given = samples(modality)
    plain = run_step(task, task.collator(given))
    with use_feature_cache(task, run_config(tmp_path), FP32) as kept, count_calls(task) as ran:
        assert kept is not None
        first = run_step(task, task.collator(given))
        assert ran[modality] == 1 and (kept.hits, kept.misses) == (0, 6)
        kept.wait()
        again = task.collator(given)
        assert "pixel_values" not in again.inputs[modality] and again.items == {modality: 6}
        second = run_step(task, again)
        assert ran[modality] == 1 and (kept.hits, kept.misses) == (6, 6)
        files = sorted(kept.folder.rglob("*.safetensors"))
        assert len(files) == 6 and kept.used == sum(path.stat().st_size for path in files)
        for path in files[::2]:  # now some of a sample are known, and some are not
            path.unlink()
        mixed = run_step(task, task.collator(given))
        assert ran[modality] == 2 and (kept.hits, kept.misses) == (9, 9)
    assert_equal(second, first)
    assert_close(first, plain)
    assert_close(mixed, plain)
    assert_equal(run_step(task, task.collator(given)), plain)  # nothing is left of it


@pytest.mark.parametrize("packing", [False, True])
def test_cached_items_match_in_other_batches_and_packed_rows(packing: bool, tmp_path: Path) -> None:
    task = make_task("clip", "whisper")
    task.collator.data = data_config("data.json", max_length=64, packing=packing)
    both = [*samples("vision"), *samples("audio")]
    plain = run_step(task, task.collator(both[::-1]))
    with use_feature_cache(task, run_config(tmp_path), FP32) as kept, count_calls(task) as ran:
        assert kept is not None
        for sample in both:
            run_step(task, task.collator([sample]))
        kept.wait()
        before = dict(ran)
        assert_close(run_step(task, task.collator(both[::-1])), plain)
        assert ran == before and kept.hits == 12


def test_bf16_features_are_stored_in_bf16_without_changing_the_step(tmp_path: Path) -> None:
    task, given = make_task("clip"), samples("vision")
    plain = run_step(task, task.collator(given), BF16)
    with use_feature_cache(task, run_config(tmp_path), BF16) as kept:
        assert kept is not None
        assert_equal(run_step(task, task.collator(given), BF16), plain)
        kept.wait()
        assert_equal(run_step(task, task.collator(given), BF16), plain)
        found = kept.stores["vision"].load(next(kept.folder.rglob("*.safetensors")).stem)
        assert found is not None and found.dtype == torch.bfloat16


def test_truncated_sample_keeps_its_first_items(tmp_path: Path) -> None:
    task = make_task("clip")
    task.collator.data = data_config("data.json", max_length=20, too_long="cut")
    first, second, third, *_ = (media for sample in samples("vision") for media in sample.media)
    turns = (
        Message("user", (first, "what")),
        Message("assistant", ("a cat",)),
        Message("user", (second, "or", third)),
        Message("assistant", ("no",)),
    )
    given = [Sample("x:1", turns)]
    plain = task.collator(given)
    with use_feature_cache(task, run_config(tmp_path), FP32) as kept:
        assert kept is not None
        assert_close(run_step(task, task.collator(given)), run_step(task, plain))
        kept.wait()
        assert_close(run_step(task, task.collator(given)), run_step(task, plain))
        assert kept.hits == 2 and task.collator(given).items == plain.items == {"vision": 2}


def test_reply_is_the_same_with_the_cache(tmp_path: Path) -> None:
    task = make_task("clip")
    question = samples("vision", (2,))[0].messages[:1]
    said = task.reply(question, most_tokens=4)
    with use_feature_cache(task, run_config(tmp_path), FP32):
        assert task.reply(question, most_tokens=4) == said


# ---------------------------------------------------------------------------------------------------- the key


def hits_after(change: Callable[[ConversationTask], None], folder: Path, **features: Any) -> int:
    """Return how many items are found after a task has changed."""
    for changes in (lambda task: None, change):
        task = make_task("clip", "whisper")
        changes(task)
        with use_feature_cache(task, run_config(folder, **features), FP32) as kept:
            assert kept is not None
            for modality in ("vision", "audio"):
                run_step(task, task.collator(samples(modality)))
            kept.wait()
    assert kept is not None
    return kept.hits


def change_weight(task: ConversationTask) -> None:
    with torch.no_grad():
        next(task.model.vision_encoder.module.parameters()).view(-1)[0] += 1e-3


def change_buffer(task: ConversationTask) -> None:
    task.model.vision_encoder.module.register_buffer("more", torch.zeros(1))


def change_config(task: ConversationTask) -> None:
    task.model.vision_encoder.module.config.layer_norm_eps = 1e-4


def change_dtype(task: ConversationTask) -> None:
    task.model.vision_encoder.module.double()
    task.model.vision_encoder.module.float()


def change_processor(task: ConversationTask) -> None:
    task.collator.processor.encoder_processors["vision"].image_mean = [0.4, 0.4, 0.4]


def change_extractor(task: ConversationTask) -> None:
    task.collator.processor.encoder_processors["audio"].padding_value = 0.25


def change_projector(task: ConversationTask) -> None:
    with torch.no_grad():
        for parameter in task.model.vision_encoder.projector.parameters():
            parameter.add_(0.1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda task: None, 12),
        (change_projector, 12),
        (change_dtype, 12),  # there and back: the same weights
        (change_weight, 6),
        (change_buffer, 6),
        (change_config, 6),
        (change_processor, 6),
        (change_extractor, 6),
    ],
)
def test_changed_encoder_or_processor_invalidates_the_cache(
    change: Callable[[ConversationTask], None], found: int, tmp_path: Path
) -> None:
    assert hits_after(change, tmp_path) == found


def test_other_precision_or_media_are_not_found(tmp_path: Path) -> None:
    def hits(config: RunConfig, placement: DevicePlacement, shift: int) -> int:
        task = make_task("clip")
        given = samples("vision")
        if shift:
            pixels = np.asarray(image(20, 20, seed=0)).copy()
            pixels[0, 0, 0] ^= shift
            first = given[0].messages[0].content
            changed = (first[0], Media("image", Image.fromarray(pixels)), *first[2:])
            given[0] = Sample("x:0", (Message("user", changed), given[0].messages[1]))
        with use_feature_cache(task, config, placement) as kept:
            assert kept is not None
            run_step(task, task.collator(given), placement)
        return kept.hits

    config = run_config(tmp_path)
    fewer = config.model_copy(update={"data": config.data.model_copy(update={"max_pixels": 5000})})
    assert [hits(config, FP32, 0), hits(config, FP32, 0), hits(config, FP32, 1)] == [0, 6, 5]
    assert hits(config, BF16, 0) == 0
    assert hits(fewer, FP32, 0) == 0


def test_limit_holds_and_full_disk_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, given = make_task("clip"), samples("vision")
    with use_feature_cache(task, run_config(tmp_path, limit="4 kB"), FP32) as kept:
        assert kept is not None
        first = run_step(task, task.collator(given))
        kept.wait()
        assert 0 < kept.used <= 4000
        assert_close(run_step(task, task.collator(given)), first)
        assert 0 < kept.hits < 6 and kept.problem is None

    def full(*_: Any) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cornstarch.data.feature_store.CacheFolder.write", full)
    with use_feature_cache(task, run_config(tmp_path / "other"), FP32) as kept:
        assert kept is not None
        assert_close(run_step(task, task.collator(given)), first)
        kept.wait()
        assert kept.problem is not None and "No space left" in kept.problem
        assert_close(run_step(task, task.collator(given)), first)


# ---------------------------------------------------------------------------------------------------- refusals


class RandomProcessor:
    """An image processor that adds noise, as augmentation does."""

    def __init__(self) -> None:
        self._inner = processor_of("clip")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: Any, return_tensors: str | None = None) -> Any:
        made = self._inner(images, return_tensors="pt")
        made["pixel_values"] += torch.randn_like(made["pixel_values"])
        return made


def make_trained(task: ConversationTask) -> None:
    task.model.train(encoders_mode={"vision": (True, True)})


def set_train_mode(task: ConversationTask) -> None:
    task.model.vision_encoder.module.train()


def add_callback(task: ConversationTask) -> None:
    task.model.vision_encoder.preprocess_callback = lambda inputs: inputs


def use_own_projector(task: ConversationTask) -> None:
    old = task.model.vision_encoder
    encoder = ModalEncoderModule(old.module, torch.nn.Linear(48, 32))
    encoder.set_trainable(False, True)
    task.model.vision_encoder = encoder


def use_random_processor(task: ConversationTask) -> None:
    task.collator.processor.encoder_processors["vision"] = RandomProcessor()


def ask_for_inputs(task: ConversationTask) -> None:
    task.model.preprocess_llm_callback = lambda pixel_values: {}


REFUSED: list[tuple[Callable[[ConversationTask], None], str]] = [
    (make_trained, "outputs of the vision encoder cannot be cached: it is trained"),
    (set_train_mode, "it is in train mode, where dropout"),
    (add_callback, "it has a preprocess_callback"),
    (use_own_projector, "its projector is a module of your own"),
    (use_random_processor, "its processor is random"),
    (ask_for_inputs, "preprocess_llm_callback may ask"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[change.__name__ for change, _ in REFUSED])
def test_inexact_cache_is_refused(change: Callable[[ConversationTask], None], reason: str, tmp_path: Path) -> None:
    task = make_task("clip")
    change(task)
    with pytest.raises(ConfigError, match=reason), use_feature_cache(task, run_config(tmp_path), FP32):
        pass
    assert task.collator.features is None and all(encoder.keep is None for encoder in task.model.encoders.values())


def test_encoder_that_mixes_items_is_refused(tmp_path: Path) -> None:
    """Wav2Vec2 takes the mean over the whole row, padding included."""
    with (
        pytest.raises(ConfigError, match="gives other features beside another item"),
        use_feature_cache(make_task("wav2vec2"), run_config(tmp_path), FP32),
    ):
        pass


FROZEN: dict[str, Any] = {"model": {"encoders": {"vision": {"train": "projector"}}}, "features": {"cache": True}}
DESCRIBED = [
    ({"model": {"encoders": {"vision": {"train": "full"}}}}, "vision is trained"),
    ({"model": {"encoders": {"vision": {"train": "lora"}}}}, "vision is trained"),
    ({"parallel": {"modules": {"model": {"tp": 2}}}}, "data parallelism only"),
    ({"parallel": {"modules": {"vision": {}, "language_model": {"cp": 2}}}}, "data parallelism only"),
    ({"parallel": {"modules": {"vision": {}, "language_model": {"stages": 2}}}}, "data parallelism only"),
    ({"features": {"limit": "much"}}, 'features.limit = "much"'),
    ({"features": {"limit": "5 GiB"}}, 'features.limit = "5 GiB"'),
]


@pytest.mark.parametrize(("sections", "reason"), DESCRIBED)
def test_config_is_refused_before_start(sections: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        tiny_config(tmp_path, **merge(FROZEN, sections))


@pytest.mark.parametrize(("limit", "size"), [("50 GB", 50 * 10**9), ("1.5 TB", 1_500_000_000_000), ("800kB", 800_000)])
def test_limit_is_parsed_to_bytes(limit: str, size: int, tmp_path: Path) -> None:
    assert run_config(tmp_path, limit=limit).features.limit_bytes == size


# ---------------------------------------------------------------------------------------------------- whole runs

TWO_EPOCHS: dict[str, Any] = {**FROZEN, "loop": {"steps": None, "epochs": 2.0}}
NO_DROPOUT: dict[str, Any] = merge(TWO_EPOCHS, {"model": {"language_model": {"config": {"attention_dropout": 0.0}}}})


def train_lines(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("workers", [0, 2])
def test_second_epoch_does_not_run_the_encoder(tmp_path: Path, workers: int) -> None:
    trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'plain'}", "features.cache=false", **TWO_EPOCHS)).fit()
    first = trainer_of(tiny_config(tmp_path, f"data.workers={workers}", **TWO_EPOCHS))
    take_step = first.step

    def step_and_wait(batch: StepBatch) -> StepResult:
        result = take_step(batch)
        assert first.run_model.features is not None
        first.run_model.features.wait()  # features are written in the background, sooner or later than the next step
        return result

    first.step = step_and_wait  # type: ignore[method-assign]
    first.fit()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)
    lines = train_lines(tmp_path / "run")
    if not workers:  # they read ahead, into the second epoch, before all of the first is there
        assert [line["features"]["misses"] for line in lines][6:] == [24] * 8
        assert lines[-1]["features"]["hits"] == 24
    summary = json.loads((tmp_path / "run" / "run.json").read_text())["features"]
    assert summary["bytes"] == lines[-1]["features"]["bytes"] > 0
    assert summary["folder"] == str(tmp_path / "feature_cache")
    assert "Feature cache" in (tmp_path / "run" / "report.html").read_text()

    other = trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'other'}", f"data.workers={workers}", **TWO_EPOCHS))
    other.setup()
    with count_calls(other.task) as ran:  # type: ignore[arg-type]
        for batch in other.batches():
            other.step(batch)
    assert ran == {"vision": 0}  # another run finds all that this one has made
    features = other.run_model.features
    assert features is not None and (features.hits, features.misses) == (48, 0)


def train_on_rank(folder: str, kind: str) -> tuple[dict[int, float], int, int]:
    """Train two epochs twice in one of two processes; return the losses, and hits and runs of the encoder at last."""
    found: dict[int, float] = {}
    ran = hits = 0

    def count(*_: Any) -> None:
        nonlocal ran
        ran += 1

    for name in ("first", "second"):
        config = tiny_config(Path(folder), f"output={folder}/{name}", f"parallel.data.kind={kind}", **NO_DROPOUT)
        trainer = trainer_of(config)
        trainer.setup()
        ran = 0
        trainer.model.vision_encoder.module.register_forward_hook(count)  # type: ignore[union-attr]
        for batch in trainer.batches():
            result = trainer.step(batch)
            found[result.step] = float(result.loss)
        assert trainer.run_model.features is not None
        trainer.run_model.features.wait()
        hits = trainer.run_model.features.hits
        dist.barrier()
    return found, hits, ran


@pytest.mark.parametrize("kind", ["ddp", "zero1", "fsdp2", "fsdp1"])
def test_two_ranks_share_the_cache(tmp_path: Path, kind: str) -> None:
    trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'plain'}", "features.cache=false", **NO_DROPOUT)).fit()
    results = pool().run(2, train_on_rank, str(tmp_path), kind)
    together = {step: sum(found[step] for found, _, _ in results) for step in results[0][0]}
    assert together == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert sum(hits for _, hits, _ in results) >= 48
    assert len(list((tmp_path / "feature_cache").rglob("*.safetensors"))) == 24
    # Where parameters are gathered, an encoder runs on one stand-in per step: another process may need its part.
    assert {ran for _, _, ran in results} == ({14} if kind.startswith("fsdp") else {0})
