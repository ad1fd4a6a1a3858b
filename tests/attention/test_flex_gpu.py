"""FlexAttention's kernels under masks as data, against plain attention with a dense mask. Needs a CUDA device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel

from cornstarch.attention import IMPLEMENTATION, MaskPattern, MaskSpec, attend_through_masks, use_mask
from cornstarch.attention.interface import DENSE_IMPLEMENTATION, build_mask
from tests import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Error relative to the largest entry, against a reference in float64 or float32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def exact_and_fresh() -> Iterator[None]:
    """Disable TensorFloat-32 and drop compiled kernels of other tests: past a limit torch stops compiling."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.compiler.reset()
    yield
    torch.set_float32_matmul_precision(precision)


def packed(tokens: int, spans: bool = True) -> MaskSpec:
    """Build two rows: three documents between padding, two with an image, and one document with a long image."""
    index = torch.arange(tokens)
    bounds = torch.tensor([5, tokens // 4, tokens // 2, tokens - 7])
    first = torch.bucketize(index, bounds, right=True) % 4
    documents = torch.stack([first, torch.ones_like(index)])
    marks = torch.full_like(documents, -1)
    if spans:
        marks[0, tokens // 8 : tokens // 6] = 0
        marks[0, tokens // 2 + 3 : tokens // 2 + 40] = 1
        marks[1, 10 : tokens - 30] = 0
    return MaskSpec(documents, marks).to("cuda")


def assert_close(found: Tensor, reference: Tensor, tolerance: float, name: str) -> None:
    largest = float(reference.detach().abs().max())
    error = float((found.detach().double() - reference.detach().double()).abs().max())
    assert error <= tolerance * max(largest, 0.1), f"{name}: off by {error:.1e}, largest entry {largest:.1e}"


class Layer(nn.Module):
    """The attributes of a layer that transformers' attention functions read."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped heads, odd length": {"tokens": 333, "heads": (8, 2)},
    "three heads": {"heads": (6, 3), "tokens": 200},
    "window": {"pattern": MaskPattern(window=50), "tokens": 200},
    "chunks": {"pattern": MaskPattern(chunk=64), "tokens": 256},
    "softcap": {"softcap": 3.0, "tokens": 200},
    "softcap, window, grouped heads": {
        "softcap": 3.0,
        "pattern": MaskPattern(window=70),
        "heads": (8, 4),
        "tokens": 333,
    },
    "sinks": {"sinks": True, "tokens": 200},
    "small heads": {"channels": 16},
    "large heads": {"channels": 256, "softcap": 3.0, "heads": (4, 2)},
    "heads of odd size": {"channels": 80, "tokens": 200},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_dense_mask(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    heads, groups = case.get("heads", (4, 4))
    tokens, channels = case.get("tokens", 256), case.get("channels", 64)
    spec, pattern = packed(tokens), case.get("pattern", MaskPattern())
    shapes = [(2, heads, tokens, channels), (2, groups, tokens, channels), (2, groups, tokens, channels)]
    inputs = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
    sinks = torch.randn(heads, device="cuda", dtype=dtype) if case.get("sinks") else None
    weight = torch.randn(2, tokens, heads, channels, device="cuda", dtype=dtype)
    layer, attend = Layer(heads // groups), AttentionInterface()[IMPLEMENTATION]

    exact = [state.detach().double().requires_grad_() for state in inputs]
    query, key, value = exact[0], *(s.repeat_interleave(heads // groups, 1) for s in exact[1:])
    scores = query @ key.transpose(2, 3) * 0.3
    if "softcap" in case:
        scores = case["softcap"] * torch.tanh(scores / case["softcap"])
    scores = scores.masked_fill(~spec.dense(pattern), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(2, -1, tokens, 1)], dim=-1)
    reference = (scores.softmax(-1)[..., :tokens] @ value).transpose(1, 2)
    (reference * weight).sum().backward()

    options = {"scaling": 0.3, "softcap": case.get("softcap"), "s_aux": sinks}
    block_mask = spec.block_mask(pattern)
    found, _ = attend(layer, *inputs, block_mask, **options)
    assert found.dtype == dtype
    (found * weight).sum().backward()
    assert_close(found, reference, TOLERANCE[dtype], "output")
    for state, ideal, which in zip(inputs, exact, ("query", "key", "value"), strict=True):
        assert_close(state.grad, ideal.grad, TOLERANCE[dtype], f"gradient of the {which}")


# Heads of 32 channels, which FlashAttention-4 takes in half precision.
SIZES = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512}
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": {**SIZES, "sliding_window": 50},
    "gemma2": {**SIZES, "sliding_window": 50, "attn_logit_softcapping": 5.0},
    "gemma3": {**SIZES, "sliding_window": 50},
    "llama4": {**SIZES, "attention_chunk_size": 48},
    "qwen3_moe": SIZES,
    "gpt2": {"hidden_size": 64, "max_position_embeddings": 512},
    "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 512},
}


def language_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = zoo.LANGUAGE_MODELS[name].build(**OVERRIDES[name])
    model.config.use_cache = False
    return model.to("cuda", dtype).train()


def run(model: PreTrainedModel, spec: MaskSpec, weight: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the logits of a packed batch, and the gradient of every parameter."""
    ids = torch.randint(3, zoo.VOCABULARY, spec.documents.shape, generator=zoo.generator(5)).cuda()
    kept = spec.documents > 0
    with use_mask(spec):
        logits = model(input_ids=ids, attention_mask=kept.long(), position_ids=spec.positions()).logits[kept]
    (logits.float() * weight[: len(logits)]).sum().backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_model_equals_itself_with_dense_masks(name: str, checkpointing: bool) -> None:
    spec = packed(200)
    weight = torch.randn(400, zoo.VOCABULARY, device="cuda")
    model = language_model(name)
    dense = copy.deepcopy(model)
    dense.set_attn_implementation(DENSE_IMPLEMENTATION)
    reference, expected = run(dense, spec, weight)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    attend_through_masks(model)
    logits, gradients = run(model, spec, weight)
    assert_close(logits, reference, 1e-4, "logits")
    for parameter, gradient in gradients.items():
        assert (gradient is None) == (expected[parameter] is None), parameter
        if gradient is not None:
            assert_close(gradient, expected[parameter], 1e-4, parameter)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_model_is_as_exact_as_with_dense_masks(name: str) -> None:
    """Both are compared with float32."""
    spec = packed(200)
    weight = torch.randn(400, zoo.VOCABULARY, device="cuda")
    exact = language_model(name)
    flex, dense = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    dense.set_attn_implementation(DENSE_IMPLEMENTATION)
    exact.set_attn_implementation(DENSE_IMPLEMENTATION)
    attend_through_masks(flex)
    reference, expected = run(exact, spec, weight)
    errors = []
    for model in (flex, dense):
        logits, gradients = run(model, spec, weight)
        gap = [(logits - reference).float().norm() / reference.norm()]
        gap += [(g - expected[n]).float().norm() / expected[n].norm() for n, g in gradients.items() if g is not None]
        errors.append(torch.stack(gap).detach())
    assert float(errors[0].max()) < 0.1
    assert bool((errors[0] <= 2 * errors[1] + 5e-3).all())


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_packed_document_equals_the_document_alone(name: str) -> None:
    spec = packed(200, spans=False)
    model = language_model(name).eval()
    attend_through_masks(model)
    ids = torch.randint(3, zoo.VOCABULARY, spec.documents.shape, generator=zoo.generator(5)).cuda()
    kept = spec.documents > 0
    with torch.no_grad(), use_mask(spec):
        together = model(input_ids=ids, attention_mask=kept.long(), position_ids=spec.positions()).logits
    model.set_attn_implementation("eager")
    for row, number in ((0, 1), (0, 2), (0, 3), (1, 1)):
        own = spec.documents[row] == number
        with torch.no_grad():
            alone = model(input_ids=ids[row, own][None]).logits[0]
        assert_close(together[row, own], alone, 1e-4, f"row {row}, document {number}")


def test_long_rows_get_block_masks_and_short_ones_dense_masks() -> None:
    masks = {}
    for tokens in (127, 128):
        spec = packed(tokens, spans=False)
        ones = torch.ones(2, tokens, dtype=torch.long, device="cuda")
        options = {"mask_function": MaskPattern(), "attention_mask": ones, "device": torch.device("cuda")}
        with use_mask(spec):
            masks[tokens] = build_mask(2, tokens, tokens, **options)
            assert not isinstance(build_mask(2, tokens, tokens, use_flex=False, **options), BlockMask)
            assert not isinstance(build_mask(2, 1, tokens, q_offset=tokens - 1, **options), BlockMask)
    assert not isinstance(masks[127], BlockMask)
    assert isinstance(masks[128], BlockMask)


def test_dropout_falls_back_to_a_dense_mask() -> None:
    model = language_model("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    attend_through_masks(model)
    logits, _ = run(model, packed(200), torch.ones(400, zoo.VOCABULARY, device="cuda"))
    assert bool(logits.isfinite().all())


def test_new_masks_do_not_recompile_kernels() -> None:
    """Every batch has another mask; only its shape may cause a compilation."""
    model = language_model("gemma2")
    attend_through_masks(model)
    weight = torch.randn(600, zoo.VOCABULARY, device="cuda")
    for tokens in (200, 264, 230):
        run(model, packed(tokens), weight)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (200, 264, 230, 290):
            spec = packed(tokens)
            run(model, MaskSpec(spec.documents.flip(1), spec.spans.roll(3, 1)), weight)


def test_many_kernel_variants_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past torch's default limit of 8 variants, whole score matrices would be in memory."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    tokens, heads, channels = 4096, 4, 32
    block_mask, attend = packed(tokens).block_mask(), AttentionInterface()[IMPLEMENTATION]
    kinds = itertools.product((torch.float32, torch.bfloat16), (None, 3.0), (False, True), (False, True))
    for dtype, softcap, turned, trained in kinds:
        shape = (2, tokens, heads, channels) if turned else (2, heads, tokens, channels)
        states = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=trained) for _ in range(3)]
        if turned:
            states = [state.transpose(1, 2) for state in states]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(Layer(1), *states, block_mask, scaling=0.3, softcap=softcap)
        scores = 2 * heads * tokens**2 * 4
        assert torch.cuda.max_memory_allocated() - before < scores / 4


def test_generation_after_a_long_prompt() -> None:
    """The prompt is read with a block mask, each new token with a dense row; both equal eager attention alone."""
    model = language_model("mistral").eval()
    attend_through_masks(model)
    ids = torch.randint(3, zoo.VOCABULARY, (2, 150), generator=zoo.generator(2)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    spec = MaskSpec.from_padding(mask)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "use_cache": True}
    with use_mask(spec):
        found = model.generate(ids, attention_mask=mask, **options)
    model.set_attn_implementation("eager")
    for row, start in ((0, 13), (1, 0)):
        alone = model.generate(ids[row : row + 1, start:], attention_mask=mask[row : row + 1, start:], **options)
        assert torch.equal(found[row, 150:], alone[0, 150 - start :])


def test_verification_runs_on_the_device() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        attend_through_masks(language_model("qwen3_moe", dtype))
