"""Stages of the parts of a multimodal model: encoders with their projectors, and the language model they meet at."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.facts import EncoderFeatures
from cornstarch.pipeline.message import flatten_payload, unflatten_payload
from cornstarch.pipeline.split import cut
from cornstarch.pipeline.stage import StageModule
from cornstarch.pipeline.template import PipelineTemplate
from tests.pipeline.protocol import Gradients, assert_same
from tests.zoo import ENCODERS, LANGUAGE_MODELS, MODALITY_TOKEN, RAGGED, item_count, text_batch

PART = ENCODERS["clip"]
ITEMS = item_count(RAGGED)


def compose_model(**options: Any) -> MultimodalModel:
    clip = PART.config()
    clip.num_hidden_layers = 3
    model = MultimodalModel(
        {"vision": PART.model_class(clip)}, LANGUAGE_MODELS["llama"].build(num_hidden_layers=3, **options)
    )
    model.set_modality_token_ids({"vision": MODALITY_TOKEN})
    return model.train()


def batch(seed: int) -> dict[str, Tensor]:
    return {**text_batch(RAGGED, PART.feature_lengths(ITEMS)), **PART.inputs(ITEMS, seed=seed)}


BATCHES = [batch(2), batch(3)]


def whole(model: MultimodalModel) -> Gradients:
    model = copy.deepcopy(model)
    losses = [model(**one).loss for one in BATCHES]
    torch.stack(losses).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": torch.stack(losses).sum().detach(), **gradients}


class StagedModel:
    """The stages of an encoder, then those of the language model; each on a model of its own."""

    def __init__(self, model: MultimodalModel, vision: int, language: int) -> None:
        self.names: list[str] = []
        self.parts: list[StageModule] = []
        encoder = PipelineTemplate.split(model.encoders["vision"], vision, by="uniform")
        for stage in range(vision):
            own = copy.deepcopy(model)
            self._add("vision_encoder.", cut(own.encoders["vision"], encoder, stage, call=self._features))
        template = PipelineTemplate.split(model.language_model, language, by="uniform")
        for stage in range(language):
            self._add("language_model.", self._language_stage(copy.deepcopy(model), template, stage))

    def _add(self, prefix: str, part: StageModule) -> None:
        self.names.append(prefix)
        self.parts.append(part)

    @staticmethod
    def _features(encoder: nn.Module, inputs: Mapping[str, Any]) -> Any:
        assert isinstance(encoder, ModalEncoderModule)
        found = encoder.features({"pixel_values": inputs["pixel_values"]})
        return {"tokens": found.tokens}

    def _language_stage(self, model: MultimodalModel, template: PipelineTemplate, stage: int) -> StageModule:
        def call(language_model: nn.Module, inputs: Mapping[str, Any]) -> Any:
            known = {key: inputs.get(key) for key in ("input_ids", "attention_mask", "labels")}
            features = {"vision": EncoderFeatures(inputs["tokens"], None)}
            merged, _ = model.merge(features, position_ids=None, inputs_embeds=None, documents=None, **known)
            return language_model(**merged)

        return cut(model.language_model, template, stage, call=call)

    def gradients(self) -> Gradients:
        made: list[list[tuple[list[Tensor], list[Tensor]]]] = []
        losses = []
        for inputs in BATCHES:  # all forwards, then all backwards
            edges: list[tuple[list[Tensor], list[Tensor]]] = []
            losses.append(self._forward(inputs, edges))
            made.append(edges)
        for loss, edges in zip(losses, made, strict=True):
            loss.backward()
            for sent, arrived in reversed(edges):
                pairs = [(s, a.grad) for s, a in zip(sent, arrived, strict=True) if s.requires_grad]
                if pairs:
                    torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])
        total: Gradients = {"loss": torch.stack(losses).sum().detach()}
        for prefix, part in zip(self.names, self.parts, strict=True):
            for name, parameter in part.model.named_parameters():
                listed = prefix + part.tied.get(name, name)
                given = [one for one in (total.get(listed), parameter.grad) if one is not None]
                total[listed] = torch.stack(given).sum(0) if given else None
        return total

    def _forward(self, inputs: Mapping[str, Any], edges: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        received = None
        tokens = torch.zeros(sum(PART.feature_lengths(ITEMS)), 32)  # later stages know how many there are
        for part in self.parts:
            given = {**inputs, "tokens": tokens}
            if part.first and received is not None:  # the language model's first stage is given tokens
                given, received = {**inputs, **received}, None
            output = part(given, received)
            if part is self.parts[-1]:
                return output.loss
            form, sent = flatten_payload(output)
            arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent]
            edges.append((sent, arrived))
            received = unflatten_payload(form, arrived)
        raise AssertionError


FREEZING: dict[str, dict[str, Any]] = {
    "all trained": {},
    "projector only": {"encoders_mode": {"vision": (False, True)}, "llm_mode": False},
    "frozen encoder": {"encoders_mode": {"vision": (False, True)}, "llm_mode": True},
    "language model only": {"encoders_mode": {"vision": (False, False)}, "llm_mode": True},
    "encoder only": {"encoders_mode": {"vision": (True, False)}, "llm_mode": False},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("freezing", FREEZING)
def test_stages_of_every_module_compute_what_the_model_does(freezing: str, checkpointing: bool) -> None:
    model = compose_model()
    if FREEZING[freezing]:
        model.train(**FREEZING[freezing])
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected = whole(model)
    for vision, language in ((1, 2), (2, 1), (2, 3)):
        assert_same(StagedModel(model, vision, language).gradients(), expected)


def test_tied_embeddings_of_a_staged_model_have_the_same_gradients() -> None:
    model = compose_model(tie_word_embeddings=True)
    assert_same(StagedModel(model, 2, 2).gradients(), whole(model))


def test_adapters_in_both_modules_have_the_same_gradients() -> None:
    peft = pytest.importorskip("peft")
    model = compose_model()
    model.language_model = peft.get_peft_model(
        model.language_model, peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    )
    encoder = model.encoders["vision"]
    encoder.module = peft.get_peft_model(
        encoder.module, peft.LoraConfig(target_modules=["q_proj", "fc1"], init_lora_weights=False)
    )
    assert PipelineTemplate.get_modules(encoder)[0] == "module.embeddings"
    assert_same(StagedModel(model, 2, 2).gradients(), whole(model))


def test_outer_forward_runs_on_every_stage_of_the_language_model() -> None:
    """As a user of `call` has it: the outer model's own forward on every stage, with its encoders there."""
    model = compose_model()
    expected = whole(model)
    template = PipelineTemplate.split(model.language_model, 3, by="uniform")
    copies = [copy.deepcopy(model) for _ in range(3)]
    parts = [
        cut(own.language_model, template, stage, call=lambda _, inputs, own=own: own(**inputs))
        for stage, own in enumerate(copies)
    ]
    losses = []
    with torch.no_grad():
        for inputs in BATCHES:
            received = None
            for part in parts:
                received = part(inputs, received)
            losses.append(received.loss)
    torch.testing.assert_close(torch.stack(losses).sum(), expected["loss"])
    for own in copies[1:]:
        assert own.dtype == torch.float32
        assert own.device.type == "cpu"
        assert not list(own.language_model.get_input_embeddings().parameters())


def test_callbacks_run_on_the_first_and_last_stage() -> None:
    calls: list[str] = []

    def record(name: str) -> Any:
        def callback(inputs: Any, *rest: Any) -> Any:
            calls.append(name)
            return rest[0] if rest else inputs

        return callback

    encoder = ModalEncoderModule(
        PART.build(),
        nn.Linear(48, 32),
        preprocess_callback=lambda inputs: record("before")(inputs),
        postprocess_module_callback=lambda inputs, output: record("behind")(inputs, output),
        postprocess_projector_callback=lambda inputs, output: record("projected")(inputs, output),
    )
    template = PipelineTemplate.split(encoder, 2, by="uniform")
    first, last = (cut(copy.deepcopy(encoder), template, stage) for stage in range(2))
    payload = first(PART.inputs(2))
    assert calls == ["before"]
    output = last(PART.inputs(2), payload)
    assert calls == ["before", "before", "behind", "projected"]
    torch.testing.assert_close(output.last_hidden_state, encoder(**PART.inputs(2)).last_hidden_state)
    assert not [name for name, _ in first.named_parameters() if "projector" in name]
