"""The description of a run, and nothing but the description: plain data, no torch.

The same names are used in YAML, on the command line (`optimizer.learning_rate=1e-4`) and in Python.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cornstarch.plan.plan import Plan

Precision = Literal["fp32", "bf16", "fp16"]
TrainMode = Literal["full", "projector", "frozen", "lora"]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
Size = Annotated[str, Field(pattern=rf"^\d+(\.\d+)? ?({'|'.join(_UNITS)})$", examples=["20 GB"])]
"""`500 MB`, `20 GB`, `1.5 TB`."""


def size_in_bytes(size: Size) -> int:
    """Return the bytes of a size."""
    digits = size.rstrip("BkMGT ")
    return int(float(digits) * _UNITS[size[len(digits) :].strip()])


def size_of_bytes(count: int) -> Size:
    """Return a size of at least so many bytes, as one writes it."""
    unit = max((name for name in _UNITS if count >= _UNITS[name]), key=_UNITS.__getitem__, default="B")
    return f"{math.ceil(10 * count / _UNITS[unit]) / 10:g} {unit}"


class Section(BaseModel):
    """A part of the description: unknown names are refused, values are checked, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


# ------------------------------------------------------------------------------------------------ model


class LoraConfig(Section):
    """Low-rank adapters (PEFT)."""

    rank: Positive = 16
    """The width of the adapters."""
    alpha: Positive = 32
    """Adapters are scaled by alpha / rank."""
    dropout: Share = 0.0
    """The share of an adapter's inputs that is dropped while training."""
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
    """The precision in which the weights are kept. Default: fp32 where trained, the run's precision where frozen."""
    lora: LoraConfig = LoraConfig()
    """For `train: lora`."""
    trust_remote_code: bool = False
    """Whether Python code in the model's folder may be run."""

    @model_validator(mode="after")
    def _one_source(self) -> PartConfig:
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
    def _different(cls, value: list[str] | None) -> list[str] | None:
        twice = sorted({label for label in value or [] if (value or []).count(label) > 1})
        if twice:
            raise ValueError(f"labels has {', '.join(map(repr, twice))} more than once")
        return value


class FactoryConfig(Section):
    """A model made by a Python function: `my_package.models:build`; it returns a module, or (module, loss)."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    arguments: dict[str, Any] = {}
    """Arguments of the function."""
    loss: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """A function of (module, batch) that returns the loss, as `package.module:function`."""
    collate: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """A function that makes a batch, a dict, of a list of rows, whose images and sounds are decoded. Default: numbers,
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
    """Or: a Python function that makes the model."""
    given: str | None = None
    """Or: the name of a model that is handed to the Trainer in Python."""
    start_from: str | None = None
    """A run's folder, or a model exported from one: the weights to begin with (a second stage of training)."""

    @model_validator(mode="after")
    def _one_form(self) -> ModelConfig:
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


# ------------------------------------------------------------------------------------------------ training


class OptimizerConfig(Section):
    """How weights are changed."""

    name: str = "adamw"
    """`adamw`, `sgd`, or a class of torch.optim: `torch.optim.Adafactor`."""
    learning_rate: AboveZero = 1e-4
    """The highest of the schedule, for parts that do not say their own."""
    weight_decay: Rate = 0.0
    """For parts that do not say their own; biases and norms are never decayed."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """For `adamw`."""
    eps: AboveZero = 1e-8
    """For `adamw`."""
    momentum: Share = 0.9
    """For `sgd`."""
    clip: AboveZero | None = 1.0
    """The largest norm of all gradients together; null: no clipping."""
    arguments: dict[str, Any] = {}
    """Further arguments of the optimizer's class."""
    scale_rate: Literal["none", "linear", "sqrt"] = "none"
    """Multiply learning rates by the number of processes, or its square root, if each process gets a whole batch."""


class ScheduleConfig(Section):
    """How the learning rate changes."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls after the warm-up."""
    warmup: Rate = 0.03
    """Below 1: a share of all steps; else a number of steps."""
    final: Share = 0.0
    """The last learning rate, as a share of the highest."""


