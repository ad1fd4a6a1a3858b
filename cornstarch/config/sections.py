"""The sections of a config: the model, the data, and how it is trained."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from cornstarch.config import fields
from cornstarch.config.fields import Also, Fraction, PositiveFloat, Rate, Section, Size, TrainMode, parse_size
from cornstarch.config.user_code import check_remote_code
from cornstarch.plan.data_options import REGISTERED, Precision
from cornstarch.plan.validation import NotNegative, Positive, as_tuple, or_registered

TaskName = Literal[
    "auto", "multimodal", "causal-lm", "seq2seq-lm", "masked-lm", "sequence-classification", "image-classification"
]  # fmt: skip
DataFormat = Literal[
    "auto", "llava", "sharegpt", "text", "pairs", "rows", "webdataset", "datasets", "callable", "given"
]  # fmt: skip
OPTIMIZER_NAMES = ["adamw", "sgd"]
"""Short names of optimizers; `register_optimizer` adds to them."""
_OPTIMIZER_CLASSES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ model


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
    """Allow Python code in the model's folder to run; `--allow-code <path>` must allow it, too."""

    @model_validator(mode="after")
    def _check_source(self) -> PartConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either `path` (a folder or a hub name) or `config` (sizes, random weights)")
        return self

    def may_run_code(self, source: str | None = None) -> bool:
        """Return `trust_remote_code`; refuse it unless the user allows the code of `source`, by default of `path`."""
        if self.trust_remote_code:
            check_remote_code(source or self.path)
        return self.trust_remote_code


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
    task: Annotated[TaskName, or_registered(REGISTERED["task"])] = "auto"
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


# ------------------------------------------------------------------------------------------------ data


class SourceConfig(Section):
    """One source of samples."""

    path: str
    """A JSON or JSONL file, WebDataset tars (`data/{000..009}.tar`), a Hugging Face dataset (a folder written by
    `save_to_disk`, parquet, arrow or csv files, or a hub name), or `package.module:function` that returns samples."""
    format: Annotated[DataFormat, or_registered(REGISTERED["data_format"])] = "auto"
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
    """Put several samples in one row instead of padding: every row has `max_length` tokens, and a step a fixed number
    of rows."""
    packing_buffer: Positive = 1024
    """With `packing`: the samples among which those that fill a row are looked for. None waits for more rows."""
    tokens_per_step: Positive | None = None
    """With `packing`: the tokens of a step over all processes, of which rows of `max_length` are made; it takes the
    place of `loop.batch_size`. Default: as many rows as `loop.batch_size` samples fill on average."""
    balance: Annotated[Literal["off", "cost"], fields.false_as_off] = "off"
    """cost: distribute the samples of a step so that all processes, and all microbatches, have as much to compute. The
    cost of a sample is predicted from its text and the headers of its media; the loss stays the same."""
    balance_encoders: Annotated[bool, Also("split_images")] = False
    """Let processes encode one another's images (and sounds): those that exceed a process's even part are encoded by
    others. The loss stays the same, and each process reads its own samples only."""
    pad_to: Literal["auto"] | Positive = "auto"
    """Pad rows of conversations and documents to a multiple of this many tokens, at most `max_length`. auto: no
    padding; or, where the model is compiled, to one of eight lengths. Packed rows always have `max_length`."""
    train_on: Literal["answers", "everything"] = "answers"
    """Which tokens count in the loss: those of the assistant's messages, or all text."""
    system: str | None = None
    """A system message for samples that have none."""
    chat_template: str | None = None
    """A Jinja chat template. Default: the tokenizer's, else a plain one."""
    shuffle: bool = True
    """A new random order for every epoch."""
    workers: Annotated[Literal["auto"] | NotNegative, Also("num_workers", "dataloader_num_workers")] = "auto"
    """Processes of each rank that read, decode and tokenize while steps compute. auto: by the cores and the memory of
    the machine, up to 8 on a GPU; 0 on a CPU with few cores or for text, and for data that need no decoding."""
    prefetch: Annotated[Positive, Also("prefetch_factor", "dataloader_prefetch_factor")] = 2
    """Batches that each of them prepares ahead."""
    skip_limit: Fraction = 0.05
    """Stop when more than this fraction of the samples is broken."""
    max_pixels: Positive = 89_478_485
    """Images with more pixels are refused as decompression bombs."""

    @field_validator("train", "evaluation", mode="before")
    @classmethod
    def _read_sources(cls, value: Any) -> Any:
        """Allow one path, one source, or a list of either."""
        many = value if isinstance(value, list) else [value]
        return [{"path": source} if isinstance(source, str) else source for source in many]

    @model_validator(mode="after")
    def _check_tokens_per_step(self) -> DataConfig:
        if self.tokens_per_step is not None and not self.packing:
            raise ValueError(
                f"`tokens_per_step` = {self.tokens_per_step} is for packed rows; set `packing: true`, or give the "
                "samples of a step: `loop.batch_size`"
            )
        if self.tokens_per_step is not None and self.tokens_per_step < self.max_length:
            raise ValueError(
                f"`tokens_per_step` = {self.tokens_per_step} is less than one row of `max_length` = {self.max_length} "
                f"tokens; expected at least {self.max_length}"
            )
        return self


