"""What it is trained on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from cornstarch.train.config.values import AboveZero, NotNegative, Positive, Section, Share

DataFormat = Literal[
    "auto", "llava", "sharegpt", "text", "pairs", "rows", "webdataset", "datasets", "callable", "given"
]  # fmt: skip


class SourceConfig(Section):
    """One source of samples."""

    path: str
    """A JSON or JSONL file, WebDataset tars (`data/{000..009}.tar`), a Hugging Face dataset (a folder written by
    `save_to_disk`, parquet, arrow or csv files, or a hub name), or `package.module:function` that returns samples."""
    format: DataFormat = "auto"
    """auto: told from the content; datasets: a Hugging Face dataset; rows: any fields, for a model of your own; given:
    handed over in Python."""
    media: str | None = None
    """The folder that images and sounds are relative to. Default: the folder of `path`."""
    name: str | None = None
    """What it is called in evaluations. Default: the end of `path`."""
    weight: AboveZero = 1.0
    """How often each sample comes per epoch: 1 is once, 0.5 every other one (the others next time), 2 is twice."""
    limit: Positive | None = None
    """Use the first so many samples only."""
    arguments: dict[str, Any] = {}
    """For a callable: its own. Else `columns`, {name of ours: name in the file}; for a Hugging Face dataset also
    `split`, `name`, `revision`, and `labels`: names or numbers."""


class DataConfig(Section):
    """What it is trained on."""

    train: list[SourceConfig] = Field(min_length=1)
    evaluation: list[SourceConfig] = []
    max_length: Positive = 2048
    """The most tokens of a sample; images are never cut."""
    too_long: Literal["skip", "cut", "error"] = "skip"
    """What to do with a longer sample."""
    packing: bool = False
    """Put several samples in one row instead of padding."""
    balance: Literal["off", "cost"] = "off"
    """cost: deal out the samples of a step so that processes, and portions, have as much to compute as one another.
    What a sample costs is predicted from its text and the headers of its media; the loss stays the same."""
    split_images: bool = False
    """Let processes lend images (and sounds) to one another: what a sample has beyond an even share is encoded by
    others. The loss stays the same, and each process reads its own samples only."""
    pad_to: Literal["auto"] | Positive = "auto"
    """Fill rows of conversations and documents up to a multiple of so many tokens, at most `max_length`. auto: not at
    all; or, where the model is compiled, to one of eight lengths, packed rows to `max_length`."""
    train_on: Literal["answers", "everything"] = "answers"
    """Which tokens count: those of the assistant's messages, or all text."""
    system: str | None = None
    """A system message for samples that have none."""
    chat_template: str | None = None
    """A Jinja chat template. Default: the tokenizer's, else a plain one."""
    shuffle: bool = True
    """A new random order for every epoch."""
    workers: NotNegative = 0
    """Processes that read and decode."""
    prefetch: Positive = 2
    """Batches that each of them prepares ahead."""
    skip_limit: Share = 0.05
    """Stop when more than this share of the samples is broken."""
    max_pixels: Positive = 89_478_485
    """Images with more pixels are refused as decompression bombs."""

    @field_validator("balance", mode="before")
    @classmethod
    def _balance_is_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML's `off` is false

    @field_validator("train", "evaluation", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        """Allow one path, one source, or a list of either."""
        many = value if isinstance(value, list) else [value]
        return [{"path": source} if isinstance(source, str) else source for source in many]
