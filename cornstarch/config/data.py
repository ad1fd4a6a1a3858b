"""The data that a model is trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from cornstarch.config.fields import Also, Fraction, NotNegative, Positive, PositiveFloat, Section

DataFormat = Literal[
    "auto", "llava", "sharegpt", "text", "pairs", "rows", "webdataset", "datasets", "callable", "given"
]  # fmt: skip


class SourceConfig(Section):
    """One source of samples."""

    path: str
    """A JSON or JSONL file, WebDataset tars (`data/{000..009}.tar`), a Hugging Face dataset (a folder written by
    `save_to_disk`, parquet, arrow or csv files, or a hub name), or `package.module:function` that returns samples."""
    format: DataFormat = "auto"
    """auto: detected from the content; datasets: a Hugging Face dataset; rows: any fields, for a model of your own;
    given: passed in Python."""
    media: str | None = None
    """The folder that images and sounds are relative to. Default: the folder of `path`."""
    name: str | None = None
    """Its name in evaluations. Default: the end of `path`."""
    weight: PositiveFloat = 1.0
    """How often each sample comes per epoch: 1 is once, 0.5 every other one (the others next time), 2 is twice."""
    limit: Positive | None = None
    """Use only this many samples, the first ones."""
    arguments: dict[str, Any] = {}
    """For a callable: its own. Else `columns`, {name of ours: name in the file}; for a Hugging Face dataset also
    `split`, `name`, `revision`, and `labels`: names or numbers."""


class DataConfig(Section):
    """The data that a model is trained on."""

    train: list[SourceConfig] = Field(min_length=1)
    evaluation: Annotated[list[SourceConfig], Also("eval")] = []
    max_length: Annotated[Positive, Also("max_seq_length")] = 2048
    """The most tokens of a sample; images are never cut."""
    too_long: Literal["skip", "cut", "error"] = "skip"
    """What to do with a longer sample."""
    packing: bool = False
    """Put several samples in one row instead of padding."""
    balance: Literal["off", "cost"] = "off"
    """cost: distribute the samples of a step so that all processes, and all microbatches, have as much to compute. The
    cost of a sample is predicted from its text and the headers of its media; the loss stays the same."""
    balance_encoders: Annotated[bool, Also("split_images")] = False
    """Let processes encode one another's images (and sounds): those that exceed a process's even part are encoded by
    others. The loss stays the same, and each process reads its own samples only."""
    pad_to: Literal["auto"] | Positive = "auto"
    """Pad rows of conversations and documents to a multiple of this many tokens, at most `max_length`. auto: no
    padding; or, where the model is compiled, to one of eight lengths, packed rows to `max_length`."""
    train_on: Literal["answers", "everything"] = "answers"
    """Which tokens count in the loss: those of the assistant's messages, or all text."""
    system: str | None = None
    """A system message for samples that have none."""
    chat_template: str | None = None
    """A Jinja chat template. Default: the tokenizer's, else a plain one."""
    shuffle: bool = True
    """A new random order for every epoch."""
    workers: Annotated[NotNegative, Also("num_workers", "dataloader_num_workers")] = 0
    """Processes that read and decode."""
    prefetch: Annotated[Positive, Also("prefetch_factor", "dataloader_prefetch_factor")] = 2
    """Batches that each of them prepares ahead."""
    skip_limit: Fraction = 0.05
    """Stop when more than this fraction of the samples is broken."""
    max_pixels: Positive = 89_478_485
    """Images with more pixels are refused as decompression bombs."""

    @field_validator("balance", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML's `off` is false

    @field_validator("train", "evaluation", mode="before")
    @classmethod
    def _read_sources(cls, value: Any) -> Any:
        """Allow one path, one source, or a list of either."""
        many = value if isinstance(value, list) else [value]
        return [{"path": source} if isinstance(source, str) else source for source in many]
