"""The published page on DDP and FSDP, in one of two processes, and wrappers around the parts of a model.

Hub names stand for tiny local folders. Each way returns its losses and, from rank 0, all parameters after three steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.clip import CLIPImageProcessor, CLIPVisionModel
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from cornstarch.models.multimodal_language_model import (
    ModalEncoderModule,
    MultimodalModel,
    MultimodalModelProcessor,
    MultimodalProjector,
)

CLIP, LLAMA = "openai/clip-vit-base-patch32", "meta-llama/Llama-3.2-1B"
Result = tuple[list[float], dict[str, Tensor]]

TRAINED: dict[str, Callable[[MultimodalModel], object]] = {
    "everything": lambda model: model.train(),
    "no encoder": lambda model: model.train(encoders_mode={"vision": (False, True)}, llm_mode=True),
    "the projector": lambda model: model.train(encoders_mode={"vision": (False, True)}, llm_mode=False),
}


def load_parts(hub: dict[str, str]) -> tuple[CLIPVisionModel, Any]:
    """Load the encoder and the language model."""
    torch.manual_seed(0)
    return CLIPVisionModel.from_pretrained(hub[CLIP]), AutoModelForCausalLM.from_pretrained(hub[LLAMA])


def compose(vision_encoder: nn.Module, language_model: nn.Module) -> MultimodalModel:
    """Compose a model whose new projector is the same everywhere."""
    torch.manual_seed(1)
    return MultimodalModel(encoders={"vision": vision_encoder}, language_model=language_model)


def make_processor(hub: dict[str, str], model: nn.Module) -> MultimodalModelProcessor:
    """Make the processor, after which the model knows its placeholder."""
    return MultimodalModelProcessor(
        tokenizer=AutoTokenizer.from_pretrained(hub[LLAMA], use_fast=True),
        image_processor=CLIPImageProcessor.from_pretrained(hub[CLIP]),
        model=model,
    )


def make_batches(processor: MultimodalModelProcessor) -> Iterator[Any]:
    """Yield this rank's samples of three batches of four; without a group, all of them."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    generator = np.random.default_rng(0)
    words = ["What is it ? A digit", "Describe this image . A sound", "the sound is it ?", "A digit . the image ."]
    for step in range(3):
        images = [Image.fromarray(generator.integers(0, 255, (40, 60, 3), dtype=np.uint8)) for _ in words]
        texts = [f"<vision> {' '.join(text.split()[:4])} {step}" for text in words]  # equally many tokens in each
        inputs = processor(text=texts[rank::size], images=images[rank::size], return_tensors="pt")
        inputs["labels"] = inputs["input_ids"].clone()
        yield inputs


def train(wrapped: nn.Module, processor: MultimodalModelProcessor) -> list[float]:
    """Train three steps; return the losses of all ranks together."""
    optimizer = SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    losses = []
    for inputs in make_batches(processor):
        loss = wrapped(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------------- the page


def train_with_one_process(hub: dict[str, str], trained: str) -> Result:
    """Train without any wrapper."""
    model = compose(*load_parts(hub))
    TRAINED[trained](model)
    losses = train(model, make_processor(hub, model))
    return losses, {name: one.detach().clone() for name, one in model.state_dict().items()}


def train_with_ddp(hub: dict[str, str], trained: str) -> Result:
    """Train as the page does with DDP."""
    model = compose(*load_parts(hub))
    TRAINED[trained](model)
    processor = make_processor(hub, model)
    ddp_model = DistributedDataParallel(model)
    losses = train(ddp_model, processor)
    return losses, full_state(model)


def train_with_fsdp1(hub: dict[str, str], trained: str, use_orig_params: bool = False) -> Result:
    """Train as the page does with FSDP1."""
    model = compose(*load_parts(hub))
    TRAINED[trained](model)
    processor = make_processor(hub, model)
    fsdp_model = FullyShardedDataParallel(
        module=model,
        auto_wrap_policy=ModuleWrapPolicy(
            [ModalEncoderModule, MultimodalProjector, torch.nn.Embedding, CLIPEncoderLayer, LlamaDecoderLayer]
        ),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        forward_prefetch=True,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    losses = train(fsdp_model, processor)
    return losses, full_state(fsdp_model)


def train_with_fsdp1_and_original_parameters(hub: dict[str, str], trained: str) -> Result:
    """Train with `use_orig_params`."""
    return train_with_fsdp1(hub, trained, use_orig_params=True)


def train_with_fsdp1_around_the_language_model(hub: dict[str, str], trained: str) -> Result:
    """Train with a language model that is a unit of its own, and so has its table to itself."""
    model = compose(*load_parts(hub))
    TRAINED[trained](model)
    processor = make_processor(hub, model)
    policy = ModuleWrapPolicy([ModalEncoderModule, MultimodalProjector, LlamaForCausalLM, LlamaDecoderLayer])
    fsdp_model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    losses = train(fsdp_model, processor)
    return losses, full_state(fsdp_model)


def train_with_fsdp2(hub: dict[str, str], trained: str) -> Result:
    """Train as the page does with FSDP2: shard layers, compose, and only then make the processor."""
    vision_encoder, language_model = load_parts(hub)
    for layer in vision_encoder.encoder.layers:
        fully_shard(layer)
    fully_shard(vision_encoder)
    for layer in language_model.model.layers:
        fully_shard(layer)
    model = compose(vision_encoder, language_model)
    TRAINED[trained](model)
    fully_shard(model.vision_encoder.projector)
    fsdp_model = fully_shard(model)
    losses = train(fsdp_model, make_processor(hub, model))
    return losses, full_state(fsdp_model)


def train_with_fsdp2_around_the_language_model(hub: dict[str, str], trained: str) -> Result:
    """Train with a whole language model that was sharded before composing."""
    vision_encoder, language_model = load_parts(hub)
    for layer in language_model.model.layers:
        fully_shard(layer)
    fully_shard(language_model)
    model = compose(vision_encoder, language_model)
    TRAINED[trained](model)
    fsdp_model = fully_shard(model)
    losses = train(fsdp_model, make_processor(hub, model))
    return losses, full_state(fsdp_model)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, on rank 0; under the names that they have without wrappers inside."""
    dist.barrier()
    # FSDP1 with offloading on a CPU returns memory that it has freed
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank():
        return {}
    return {plain_name(name): value.detach().clone() for name, value in state.items()}


def plain_name(name: str) -> str:
    """Return the name of a parameter without those of wrappers."""
    for wrapper in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


# ---------------------------------------------------------------------------------------------------- wrapped parts


def train_with_ddp_around_parts(hub: dict[str, str], trained: str) -> Result:
    """Train with DDP around each part that is trained."""
    model = compose(*load_parts(hub))
    TRAINED[trained](model)
    processor = make_processor(hub, model)
    if trained == "everything":
        model.vision_encoder = DistributedDataParallel(model.vision_encoder)
    else:
        model.encoders["vision"].projector = DistributedDataParallel(model.encoders["vision"].projector)
    if trained != "the projector":
        model.language_model = DistributedDataParallel(model.language_model)
    losses = train(model, processor)
    return losses, full_state(model)
