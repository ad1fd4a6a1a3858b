"""Splitting any model into pipeline stages, without code for any model.

    template = PipelineTemplate.split(model, 2)
    part = cut(model, template, stage=0)
    payload = part({"input_ids": ids})          # stage 1 takes it as `received`

The model's own forward is kept; the modules that other stages own are replaced (see `remote_module`). Where a model may
be split, and which results stages exchange, is found on a small twin of the model. The twin is then split and compared
with itself in one piece, loss and every gradient, in one process: a model that would be trained wrongly is refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.twin import add_noise, build_twin_config, copy_module, shorten_items
from cornstarch.pipeline.example_inputs import guess_inputs
from cornstarch.pipeline.message import flatten_payload, unflatten_payload
from cornstarch.pipeline.model_analysis import ModelAnalysis, count_parameters, find_wrapped_model, trace_dataflow
from cornstarch.pipeline.remote_module import RemoteModule
from cornstarch.pipeline.stage import Call, FunctionLayer, SequentialStage, StageModule, build_stage, call_with_names
from cornstarch.trees import differentiable

if TYPE_CHECKING:
    from cornstarch.pipeline.template import PipelineTemplate

__all__ = ["analyze_model", "check_embedding_stage", "copy_analysis", "cut", "sequential_stages", "survey"]

T = TypeVar("T")
R = TypeVar("R")
MakeInputs = Callable[[nn.Module], Mapping[str, Any]]
Gradients = dict[str, Tensor | None]

_MAX_TWIN_PARAMETERS = 20_000_000  # a model of at most this size may be copied as it is
_MAX_VERIFIED_STAGES = 4

# Results by class and options, and for modules without a config by object; refusals are remembered, too.
_analyses: dict[tuple[Any, ...], ModelAnalysis | UnsupportedModelError] = {}
_module_analyses: WeakKeyDictionary[nn.Module, ModelAnalysis | UnsupportedModelError] = WeakKeyDictionary()
_embedding_stage_errors: dict[tuple[Any, ...], str] = {}


def cut(
    model: nn.Module,
    template: PipelineTemplate,
    stage: int,
    survey: ModelAnalysis | None = None,
    call: Call | None = None,
) -> StageModule:
    """Turn a model into one of its stages, in place: the parameters of other stages are freed.

    Parameters keep their names. A model on the meta device stays there. For several stages of one model, copy it first.

    Args:
        model: A transformers model, also inside PEFT; a `ModalEncoderModule`; an `nn.Sequential`.
        template: The modules of each stage.
        stage: Which of the stages to build.
        survey: The analysis of the model, if it is known already.
        call: Runs the model on a batch, if `model(**inputs)` does not: a `MultimodalModel` around its language model.
    """
    if any(isinstance(part, RemoteModule) for part in model.modules()):
        raise ConfigError(f"{type(model).__name__} was cut into stages before. Copy the whole model for each stage.")
    analysis = survey if survey is not None else analyze_model(model)
    starts = template.starts(model, analysis)
    if not 0 <= stage < len(starts):
        raise ConfigError(f"stage = {stage}: {template!r} has the stages 0 to {len(starts) - 1}.")
    if isinstance(find_wrapped_model(model).inner, nn.Sequential):
        return SequentialStage.of(model, starts, stage, call)
    return build_stage(model, analysis, starts, stage, call or call_with_names)


def sequential_stages(
    layers: Sequence[nn.Module | Callable[..., Any]], boundaries: Sequence[int], call: Call | None = None
) -> list[SequentialStage]:
    """Return the stages of a list of layers and functions.

    Parameters are named as in an `nn.Sequential` of the list, by the index of their layer. The layers are not copied: a
    layer that occurs twice is the same object on both stages, and its parameters are listed as tied.

    Args:
        layers: The layers; each is called on the result of the one before.
        boundaries: The indices of the layers with which a new stage begins.
        call: Runs the model of the first stage on a batch. Default: on the batch's only entry, or its entry `input`.
    """
    starts = [0, *boundaries]
    if any(a >= b for a, b in zip(starts, [*boundaries, len(layers)], strict=True)):
        raise ConfigError(
            f"boundaries = {list(boundaries)}: expected increasing numbers between 1 and {len(layers) - 1}, the layers "
            f"with which stages begin; there are {len(layers)} layers."
        )
    modules = [layer if isinstance(layer, nn.Module) else FunctionLayer(layer) for layer in layers]
    return [SequentialStage.of(nn.Sequential(*modules), starts, stage, call) for stage in range(len(starts))]


# ---------------------------------------------------------------------------------------------------- analysis


def analyze_model(model: nn.Module, make_inputs: MakeInputs | None = None) -> ModelAnalysis:
    """Find where a model may be split, and which results travel from stage to stage.

    The analysis runs on a narrow twin with as many layers, built from the model's config. The model itself is not run,
    and may be on the meta device. The result is cached for each class and its options.

    Args:
        model: A transformers model, also inside PEFT or a `ModalEncoderModule`; an `nn.Sequential`; any other module
            with a list of layers.
        make_inputs: Returns a small batch for the twin that it is given. Needed where a batch cannot be guessed from
            the config, and for modules that are not transformers models.

    Returns:
        The analysis, with the names that modules have in `model`.
    """
    wrapped = find_wrapped_model(model)
    inner = wrapped.inner
    if isinstance(inner, nn.Sequential):
        names = tuple(inner._modules)  # not `named_children`, which leaves out a layer that occurs twice
        return wrapped.add_outer_names(ModelAnalysis(wrapped.class_name, names, {}, {}))
    cache: MutableMapping[Any, ModelAnalysis | UnsupportedModelError] = _module_analyses
    key: Any = inner
    if isinstance(inner, PreTrainedModel):
        cache, key = _analyses, _get_cache_key(inner, make_inputs)
    if key not in cache:
        try:
            cache[key] = _analyze(inner, make_inputs)
        except UnsupportedModelError as error:
            name, reason = type(inner).__name__, str(error).rstrip(".")
            is_named = reason.startswith(name)
            cache[key] = error if is_named else UnsupportedModelError(f"{name} cannot be cut into stages: {reason}.")
    found = cache[key]
    if isinstance(found, UnsupportedModelError):
        raise UnsupportedModelError(str(found))
    return wrapped.add_outer_names(found)


survey = analyze_model  # the published name


def copy_analysis(target: nn.Module, source: nn.Module) -> None:
    """Let a copy of a module use the analysis of the module."""
    inner, original = find_wrapped_model(target).inner, find_wrapped_model(source).inner
    if original in _module_analyses:
        _module_analyses[inner] = _module_analyses[original]


def _get_cache_key(inner: PreTrainedModel, make_inputs: MakeInputs | None) -> tuple[Any, ...]:
    irrelevant = ("_name_or_path", "dtype", "transformers_version", "architectures")
    options = {name: value for name, value in inner.config.to_dict().items() if name not in irrelevant}
    return (type(inner), repr(sorted(options.items())), make_inputs)


def _use_first_twin(inner: nn.Module, prepare: Callable[[nn.Module], T], verify: Callable[[nn.Module, T], R]) -> R:
    """Call `verify` with the first small copy of a model on which `prepare` works, and with what it returned."""
    first_error: Exception | None = None
    for build_twin in _list_twin_builders(inner):
        with _use_cpu_float32():
            try:
                twin = build_twin().eval()
                with torch.no_grad():  # finite values: some models leave parameters uninitialized
                    for parameter in (one for one in twin.parameters() if one.is_floating_point()):
                        parameter.nan_to_num_(0.0, 0.0, 0.0).clamp_(-10, 10)
                add_noise(twin)
                prepared = prepare(twin)
            except UnsupportedModelError:
                raise
            except Exception as error:  # configs and forwards raise errors of every kind
                first_error = first_error or error
                continue
            return verify(twin, prepared)
    reason = f"no small copy of it runs ({type(first_error).__name__}: {first_error})"
    raise UnsupportedModelError(reason) from first_error


def _analyze(inner: nn.Module, make_inputs: MakeInputs | None) -> ModelAnalysis:
    modules = dict(inner.named_modules())

    def trace(twin: nn.Module) -> tuple[dict[str, Any], ModelAnalysis]:
        traced = copy_module(twin)
        batch = _get_batch(traced, make_inputs)
        found = trace_dataflow(traced, lambda: traced(**batch))
        for name in (*found.layers, *found.side_modules):  # they must be those of the model
            parent = name.rpartition(".")[0]
            around = twin.get_submodule(parent)
            is_list = isinstance(around, nn.ModuleList | nn.Sequential)
            if name not in modules or (is_list and list(around._modules) != list(modules[parent]._modules)):
                raise ValueError(f"{name} is not the same in a small copy that is made from the config")
        return batch, found

    return _use_first_twin(inner, trace, lambda twin, traced: _verify_analysis(twin, *traced))


def _get_batch(twin: nn.Module, make_inputs: MakeInputs | None) -> dict[str, Any]:
    """Return the first batch on which a model runs; raise the first error if there is none."""
    if make_inputs is not None:
        batches = iter([dict(make_inputs(twin))])
    elif isinstance(twin, PreTrainedModel):
        batches = guess_inputs(twin)
    else:
        raise UnsupportedModelError("it is no transformers model: say what it is run on (make_inputs)")
    first_error: Exception | None = None
    for batch in batches:
        try:
            with torch.no_grad():
                twin(**batch)
            return batch
        except Exception as error:  # models raise errors of every kind
            first_error = first_error or error
    raise first_error or ValueError("there is nothing to run it on")


# ---------------------------------------------------------------------------------------------------- twins


def _list_twin_builders(inner: nn.Module) -> Iterator[Callable[[], nn.Module]]:
    is_small = count_parameters(inner) <= _MAX_TWIN_PARAMETERS
    if isinstance(inner, PreTrainedModel):
        # All layers, but narrow: which layers read which results depends on their number.
        kind, config = type(inner), inner.config
        if (shorter := shorten_items(narrow := build_twin_config(config, layers=sys.maxsize))) is not None:
            yield lambda: _build_twin(kind, shorter)
        yield lambda: _build_twin(kind, narrow)
        yield lambda: _build_twin(kind, _align_widths(config, build_twin_config(config, layers=sys.maxsize)))
        if is_small:
            yield lambda: _build_twin(kind, copy.deepcopy(config))
    elif is_small:
        yield lambda: _copy_as_twin(inner)


def _build_twin(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    config._attn_implementation = "eager"
    return kind(config).float()


def _align_widths(config: PreTrainedConfig, twin: PreTrainedConfig) -> PreTrainedConfig:
    """Let sizes of any name that equal the hidden size also equal the twin's hidden size."""
    old, new = getattr(config, "hidden_size", None), getattr(twin, "hidden_size", None)
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _align_widths(value, getattr(twin, name))
        elif type(value) is int and value == old and new is not None:
            setattr(twin, name, new)
    return twin


