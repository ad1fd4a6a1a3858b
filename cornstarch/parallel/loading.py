"""Weights read from safetensors by slice: a rank reads its own shards, and never holds a tensor that it has not.

The model is built on the meta device and sharded, and only then are its files opened:

    from_pretrained -> model on meta -> shard -> for each stored tensor: where it goes, and which boxes of it are local
                                                                                  |
    parameters as DTensors <- names, dtypes, ties, buffers: transformers' own loader <- shards, read as it asks for them

transformers' loader renames and merges what is stored under other names. It is given shards for full tensors, and
parameters of the shards' shapes to put them in. That is right as long as each of its steps treats a shard as it would
treat that part of the full tensor; if a step is not known to do so, the model is read in full.

`build_partial_model` makes new models of which a rank keeps its part. Parameters of other ranks lose their memory as
soon as they are registered. Random numbers for them are drawn all the same and thrown away, so that everything after
them is drawn as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from cornstarch.compat import TorchDispatchMode, destinations, weights_through
from cornstarch.errors import ConfigError
from cornstarch.files import find_damaged_weights
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.tensor.shard_boxes import FullReadRequired, ShardReadPlan, ShardSpec, get_shard_specs
from cornstarch.parallel.tensor.shard_layers import shard_tensors
from cornstarch.parallel.tensor.styles import Style

ShardFunction = Callable[[Any], Any]
LocalNames = Callable[[Any], Collection[str]]
"""Returns the names of the parameters of this rank, given the model on the meta device."""

_REASON, _PARTIAL = "full_read_reason", "is_partial"


def load_sharded(
    model_class: Any,
    folder: str | Path,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, Style | str] | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
    **options: Any,
) -> Any:
    """Return the model of a folder, sharded over the ranks of a mesh; this rank reads its own shards only.

    The result is that of `from_pretrained` and `shard_tensors`, without ever having the full model. All ranks must call
    it.

    Args:
        model_class: A class of transformers, or an Auto class.
        folder: A folder with safetensors, or the name of one on the hub.
        mesh: The ranks; it has one axis.
        plan, sequence, vocabulary: As for `shard_tensors`.
        options: Whatever else `from_pretrained` takes: `dtype`, `attn_implementation`, …
    """
    wants_info = options.pop("output_loading_info", False)

    def shard(model: nn.Module) -> None:
        shard_tensors(model, mesh, plan=plan, sequence=sequence, vocabulary=vocabulary)

    model, info = load_partial(model_class, folder, shard, output_loading_info=True, **options)
    # Weights that were not stored, such as a new head, are random: all ranks take those of the first.
    mismatched = {entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]}
    for name, parameter in model.named_parameters():
        if mesh.size() > 1 and name in {*info["missing_keys"], *mismatched} and not isinstance(parameter, DTensor):
            dist.broadcast(parameter.detach(), group=mesh.get_group(), group_src=0)
    return (model, info) if wants_info else model


def load_partial(
    model_class: Any, folder: str | Path, shard: ShardFunction, *, held: LocalNames | None = None, **options: Any
) -> Any:
    """Return the model of a folder, of which this rank reads what `shard` and `held` leave.

    Args:
        model_class: A class of transformers, or an Auto class.
        folder: A folder with safetensors, or the name of one on the hub.
        shard: Changes a model in place. It is called with the model on the meta device: it may turn parameters into
            DTensors, or drop parameters (`drop_parameters`). If it raises `FullReadRequired`, or cannot work on the
            meta device, the model is read in full and `shard` called once more; `full_read_reason` tells why.
        held: Returns the names of the parameters to read. All others stay on the meta device.
        options: Whatever else `from_pretrained` takes.
    """
    options = {"use_safetensors": True, **options}
    try:
        try:
            with isolate_random_state(), ExitStack() as files:
                reader = _ShardReader(shard, held, str(folder), files)
                with weights_through(reader):
                    loaded = model_class.from_pretrained(folder, **options)
                reader.finish(loaded[0] if isinstance(loaded, tuple) else loaded)
                return loaded
        except FullReadRequired as error:
            reason = str(error)
        with isolate_random_state():
            loaded = model_class.from_pretrained(folder, **options)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: {find_damaged_weights(Path(folder)) or error}") from error
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    shard(model)
    record_full_read(model, reason)
    return loaded


@contextmanager
def isolate_random_state() -> Iterator[None]:
    """Run a block that loads a model, such that numbers drawn after it do not depend on those drawn in it.

    `_init_weights` of some models draws numbers for every layer that is not on the meta device, also for those whose
    weights are stored. Afterwards numbers follow from the state before the block, on every rank alike.
    """
    seed = crc32(torch.get_rng_state().numpy().tobytes())
    with torch.random.fork_rng(devices=[]):
        yield
    torch.default_generator.manual_seed(seed)


def is_partial(model: nn.Module) -> bool:
    """Return whether a model was built or read with some parameters, those of other ranks, left on the meta device."""
    return _PARTIAL in unwrap(model).__dict__


def mark_partial(model: nn.Module) -> None:
    unwrap(model).__dict__[_PARTIAL] = True


def full_read_reason(model: nn.Module) -> str | None:
    """Return why a model was read in full before it was sharded, or None if it was read by slice, or not at all."""
    return unwrap(model).__dict__.get(_REASON)


def record_full_read(model: nn.Module, reason: str | None) -> None:
    unwrap(model).__dict__[_REASON] = reason


def drop_parameters(module: nn.Module) -> None:
    """Remove the parameters and buffers of a module and all modules in it, so that they are not read."""
    for inner in module.modules():
        inner._parameters.clear()
        inner._buffers.clear()
        inner._is_hf_initialized = True  # type: ignore[assignment]  # tells transformers not to initialize it


class _ShardReader:
    """Reads one model: from its parameter names to shards of stored tensors, and back to DTensors."""

    def __init__(self, shard: ShardFunction, held: LocalNames | None, folder: str, files: ExitStack) -> None:
        self._shard, self._held, self._folder, self._files = shard, held, folder, files
        self._places: list[tuple[nn.Module, str, DTensor]] = []
        self._hidden: _HiddenParameters | None = None
        self._was_called = False

    def __call__(self, model: Any, files: Sequence[str] | None, settings: Any) -> Mapping[str, Any]:
        """Shard the model, and return the tensors for the loader by stored name."""
        self._was_called = True
        if settings.hf_quantizer is not None:
            raise FullReadRequired("its weights are quantised")
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        sources = self._open(files)
        going = destinations(model.base_model_prefix, shapes, sources, settings.weight_mapping)
        stored = {to.names[0]: tuple(sources[key].get_shape()) for key, to in going.items() if not to.steps}
        mismatched = {name: (shape, shapes[name]) for name, shape in stored.items() if shape != shapes[name]}
        if mismatched and not settings.ignore_mismatched_sizes:
            lines = [f"{n} is {list(there)} there, {list(here)} here" for n, (there, here) in mismatched.items()]
            listed = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
            raise ConfigError(
                f"{self._folder}: its weights do not fit {type(model).__name__}: {listed}. "
                "Its config.json, or the config that was given, is that of another model."
            )
        names = None if self._held is None else self._held(model)
        placed = {name for to in going.values() for name in to.names}
        if names is not None:
            self._check_all_stored(model, placed - mismatched.keys())
        try:
            self._shard(model)
        except (NotImplementedError, RuntimeError) as error:
            raise FullReadRequired(f"it cannot be cut on the meta device ({error})") from error
        if names is not None:
            self._hidden = _HiddenParameters(model, names)
        kept = set(model.state_dict())
        # transformers must not see ties of which one end is gone.
        ties: dict[str, str] = dict(model.all_tied_weights_keys or {})
        model.all_tied_weights_keys = {a: b for a, b in ties.items() if a in kept and b in kept}
        held: dict[str, tuple[DTensor, ShardSpec | None]] = {}
        plain: dict[int, nn.Parameter] = {}  # of the shards' shapes; the loader could not fill DTensors
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    held[f"{prefix}.{name}".lstrip(".")] = parameter, get_shard_specs(module).get(name)
                    self._places.append((module, name, parameter))
                    local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                    module._parameters[name] = plain.setdefault(id(parameter), local)  # tied parameters stay tied
        # A shard must not be initialized randomly.
        if misfits := [name for name in held if name in mismatched]:
            raise FullReadRequired(f"{misfits[0]} is stored with another shape, and made anew")
        placed |= {target for target, source in ties.items() if source in placed}
        if missing := [name for name in held if name not in placed]:
            raise FullReadRequired(f"{missing[0]} is not stored, and made anew")
        plan = ShardReadPlan(sources, going, held, kept, ties)
        itself = destinations(model.base_model_prefix, shapes, plan.merged, settings.weight_mapping)
        return plan.build_shards(itself)

    def _open(self, files: Sequence[str] | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in files or ():
            if not Path(file).is_file():
                raise ConfigError(f"{self._folder}: {Path(file).name} is not there, and has some of the weights.")
            opened: Any = self._files.enter_context(safe_open(file, framework="pt"))
            found |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return found

    def _check_all_stored(self, model: Any, stored: set[str]) -> None:
        """Require a full read if anything is initialized randomly: all ranks must draw the same numbers."""
        for target, source in (model.all_tied_weights_keys or {}).items():
            if target in stored and source in stored:
                raise FullReadRequired(f"{target} and {source} are tied, and both are stored")
            stored |= {target, source} if stored & {target, source} else set()
        if new := [name for name, _ in model.named_parameters() if name not in stored]:
            raise FullReadRequired(f"{new[0]} is not stored as it is here, and made anew")

    def finish(self, model: nn.Module) -> None:
        """Turn the parameters that were read into DTensors again."""
        if not self._was_called:
            raise FullReadRequired(f"{type(model).__name__} is not loaded by transformers' own loader")
        if any(hasattr(module, "base_layer") for module in model.modules()):
            raise FullReadRequired("it is stored with adapters")
        if self._hidden is not None:
            self._hidden.restore(model)
        tied: dict[int, list[tuple[nn.Module, str, DTensor]]] = {}
        for module, name, former in self._places:
            tied.setdefault(id(module._parameters[name]), []).append((module, name, former))
        for places in tied.values():
            module, name, former = places[0]
            read = module._parameters[name]
            assert read is not None and not read.is_meta, name
            sizes: dict[str, Any] = {"shape": former.shape, "stride": former.stride()}
            whole = DTensor.from_local(read.detach(), former.device_mesh, former.placements, run_check=False, **sizes)
            parameter = nn.Parameter(whole, requires_grad=read.requires_grad)
            for module, name, _ in places:
                module._parameters[name] = parameter


class _HiddenParameters:
    """Parameters of other ranks, hidden from the loader while it works; those named in `held` stay."""

    def __init__(self, model: Any, held: Collection[str]) -> None:
        self._ties = dict(model.all_tied_weights_keys or {})
        self._parameters = [
            (module, key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and f"{prefix}.{key}".lstrip(".") not in held
        ]
        gone = {id(parameter) for _, _, parameter in self._parameters}
        self._around = [m for m in model.modules() if any(id(parameter) in gone for parameter in m.parameters())]
        for module in self._around:  # the loader would want to initialize what is missing
            module._is_hf_initialized = True
        for module, key, _ in self._parameters:
            module._parameters[key] = None

    def restore(self, model: Any) -> None:
        for module, key, parameter in self._parameters:
            parameter._is_hf_initialized = True
            module._parameters[key] = parameter
        for module in self._around:
            module._is_hf_initialized = False
        model.all_tied_weights_keys = self._ties
        # Tied parameters without memory are one object, as they are where they have weights.
        for target, source in self._ties.items():
            owner, _, key = target.rpartition(".")
            module, parameter = model.get_submodule(owner), model.get_parameter(source)
            if parameter.is_meta and key in module._parameters:
                module._parameters[key] = parameter
        try:
            model.initialize_weights()
        except (NotImplementedError, RuntimeError) as error:
            raise FullReadRequired(f"its buffers are made from weights that are not here ({error})") from error
        mark_partial(model)


_Registered = tuple[nn.Module, str, torch.Size]  # the module, the name in it, and the shape of a parameter


def build_partial_model(make: Callable[[], nn.Module], held: LocalNames) -> nn.Module:
    """Build a model on the CPU in which only the parameters of this rank have memory, the others being on meta.

    Its numbers, and the state of the random number generator afterwards, are those of the full model. If a model cannot
    be built in this way, it is built in full, and `full_read_reason` tells why.
    """
    before = torch.get_rng_state()
    try:
        # Built twice: only the finished model tells the names of its parameters, but memory has to go while it is
        # built. The first pass draws nothing and records the order in which parameters come.
        with torch.random.fork_rng(devices=[]), _Construction(None) as rehearsal:
            bare = make()
        names = held(bare)
        paths: dict[int, list[str]] = {}
        for path, module in bare.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(f"{path}." if path else "")
        keeps = [  # those of this rank, and those that are not in the finished model
            id(module) not in paths or any(f"{path}{name}" in names for path in paths[id(module)])
            for module, name, _ in rehearsal.registered
        ]
        with _Construction(keeps, rehearsal.registered) as construction:
            model = make()
        if len(construction.registered) != len(rehearsal.registered):
            raise FullReadRequired("it is not made in the same way every time")
        if lost := [n for n, p in model.named_parameters(remove_duplicate=False) if n in names and p.is_meta]:
            raise FullReadRequired(f"{lost[0]} is copied from what is not here")
        mark_partial(model)
        return model
    except (FullReadRequired, NotImplementedError, RuntimeError) as error:
        is_known = isinstance(error, FullReadRequired)
        reason = str(error) if is_known else f"it looks at numbers while it is made ({error})"
    torch.set_rng_state(before)
    model = make()
    record_full_read(model, reason)
    return model


class _Construction(TorchDispatchMode):
    """Records parameters while a model is built; those that `keeps` does not keep, or all if it is None, go to meta."""

    def __init__(self, keeps: Sequence[bool] | None, expected: Sequence[_Registered] = ()) -> None:
        super().__init__()
        self._keeps, self._expected = keeps, expected
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.registered: list[_Registered] = []

    def __enter__(self) -> _Construction:
        self._hook = register_module_parameter_registration_hook(self._register)  # type: ignore[arg-type]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        self._scratch.clear()
        super().__exit__(*error)

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        number = len(self.registered)
        self.registered.append((module, name, parameter.shape))
        if self._keeps is not None:
            before = self._expected[number] if number < len(self._expected) else None
            if before is None or (type(module), name, parameter.shape) != (type(before[0]), *before[1:]):
                raise FullReadRequired("it is not made in the same way every time")
        if parameter.is_meta or (self._keeps is not None and self._keeps[number]):
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Draw random numbers for a parameter without memory, too, and throw them away."""
        if self._keeps is not None and torch.Tag.nondeterministic_seeded in func.tags and any(map(_is_bare, args)):
            func(*(self._scratch_like(one) if _is_bare(one) else one for one in args), **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _scratch_like(self, bare: Tensor) -> Tensor:
        if not bare.is_contiguous():  # torch draws for those in another order
            return torch.empty_like(bare, device="cpu")
        # Always the same memory: a fragmented heap is seldom given back to the system.
        known = self._scratch.get(bare.dtype)
        if known is None or known.numel() < bare.numel():
            known = self._scratch[bare.dtype] = torch.empty(bare.numel(), dtype=bare.dtype, device="cpu")
        return known[: bare.numel()].view(bare.shape)


def _is_bare(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