class EarlyStoppingConfig(Section):
    """Stop when evaluation does not get better."""

    patience: Positive = 3
    """So many evaluations without improvement."""
    least: Rate = 0.0
    """What counts as improvement."""


class LoopConfig(Section):
    """How long, and in which portions."""

    steps: Positive | None = None
    """Steps of the optimizer."""
    epochs: AboveZero | None = None
    """Passes over the data. Default, if `steps` is not given either: 1."""
    batch_size: Positive = 8
    """Samples per step, packed or not."""
    accumulation: Positive = 1
    """Portions a batch is cut into, one after the other; the gradient is the same."""
    evaluate_every: Positive | None = None
    """Steps. Default: at the end only."""
    exchange_check: bool = True
    """At the end, evaluate once more with the images (or sounds) of samples exchanged: does the model look?"""
    early_stopping: EarlyStoppingConfig | None = None
    """Default: none."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the trained weights, used for evaluation and export."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    activation_budget: Annotated[float, Field(gt=0, le=1)] | Size = 1.0
    """A size, `20 GB`: as few layers as possible are computed again, so that what a portion keeps for its backward pass
    fits. A share: that much of the activations of compiled layers is kept; of the rest, the cheapest first."""

    @model_validator(mode="after")
    def _portions(self) -> LoopConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either `steps` or `epochs`")
        if self.batch_size % self.accumulation:
            raise ValueError(f"`batch_size` = {self.batch_size} is no multiple of `accumulation` = {self.accumulation}")
        if self.activation_bytes is not None and self.activation_checkpointing:
            raise ValueError(
                f"`activation_checkpointing` computes every layer again, `activation_budget` = "
                f"{self.activation_budget} as few as possible; give one of them"
            )
        return self

    @property
    def activation_share(self) -> float:
        """The share of compiled layers' activations that is kept."""
        return 1.0 if isinstance(self.activation_budget, str) else self.activation_budget

    @property
    def activation_bytes(self) -> int | None:
        """The most that a portion may keep for its backward pass; None: no size was given."""
        return size_in_bytes(self.activation_budget) if isinstance(self.activation_budget, str) else None


class CheckpointConfig(Section):
    """What is kept."""

    every: Positive | None = None
    """Steps. Default: at the end, at the best evaluation and on SIGTERM."""
    keep: Positive = 2
    """The newest so many; the best one is kept beside them."""
    best_by: Literal["loss", "accuracy"] = "loss"
    """What the best evaluation is told by."""
    background: bool = False
    """Copy the state and write it while training goes on: steps wait for the copy only, which takes as much memory of
    the CPU as the state has. A failure ends the run in the next step."""
    form: Literal["sharded", "full", "local"] = "sharded"
    """sharded: each process writes what it holds. full: the first process writes everything. local: each process writes
    all that it has, and only the same layout can load it."""


class LoggingConfig(Section):
    """What is told while it runs."""

    every: Positive = 10
    """Steps between lines of metrics."""
    to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = []
    """Beside metrics.jsonl, which is always written."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """auto: a bar in a terminal, else lines."""
    samples: NotNegative = 8
    """Samples of the evaluation data shown in the report with the model's answers."""


class FeaturesConfig(Section):
    """What frozen encoders make of images and sounds, kept on the disk for later epochs and other runs."""

    cache: bool = False
    """Keep it. An item that was encoded before is not even decoded again. Encoders must not be trained themselves."""
    folder: Path | None = None
    """Where, for all runs that share it. Default: `feature_cache` beside the run's folder."""
    ahead: bool = True
    """With `loop.accumulation`, let frozen encoders run once for several portions of a step that have few items."""
    limit: Size = "50 GB"
    """The most that all files in the folder may take together: `500 MB`, `50 GB`, `1.5 TB`."""

    @property
    def limit_bytes(self) -> int:
        """The limit in bytes."""
        return size_in_bytes(self.limit)


