"""The published guide to parallelisation, and the example that goes with it, in one of four processes.

Hub names stand for tiny local folders, the batch is as large as both numbers of the plugin say, and the Booster comes
from Cornstarch. Everything else is as it was published.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup
from transformers.models.clip import CLIPImageProcessor, CLIPVisionModel
from transformers.models.llama import LlamaForCausalLM

from cornstarch.booster import Booster
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel, MultimodalProcessor
from cornstarch.pipeline_template import PipelineTemplate
from cornstarch.plugin.multimodal_parallel_plugin import ModalParallelPlugin, MultimodalParallelPlugin


class FakeDataset(Dataset):  # type: ignore[type-arg]
    """Pictures of noise."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = np.random.default_rng(index).integers(0, 255, (48, 72, 3), dtype=np.uint8)
        words = ("What is it ? A digit .", "Describe this . the sound .", "it is A image")
        return {"image": Image.fromarray(pixels), "text": f"<image> {words[index % 3]}"}


def collate_fn(batches: list[dict[str, Any]], processor: MultimodalProcessor) -> Any:
    """Return a batch, as the example does."""
    images = []
    texts = []
    for batch in batches:
        images.append(batch["image"])
        texts.append(batch["text"])
    inputs = processor(
        encoder_inputs={"vision": {"images": images}},
        llm_inputs={"text": texts, "padding": True},
        return_tensors="pt",
    )
    inputs["labels"] = inputs["input_ids"].clone()
    return inputs


def pretrain(hub: dict[str, str], parallel: bool) -> tuple[list[float], bool]:
    """Run the example, 2 tensor-parallel ranks for each part; or the same in one process."""
    vision_encoder_path = hub["openai/clip-vit-base-patch32"]
    llm_path = hub["meta-llama/Llama-3.2-1B"]
    torch.manual_seed(0)
    vision_encoder = ModalEncoderModule(CLIPVisionModel.from_pretrained(vision_encoder_path))
    language_model = AutoModelForCausalLM.from_pretrained(llm_path)
    model: Any = MultimodalModel(
        encoders={"vision": vision_encoder},
        language_model=language_model,
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    # Create a processor
    image_processor = CLIPImageProcessor.from_pretrained(vision_encoder_path)
    tokenizer = AutoTokenizer.from_pretrained(llm_path, use_fast=True)
    tokenizer.pad_token = tokenizer.eos_token
    processor = MultimodalProcessor(
        encoder_processors={"vision": image_processor},
        llm_tokenizer=tokenizer,
        model=model,
        predefined_tokens={"vision": "<image>"},
    )
    dataloader = DataLoader(
        dataset=FakeDataset(),
        batch_size=8,
        collate_fn=functools.partial(collate_fn, processor=processor),
    )
    optimizer: Any = Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    total_steps = len(dataloader)
    lr_scheduler: LambdaLR = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=0,
        num_training_steps=total_steps,
    )
    dataloader_iter = iter(dataloader)
    losses = []
    if not parallel:
        for inputs in dataloader_iter:
            loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        return losses, True

    # Parallelize the model
    vision_encoder_plugin = ModalParallelPlugin(
        tp_size=2,
        pipeline_template=PipelineTemplate(
            model_name=PipelineTemplate.get_model_name(vision_encoder.module),
            modules_per_stage=[PipelineTemplate.get_modules(vision_encoder)],
        ),
    )
    language_model_plugin = ModalParallelPlugin(
        tp_size=2,
        pipeline_template=PipelineTemplate(
            model_name=PipelineTemplate.get_model_name(language_model),
            modules_per_stage=[PipelineTemplate.get_modules(language_model)],
        ),
    )
    num_microbatches = 4
    microbatch_size = 2
    with warnings.catch_warnings(record=True):  # flash attention
        plugin = MultimodalParallelPlugin(
            encoder_plugins={"vision": vision_encoder_plugin},
            language_model_plugin=language_model_plugin,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            precision=None,
            enable_flash_attention=True,
        )
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(
        model=model,
        optimizer=optimizer,
        criterion=lambda outputs, inputs: outputs.loss,
    )
    optimizer.zero_grad()
    is_pp_last_stage = plugin.stage_manager.is_last_stage(check_only_in_modal=False)  # type: ignore[union-attr]
    for _ in range(total_steps):
        outputs = booster.execute_pipeline(
            data_iter=dataloader_iter,
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            return_loss=True,
            return_outputs=False,
        )
        if is_pp_last_stage:
            loss = outputs["loss"]
            losses.append(loss.item())
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    return losses, is_pp_last_stage


def run_guide(hub: dict[str, str]) -> tuple[str, list[str], list[bool]]:
    """Run the guide's page: a template of two stages, and 4 ranks."""
    language_model = LlamaForCausalLM.from_pretrained(hub["meta-llama/Llama-3.1-8B-Instruct"])
    layers: list[str] = PipelineTemplate.get_modules(language_model)
    layers_per_stage = [
        layers[:2],
        layers[2:],
    ]
    pipeline_template = PipelineTemplate(
        model_name=PipelineTemplate.get_model_name(language_model),
        modules_per_stage=layers_per_stage,
    )
    clip = CLIPVisionModel.from_pretrained
    mllm = MultimodalModel(
        encoders={
            "vision": ModalEncoderModule(clip(hub["openai/clip-vit-base-patch32"])),
            "audio": ModalEncoderModule(clip(hub["openai/clip-vit-large-patch14"])),
        },
        language_model=language_model,
    )
    mllm.set_modality_token_ids({"vision": 19, "audio": 20})
    vision_encoder_plugin = ModalParallelPlugin(tp_size=1, sp_size=1)
    audio_encoder_plugin = ModalParallelPlugin(tp_size=1, sp_size=1)
    language_model_plugin = ModalParallelPlugin(tp_size=1, sp_size=1, pipeline_template=pipeline_template)
    mllm_plugin = MultimodalParallelPlugin(
        encoder_plugins={
            "vision": vision_encoder_plugin,
            "audio": audio_encoder_plugin,
        },
        language_model_plugin=language_model_plugin,
        num_microbatches=2,
        microbatch_size=1,
    )

    # Parallelize the model.
    booster = Booster(plugin=mllm_plugin)
    parallel_mllm, optimizer, *_ = booster.boost(model=mllm, optimizer=Adam(mllm.parameters()))
    ids = torch.tensor([[3] + [19] * 5 + [4] + [20] * 5, [20] * 5 + [5, 6] + [19] * 5])
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "vision": {"pixel_values": pixels}, "audio": {"pixel_values": pixels}, "labels": ids}
    outputs = booster.execute_pipeline(
        iter([batch]),
        parallel_mllm,
        lambda outputs, inputs: outputs.loss,
        optimizer,
        return_loss=True,
        return_outputs=False,
    )
    optimizer.step()
    optimizer.zero_grad()
    held = sorted({name.split(".")[0] for name, _ in parallel_mllm.module.named_parameters()})
    return repr(pipeline_template), held, [outputs["loss"] is not None]
