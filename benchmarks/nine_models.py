"""The nine multimodal models of the published evaluation of modality parallelism, and the costs of their layers.

The cost of a layer is its number of floating-point operations for one microbatch of one sample: 1,024 tokens of text,
and an image of 1280 × 720 and 30 seconds of audio if the model takes them. The image is split as the encoder does it:
into as many whole tiles as fit or, if the encoder takes any size, into patches.

`Model.pieces` are these operations, divided over the devices of a stage; layers are recomputed in the backward pass.
`run_cost` is the same in the planner's format, with parameters and activations; the planner itself accounts for tp, cp,
bytes and links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost

LANGUAGE = "language_model"
TEXT = 1024
ENCODER_DEVICES, LANGUAGE_DEVICES = 2, 4  # of a stage: tp 2; tp 2 × cp 2
DEVICES = 24
MICROBATCHES = 24

Cost = tuple[float, float, float]
"""Forward, backward of inputs, backward of weights."""


@dataclass(frozen=True)
class Stack:
    """A stack of identical layers."""

    name: str
    layers: int
    hidden: int
    inner: int
    """The width of the feed-forward layer, summed over the active experts of a token."""
    heads: int
    kv_heads: int
    head: int
    """The head size."""
    gated: bool
    """Whether the feed-forward layer has three matrices instead of two."""
    vocabulary: int = 0
    tiles: int = 1
    tokens: int = 0
    """Tokens per tile; attention is limited to a tile."""
    handed: int = 0
    """Tokens that the language model receives."""
    experts: int = 1
    """The ratio of all feed-forward parameters to the active ones."""

    @property
    def parameters(self) -> int:
        """Parameters of a layer."""
        feed_forward = (3 if self.gated else 2) * self.hidden * self.inner
        return round(self.matrices) + (self.experts - 1) * feed_forward

    @property
    def matrices(self) -> float:
        """Active parameters of a layer."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.inner

    def layer(self, tokens: int, tiles: int, causal: bool) -> tuple[float, float]:
        """Return the operations of a layer's forward pass: of its matrices, and of attention."""
        pairs = tiles * tokens**2 * (0.5 if causal else 1.0)
        return 2.0 * tiles * tokens * self.matrices, 4.0 * pairs * self.heads * self.head


def _language(name: str, layers: int, hidden: int, inner: int, heads: int, kv: int, vocabulary: int) -> Stack:
    return Stack(name, layers, hidden, inner, heads, kv, 128, True, vocabulary)


