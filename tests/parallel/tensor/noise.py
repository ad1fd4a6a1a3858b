"""What the tests of dropout let several processes do: note what was dropped, and compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cornstarch.parallel.tensor import gather_full_tensors, shard_tensors
from tests import zoo

P = 0.5
# By model: options that drop something everywhere, layers whose input is cut and dropped, whole outputs that are.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "gpt2": ({"attn_pdrop": P, "resid_pdrop": P, "embd_pdrop": P}, "attn.c_proj", "mlp.dropout"),
    "opt": ({"attention_dropout": P, "dropout": P}, "self_attn.out_proj", "fc2"),
    "phi3": ({"attention_dropout": P, "resid_pdrop": P, "embd_pdrop": P}, "self_attn.o_proj", "resid_mlp_dropout"),
    "mixtral": ({"attention_dropout": P}, "self_attn.o_proj", "mlp"),
}


class Seen:
    """What went into and came out of modules, by their names."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._keeping(name))

    def _keeping(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                self.inputs.setdefault(name, inputs[0].detach().clone())
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                self.outputs.setdefault(name, first.detach().clone())

        return keep


def everyone(value: Tensor) -> list[Tensor]:
    """Return what each rank has; they must be of the same shape."""
    own = value.contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found


def are_equal(value: Tensor) -> bool:
    first, *rest = everyone(value)
    return all(torch.equal(first, other) for other in rest)


def built(name: str, **options: Any) -> nn.Module:
    with zoo.reproducible(0):
        return zoo.LANGUAGE_MODELS[name].build(**{**CASES[name][0], **options}).train()


def cut(model: nn.Module, **options: Any) -> nn.Module:
    return shard_tensors(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), **options)


def batch() -> dict[str, Tensor]:
    return zoo.text_batch(("t" * 12, "t" * 12))


def dropped(name: str, sequence: bool = False) -> dict[str, Any]:
    """Run a model that is cut in training; return what the ranks have alike and what not."""
    model = cut(built(name), sequence=sequence)
    seen = Seen(model)
    torch.manual_seed(1)
    output = model(**batch(), output_hidden_states=not sequence)
    after = torch.rand(3)
    _, inside, whole = CASES[name]
    hidden = output.hidden_states or ()
    insides = [value for key, value in seen.inputs.items() if key.endswith(inside)]
    wholes = [value for key, value in seen.outputs.items() if key.endswith(whole)]
    assert insides and wholes
    return {
        "loss": are_equal(output.loss.detach()),
        "hidden": [are_equal(one.detach()) for one in hidden],
        "whole": [are_equal(one) for one in wholes],
        "zeros": [are_equal((one == 0).float()) for one in wholes],
        "next": are_equal(after),
    }


def masks(sequence: bool = False) -> tuple[bool, bool, bool]:
    """Say whether ranks dropped the same inside heads, whether layers did, and whether the same happens once more."""
    model = cut(built("gpt2", attn_implementation="eager"), sequence=sequence)
    drawn: list[list[Tensor]] = []
    for _ in range(2):
        torch.manual_seed(1)
        attentions = model(**batch(), output_attentions=True).attentions
        drawn.append([(one == 0).float().detach() for one in attentions])
    first, again = drawn
    return (
        any(are_equal(one) for one in first),
        torch.equal(first[0], first[1]),
        all(torch.equal(one, other) for one, other in zip(first, again, strict=True)),
    )


def recomputed(name: str, sequence: bool = False) -> tuple[float, bool]:
    """Return how far gradients are from those of activations that are kept, and whether random states end alike."""
    found = []
    for recompute in (False, True):
        model = cut(built(name), sequence=sequence)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
        torch.manual_seed(1)
        for _ in range(2):  # the second pass finds what the first one's repetition has left behind
            model(**batch()).loss.backward()
        own = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
        found.append((gather_full_tensors(model, own), torch.get_rng_state()))
    (kept, state), (again, other) = found
    assert kept.keys() == again.keys()
    return max(float((kept[key] - again[key]).abs().max()) for key in kept), torch.equal(state, other)


def adapters() -> dict[str, bool]:
    """Say what LoRA's dropout did alike on all ranks, by the layer that the adapter is around."""
    model = zoo.LANGUAGE_MODELS["llama"].build(attention_dropout=P)
    config = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"], lora_dropout=P)
    cut(peft := get_peft_model(model, config).train())
    seen = Seen(peft)
    torch.manual_seed(1)
    peft(**batch())
    drops = {key: value for key, value in seen.outputs.items() if ".lora_dropout." in key and ".layers.0." in key}
    return {key.split(".")[-3]: are_equal((value == 0).float()) for key, value in drops.items()}
