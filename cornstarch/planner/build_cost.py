"""The cost of a run on a device: from its layers' calls to a `RunCost`, without weights and without the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cornstarch.config import OptimizerConfig, Precision, RunConfig
from cornstarch.cost.analytic import FP8_REACHES, AnalyticCost, CallCost, ComputeSetting, DeviceSpeed
from cornstarch.cost.profiled import PASSES, ProfiledCost
from cornstarch.cost.segments import ModelSegment, find_segments
from cornstarch.engine.acceleration import compiles
from cornstarch.engine.memory_tracker import state_size
from cornstarch.engine.model_parts import cast_parts, choose_masters, split_into_parts
from cornstarch.errors import ConfigError
from cornstarch.kernels.master_weights import has_master
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.device import DTYPES, DevicePlacement, choose_placement
from cornstarch.plan import cluster
from cornstarch.plan.cluster import Device
from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost
from cornstarch.plan.data_statistics import DataStatistics, load_yaml, write_text
from cornstarch.plan.expert_cost import ExpertCost
from cornstarch.plan.plan import LANGUAGE_MODEL, WHOLE_MODEL
from cornstarch.planner.gathered_weights import gathers_halves, halve_weights, keep_sizes
from cornstarch.planner.module_sizes import ModuleSizes, find_module_sizes
from cornstarch.tasks.build import build_calls, build_meta_model

_MEASURED_ON = "measured_on"
_TUPLES = ("feeds", "tp_sizes", "cp_sizes", "ep_sizes")
_MODULES = ("modules", "eager", "gathered", "gathered_eager")


@dataclass(frozen=True)
class MicrobatchShape:
    """The size of a microbatch."""

    rows: int
    """Samples."""
    tokens: int
    """Of each sample."""
    items: Mapping[str, int] = field(default_factory=dict)
    """Items of all rows together, by encoder. Default: one for each row."""
    trained: int | None = None
    """Tokens of all rows that have a label; the head computes no others. Default: all."""

    def count(self, encoder: str) -> int:
        return max(1, self.items.get(encoder, self.rows))

    @property
    def labels(self) -> int:
        """Tokens that the head computes."""
        return self.rows * self.tokens if self.trained is None else min(self.trained, self.rows * self.tokens)


def build_microbatch_shape(config: RunConfig, model: nn.Module, facts: DataStatistics | None = None) -> MicrobatchShape:
    """Return the shape of a run's microbatch on one rank.

    Without facts, samples have `data.max_length` tokens, all of them with a label, and one item for each encoder.
    """
    rows = max(1, config.rows_per_step // config.loop.microbatches)
    encoders = list(model.encoders) if isinstance(model, MultimodalModel) else []
    if facts is None:
        return MicrobatchShape(rows, config.data.max_length, dict.fromkeys(encoders, rows))
    tokens = max(1, min(round(facts.tokens), config.data.max_length))
    items = {name: round(rows * facts.items.get(name, 1.0)) for name in encoders}
    placeholders = sum(rows * facts.items.get(name, 1.0) * facts.item_tokens.get(name, 0.0) for name in encoders)
    return MicrobatchShape(rows, tokens, items, max(1, round(rows * tokens - placeholders)))


def run_cost(
    config: RunConfig, device: Device, facts: DataStatistics | None = None, *, is_measured: bool = False
) -> RunCost:
    """Return the cost of the layers of a run on a device.

    The model is traced on the meta device: no weights are read, and the device need not be there.

    Args:
        config: The run.
        device: The device of each rank.
        facts: What the data is like. Default: samples of `data.max_length` tokens, one item for each encoder.
        is_measured: Whether the device's figures are measured ones, not its maker's.
    """
    model, precision = build_run_model(config, device)
    cost = model_cost(
        model,
        build_microbatch_shape(config, model, facts),
        device,
        precision,
        compiled=config.compile == "layers" or (config.compile == "auto" and device.name != "cpu"),
        batch=config.loop.batch_size,
        optimizer=config.optimizer,
        is_measured=is_measured,
        budget=config.loop.activation_fraction,
        fp8=config.fp8,
    )
    return cost if facts is None else replace(cost, straggler=tuple(sorted(facts.straggler.items())))


def build_run_model(config: RunConfig, device: Device, world: int | None = None) -> tuple[nn.Module, Precision]:
    """Return a run's model on the meta device, its weights in the precisions of a device, and the run's precision.

    `world`: the number of ranks; None: unknown, so that weights are those of several.
    """
    usual: Precision = "bf16" if device.has_bf16 else "fp32"
    precision = usual if config.precision == "auto" else config.precision
    model = build_meta_model(config)
    kind = "cpu" if device.name == "cpu" else "cuda"
    masters = None if world is None else choose_masters(config, kind, DTYPES[precision], world)
    cast_parts(split_into_parts(model, config.model, config.optimizer), DTYPES[precision], masters)
    return model, precision


def model_cost(
    model: nn.Module,
    microbatch: MicrobatchShape,
    device: Device,
    precision: Precision,
    *,
    compiled: bool | None = None,
    batch: int | None = None,
    optimizer: OptimizerConfig | None = None,
    is_measured: bool = False,
    budget: float = 1.0,
    fp8: str = "off",
) -> RunCost:
    """Return the cost of the layers of a model on a device.

    The model is on the meta device, its parameters in the precisions of the run; `precision` is that of autocast.
    `compiled`: whether layers are compiled; default: on GPUs. `batch`: samples of a step; default: those of the
    microbatch. `optimizer`: has states for trained parameters; default: AdamW. `is_measured`: as in `run_cost`.
    `budget`: the fraction of their activations that compiled layers keep.
    `fp8`: how products in fp8 are scaled, as in a config.
    """
    on_gpu, speed, dtype = device.name != "cpu", DeviceSpeed.of(device, is_measured), DTYPES[precision]
    fused = on_gpu if compiled is None else compiled

    def build_model(is_causal: bool) -> AnalyticCost:
        reached = FP8_REACHES[fp8]
        setting = ComputeSetting(dtype, on_gpu, fused, is_causal, microbatch.labels, budget, reached)
        return AnalyticCost(speed, setting)

    sizes: dict[str, ModuleSizes] = {}
    build = partial(build_cost, model, microbatch, build_model, dtype, on_gpu, batch, optimizer, sizes)
    cost = build()
    if not gathers_halves(model, dtype, on_gpu):
        return cost
    with halve_weights(model):
        halved = build()
    return replace(
        cost,
        gathered_itemsize=dtype.itemsize,
        gathered=keep_sizes(halved.modules, cost.modules),
        gathered_eager=keep_sizes(halved.eager, cost.eager),
    )


def build_cost(
    model: nn.Module,
    microbatch: MicrobatchShape,
    build_cost_model: Callable[[bool], AnalyticCost | ProfiledCost],
    dtype: torch.dtype,
    on_gpu: bool,
    batch: int | None = None,
    optimizer: OptimizerConfig | None = None,
    sizes: dict[str, ModuleSizes] | None = None,
) -> RunCost:
    """Return the cost of the layers as `model_cost` does; `build_cost_model` is given whether attention is causal.

    `sizes`: over which modules can be sharded, as far as known; those of others are added.
    """
    sizes = {} if sizes is None else sizes
    modules, eager, flops = [], list[ModuleCost](), 0.0
    for name, part, call in _list_parts(model, microbatch):
        is_language_model = isinstance(model, MultimodalModel) and part is model.language_model
        cost_model = build_cost_model(is_language_model)
        try:
            segments = find_segments(part, call, dtype, on_gpu)
            costs = [[cost_model(one) for one in segment.calls] for segment in segments]
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"A layer of {name} does not fit on this device. Measure a smaller microbatch: a larger "
                "loop.gradient_accumulation_steps, or a smaller data.max_length."
            ) from error
        except Exception as error:  # model code that needs values, which meta tensors do not have
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160].rstrip(".")
            kind = type(unwrap(part)).__name__
            raise ConfigError(f"The cost of the layers of {name} ({kind}) cannot be computed: {reason}.") from error
        flops += sum(one.flops for segment in costs for one in segment)
        items = microbatch.count(name) if isinstance(part, ModalEncoderModule) else 0
        if name not in sizes:
            sizes[name] = find_module_sizes(part, is_language_model, microbatch.tokens)
        build = partial(_build_layers, segments, items=items, dtype=dtype, sizes=sizes[name])
        modules.append(sizes[name].build_cost(name, build(costs)))
        if cost_model.eager is not None:
            plain = [[cost_model.eager(one) for one in segment.calls] for segment in segments]
            eager.append(sizes[name].build_cost(name, build(plain)))
    counts: Counter[torch.dtype] = Counter()  # trained numbers: optimizer states are those of the most frequent type
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel() if parameter.requires_grad else 0
    masters = any(map(has_master, model.parameters()))
    common, many = counts.most_common(1)[0] if counts else (dtype, 0)
    return RunCost(
        tuple(modules),
        eager=tuple(eager),
        samples=microbatch.rows,
        batch=batch or microbatch.rows,
        tokens=float(microbatch.tokens),
        flops=flops / microbatch.rows,
        precision={torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32"),
        state_bytes=state_size(optimizer or OptimizerConfig(), common, True, masters).per_element if many else 0,
    )


def _list_parts(model: nn.Module, microbatch: MicrobatchShape) -> Iterator[tuple[str, nn.Module, Callable[[], Any]]]:
    """Yield the parts of a model with their calls, by the names that plans have for them."""
    rows, tokens = microbatch.rows, microbatch.tokens
    if not isinstance(model, MultimodalModel):
        yield WHOLE_MODEL, model, next(build_calls(model, rows, tokens, 1))[2]
        return
    for name, encoder in model.encoders.items():
        calls = {part: call for _, part, call in build_calls(model, microbatch.count(name), tokens, 1)}
        yield name, encoder, calls[encoder]
    calls = {part: call for _, part, call in build_calls(model, rows, tokens, 1)}
    yield LANGUAGE_MODEL if model.encoders else WHOLE_MODEL, model.language_model, calls[model.language_model]


def _build_layers(
    segments: Sequence[ModelSegment], costs: Sequence[Sequence[CallCost]], items: int, dtype: torch.dtype,
    sizes: ModuleSizes,
) -> tuple[LayerCost, ...]:  # fmt: skip
    seen: set[int] = set()
    pairs = zip(segments, costs, strict=True)
    return tuple(_build_layer(segment, own, seen, items, dtype, sizes) for segment, own in pairs)


def _build_layer(
    segment: ModelSegment, costs: Sequence[CallCost], seen: set[int], items: int, dtype: torch.dtype, sizes: ModuleSizes
) -> LayerCost:
    """Return the cost of a segment; shared parameters count for the first segment that has them."""
    cost = sum(costs, CallCost())
    every = {id(p): p for module in segment.modules for p in module.parameters()}
    own = [parameter for key, parameter in every.items() if key not in seen]
    shared = [parameter for key, parameter in every.items() if key in seen and parameter.requires_grad]
    seen.update(every)
    trained = sum(p.numel() for p in own if p.requires_grad)
    total = sum(p.numel() for p in own)
    is_trained = any(p.requires_grad for p in every.values())
    layers = [(call, one) for call, one in zip(segment.calls, costs, strict=True) if call.is_layer]
    inputs = sum(max((t.numel() * t.element_size() for t in call.inputs), default=0) for call, _ in layers)
    products = max((t.numel() * dtype.itemsize for call, _ in layers for t in call.inputs), default=0)
    return LayerCost(
        name=segment.name,
        forward=cost.forward,
        input_gradient=cost.input_gradient,
        weight_gradient=cost.weight_gradient,
        parameters=total,
        parameter_bytes=sum(p.numel() * p.element_size() for p in own),
        activation_bytes=cost.kept,
        activation_bytes_recomputed=min(cost.recomputed, cost.kept),
        output_bytes=cost.output,
        trained=is_trained,
        trained_parameters=trained if 0 < trained < total or (is_trained and not trained) else None,
        sums=2 if layers else 0,
        sum_bytes=products if 0 < products < cost.output else None,
        kv_bytes=cost.keys,
        tp_cuts="always" if layers else "vocabulary" if any(one.is_head for one in segment.calls) else "never",
        **sizes.count_whole(own),
        whole_bytes=min(2 * inputs, cost.kept),
        working_bytes=cost.working,
        again=sum(one.forward for _, one in layers),
        shared_bytes=sum(p.numel() * p.element_size() for p in shared),
        items=float(items),
        experts=cost.experts,
    )


def profile_run(
    config: RunConfig,
    facts: DataStatistics | None = None,
    on_measure: Callable[[str], None] = lambda words: None,
    spread: list[float] | None = None,
) -> RunCost:
    """Return the cost of the layers of a run, measured on the device of its config.

    One layer of each kind is built there with random weights and run forward and backward. The model itself is not
    built, and no weights are read. `on_measure` is called with a description of each call that is measured.
    `spread` gets the relative standard deviation between several measurements of all kinds.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    placement = choose_placement(config.device, config.precision, config.attention)
    model = build_meta_model(config)
    cast_parts(split_into_parts(model, config.model, config.optimizer), placement.dtype)
    return profile_model(
        model,
        build_microbatch_shape(config, model, facts),
        placement,
        compiled=compiles(config.compile, placement.device),
        batch=config.loop.batch_size,
        optimizer=config.optimizer,
        on_measure=on_measure,
        spread=spread,
    )