# ------------------------------------------------------------------------------------------------ training


class OptimizerConfig(Section):
    """The optimizer."""

    name: Annotated[str, Also("optim")] = "adamw"
    """`adamw`, `sgd`, or a class of torch.optim: `torch.optim.Adafactor`."""
    learning_rate: Annotated[PositiveFloat, Also("lr")] = 1e-4
    """The peak of the schedule, for parts without a learning rate of their own."""
    weight_decay: Annotated[Rate, Also("wd")] = 0.0
    """For parts without a weight decay of their own; biases and norms are never decayed."""
    betas: Annotated[tuple[Fraction, Fraction], as_tuple] = (0.9, 0.999)
    """For `adamw`."""
    eps: Annotated[PositiveFloat, Also("adam_epsilon")] = 1e-8
    """For `adamw`."""
    momentum: Fraction = 0.9
    """For `sgd`."""
    max_grad_norm: Annotated[PositiveFloat | None, Also("clip", "gradient_clip_val", "clip_grad_norm")] = 1.0
    """The largest norm of all gradients together; null: no clipping."""
    master_weights: Literal["auto"] | bool = "auto"
    """Keep trained weights in bf16, and exact float32 masters of them in the optimizer: 14 bytes per parameter instead
    of 16, and nothing to cast in forward passes. auto: where a run computes in bf16 on one GPU with `adamw`."""
    arguments: dict[str, Any] = {}
    """Further arguments of the optimizer's class."""
    scale_rate: Literal["none", "linear", "sqrt"] = "none"
    """Multiply learning rates by the number of processes, or its square root, if each process gets a whole batch."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        """Refuse a name that torch.optim does not have; classes of other packages are looked up by the run."""
        module, _, name = value.rpartition(".")
        if value.lower() in OPTIMIZER_NAMES or module not in ("", "torch.optim") or name in _OPTIMIZER_CLASSES:
            return value
        if hasattr(import_module("torch.optim"), name):  # a newer torch has more
            return value
        near = get_close_matches(name, [*OPTIMIZER_NAMES, *_OPTIMIZER_CLASSES], n=1)
        meant = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(
            f"torch.optim has no `{name[:80]}`.{meant} Expected adamw, sgd, a class of torch.optim such as "
            "torch.optim.Adafactor, or a class of another package with its module, package.module.Class"
        )


class ScheduleConfig(Section):
    """The learning rate schedule."""

    name: Annotated[Literal["cosine", "linear", "constant"], Also("lr_scheduler_type")] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: Annotated[Rate, Also("warmup_steps", "warmup_ratio")] = 0.03
    """Below 1: a fraction of all steps; else a number of steps."""
    min_lr_ratio: Annotated[Fraction, Also("final")] = 0.0
    """The last learning rate, as a fraction of the peak."""


class EarlyStoppingConfig(Section):
    """Stop when evaluation does not get better."""

    patience: Annotated[Positive, Also("early_stopping_patience")] = 3
    """How many evaluations without improvement."""
    min_delta: Annotated[Rate, Also("least", "early_stopping_threshold")] = 0.0
    """A smaller change does not count as improvement."""


class LoopConfig(Section):
    """How long to train, and in which batches."""

    steps: Annotated[Positive | None, Also("max_steps")] = None
    """Optimizer steps."""
    epochs: Annotated[PositiveFloat | None, Also("num_train_epochs", "num_epochs", "max_epochs")] = None
    """Passes over the data. Default, if `steps` is not given either: 1."""
    batch_size: Annotated[Positive, Also("global_batch_size", "bs")] = 8
    """Samples per step over all processes; packed, on average."""
    gradient_accumulation_steps: Annotated[
        Positive | Literal["auto"], Also("accumulation", "accumulate_grad_batches", "grad_accum")
    ] = "auto"
    """Microbatches that a batch is split into, one after the other; the gradient is the same. auto: as few as fit the
    GPU's memory by an estimate; 1 on a CPU, with pipelines, and with tensor or context parallelism."""
    evaluate_every: Annotated[Positive | None, Also("eval_steps")] = None
    """Steps between evaluations. Default: at the end only."""
    exchange_check: bool = True
    """At the end, evaluate once more with the images (or sounds) of samples exchanged: does the model use them?"""
    early_stopping: EarlyStoppingConfig | None = None
    """Default: none."""
    on_bad_loss: Literal["stop", "skip", "rewind"] = "stop"
    """When a loss or gradient is NaN or infinite, or with skip and rewind also when a loss spikes. stop: end the run;
    skip: leave the weights as they are and go on; rewind: go back to the last checkpoint and leave the batch out."""
    check_replicas: Annotated[Literal["auto", "off"] | Positive, fields.false_as_off] = "auto"
    """Steps between comparisons of replicated weights, which find bits that have flipped. auto: as often as costs at
    most 0.1 % of the time."""
    ema_decay: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Also("ema")] = None
    """Decay of an exponential moving average of the trained weights, used for evaluation and export."""
    activation_checkpointing: Annotated[bool, Also("gradient_checkpointing")] = False
    """Recompute activations in the backward pass instead of keeping them."""
    activation_budget: Annotated[float, Field(gt=0, le=1)] | Size = 1.0
    """A size, `20 GB`: as few layers as possible are recomputed, so that the activations of a microbatch fit. A
    fraction: that much of the activations of compiled layers is kept; of the rest, the cheapest are recomputed."""
    _chosen_microbatches: int = PrivateAttr(default=1)

    @model_validator(mode="after")
    def _check_batches(self) -> LoopConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either `steps` or `epochs`")
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"`batch_size` = {self.batch_size} is no multiple of `gradient_accumulation_steps` = "
                f"{self.microbatches}"
            )
        if self.activation_bytes is not None and self.activation_checkpointing:
            raise ValueError(
                f"`activation_checkpointing` recomputes every layer, `activation_budget` = "
                f"{self.activation_budget} as few as possible; give one of them"
            )
        return self

    @property
    def microbatches(self) -> int:
        """The microbatches of a step; with `auto` 1 until a run has chosen."""
        given = self.gradient_accumulation_steps
        return given if isinstance(given, int) else self._chosen_microbatches

    def set_chosen_microbatches(self, count: int) -> None:
        """Let `auto` stand for this number of microbatches."""
        assert self.gradient_accumulation_steps == "auto"
        self._chosen_microbatches = count

    @property
    def activation_fraction(self) -> float:
        """The fraction of compiled layers' activations that is kept."""
        return 1.0 if isinstance(self.activation_budget, str) else self.activation_budget

    @property
    def activation_bytes(self) -> int | None:
        """The most that the activations of a microbatch may take; None: no size was given."""
        return parse_size(self.activation_budget) if isinstance(self.activation_budget, str) else None