class ModuleParallelConfig(Section):
    """How one module is spread: an encoder with its projector, the language model, or a whole model."""

    tp: Positive = 1
    """Ranks that each matrix is cut over (tensor parallelism)."""
    cp: Positive = 1
    """Ranks that each sequence is cut over (context parallelism)."""
    cp_mode: Literal["ring_attn", "all_to_all", "gather"] = "ring_attn"
    """How attention sees the tokens of the other ranks."""
    cp_distribution: Literal["uniform", "zigzag", "makespan_min", "auto"] = "auto"
    """Which tokens each rank gets."""
    stages: Positive = 1
    """Pipeline stages: sets of ranks that hold some of the layers each."""
    virtual_stages: Positive = 1
    """Parts of the layers that each of these sets holds (interleaving)."""
    layers: Annotated[list[Positive], Field(min_length=1)] | None = None
    """How many layers each of these parts has, in order. Default: parts that weigh the same."""
    zero: Literal[0, 1, 2, 3] | None = None
    """The ZeRO stage of this module alone. Default: what `data.kind` says."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    precision: Precision | None = None
    """What the module is computed in. Default: the run's."""
    tp_sequence: bool = False
    """Cut activations between attention and feed-forward layers, too, along tokens (sequence parallelism)."""
    tp_vocabulary: bool = False
    """Cut the table of embeddings and the head of a language model, too, by words."""


class CompressionConfig(Section):
    """How gradients, or changes of weights, are made smaller for the wire."""

    kind: Literal["none", "bf16", "fp16", "topk", "randomk", "quantize", "powersgd"] = "none"
    """bf16, fp16: numbers of half the size; topk: the largest of each block; randomk: some, the same in all processes;
    quantize: few bits each; powersgd: two thin matrices for each matrix."""
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.01
    """topk, randomk: the share of the numbers that is sent."""
    bits: Literal[8, 4, 1] = 8
    """quantize: of each number; 1: the sign alone."""
    block: Positive = 1024
    """topk, quantize: numbers that have their largest chosen together, or one scale together."""
    rank: Positive = 4
    """powersgd: columns of the thin matrices."""
    error_feedback: bool = True
    """Remember what was not sent, and add it in the next step."""
    stochastic: bool = True
    """quantize with 8 or 4 bits: round up or down by chance, right on average."""
    warmup: NotNegative = 0
    """Steps at the beginning that send everything; at least 2 with powersgd."""
    seed: NotNegative = 0
    """Of what is chosen or rounded by chance."""


class LocalConfig(Section):
    """local_sgd, diloco: processes train by themselves for some steps, then bring their weights together."""

    every: Positive = 16
    """Steps between two exchanges."""
    outer_learning_rate: Rate = 0.7
    """diloco: how far the weights go along the mean change."""
    outer_momentum: Rate = 0.9
    """diloco: of the outer optimizer, Nesterov's."""
    overlap: bool = False
    """diloco: train on while changes travel; they are applied when the next exchange begins."""


class AsynchronousConfig(Section):
    """async: each process applies what has arrived, and waits only for those that are too far behind."""

    staleness: NotNegative = 4
    """Steps that a process may be ahead of the slowest."""
    scale_learning_rate: bool = True
    """Apply a change that is s steps old with 1 / (1 + s) of its weight."""


class GossipConfig(Section):
    """gossip: each process averages its weights with a few neighbours only."""

    graph: Literal["ring", "torus", "exponential", "random_pairs"] = "ring"
    """Who the neighbours are: the two beside; the four around; those 1, 2, 4, … ahead, in turn; one by chance."""
    overlap: bool = True
    """Let weights travel while the next gradients are computed."""
    wait: bool = True
    """Wait for the neighbours' weights of the same step; false: average with those that have come."""
    seed: NotNegative = 0
    """random_pairs: of the pairs."""


