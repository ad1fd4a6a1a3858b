"""The tracer: runs a call on shapes once and records FLOPs, memory traffic and saved tensors.

`trace_flops` runs a shape-only copy of a module (`kernels.shape_tracing`). Integers keep their values, so code
that reads grids and masks works. The trace has the products and the attention calls of the forward pass, and which of
their gradients the backward pass needs. The backward pass itself runs only to see what is recomputed.

`trace_memory` runs a module on the meta device under simulated autocast and attention kernels
(`cornstarch.cost.meta_kernels`). The trace has every operation with the bytes that it reads and writes, and the tensors
that autograd saves for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from cornstarch.attention.interface import set_attention_function, set_mask_builder
from cornstarch.attention.mask import CAUSAL, MaskPattern, MaskSpec
from cornstarch.compat import TorchDispatchMode, multiply_groups
from cornstarch.cost import meta_kernels
from cornstarch.cost.activations import SavedTensors, storage_of
from cornstarch.cost.meta_kernels import EVERYTHING
from cornstarch.errors import UnsupportedModelError
from cornstarch.kernels.shape_tracing import find_checkpointed_modules
from cornstarch.models.multimodal_language_model.shape_inference import ShapeInferenceMode, ShapeTensor, is_float
from cornstarch.parallel import wrapping_units
from cornstarch.parallel.expert import find_experts
from cornstarch.trees import map_tensors, tensors_in

_aten = torch.ops.aten
_GROUPED = frozenset(multiply_groups())
# Positions of the two operands of each product.
_OPERANDS = {
    _aten.mm: (0, 1), _aten.addmm: (1, 2), _aten.bmm: (0, 1), _aten.baddbmm: (1, 2), _aten.convolution: (0, 1),
    **dict.fromkeys(_GROUPED, (0, 1)),
}  # fmt: skip
_BATCHED = (_aten.bmm, _aten.baddbmm)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts",
)  # fmt: skip
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TILE = 128**2
EXPERTS = "experts"
"""The section of the operations inside modules of experts."""


@dataclass(frozen=True)
class AttentionCall:
    """The sizes and the mask of one attention call."""

    rows: int
    queries: int
    keys: int
    pattern: MaskPattern
    spec: MaskSpec | None
    """The padding of the rows; None: no padding."""

    @property
    def pairs(self) -> float:
        return float(self.rows * self.queries * self.keys)


@dataclass
class Operation:
    """One operation: a product of matrices, a convolution, attention, or one that only moves memory."""

    flops: float = 0.0
    """Of the forward pass; 0: it only moves memory."""
    dtype: str = "fp32"
    tiles: float = 1.0
    """Tiles of 128 × 128 in the result: few of them do not keep a large device busy."""
    reads: Mapping[StorageWeakRef, int] = field(default_factory=dict)
    """Bytes by storage."""
    writes: Mapping[StorageWeakRef, int] = field(default_factory=dict)
    is_attention: bool = False
    has_weights: bool = False
    """Whether one of the operands is a weight."""
    is_trained: bool = False
    """Whether one of the operands is a trained weight."""
    least_dim: int = 0
    """The smaller dimension of the weight."""
    section: str = ""
    gradients: tuple[tuple[float, bool], ...] = ()
    """FLOPs of each gradient of an operand, and whether that operand is a weight; () if the loss does not need it."""
    idle: float = 0.0
    """The fraction of the FLOPs that is spent on experts that a token did not choose."""
    attention: AttentionCall | None = None
    is_recomputed: bool = False
    """Whether it is part of the backward pass: activation checkpointing."""
    output: Tensor | None = None


@dataclass
class Trace:
    """The record of a traced call."""

    operations: list[Operation] = field(default_factory=list)
    patterns: list[MaskPattern] = field(default_factory=list)
    """The patterns of all masks that were built."""
    result: Any = None
    own: dict[StorageWeakRef, bool] = field(default_factory=dict)
    """Weights, and everything computed from weights alone; whether a trained one is among them."""
    outputs: dict[StorageWeakRef, int] = field(default_factory=dict)
    kv_bytes: int = 0
    """Bytes of keys and values."""
    saved: SavedTensors = field(default_factory=SavedTensors)
    """Empty if only FLOPs were traced."""
    experts: set[StorageWeakRef] = field(default_factory=set)
    """The weights of experts, and everything computed from them alone."""
    sent_bytes: int = 0
    """Bytes of the tokens that routers gave to experts: those of a token once for each of its experts."""


# ---------------------------------------------------------------------------------------------------- entry points


def trace_flops(
    module: nn.Module, call: Callable[[], Any], roots: Callable[[Any], Any], sections: Mapping[str, nn.Module]
) -> Trace:
    """Run a shape-only copy of a module; return its products and attention calls, those of `sections` with names."""
    # `roots` returns the part of the result that the loss depends on.

    def run(is_backward: bool) -> Trace:
        tracer = Tracer(module)
        with ExitStack() as stack:
            stack.callback(set_mask_builder(tracer.make_mask))
            stack.callback(set_attention_function(tracer.attend))
            stack.enter_context(tracer.record_sections(sections))
            stack.enter_context(ShapeInferenceMode())
            stack.enter_context(tracer)
            tracer.trace.result = result = call()
            used = [tensor for tensor in tensors_in(_as_values(roots(result))) if tensor.requires_grad]
            tracer.drop_unused_gradients(used)
            if used and is_backward:
                tracer.is_backward = True
                torch.autograd.backward(used, [ShapeTensor.of(one.shape, one.dtype) for one in used])
        return tracer.trace

    try:
        with torch.random.fork_rng(devices=[]):  # layer drop must not advance the run's random state
            with find_checkpointed_modules() as checkpoints:
                trace = run(is_backward=False)
            # Without checkpointing, every product of the backward pass follows from the forward pass.
            return run(is_backward=True) if checkpoints else trace
    except Exception as error:  # model code that needs values, which shapes do not have
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedModelError(
            f"The FLOPs of {type(module).__name__} cannot be counted: its code raised {type(error).__name__} when it "
            f"was run on shapes ({reason})."
        ) from error
    finally:
        for parameter in module.parameters():
            parameter.grad = None


def trace_memory(
    module: nn.Module,
    call: Callable[[], Any],
    compute_dtype: torch.dtype,
    on_gpu: bool = True,
    casts_weights: bool = True,
    is_causal: bool = False,
) -> Trace:
    """Run a module on the meta device, forward only, and return its operations and the tensors that autograd saves."""
    # `compute_dtype` is the precision of autocast (float32: none), which copies weights (`casts_weights`) except where
    # FSDP gathers them in `param_dtype`; `on_gpu` simulates the kernels of a GPU.
    tracer = Tracer(module, SavedTensors(module), is_causal)
    saved = tracer.trace.saved
    with ExitStack() as stack:
        stack.enter_context(tracer.record_experts(module))
        for layer in wrapping_units(module):  # the units of activation checkpointing
            stack.enter_context(saved.record_layer(layer))
        stack.enter_context(meta_kernels.attend_without_masks(module))
        dtype = None if compute_dtype is torch.float32 else compute_dtype
        on_copy = saved.add_copy if casts_weights else saved.leave_out
        stack.enter_context(meta_kernels.MetaKernels(tracer, dtype, on_gpu, on_copy))
        stack.enter_context(tracer)
        stack.enter_context(saved_tensors_hooks(saved.add, lambda tensor: tensor))
        result = call()
    for tensor in _find_tensors(_as_values(result)):
        tracer.trace.outputs[storage_of(tensor)] = tensor.numel() * tensor.element_size()
    tracer.trace.result = result
    return tracer.trace


# ---------------------------------------------------------------------------------------------------- the tracer


class Tracer(TorchDispatchMode):
    """Records every operation of a module, and in `saved` (None: FLOPs only) what autograd saves."""

    # If masks are not traced, `is_causal` says whether attention sees only earlier tokens.
    def __init__(self, module: nn.Module, saved: SavedTensors | None = None, is_causal: bool = False) -> None:
        super().__init__()
        self.trace = Trace() if saved is None else Trace(saved=saved)
        self.is_backward = False
        self._is_paused = False
        self._has_bytes, self._is_causal = saved is not None, is_causal
        self._section = ""
        self._masks: dict[int, tuple[MaskPattern, MaskSpec | None, Tensor]] = {}
        self._alive: list[Tensor] = []  # a freed storage could be reused and mistaken for the recorded one
        self._forms: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self._own = self.trace.own
        # A transposed weight shares its storage, so storages identify weights.
        self._own.update({storage_of(parameter): parameter.requires_grad for parameter in module.parameters()})
        for buffer in module.buffers() if self._has_bytes else ():
            self._own.setdefault(storage_of(buffer), False)
        self._idle = {} if self._has_bytes else _find_idle_fractions(module)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named, packet = named or {}, function.overloadpacket
        if self._has_bytes:
            result = function(*arguments, **named)
            if not self._is_paused:
                self._record_with_bytes(packet, arguments, named, result)
            return result
        result = self._run(function, arguments, named)
        if packet in _OPERANDS:
            # In the backward pass, gradients are known from the forward pass; only recomputation has grad enabled.
            if not self.is_backward or torch.is_grad_enabled():
                operands = [arguments[place] for place in _OPERANDS[packet]]
                idle = max(self._idle.get(storage_of(one), 0.0) for one in operands) if packet in _BATCHED else 0.0
                self.record_product(operands, [result], _count_flops(packet, arguments, named, result), idle)
        elif not self.is_backward and packet is not _aten.embedding:
            self._inherit([tensor for tensor in tensors_in(arguments) if is_float(tensor)], tensors_in(result))
        return result

    def _run(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute a result, or reuse the form of an equal call: layers repeat, and inferring shapes is slow."""
        if function.overloadpacket in _GROUPED:
            return meta_kernels.infer_grouped_shape(*arguments, *named.values())
        given = tensors_in([arguments, named])
        if not all(isinstance(tensor, ShapeTensor) for tensor in given):
            return function(*arguments, **named)
        key = repr((function, map_tensors(lambda t: (tuple(t.shape), t.stride(), t.dtype), [arguments, named])))
        if key in self._forms:
            size, stride, dtype = self._forms[key]
            return ShapeTensor(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
        result = function(*arguments, **named)
        is_new = isinstance(result, ShapeTensor) and storage_of(result) not in map(storage_of, given)
        if is_new:  # no view, not in place
            self._forms[key] = (tuple(result.shape), result.stride(), result.dtype)
        return result

    def _record_with_bytes(self, packet: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        given, made = _find_tensors([arguments, named]), _find_tensors(result)
        self._alive += [one.detach() for one in made]
        before = {storage_of(tensor) for tensor in given}
        made = [one for one in made if storage_of(one) not in before]  # no views, nothing in place
        if packet in _OPERANDS and packet not in _GROUPED:
            self.record_product(given, made, _count_flops(packet, arguments, named, result))
        elif given and made:
            self._inherit(given, made)
            reads, writes = _measure_storages(given), _measure_storages(made)
            self.trace.operations.append(Operation(reads=reads, writes=writes, section=self._section))

    def _inherit(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Treat what is computed from weights alone as weights."""
        if given and all(storage_of(one) in self._own for one in given):
            trained = any(self._own[storage_of(one)] for one in given)
            self._own.update({storage_of(one): trained for one in made})
            if any(storage_of(one) in self.trace.experts for one in given):
                self.trace.experts.update(map(storage_of, made))

    def record_product(self, given: Sequence[Tensor], made: Sequence[Tensor], flops: float, idle: float = 0.0) -> None:
        own = [self._own.get(storage_of(one)) for one in given]
        needed = [weight is not None for one, weight in zip(given, own, strict=True) if one.requires_grad]
        operation = Operation(
            flops,
            DTYPE_NAMES.get(given[-1].dtype, "fp32"),
            max(sum(one.numel() for one in made) / _TILE, 1),
            has_weights=any(one is not None for one in own),
            is_trained=any(own),
            least_dim=min((min(t.shape[-2:]) for t, w in zip(given, own, strict=True) if w is not None), default=0),
            gradients=tuple((flops, is_weight) for is_weight in needed),
            idle=idle,
        )
        self._record(operation, given, made)

    def _record(self, operation: Operation, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        if self._has_bytes:
            operation.section = self._section
            operation.reads, operation.writes = _measure_storages(given), _measure_storages(made)
            self.trace.saved.add_flops(operation.flops)
        else:
            operation.section, operation.is_recomputed = self._section, self.is_backward
            operation.output = None if self.is_backward else made[0]
        self.trace.operations.append(operation)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside the block: the caller records one operation for all of it."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def record_attention(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        queries, keys = query.shape[-2], key.shape[-2]
        visible = (1 + 1 / queries) / 2 if self._is_causal and queries == keys else 1.0
        rows = query.numel() // query.shape[-1] // queries
        flops = 2.0 * rows * queries * keys * visible * (query.shape[-1] + value.shape[-1])
        self._alive.append(output.detach())
        dtype = DTYPE_NAMES.get(output.dtype, "fp32")
        self._record(Operation(flops, dtype, is_attention=True), [query, key, value], [output])
        self.trace.kv_bytes += sum(_measure_storages([key, value]).values())

    def make_mask(
        self, batch_size: int, q_length: int, kv_length: int, *, mask_function: Any, attention_mask: Any, **_: Any
    ) -> Tensor:
        """Return the shape of a mask and remember its pattern (`attention.interface.make_masks_by`)."""
        pattern = meta_kernels.recognize_pattern(mask_function) or CAUSAL
        spec = None
        known = attention_mask is not None and attention_mask.dim() == 2 and not isinstance(attention_mask, ShapeTensor)
        if known and q_length == kv_length == attention_mask.shape[1]:
            spec = MaskSpec.from_padding(attention_mask)
        mask = ShapeTensor.of((batch_size, 1, q_length, kv_length), torch.bool)
        self._masks[id(mask)] = pattern, spec, mask
        self.trace.patterns.append(pattern)
        return mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> tuple[Tensor, None]:
        """Attend for a layer on shapes (`attention.interface.attend_by`)."""
        pattern, spec = EVERYTHING, None
        if mask is not None:
            only = list(self._masks.values()) if len(self._masks) == 1 else [(EVERYTHING, None, mask)]
            pattern, spec, _ = self._masks.get(id(mask), only[0])
        else:
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", False) if causal is None else causal
            if causal and query.shape[2] == key.shape[2]:
                pattern = CAUSAL
        result = meta_kernels.AttentionShape.apply(query, key, value)
        call = AttentionCall(query.shape[0], query.shape[2], key.shape[2], pattern, spec)
        scores, sums = (2.0 * query.shape[1] * width * call.pairs for width in (query.shape[-1], value.shape[-1]))
        # The gradient of the scores is needed for both queries and keys.
        of_query, of_key = query.requires_grad, key.requires_grad
        wanted = (scores, of_query), (scores, of_key), (sums, of_query or of_key), (sums, value.requires_grad)
        gradients = tuple((count, False) for count, is_needed in wanted if is_needed)
        operation = Operation(scores + sums, is_attention=True, gradients=gradients, attention=call)
        self._record(operation, [query, key, value], [result])
        return result, None

    @contextmanager
    def record_sections(self, sections: Mapping[str, nn.Module]) -> Iterator[None]:
        """Mark the operations of some modules with a name."""

        def enter(section: str) -> Callable[..., None]:
            return lambda *_: setattr(self, "_section", section)

        with ExitStack() as stack:
            for name, module in sections.items():
                stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                stack.callback(module.register_forward_hook(enter("")).remove)
            yield

    @contextmanager
    def record_experts(self, model: nn.Module) -> Iterator[None]:
        """Mark the operations of modules of experts, and count the tokens that they are given."""
        found = find_experts(model)
        self.trace.experts.update(storage_of(p) for one in found.values() for p in one.parameters(recurse=False))

        def count(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            # Models have names of their own for the three: what they have in common is the order.
            hidden, index, *_ = (*arguments, *named.values())
            self.trace.sent_bytes += index.numel() * hidden.shape[-1] * hidden.element_size()

        with ExitStack() as stack:
            for one in found.values():
                stack.enter_context(self.record_sections({EXPERTS: one}))
                stack.callback(one.register_forward_pre_hook(count, with_kwargs=True).remove)
            yield

    def drop_unused_gradients(self, roots: Sequence[Tensor]) -> None:
        """Drop the gradients of operations that the roots do not depend on."""
        reached: set[Any] = {None}
        waiting: list[Any] = [root.grad_fn for root in roots]
        while waiting:
            if (node := waiting.pop()) not in reached:
                reached.add(node)
                waiting += [following for following, _ in node.next_functions]
        reached.remove(None)
        for operation in self.trace.operations:
            if operation.output is None or operation.output.grad_fn not in reached:
                operation.gradients = ()
            operation.output = None


def _as_values(result: Any) -> Any:
    return list(result.values()) if isinstance(result, Mapping) else result


def _find_tensors(value: Any) -> list[Tensor]:
    return [one for one in tensors_in(value) if one.numel()]


def _measure_storages(tensors: Sequence[Tensor]) -> dict[StorageWeakRef, int]:
    """Return the bytes that an operation on some tensors reads or writes, by storage."""
    sizes: dict[StorageWeakRef, int] = {}
    for tensor in tensors:
        # An expanded tensor has more elements than its storage.
        size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        storage = storage_of(tensor)
        sizes[storage] = max(size, sizes.get(storage, 0))
    return sizes


def _count_flops(packet: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Tensor) -> float:
    if packet in _GROUPED:  # missing in torch's registry: every row is multiplied with one of the matrices
        return 2.0 * arguments[0].shape[0] * arguments[0].shape[1] * arguments[1].shape[-1]
    return float(flop_registry[packet](*arguments, **named, out_val=result))


def _find_idle_fractions(module: nn.Module) -> dict[StorageWeakRef, float]:
    """Return, by stacked matrices of experts, the fraction of experts that a token does not choose."""
    fractions: dict[StorageWeakRef, float] = {}
    for part in module.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        values = ([getattr(part.config, name, None) for name in names] for names in (_EXPERTS, _EXPERTS_PER_TOKEN))
        experts, chosen = (next((one for one in found if isinstance(one, int) and one > 0), 0) for found in values)
        if 0 < chosen < experts:
            stacked = [p for p in part.parameters() if p.dim() == 3 and p.shape[0] == experts]
            fractions.update({storage_of(parameter): 1 - chosen / experts for parameter in stacked})
    return fractions
