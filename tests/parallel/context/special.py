"""More of what several processes do in the tests here: around cut tokens, and dealt-out items."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel import apply_data_parallel, data_mesh
from cornstarch.parallel.context import encoder_items as items
from cornstarch.parallel.context import (
    explain_whole_items,
    get_last_distribution,
    shard_items,
    shard_tokens,
    use_whole_rows,
    verify_tokens,
)
from cornstarch.parallel.distributed import to_full_tensor
from cornstarch.plan import DataPlan
from tests import zoo
from tests.parallel.context.work import difference, gradients, mesh, pad_rows, shuffle_rows, summed, text


def llama(**config: Any) -> Any:
    """Return the language model, always with the same weights."""
    return zoo.LANGUAGE_MODELS["llama"].build(**config).train()


def with_data_parallelism(kind: str) -> str:
    """Wrap a model whose tokens are cut, and compare its averaged gradients."""
    model, batch = llama(), pad_rows()
    expected = gradients(model, model(**batch).loss)
    shard_tokens(model, mesh(), distribution=shuffle_rows)
    wrapped: Any = apply_data_parallel(model, data_mesh("cpu"), DataPlan(kind=kind))  # type: ignore[arg-type]
    (wrapped(**batch).loss * dist.get_world_size()).backward()
    found = {name: None if p.grad is None else to_full_tensor(p.grad) for name, p in model.named_parameters()}
    return difference(found, expected)


def slope_under_dropout() -> tuple[float, float]:
    """Return the slope of the loss along some direction by gradients, and by two losses near each other."""
    model, batch = llama(attention_dropout=0.3), pad_rows()
    shard_tokens(model, mesh(), mode="ring_attn", distribution=shuffle_rows)
    noise = zoo.generator(6)
    direction = {name: torch.randn(p.shape, generator=noise) for name, p in model.named_parameters()}

    def loss(step: float) -> Tensor:
        torch.manual_seed(dist.get_rank())
        moved = {name: p.detach() + step * direction[name] for name, p in model.named_parameters()}
        return torch.func.functional_call(model, moved, (), batch).loss

    torch.manual_seed(dist.get_rank())
    found = summed(gradients(model, model(**batch).loss))
    slope = sum(float((g * direction[name]).sum()) for name, g in found.items() if g is not None)
    with torch.no_grad():
        change = loss(1e-3) - loss(-1e-3)
    dist.all_reduce(change)
    return slope, float(change) / 2e-3


def generate_text() -> tuple[list[Any], list[Any]]:
    """Continue a text with a model whose tokens are cut, and with the same model whole."""
    model = llama().eval()
    prompt = text()["input_ids"][:, :7]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    whole = model.generate(prompt, **options).tolist()
    shard_tokens(model, mesh())
    cut = model.generate(prompt, **options).tolist()
    with use_whole_rows(model):
        assert model.generate(prompt, use_cache=False, **options).tolist() == whole
    return cut, whole


def token_indices() -> tuple[list[int], tuple[int, ...], str]:
    """Return the places of this rank's tokens, the shape of its logits, and why."""
    model = shard_tokens(llama(), mesh())
    output = model(**text())
    found = get_last_distribution(model)
    assert found is not None
    return output.token_index.tolist(), tuple(output.logits.shape), found.reason


def from_meta() -> str:
    """Cut a model that has no weights yet, then give it some."""
    whole, batch = llama(), pad_rows()
    expected = gradients(whole, whole(**batch).loss)
    with torch.device("meta"):
        model = type(whole)(whole.config)
    shard_tokens(model, mesh(), distribution="zigzag")
    model.load_state_dict(whole.state_dict(), assign=True)
    model.model.rotary_emb = whole.model.rotary_emb  # what is computed and not loaded
    for parameter in model.parameters():
        parameter.requires_grad_()
    verify_tokens(model)
    return difference(summed(gradients(model.train(), model(**batch).loss)), expected)


def with_given_count() -> tuple[float, float]:
    """Divide by the tokens of a larger batch."""
    model, batch = llama(), pad_rows()
    trained = int((batch["labels"][:, 1:] != zoo.IGNORED).sum())
    expected = float(model(**batch).loss) * trained / 100
    shard_tokens(model, mesh())
    loss = model(**batch, num_items_in_batch=100).loss.detach()
    dist.all_reduce(loss)
    return float(loss), expected


# ------------------------------------------------------------------------------------------------ encoders


def encoder(name: str, items: int, patches: Any = "auto", recompute: bool = False) -> str:
    """Let an encoder of the zoo encode items whole, then dealt out; each rank's loss is of some of the features."""
    part = zoo.ENCODERS[name]
    inputs = part.inputs(items)
    model = part.build().train()
    weights = torch.randn(10_000, generator=zoo.generator(8))

    def loss_of(features: Tensor, rank: int, ranks: int) -> Tensor:
        values = features.reshape(len(features), -1)
        own = (torch.arange(len(values)) % ranks == rank).float()
        return (values.square().mean(1) * weights[: len(values)] * own).sum()

    whole = part.select(model(**inputs), inputs)
    expected = gradients(model, loss_of(whole, 0, 1))
    shard_items(model, mesh(), patches=patches)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
    found = part.select(model(**inputs), inputs)
    if not torch.allclose(found, whole, rtol=1e-4, atol=1e-5):
        return "other features"
    return difference(summed(gradients(model, loss_of(found, dist.get_rank(), dist.get_world_size()))), expected)


def patches_with_data_parallelism(kind: str) -> str:
    """Wrap an encoder whose patches are cut, and compare its averaged gradients."""
    part = zoo.ENCODERS["clip"]
    inputs, model = part.inputs(1), part.build().train()
    expected = gradients(model, model(**inputs).last_hidden_state.square().mean())
    shard_items(model, mesh(), patches="always")
    wrapped: Any = apply_data_parallel(model, data_mesh("cpu"), DataPlan(kind=kind))  # type: ignore[arg-type]
    wrapped(**inputs).last_hidden_state.square().mean().backward()  # each has a share of the sum, and a mean is taken
    found = {name: None if p.grad is None else to_full_tensor(p.grad) for name, p in model.named_parameters()}
    return difference(found, expected)


def tokens_in_layers(name: str) -> list[tuple[int, str | None]]:
    """Return how many tokens a layer of this rank has, of one item and of two alike, and why they were not cut."""
    part = zoo.ENCODERS[name]
    found = []
    for count in (1, 2):
        model = part.build()
        shard_items(model, mesh())
        seen: list[int] = []
        inside = next(module for key, module in model.named_modules() if key.endswith("1.mlp"))
        inputs = {key: torch.cat([value] * count) for key, value in part.inputs(1).items()}
        inside.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.shape[-2]))
        with mock.patch.object(items, "MIN_PATCHES", 4):  # all of the zoo is small
            model(**inputs)
        found.append((seen[-1], explain_whole_items(model)))
    return found


def patches_encoded() -> list[int]:
    """Return how many patches each rank encodes."""
    part = zoo.ENCODERS["qwen2_vl"]
    model = part.build()
    shard_items(model, mesh())
    seen: list[int] = []
    model.patch_embed.register_forward_hook(lambda module, args, output: seen.append(len(output)))  # type: ignore
    model(**part.inputs(4))
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(seen))
    return [int(count) for count in counts]


class Normed(nn.Module):
    """An encoder that takes means over its items."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, pixel_values: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Normalise."""
        return self.norm(pixel_values)