def profile_model(
    model: nn.Module,
    microbatch: MicrobatchShape,
    placement: DevicePlacement,
    *,
    compiled: bool | None = None,
    batch: int | None = None,
    optimizer: OptimizerConfig | None = None,
    known: dict[str, CallCost] | None = None,
    on_measure: Callable[[str], None] = lambda words: None,
    spread: list[float] | None = None,
) -> RunCost:
    """Return the cost of the layers of a model, measured on a device; the arguments are those of `model_cost`.

    `known`: earlier measurements, which are not repeated; new ones are added. `spread`: as in `profile_run`.
    """
    on_gpu = placement.device.type != "cpu"
    fused = compiles("auto", placement.device) if compiled is None else compiled
    known = {} if known is None else known
    cost_models: list[ProfiledCost] = []

    def build_cost_model(is_causal: bool) -> ProfiledCost:
        setting = ComputeSetting(placement.dtype, on_gpu, fused, is_causal, microbatch.labels)
        cost_models.append(ProfiledCost(placement, setting, known, on_measure))
        return cost_models[-1]

    build = partial(build_cost, model, microbatch, build_cost_model, placement.dtype, on_gpu, batch, optimizer)
    cost = build()
    if not on_gpu or spread is not None:
        for _ in range(PASSES - 1):
            for one in cost_models:
                one.measure_again()
        cost = build()
    cost = replace(cost, is_measured=True)
    if spread is not None:
        times = [each for one in cost_models for each in one.list_spreads()]
        spread.append(sum(deviation for _, deviation in times) / (sum(seconds for seconds, _ in times) or 1.0))
    if on_gpu:
        half = placement.dtype.itemsize if gathers_halves(model, placement.dtype, on_gpu) else None
        return replace(cost, gathered_itemsize=half)
    return cost


