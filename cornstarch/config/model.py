"""The model: encoders, a language model, adapters; or any whole model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cornstarch.config.fields import Fraction, Positive, Precision, Rate, Section, TrainMode


class LoraConfig(Section):
    """Low-rank adapters (PEFT)."""

    rank: Positive = 16
    """The width of the adapters."""
    alpha: Positive = 32
    """Adapters are scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """The fraction of an adapter's inputs that is dropped while training."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the layers that get adapters, as PEFT takes them."""


class PartConfig(Section):
    """One Hugging Face model."""

    path: str | None = None
    """A local folder or a hub name."""
    config: dict[str, Any] | None = None
    """Instead of `path`: build from a config (`model_type` and sizes) with random weights."""
    class_name: str | None = None
    """The class, where transformers cannot tell: `transformers.CLIPVisionModel`."""
    train: TrainMode = "full"
    """full: all weights; lora: adapters; projector: the projector only (encoders); frozen: nothing."""
    learning_rate: Rate | None = None
    """Default: the optimizer's."""
    weight_decay: Rate | None = None
    """Default: the optimizer's."""
    dtype: Precision | None = None
    """The precision of the stored weights. Default: fp32 where trained, the run's precision where frozen."""
    lora: LoraConfig = LoraConfig()
    """For `train: lora`."""
    trust_remote_code: bool = False
    """Allow Python code in the model's folder to run."""

    @model_validator(mode="after")
    def _check_source(self) -> PartConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either `path` (a folder or a hub name) or `config` (sizes, random weights)")
        return self


class EncoderConfig(PartConfig):
    """An encoder with its projector."""

    train: TrainMode = "projector"
    """projector: the projector only; full, lora: the encoder as well; frozen: neither."""
    projector: Literal["linear", "mlp"] = "mlp"
    """One linear layer, or two with an activation between them."""
    activation: str = "gelu"
    """The activation of an mlp projector, by its name in transformers."""
    projector_learning_rate: Rate | None = None
    """Default: the part's learning rate."""
    token: str | None = None
    """The placeholder in texts. Default: `<name>`."""
    attention: Literal["causal", "item", "modality"] = "causal"
    """How its tokens see each other: like text, within one item, or within the modality in both directions."""
    processor: str | None = None
    """Folder or hub name of the image processor or feature extractor. Default: `path`."""
    processor_config: dict[str, Any] | None = None
    """Instead of `processor`: `class_name` and arguments of an image processor or feature extractor."""


class LanguageModelConfig(PartConfig):
    """The language model."""

    train: Literal["full", "frozen", "lora"] = "full"
    """full: all weights; lora: adapters; frozen: nothing."""
    tokenizer: str | None = None
    """Folder or hub name. Default: `path`."""


class WholeModelConfig(PartConfig):
    """Any one model: a saved Cornstarch model, a Hugging Face multimodal model, a plain LLM, T5, BERT, …"""

    train: Literal["full", "frozen", "lora"] = "full"
    """full: all weights; lora: adapters; frozen: nothing."""
    task: Literal[
        "auto", "multimodal", "causal-lm", "seq2seq-lm", "masked-lm", "sequence-classification", "image-classification"
    ] = "auto"
    """What the model does; auto: what its config says, and the data where a model can do several things."""
    tokenizer: str | None = None
    """Folder or hub name. Default: `path`."""
    processor: str | None = None
    """For images: folder or hub name of the image processor. Default: `path`."""
    processor_config: dict[str, Any] | None = None
    """Instead of `processor`: `class_name` and arguments of an image processor."""
    labels: Annotated[list[str], Field(min_length=2)] | None = None
    """For classification: all labels, in the order of their numbers. Default: the model's, else those in the training
    data."""

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: list[str] | None) -> list[str] | None:
        twice = sorted({label for label in value or [] if (value or []).count(label) > 1})
        if twice:
            raise ValueError(f"labels has {', '.join(map(repr, twice))} more than once")
        return value


class FactoryConfig(Section):
    """A model built by a Python function: `my_package.models:build`; it returns a module, or (module, loss)."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    arguments: dict[str, Any] = {}
    """Arguments of the function."""
    loss: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """A function of (module, batch) that returns the loss, as `package.module:function`."""
    collate: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """A function that collates a list of rows, with images and sounds decoded, into a batch, a dict. Default: numbers,
    arrays and images are stacked, texts stay lists."""


class ModelConfig(Section):
    """What is trained: `language_model` with `encoders`, or one `whole` model, or a `factory`."""

    language_model: LanguageModelConfig | None = None
    """The language model that the encoders are composed with."""
    encoders: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], EncoderConfig] = {}
    """By modality name: vision, audio, or any other."""
    whole: WholeModelConfig | None = None
    """Or: one model as it is."""
    factory: FactoryConfig | None = None
    """Or: a Python function that builds the model."""
    given: str | None = None
    """Or: the name of a model that is passed to the Trainer in Python."""
    start_from: str | None = None
    """A run's folder, or a model exported from one: the initial weights (a second stage of training)."""

    @model_validator(mode="after")
    def _check_form(self) -> ModelConfig:
        forms = [name for name in ("language_model", "whole", "factory", "given") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError(
                "give exactly one of `language_model` (with `encoders`), `whole`, `factory`, `given`; "
                f"found {', '.join(forms) or 'none'}"
            )
        if self.encoders and self.language_model is None:
            raise ValueError("`encoders` are composed with a `language_model`; there is none")
        return self
