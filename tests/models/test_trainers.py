"""Trainers of other libraries train a whole model like a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import lightning
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionModel,
    Trainer,
    TrainingArguments,
    pipeline,
)
from trl import SFTConfig, SFTTrainer

from cornstarch import MultimodalModel, MultimodalModelProcessor
from cornstarch.errors import ConfigError
from tests.documented.hub import make_hub, tokenizer
from tests.models.small import PATCHES, VISION, clip, llama

Sample = dict[str, Tensor]
STEPS, SAMPLES = 3, 4


def build_model(**sizes: Any) -> MultimodalModel:
    """Return a model with tied embeddings, in whose vocabulary the placeholder is."""
    language_model = llama(vocab_size=VISION + 2, tie_word_embeddings=True, **sizes)
    torch.manual_seed(3)
    model = MultimodalModel({"vision": clip()}, language_model)
    model.set_modality_token_ids({"vision": VISION})
    return model.train()


def make_samples(count: int = STEPS * SAMPLES) -> list[Sample]:
    """Return texts of different lengths, most of them with an image."""
    noise = torch.Generator().manual_seed(5)
    samples = []
    for number in range(count):
        text = torch.randint(3, VISION, (3 + number % 5,), generator=noise)
        image = torch.randn(3, 8, 8, generator=noise)
        ids = torch.cat([text[:1], torch.full((PATCHES,), VISION), text[1:]])
        samples.append({"input_ids": ids, "pixel_values": image} if number % 4 else {"input_ids": text})
    return samples


def collate(samples: Sequence[Sample], labels_at_placeholders: bool = False) -> dict[str, Tensor]:
    """Return a padded batch; labels are the tokens."""
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    if not labels_at_placeholders:
        labels = labels.masked_fill(ids == VISION, -100)
    images = [torch.as_tensor(one["pixel_values"]) for one in samples if one.get("pixel_values") is not None]
    pixels = {"pixel_values": torch.stack(images)} if images else {}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **pixels}


def collate_all_labels(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Return a batch with labels at placeholders, too: the model leaves them out."""
    return collate(samples, labels_at_placeholders=True)


def make_optimizer(model: nn.Module) -> SGD:
    return SGD([one for one in model.parameters() if one.requires_grad], lr=0.2, momentum=0.9)