def get_device_name(config: RunConfig) -> str:
    """Return the name of the device of a run; `cpu` for a processor."""
    found = choose_placement(config.device, config.precision, config.attention).device
    return torch.cuda.get_device_name(found) if found.type == "cuda" else found.type


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}.")


def write_costs(path: str | Path, cost: RunCost, measured_on: str) -> None:
    """Write costs to a file for `read_costs`; `measured_on`: the name of the device."""
    import yaml

    data, usual = asdict(replace(cost, parts=())), {one.name: one.default for one in fields(LayerCost)}
    del data["parts"]
    for key in _MODULES:
        data[key] = {one.pop("name"): one for one in data.pop(key)}
        for module in data[key].values():
            for name in _TUPLES:
                module[name] = list(module[name])
            module["layers"] = [
                {name: value for name, value in one.items() if value != usual[name]} for one in module["layers"]
            ]
    text = yaml.safe_dump({_MEASURED_ON: measured_on, **data}, sort_keys=False, width=200)
    write_text(path, text)


def read_costs(path: str | Path, on: Device | None = None) -> RunCost:
    """Read a file of `cornstarch profile`; costs of another device than `on` are refused."""
    data = load_yaml(path, "profile")
    if not isinstance(data, Mapping) or not isinstance(data.get("modules"), Mapping):
        raise ConfigError(f"{path}: the file has no costs; `cornstarch profile CONFIG --output {path}` writes them.")
    try:
        measured_on = str(data.get(_MEASURED_ON, ""))
        found = cluster.find_device_or_unknown(measured_on).name
        if on is not None and measured_on and on.name not in (found, measured_on):
            raise ConfigError(
                f"the costs were measured on {measured_on}; they do not apply to {on.name}. Measure them there "
                "(cornstarch profile), or leave them out: costs are then computed from shapes."
            )
        given = {name: value for name, value in data.items() if name != _MEASURED_ON}
        modules = {key: _read_modules(key, given.get(key) or {}) for key in _MODULES}
        return replace(_read(RunCost, "the run", {**given, **modules}), is_measured=True)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_modules(key: str, data: Any) -> tuple[ModuleCost, ...]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{key}: expected modules by name.")
    modules = []
    for name, module in data.items():
        where = f"{key}.{name}"
        if not isinstance(module, Mapping) or not isinstance(module.get("layers"), list):
            raise ConfigError(f"{where}: expected `layers`, a list.")
        layers = tuple(_read_layer(f"{where}.layers[{n}]", one) for n, one in enumerate(module["layers"]))
        values = {name: tuple(value) if name in _TUPLES else value for name, value in module.items()}
        modules.append(_read(ModuleCost, where, {**values, "name": name, "layers": layers}))
    return tuple(modules)


def _read_layer(where: str, data: Any) -> LayerCost:
    experts = data.get("experts") if isinstance(data, Mapping) else None
    if experts is not None:
        data = {**data, "experts": _read(ExpertCost, f"{where}.experts", experts)}
    layer: LayerCost = _read(LayerCost, where, data)
    return layer


def _read(kind: type, where: str, data: Any) -> Any:
    """Return an object of a class, given exactly the fields that it needs."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a mapping; found {data!r}.")
    known = {one.name: one for one in fields(kind)}
    unknown = [str(name) for name in data if name not in known]
    missing = [name for name, one in known.items() if one.default is MISSING and name not in data]
    wrong = [
        f"{name} = {value!r}"
        for name, value in data.items()
        if name in known and str(known[name].type) in ("int", "float") and type(value) not in (int, float)
    ]
    for found, words in ((unknown, "unknown"), (missing, "missing"), (wrong, "expected a number")):
        if found:
            raise ConfigError(f"{where}: {', '.join(found)}: {words}.")
    return kind(**data)