class DataParallelConfig(Section):
    """Data parallelism: what every process keeps, and what they share."""

    kind: Literal[
        "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "local_sgd", "diloco", "async", "gossip"
    ] = "ddp"
    """ddp: everything whole in every process; zero1: optimizer states shared out; zero2: gradients too; zero3, fsdp1,
    fsdp2: parameters too; hsdp: fsdp2 within each of several copies; local_sgd, diloco, async, gossip: processes that
    are not in step (slow networks)."""
    replicate: Positive | None = None
    """hsdp: the number of copies."""
    param_dtype: Precision | None = None
    """What sharded parameters are gathered and computed in. Default: what they are kept in."""
    reduce_dtype: Precision | None = None
    """What gradients are summed over processes in. Default: what they are computed in."""
    buffer_dtype: Precision | None = None
    """fsdp1: what buffers are cast to."""
    bucket_mb: AboveZero | Literal["auto"] | None = None
    """ddp, zero1: megabytes of gradients that are summed together; auto: as suits the link, measured at the start.
    Default: torch's."""
    static_graph: bool = False
    """ddp, zero1: every step uses the same parameters in the same order."""
    gradient_as_bucket_view: bool = True
    """ddp, zero1: gradients lie in the buckets, instead of being copied there."""
    find_unused: bool = True
    """ddp, zero1: look in every step for parameters without a gradient (a layer that no token reaches)."""
    offload: bool = False
    """Sharded parameters and the optimizer wait in the CPU's memory."""
    reshard_after_forward: bool | int | None = None
    """Whether gathered parameters are freed after forward and gathered again for backward; a number: over so many."""
    prefetch: NotNegative = 0
    """Units whose parameters are gathered ahead of the one that computes."""
    wrap: Literal["auto", "none"] | list[str] = "auto"
    """What is gathered together: auto: layers; none: the whole model; or names of classes."""
    wrap_min_parameters: Positive | None = None
    """Layers with fewer parameters are gathered with what is around them."""
    compression: CompressionConfig = CompressionConfig()
    local: LocalConfig = LocalConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    gossip: GossipConfig = GossipConfig()


class ParallelConfig(Section):
    """How the run is spread over processes, of which there are as many as it is started with.

    `parallel: auto` is short for `parallel: {auto: true}`.
    """

    modules: dict[str, ModuleParallelConfig] = {}
    """By name: each encoder, and language_model; or model, for a model that is not taken apart."""
    data: DataParallelConfig = DataParallelConfig()
    ranks: Literal["auto", "shared", "own", "colocated", "first_stage"] = "auto"
    """shared: every rank holds all modules; own: each module has ranks of its own; colocated: the encoders share ranks;
    first_stage: the encoders stand on the ranks of the language model's first stage."""
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "auto"] = "1f1b"
    """In which order the stages of a pipeline work."""
    verify: Literal["auto", "always", "never"] = "auto"
    """Try the plan on a tiny twin of the model before training. auto: if it cuts a model that no test has cut so."""
    auto: bool = False
    """Choose the plan when the run is started, for the processes that there are; then nothing above but `verify`
    is said."""
    cluster: str | None = None
    """auto: what the processes run on, a name or a file (docs/clusters.md). Default: this machine, by the catalogue."""
    costs: str | None = None
    """auto: a file of `cornstarch profile`. Default: what layers cost is counted."""

    @model_validator(mode="after")
    def _makes_sense(self) -> ParallelConfig:
        chosen = ("modules", "data", "ranks", "schedule")
        said = [name for name in chosen if getattr(self, name) != type(self).model_fields[name].default]
        if self.auto and said:
            raise ValueError(
                f"`auto` chooses {' and '.join(f'`{name}`' for name in said)} itself; leave one of them out"
            )
        for name in ("cluster", "costs"):
            if getattr(self, name) is not None and not self.auto:
                raise ValueError(f"`{name}` is what `auto` chooses by; write `auto: true` beside it, or leave it out")
        self.plan()
        return self

    def plan(self) -> Plan:
        """Return what is meant as a plan; with `auto`, before it is chosen: nothing is spread."""
        data = self.model_dump(mode="json", exclude={"verify", "auto", "cluster", "costs"})
        if not self.modules:
            del data["modules"]
        return Plan.from_data(data)