def train_by_hand(model: nn.Module, microbatches: int = 1) -> list[float]:
    """Train on the tokens of a step alike, whichever microbatch they are in."""
    optimizer, losses = make_optimizer(model), []
    samples = make_samples()
    for step in range(STEPS):
        own = samples[step * SAMPLES : (step + 1) * SAMPLES]
        size = SAMPLES // microbatches
        batches = [collate(own[first : first + size]) for first in range(0, SAMPLES, size)]
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
        total = 0.0
        for batch, count in zip(batches, counts, strict=True):
            loss = model(**batch).loss * count / sum(counts)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    weights = dict(expected.named_parameters())
    assert weights.keys() == dict(found.named_parameters()).keys()
    for name, weight in found.named_parameters():
        torch.testing.assert_close(
            weight, weights[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


class InOrder(IterableDataset):  # type: ignore[type-arg]
    """Samples in their order."""

    def __iter__(self) -> Iterator[Sample]:
        return iter(make_samples())


def arguments(
    folder: Path, microbatches: int = 1, kind: type[TrainingArguments] = TrainingArguments, **options: Any
) -> Any:
    return kind(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES // microbatches,
        gradient_accumulation_steps=microbatches,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **{"save_strategy": "no", "gradient_checkpointing": False, **options},
    )


def make_trainer(model: nn.Module, folder: Path, collator: Callable[..., Any] = collate, **options: Any) -> Trainer:
    return Trainer(
        model=model,
        args=arguments(folder, **options),
        train_dataset=InOrder(),
        data_collator=collator,
        optimizers=(make_optimizer(model), None),
    )


def logged(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# ---------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("collator", [collate, collate_all_labels])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "recomputed"])
def test_transformers_trainer(tmp_path: Path, collator: Callable[..., Any], options: dict[str, Any]) -> None:
    expected = build_model()
    losses = train_by_hand(expected)
    model = build_model()
    trainer = make_trainer(model, tmp_path, collator, **options)
    trainer.train()
    assert logged(trainer) == pytest.approx(losses, rel=1e-4)
    assert_same(model, expected)
    assert model.is_gradient_checkpointing == bool(options)


def test_transformers_trainer_accumulates(tmp_path: Path) -> None:
    expected = build_model()
    losses = train_by_hand(expected, microbatches=2)
    model = build_model()
    trainer = make_trainer(model, tmp_path, microbatches=2)
    trainer.train()
    assert logged(trainer) == pytest.approx(losses, rel=1e-4)
    assert_same(model, expected)
    with pytest.raises(ConfigError, match=r"counted over several batches.*\n?.*Set these labels to -100"):
        make_trainer(build_model(), tmp_path, collate_all_labels, microbatches=2).train()


def test_transformers_trainer_saves_and_continues(tmp_path: Path) -> None:
    model = build_model()
    trainer = make_trainer(model, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    weights = safetensors.torch.load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert "language_model.lm_head.weight" not in weights
    assert "language_model.model.embed_tokens.weight" in weights
    again = build_model()
    trainer = make_trainer(again, tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(again, model)
    with pytest.raises(ConfigError, match="transformers' Trainer"):
        MultimodalModel.from_pretrained(tmp_path / "checkpoint-2")


# ---------------------------------------------------------------------------------------------------- TRL


def make_sft_trainer(
    model: nn.Module, folder: Path, collator: Callable[..., Any] = collate, **options: Any
) -> SFTTrainer:
    samples = make_samples()
    rows = [{name: value.tolist() for name, value in sample.items()} for sample in samples]
    table = datasets.Dataset.from_list([{"pixel_values": None, **row} for row in rows])
    args = arguments(folder, kind=SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None, **options)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=table,
        data_collator=collator,
        processing_class=tokenizer(),
        optimizers=(make_optimizer(model), None),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(table)  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize("microbatches", [1, 2])
def test_trl_sft_trainer(tmp_path: Path, microbatches: int) -> None:
    expected = build_model()
    losses = train_by_hand(expected, microbatches)
    model = build_model()
    trainer = make_sft_trainer(model, tmp_path, microbatches=microbatches)
    trainer.train()
    assert logged(trainer) == pytest.approx(losses, rel=1e-4)
    assert_same(model, expected)


def test_trl_is_refused_labels_that_it_would_train_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"computed outside of the model.*Set them to -100"):
        make_sft_trainer(build_model(), tmp_path, collate_all_labels).train()


# ---------------------------------------------------------------------------------------------------- Accelerate


def test_accelerate(tmp_path: Path) -> None:
    expected = build_model()
    losses = train_by_hand(expected)
    model = build_model()
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(InOrder(), batch_size=SAMPLES, collate_fn=collate_all_labels)
    wrapped, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    found = []
    for batch in loader:
        loss = wrapped(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found == pytest.approx(losses, rel=1e-4)
    assert_same(model, expected)
    state = accelerator.get_state_dict(wrapped)
    accelerator.unwrap_model(wrapped).save_pretrained(
        tmp_path / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    assert_same(MultimodalModel.from_pretrained(tmp_path / "model"), expected)


# ---------------------------------------------------------------------------------------------------- Lightning


class Module(lightning.LightningModule):
    """A model as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> SGD:
        return make_optimizer(self.model)


def test_lightning(tmp_path: Path) -> None:
    expected = build_model()
    losses = train_by_hand(expected)
    module = Module()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(InOrder(), batch_size=SAMPLES, collate_fn=collate_all_labels))
    assert module.losses == pytest.approx(losses, rel=1e-4)
    assert_same(module.model, expected)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = Module.load_from_checkpoint(tmp_path / "end.ckpt")
    assert_same(again.model, expected)


# ---------------------------------------------------------------------------------------------------- PEFT


def adapt(model: nn.Module) -> PeftModel:
    """Put adapters into all parts of a model."""
    torch.manual_seed(9)
    targets = ["q_proj", "projection"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))  # type: ignore[arg-type, return-value]


def test_peft_over_the_whole_model(tmp_path: Path) -> None:
    expected = adapt(build_model())
    losses = train_by_hand(expected)
    model = adapt(build_model())
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert {
        part for part in ("vision_encoder.module", "projector", "language_model") if any(part in n for n in trained)
    }
    assert all("lora_" in name for name in trained)
    trainer = make_trainer(model, tmp_path, collate_all_labels, gradient_checkpointing=True)
    trainer.train()
    assert logged(trainer) == pytest.approx(losses, rel=1e-4)
    assert losses[-1] != losses[0]
    assert_same(model, expected)
    model.save_pretrained(str(tmp_path / "adapters"))
    loaded = PeftModel.from_pretrained(build_model(), str(tmp_path / "adapters"))  # type: ignore[arg-type]
    batch = collate(make_samples(2))
    loaded.eval(), model.eval()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    prompt = {"input_ids": batch["input_ids"], "pixel_values": batch["pixel_values"]}
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] == batch["input_ids"].shape[1] + 2


# ---------------------------------------------------------------------------------------------------- what they ask


def test_the_config_is_that_of_the_parts() -> None:
    model = build_model()
    assert model.config is model.config
    assert model.config.get_text_config() is model.language_model.config
    assert model.config.vision_config is model.vision_encoder.module.config
    assert model.config.tie_word_embeddings
    assert model.config.to_dict()["text_config"]["model_type"] == "llama"
    assert model.can_generate() and model.generation_config is model.language_model.generation_config
    plain = sum(one.numel() for one in model.parameters())
    assert model.num_parameters() == plain
    assert model.num_parameters(exclude_embeddings=True) == plain - model.get_input_embeddings().weight.numel()


def test_state_dicts_have_tied_weights_once() -> None:
    model = build_model()
    state = model.state_dict()
    assert "language_model.lm_head.weight" not in state
    again = build_model()
    nn.init.zeros_(again.language_model.lm_head.weight)
    assert again.load_state_dict(state).missing_keys == []
    assert_same(again, model)
    untied = build_model()
    untied.language_model.lm_head.weight = nn.Parameter(untied.language_model.lm_head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="lm_head"):
        untied.load_state_dict(state)


def test_pipeline(tmp_path: Path) -> None:
    hub = make_hub(tmp_path)
    vision, text = hub["openai/clip-vit-base-patch32"], hub["meta-llama/Llama-3.2-1B"]
    model = MultimodalModel(
        {"vision": CLIPVisionModel.from_pretrained(vision)}, AutoModelForCausalLM.from_pretrained(text)
    ).eval()
    processor = MultimodalModelProcessor(
        tokenizer=AutoTokenizer.from_pretrained(text),
        image_processor=CLIPImageProcessor.from_pretrained(vision),
        model=model,
    )
    image, prompt = Image.new("RGB", (40, 60), "red"), "<vision> What is it ?"
    pipe: Any = pipeline("image-text-to-text", model=model, processor=processor, device="cpu")
    (found,) = pipe(images=image, text=prompt, max_new_tokens=3)
    inputs = processor(text=prompt, images=image, return_tensors="pt")
    row = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, -3:]
    assert found["generated_text"].endswith(processor.decode(row, skip_special_tokens=True))
    assert found["input_text"] == prompt


def test_push_to_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uploads: list[Any] = []

    def upload_folder(self: Any, **options: Any) -> str:
        folder = Path(options["folder_path"])
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        uploads.append((options["repo_id"], options["commit_message"], files, (folder / "README.md").read_text()))
        return "https://hub/commit"

    api = huggingface_hub.HfApi
    monkeypatch.setattr(api, "create_repo", lambda self, name, **_: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr(api, "upload_folder", upload_folder)
    model = build_model()
    model.add_model_tags(["sft"])
    assert model.push_to_hub("mine", tags=["own"]) == "https://hub/commit"
    model.save_pretrained(tmp_path / "other", push_to_hub=True, commit_message="Now")
    (repo, message, files, card), (other, now, *_) = uploads
    assert (repo, message) == ("me/mine", "Upload model") and (other, now) == ("me/other", "Now")
    assert {"cornstarch_model.json", "language_model/model.safetensors", "vision_encoder/config.json"} <= {*files}
    assert all(tag in card for tag in ("cornstarch", "sft", "own"))


def test_weights_to_save_can_be_given(tmp_path: Path) -> None:
    model, other = build_model(), build_model()
    with torch.no_grad():
        for one in other.parameters():
            one.add_(1)
    model.save_pretrained(tmp_path / "model", state_dict=other.state_dict())
    assert_same(MultimodalModel.from_pretrained(tmp_path / "model"), other)
    state = other.state_dict()
    del state["vision_encoder.projector.projection.bias"]
    with pytest.raises(ConfigError, match=r"state_dict lacks vision_encoder.projector.projection.bias"):
        model.save_pretrained(tmp_path / "second", state_dict=state)
    model.save_pretrained(tmp_path / "third", is_main_process=False)
    assert not (tmp_path / "third").exists()