def _copy_as_twin(inner: nn.Module) -> nn.Module:
    twin = copy_module(inner)
    if any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers())):
        twin = twin.to_empty(device="cpu")
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.data.zero_()
    return twin.to("cpu")


@contextmanager
def _use_cpu_float32() -> Iterator[None]:
    """Compute on the CPU in single precision, and restore the random state afterwards."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    is_cpu = torch.get_default_device().type == "cpu"  # a device context slows every torch function down
    device = nullcontext() if is_cpu else torch.device("cpu")
    try:
        with device, torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)


# ---------------------------------------------------------------------------------------------------- verification


def _verify_analysis(twin: nn.Module, batch: dict[str, Any], found: ModelAnalysis) -> ModelAnalysis:
    """Return an analysis with which the twin was split and computed the same: the given one, or a more cautious one."""
    # A result without a gradient (a mask, a table that is looked up) is invisible to the trace: send everything then.
    cautious = replace(found, last_reader={**dict.fromkeys(found.side_modules, len(found.layers)), **found.last_reader})
    # Some models cannot run with a head only.
    barred = {**found.barred, len(found.layers): "what follows the layers cannot run without a layer"}
    errors = []
    for attempt in (found, cautious, replace(found, barred=barred), replace(cautious, barred=barred)):
        try:
            verify_split(twin, batch, attempt)
            return attempt
        except UnsupportedModelError as error:
            errors.append(error)
    raise errors[0]


def check_embedding_stage(inner: nn.Module) -> None:
    """Raise `UnsupportedModelError` unless a first stage may have embeddings only, and no layer."""
    # The second stage then receives only the input of the first layer. A small copy verifies that this is enough.
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(f"{type(inner).__name__}: every stage of such a module needs a layer.")
    key = _get_cache_key(inner, None)
    if key not in _embedding_stage_errors:
        error = ""
        try:
            _use_first_twin(
                inner,
                lambda twin: (_get_batch(copy_module(twin), None), analyze_model(twin)),
                lambda twin, found: verify_split(twin, *found, [0, 0, *found[1].boundaries[:1]]),
            )
        except UnsupportedModelError as found:
            error = str(found)
        _embedding_stage_errors[key] = error
    if reason := _embedding_stage_errors[key]:
        raise UnsupportedModelError(f"{type(inner).__name__} cannot begin with a stage without layers: {reason}")


def verify_split(
    model: nn.Module, inputs: Mapping[str, Any], analysis: ModelAnalysis, starts: Sequence[int] | None = None
) -> None:
    """Raise `UnsupportedModelError` unless the stages of a model compute what the whole model computes."""
    if starts is None:
        places = [0, *analysis.boundaries]
        count = min(len(places), _MAX_VERIFIED_STAGES)
        starts = [places[index * (len(places) - 1) // max(1, count - 1)] for index in range(count)]
    if len(starts) < 2:
        return
    expected = run_whole(copy_module(model), inputs)
    try:
        stages = [build_stage(copy_module(model), analysis, starts, stage) for stage in range(len(starts))]
        found = run_staged(stages, inputs)
    except Exception as error:
        raise UnsupportedModelError(f"a stage of a small copy fails: {type(error).__name__}: {error}") from error
    if difference := _find_first_difference(found, expected):
        raise UnsupportedModelError(f"a small copy computes something else when it is cut: {difference}")


def run_whole(model: nn.Module, inputs: Mapping[str, Any]) -> Gradients:
    """Return the loss of a model on a batch, and all gradients, by name."""
    torch.manual_seed(0)
    loss = compute_probe_loss(model(**inputs))
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


def run_staged(stages: Sequence[StageModule], inputs: Mapping[str, Any]) -> Gradients:
    """Return the same as `run_whole`, computed stage by stage; gradients of tied parameters are summed."""
    received = None
    edges: list[tuple[list[Tensor], list[Tensor]]] = []
    for stage in stages:
        torch.manual_seed(0)  # as for the whole model, if random numbers are drawn before the layers
        output = stage(inputs, received)
        if not stage.last:
            spec, sent = flatten_payload(output)
            arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent]
            edges.append((sent, arrived))
            received = unflatten_payload(spec, arrived)
    loss = compute_probe_loss(output)
    loss.backward()
    for sent, arrived in reversed(edges):
        pairs = [(s, a.grad) for s, a in zip(sent, arrived, strict=True) if s.requires_grad and a.grad is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    total: Gradients = {"loss": loss.detach()}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            listed = stage.tied.get(name, name)
            parts = [one for one in (total.get(listed), parameter.grad) if one is not None]
            total[listed] = sum(parts[1:], parts[0]) if parts else None
    return total


def compute_probe_loss(output: Any) -> Tensor:
    """Return a scalar that depends on every element of an output, each with a weight of its own."""
    noise = torch.Generator().manual_seed(4)
    parts = [
        (tensor.float() * torch.randn(tensor.shape, generator=noise).to(tensor.device)).mean()
        for tensor in differentiable(output)
        if tensor.is_floating_point() and tensor.numel()
    ]
    if not parts:
        raise UnsupportedModelError("nothing in its output has a gradient")
    return torch.stack(parts).sum()


def _find_first_difference(found: Gradients, expected: Gradients) -> str:
    """Describe where two results differ beyond rounding; "" if they do not."""
    if found.keys() != expected.keys():
        return f"other parameters: {', '.join(sorted(found.keys() ^ expected.keys())[:3])}"
    scale = max(float(value.abs().max()) for value in expected.values() if value is not None and value.numel())
    for name, value in expected.items():
        other = found[name]
        if (value is None) != (other is None):
            return f"{name} has {'no' if other is None else 'a'} gradient"
        if value is None or other is None or not value.numel():
            continue
        distance = float((other - value).abs().max())
        if not distance <= 1e-4 * float(value.abs().max()) + 1e-5 * scale:
            return f"{name} differs by {distance:.2g}"
    return ""