class RunConfig(Section):
    """Everything that a run is."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "run"
    """The name of the run."""
    output: Path | None = None
    """The run's folder. Default: `runs/<name>`."""
    seed: NotNegative = 0
    """Of all random numbers."""
    device: str = "auto"
    """auto: a GPU if there is one."""
    threads: Positive | None = None
    """Threads of the CPU that one process computes with. Default: torch's choice; small models are faster with 1."""
    precision: Precision | Literal["auto"] = "auto"
    """What is computed in. auto: bf16 on a GPU that has it, else fp32."""
    compile: Literal["auto", "layers", "off"] = "auto"
    """layers: every layer is compiled; auto: on a GPU, where it can be; off: nothing is."""
    fp8: Literal["off", "rowwise", "tensorwise"] = "off"
    """Multiply in 8 bits in the large linear layers of what is trained (GPUs from Ada and Hopper on). rowwise: a scale
    for each row, closer to bf16; tensorwise: one for each matrix, quicker."""
    attention: Literal["auto", "flex", "sdpa", "cudnn", "varlen"] = "auto"
    """Which kernels attend on a GPU. auto: the quickest that respect the mask."""
    model: ModelConfig
    """What is trained."""
    data: DataConfig
    """What it is trained on."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig = LoopConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    features: FeaturesConfig = FeaturesConfig()
    parallel: ParallelConfig = ParallelConfig()

    @field_validator("compile", mode="before")
    @classmethod
    def _said_as_a_switch(cls, value: Any) -> Any:
        return {True: "layers", False: "off"}[value] if isinstance(value, bool) else value  # YAML's `off` is false

    @field_validator("parallel", mode="before")
    @classmethod
    def _said_in_a_word(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @field_validator("fp8", mode="before")
    @classmethod
    def _fp8_is_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML's `off` is false

    @model_validator(mode="after")
    def _fp8_is_possible(self) -> RunConfig:
        if self.fp8 == "off":
            return self
        said: dict[str, str | None] = {"precision": self.precision}
        said |= {f"parallel.modules.{name}.precision": one.precision for name, one in self.parallel.modules.items()}
        for key, precision in said.items():
            if precision not in ("auto", "bf16", None):
                raise ValueError(
                    f"`fp8` = {self.fp8} with `{key}` = {precision}: what is not multiplied in fp8 is computed in bf16 "
                    "then. Use bf16 or auto, or set `fp8` to off"
                )
        plan = self.parallel.plan()
        cut = sorted(name for name, module in plan.modules.items() if module.tp > 1)
        if cut:
            raise ValueError(
                f"`fp8` = {self.fp8} with tp > 1 for {', '.join(cut)}: matrices that are cut over ranks are not "
                "multiplied in fp8. Use data parallelism (fsdp2) or stages instead of tp, or set `fp8` to off"
            )
        if plan.is_pipeline and plan.schedule in ("zero_bubble", "auto"):
            raise ValueError(
                f"`fp8` = {self.fp8} with `parallel.schedule` = {plan.schedule}: it takes apart the gradients of "
                "inputs and of weights, which layers in fp8 compute together. Use 1f1b or interleaved, or set `fp8` to "
                "off"
            )
        return self

    @model_validator(mode="after")
    def _modules_are_there(self) -> RunConfig:
        model, named = self.model, set(self.parallel.modules)
        known = {*model.encoders, "language_model"} if model.encoders else {"model", "language_model"}
        wrong = sorted(named - known - {"model"})
        if wrong:
            raise ValueError(
                f"`parallel.modules` has {', '.join(wrong)}; the model has {', '.join(sorted(known))}"
                f"{', or `model` for all of them alike' if model.encoders else ''}"
            )
        missing = sorted(known - named)
        if model.encoders and named and named != {"model"} and missing:
            raise ValueError(
                f"`parallel.modules` says nothing about {', '.join(missing)}; say it for every module, or for `model`, "
                "which stands for all of them"
            )
        return self

    @model_validator(mode="after")
    def _balances_one_batch(self) -> RunConfig:
        if self.data.balance != "off" and self.parallel.data.kind in ("local_sgd", "diloco", "async", "gossip"):
            raise ValueError(
                f"`data.balance` = {self.data.balance} with `parallel.data.kind` = {self.parallel.data.kind}: "
                "a process trains on batches of its own between exchanges, and long samples would come together in "
                "them. Set `data.balance` to off"
            )
        return self

    @model_validator(mode="after")
    def _trains_apart(self) -> RunConfig:
        kind = self.parallel.data.kind
        if kind not in ("local_sgd", "diloco", "async", "gossip"):
            return self
        if self.loop.ema is not None:
            raise ValueError(
                f"`loop.ema` with `parallel.data.kind` = {kind}: each process has weights of its own, and would "
                "average others over time than are saved. Leave `loop.ema` out: the mean over processes is saved"
            )
        if self.precision == "fp16":
            raise ValueError(
                f"`precision` = fp16 with `parallel.data.kind` = {kind}: each process would scale its losses "
                "otherwise, and leave out other steps. Use bf16 or fp32"
            )
        return self

    @model_validator(mode="after")
    def _computes_again_once(self) -> RunConfig:
        schedule, takes_apart = self.parallel.schedule, self.parallel.schedule in ("zero_bubble", "auto")
        if self.loop.activation_checkpointing and takes_apart and self.parallel.plan().is_pipeline:
            raise ValueError(
                f"`loop.activation_checkpointing` with `parallel.schedule` = {schedule}: activations would be computed "
                "again for the gradients of inputs, and once more for those of each matrix, which zero_bubble takes "
                "apart; use 1f1b or interleaved"
            )
        return self

    @model_validator(mode="after")
    def _activations_can_be_counted(self) -> RunConfig:
        if self.loop.activation_bytes is None:
            return self
        plan, said = self.parallel.plan(), f"`loop.activation_budget` = {self.loop.activation_budget}"
        if plan.is_pipeline or any(module.tp > 1 or module.cp > 1 for module in plan.modules.values()):
            raise ValueError(
                f"{said}: what stages of a pipeline and parts of layers (tp, cp) keep is not estimated yet. Set "
                "`parallel.modules.<name>.activation_checkpointing`, which computes every layer of a module again"
            )
        if again := sorted(name for name, module in plan.modules.items() if module.activation_checkpointing):
            raise ValueError(
                f"{said} chooses which layers are computed again, and `parallel.modules.{again[0]}."
                "activation_checkpointing` says all of them; give one of them"
            )
        return self

    @property
    def recomputes(self) -> bool:
        """Whether all of the model computes activations again in the backward pass."""
        modules = self.parallel.modules.values()
        every = bool(modules) and all(module.activation_checkpointing for module in modules)
        return self.loop.activation_checkpointing or every

    @model_validator(mode="after")
    def _features_can_be_kept(self) -> RunConfig:
        if not self.features.cache:
            return self
        trained = sorted(name for name, part in self.model.encoders.items() if part.train in ("full", "lora"))
        if trained:
            raise ValueError(
                f"`features.cache` keeps what frozen encoders make; {', '.join(trained)} is trained, and makes other "
                "features after every step. Set its `train` to projector or frozen, or leave the cache out"
            )
        if self.model.language_model is not None and not self.model.encoders:
            raise ValueError("`features.cache` keeps what encoders make; `model` has none")
        plan = self.parallel.plan()
        if plan.is_pipeline or any(module.tp > 1 or module.cp > 1 for module in plan.modules.values()):
            raise ValueError(
                "`features.cache` works with data parallelism only: processes that share the samples of a step "
                "(stages, tp, cp) would have to find the same items in the cache at the same moment. Leave it out, or "
                "let every process have samples of its own"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.output if self.output is not None else Path("runs") / self.name