def _encoder(
    name: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    tiles: int,
    tokens: int,
    handed: int,
    gated: bool = False,
) -> Stack:
    return Stack(name, layers, hidden, inner, heads, heads, hidden // heads, gated, 0, tiles, tokens, handed)


LLAMA_8B = _language("llama_8b", 32, 4096, 14336, 32, 8, 128256)
GEMMA2_27B = _language("gemma2_27b", 46, 4608, 36864, 32, 16, 256000)
QWEN2_72B = _language("qwen2_72b", 80, 8192, 29568, 64, 8, 152064)
PHI3_SMALL = _language("phi3_small", 32, 4096, 14336, 32, 8, 100352)
INTERNLM2_20B = _language("internlm2_20b", 48, 6144, 16384, 48, 8, 92544)
MIXTRAL_8X7B = replace(_language("mixtral_8x7b", 32, 4096, 2 * 14336, 32, 8, 32000), experts=4)  # 2 of 8 active
MISTRAL_7B = _language("mistral_7b", 32, 4096, 14336, 32, 8, 32768)
QWEN2_14B = _language("qwen2_14b", 48, 5120, 13824, 40, 8, 152064)
LLAMA_70B = _language("llama_70b", 80, 8192, 28672, 64, 8, 128256)

PIXTRAL = _encoder("pixtral_400m", 24, 1024, 4096, 16, 1, 64 * 36, 64 * 36, gated=True)  # shrunk to 1024 × 576
INTERN_VIT = _encoder("intern_vit_6b", 45, 3072, 12800, 24, 2, 1025, 2 * 1024)  # 448 × 448; 25 heads, but for tp 2
VIT_22B = _encoder("vit_22b", 48, 6144, 24576, 48, 3, 577, 3 * 576)  # 384 × 384
SIGLIP = _encoder("siglip_878m", 27, 1152, 4304, 16, 3, 729, 3 * 729)  # 384 × 384
QWEN2_VISION = _encoder("qwen2_vision_675m", 32, 1280, 5120, 16, 1, 92 * 52, 46 * 26)
EVA_CLIP = _encoder("evaclip_18b", 48, 5120, 25600, 40, 15, 257, 15 * 256)  # 224 × 224
WHISPER_SMALL = _encoder("whisper_242m", 12, 768, 3072, 12, 1, 1500, 1500)
WHISPER_MEDIUM = _encoder("whisper_307m", 24, 1024, 4096, 16, 1, 1500, 1500)
WHISPER_LARGE = _encoder("whisper_1.5b", 32, 1280, 5120, 20, 1, 1500, 1500)
QWEN2_AUDIO = _encoder("qwen2_audio", 32, 1280, 5120, 20, 1, 1500, 750)


@dataclass(frozen=True, eq=False)
class Model:
    """A language model and its encoders. In the nine models, only projectors are trained."""

    name: str
    language: Stack
    encoders: Mapping[str, Stack]
    text: int = TEXT
    """Text tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of the language model."""
        return self.text + sum(encoder.handed for encoder in self.encoders.values())

    def pieces(self, module: str, frozen_aware: bool = True, devices: int | None = None) -> list[Cost]:
        """Return the costs of a module's layers, in 10^12 operations of one device; the last includes its head.

        Args:
            module: The name of an encoder, or "language_model".
            frozen_aware: If false, assume that everything is trained.
            devices: The number of devices that divide the work of a layer.
        """
        if module == LANGUAGE:
            return self._language_pieces(frozen_aware, devices or LANGUAGE_DEVICES)
        return self._encoder_pieces(self.encoders[module], frozen_aware, devices or ENCODER_DEVICES)

    def _language_pieces(self, frozen_aware: bool, devices: int) -> list[Cost]:
        unit = 1e12 * devices
        one = _cost(self.language.layer(self.tokens, 1, causal=True), True, not frozen_aware, unit)
        head = 2.0 * self.tokens * self.language.hidden * self.language.vocabulary / unit
        return [*[one] * (self.language.layers - 1), _sum(one, (head, head, 0.0 if frozen_aware else head))]

    def _encoder_pieces(self, encoder: Stack, frozen_aware: bool, devices: int) -> list[Cost]:
        unit = 1e12 * devices
        one = _cost(
            encoder.layer(encoder.tokens, encoder.tiles, causal=False), not frozen_aware, not frozen_aware, unit
        )
        projector = 2.0 * encoder.handed * encoder.hidden * self.language.hidden / unit
        return [*[one] * (encoder.layers - 1), _sum(one, (projector, 0.0 if frozen_aware else projector, projector))]


def _cost(operations: tuple[float, float], passes_gradients: bool, trains: bool, unit: float) -> Cost:
    """Return the cost of a layer, with recomputation if it has a backward pass."""
    matrices, pairs = operations[0] / unit, operations[1] / unit
    forward = matrices + pairs
    backward = forward + matrices + 2 * pairs if passes_gradients else 0.0
    return forward, backward, matrices if trains else 0.0


def _sum(one: Cost, other: Cost) -> Cost:
    forward, inputs, weights = (a + b for a, b in zip(one, other, strict=True))
    return forward, inputs, weights


# ---------------------------------------------------------------------------------------------------- for the planner

Sizes = tuple[int, ...]
FIXED: dict[str, tuple[Sizes, Sizes]] = {"encoder": ((2,), (1, 2)), LANGUAGE: ((2,), (2,))}
"""tp and cp of the published evaluation; an encoder has cp 2 only inside the language model's first stage."""
FREE: dict[str, tuple[Sizes, Sizes]] = {"encoder": ((1, 2, 4), (1, 2, 4)), LANGUAGE: ((1, 2, 4, 8), (1, 2, 4))}
BYTES = 2  # bytes per number: bf16


def run_cost(
    model: Model,
    rate: float,
    sizes: Mapping[str, tuple[Sizes, Sizes]],
    trained: bool = False,
    batch: int = MICROBATCHES,
) -> RunCost:
    """Return the cost of a model for the planner.

    Args:
        model: One of the nine.
        rate: Operations per second of a device.
        sizes: The available tp and cp of encoders and of the language model.
        trained: Whether everything is trained, not only the projectors.
        batch: Samples per step.
    """
    modules = [
        ModuleCost(
            name, _encoder_layers(model, name, rate, trained), (LANGUAGE,), *_dividing(encoder, sizes["encoder"])
        )
        for name, encoder in model.encoders.items()
    ]
    last = ModuleCost(LANGUAGE, _language_layers(model, rate, trained), (), *_dividing(model.language, sizes[LANGUAGE]))
    cost = RunCost((*modules, last), batch=batch, tokens=model.tokens, state_bytes=12)
    return replace(
        cost, flops=sum(_needed(module, cost.has_trained_input(module.name)) for module in cost.modules) * rate
    )


def _needed(module: ModuleCost, upstream: bool) -> float:
    """Return the seconds of a sample in a module, without recomputation."""
    total = 0.0
    for layer in module.layers:
        total += layer.forward + (layer.input_gradient if upstream else 0.0) + layer.weight_gradient * layer.trained
        upstream = upstream or layer.trained
    return total


def _dividing(stack: Stack, sizes: tuple[Sizes, Sizes]) -> tuple[Sizes, Sizes]:
    """Return the sizes that divide the heads."""
    tp, cp = sizes
    return tuple(size for size in tp if stack.heads % size == 0 and stack.kv_heads % size == 0), cp


def _layer(stack: Stack, tokens: int, tiles: int, causal: bool, rate: float, trained: bool) -> LayerCost:
    """Return a layer that keeps the inputs and outputs of its matrices."""
    matrices, pairs = (operations / rate for operations in stack.layer(tokens, tiles, causal))
    every, across = tiles * tokens, stack.head * (2 * stack.heads + 2 * stack.kv_heads)
    kept = BYTES * every * (4 * stack.hidden + across + (3 if stack.gated else 2) * stack.inner)
    return LayerCost(
        stack.name,
        forward=matrices + pairs,
        input_gradient=matrices + 2 * pairs,
        weight_gradient=matrices,
        parameters=stack.parameters,
        parameter_bytes=BYTES * stack.parameters,
        activation_bytes=kept,
        activation_bytes_recomputed=BYTES * every * stack.hidden,
        output_bytes=BYTES * every * stack.hidden,
        trained=trained,
        kv_bytes=BYTES * every * 2 * stack.kv_heads * stack.head,
        whole_bytes=BYTES * every * 2 * stack.hidden,
        items=0.0 if causal else tiles,
    )


def _language_layers(model: Model, rate: float, trained: bool) -> tuple[LayerCost, ...]:
    """Return the layers; the first has the embedding table, which costs no operations, and the last the head."""
    stack = model.language
    one = _layer(stack, model.tokens, 1, True, rate, trained)
    words = stack.hidden * stack.vocabulary
    head = 2.0 * model.tokens * words / rate
    first = replace(one, parameters=one.parameters + words, parameter_bytes=one.parameter_bytes + BYTES * words)
    last = replace(
        first,
        forward=one.forward + head,
        again=one.forward,
        input_gradient=one.input_gradient + head,
        weight_gradient=one.weight_gradient + head,
        activation_bytes=one.activation_bytes + BYTES * model.tokens * stack.vocabulary,
    )
    return (first, *[one] * (stack.layers - 2), last)


def _encoder_layers(model: Model, name: str, rate: float, trained: bool) -> tuple[LayerCost, ...]:
    """Return the layers; the last includes the projector, which is always trained."""
    stack = model.encoders[name]
    one = _layer(stack, stack.tokens, stack.tiles, False, rate, trained)
    matrix = stack.hidden * model.language.hidden
    projector = 2.0 * stack.handed * matrix / rate
    last = replace(
        one,
        forward=one.forward + projector,
        again=one.forward,
        input_gradient=one.input_gradient + projector,
        weight_gradient=projector + (one.weight_gradient if trained else 0.0),
        parameters=one.parameters + matrix,
        parameter_bytes=one.parameter_bytes + BYTES * matrix,
        output_bytes=BYTES * stack.handed * model.language.hidden,
        trained=True,
        trained_parameters=None if trained else matrix,
    )
    return (*[one] * (stack.layers - 1), last)


MODELS = [
    Model("VLM-S", LLAMA_8B, {"vision": PIXTRAL}),
    Model("VLM-M", GEMMA2_27B, {"vision": INTERN_VIT}),
    Model("VLM-L", QWEN2_72B, {"vision": VIT_22B}),
    Model("ALM-S", PHI3_SMALL, {"audio": WHISPER_SMALL}),
    Model("ALM-M", INTERNLM2_20B, {"audio": WHISPER_MEDIUM}),
    Model("ALM-L", MIXTRAL_8X7B, {"audio": QWEN2_AUDIO}),
    Model("VALM-S", MISTRAL_7B, {"vision": SIGLIP, "audio": WHISPER_SMALL}),
    Model("VALM-M", QWEN2_14B, {"vision": QWEN2_VISION, "audio": WHISPER_MEDIUM}),
    Model("VALM-L", LLAMA_70B, {"vision": EVA_CLIP, "audio": WHISPER_LARGE}),
]


def _published(model: Model) -> Model:
    """Return a model as in the published evaluation's script: few tokens per tile, at most 48 layers.

    Every sample has a token for each tile of all samples of a step. An unchanged model is returned as it is.
    """
    language = replace(model.language, layers=40) if model.language.layers > 48 else model.language
    encoders = {
        name: replace(encoder, handed=MICROBATCHES * encoder.tiles) if encoder.tiles > 1 else encoder
        for name, encoder in model.encoders.items()
    }
    changed = Model(model.name, language, encoders)
    return model if (language, encoders) == (model.language, model.encoders) else changed


WORKLOADS = {"published": [_published(model) for model in MODELS], "patches": MODELS}
