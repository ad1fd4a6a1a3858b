"""Tiny models of each task, tokenizers and rows for them, and the comparisons that hold for all tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from cornstarch.config import RunConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.formats import open_sources
from cornstarch.tasks.task import Task

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
WORDS = "a and cat dog is it loud look now or sound the this what one two three four five six".split()
VOCABULARY = 64

T5 = {"model_type": "t5", "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
      "num_heads": 2, "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
BART = {"model_type": "bart", "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        "forced_eos_token_id": None}  # fmt: skip
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
BERT = {"model_type": "bert", **_TEXT, "max_position_embeddings": 32, "pad_token_id": 0}
ROBERTA = {"model_type": "roberta", **_TEXT, "max_position_embeddings": 34, "pad_token_id": 0}
LLAMA = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}  # fmt: skip
VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
       "intermediate_size": 32, "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0,
       "attention_probs_dropout_prob": 0.0}  # fmt: skip
VIT_PROCESSOR = {"class_name": "ViTImageProcessor", "size": {"height": 16, "width": 16}}


def words(**options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words that puts a start and an end token around a text."""
    table = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    table |= {f"word{number}": number for number in range(len(table), VOCABULARY)}
    inner = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **{**names, "mask_token": "<mask>", **options})


def tokenizer_folder(folder: Path, **options: Any) -> str:
    """Write the tokenizer, and return where."""
    words(**options).save_pretrained(folder / "words")
    return str(folder / "words")


def run_config(data: Path | str | Sequence[Any], evaluation: Any = (), seed: int = 0, **model: Any) -> RunConfig:
    """Return the description of a run with one whole model; what belongs to `data` is told by its name."""
    limits = {key: model.pop(key) for key in list(model) if key in ("max_length", "too_long", "packing", "system")}
    limits |= {key: model.pop(key) for key in list(model) if key in ("chat_template", "train_on", "max_pixels")}
    described = {"train": str(data) if isinstance(data, Path) else data, "evaluation": list(evaluation), **limits}
    return RunConfig.model_validate({"seed": seed, "model": {"whole": model}, "data": described})


def batches(task: Task, config: RunConfig, size: int) -> list[CollatedBatch]:
    """Return all training rows in batches, as the collator makes them."""
    source = open_sources(config.data.train)
    prepared = [task.collator.prepare(source[index]) for index in range(len(source))]
    return [task.collator.join(prepared[start : start + size]) for start in range(0, len(prepared), size)]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of all gradients, and set them to none."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def check_microbatches(task: Task, config: RunConfig) -> None:
    """The loss and every gradient of all rows at once are those of microbatches, weighted by what they count."""
    (whole,) = batches(task, config, 1000)
    task.model.train()
    loss = task.loss(whole.inputs)
    loss.backward()
    expected = gradients(task.model)
    for size in (1, 2, 3):
        microbatches = batches(task, config, size)
        assert sum(microbatch.trained_tokens for microbatch in microbatches) == whole.trained_tokens
        total = 0.0
        for microbatch in microbatches:
            part = task.loss(microbatch.inputs) * (microbatch.trained_tokens / whole.trained_tokens)
            part.backward()
            total += part.item()
        torch.testing.assert_close(torch.tensor(total), loss.detach(), rtol=1e-5, atol=1e-6)
        for name, gradient in gradients(task.model).items():
            assert (gradient is None) == (expected[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def check_measures_add_up(task: Task, config: RunConfig) -> None:
    """What is measured of all rows at once is the sum of what is measured of microbatches."""
    task.model.eval()
    with torch.no_grad():
        (whole,) = [task.measure(batch) for batch in batches(task, config, 1000)]
        first, *others = [task.measure(batch) for batch in batches(task, config, 2)]
        for other in others:
            first = first + other
    assert first.sums.keys() == whole.sums.keys()
    for name, (total, count) in whole.sums.items():
        assert first.sums[name][1] == count
        torch.testing.assert_close(first.sums[name][0], total, rtol=1e-5, atol=1e-5, msg=name)


def check_folder(task: Task, config: RunConfig, folder: Path, **tolerance: float) -> nn.Module:
    """What is saved loads again and gives the same logits; the model that was saved stays as it is.

    Without a tolerance the weights are those that were saved, to the bit; some processors round products otherwise if
    weights lie elsewhere in memory.
    """
    (batch,) = batches(task, config, 1000)
    task.model.eval()
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    with torch.no_grad():
        expected = task.logits(task.model, batch.inputs)
        task.save(folder)
        loaded = task.load(folder).eval()
        found = task.logits(loaded, batch.inputs)
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 1e-6, "atol": 1e-8}))
    if not tolerance:
        torch.testing.assert_close(dict(loaded.state_dict()), before, rtol=0, atol=0)
    after = task.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return loaded


def disturb(model: nn.Module) -> None:
    """Move every weight, so that adapters and heads are not zero and answers differ."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
