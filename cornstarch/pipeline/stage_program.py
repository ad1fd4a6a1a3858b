"""What each stage of a model computes: encoder stages send their tokens, language model stages merge them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention.mask_verification import mark_verified
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.facts import EncoderFeatures
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.mesh import StageMeshes
from cornstarch.pipeline.message import Payload
from cornstarch.pipeline.remote_module import replace_parameters
from cornstarch.pipeline.split import copy_analysis
from cornstarch.pipeline.stage import StageModule

Inputs = Mapping[str, Any]
Call = Callable[[nn.Module, Inputs], Any]  # computes the result of a batch with a model: a loss, or a metric

_LANGUAGE_INPUTS = ("input_ids", "attention_mask", "position_ids", "labels", "inputs_embeds", "documents")


class StageProgram(nn.Module):
    """The computation of one stage, here of a model without encoders. `model` owns all its parameters."""

    part: StageModule | None

    def __init__(self, model: nn.Module, part: StageModule | None) -> None:
        super().__init__()
        self.model = model
        self.__dict__["part"] = part  # not a submodule: it has the same modules, and parameters need one name
        self.call: Call | None = None  # is run on `model`
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns the context of forward passes (autocast); `call` brings its own."""

    def run(self, _: nn.Module, inputs: Inputs) -> Any:
        """Run `call`; the stage module inside ends it where the stage ends."""
        return self.model(**inputs) if self.call is None else self.call(self.model, inputs)

    def forward(self, inputs: Inputs, received: Mapping[int, Payload]) -> Any:
        if self.part is None:
            return self.run(self.model, inputs)
        return self.part(inputs, next(iter(received.values()), None))


class EncoderProgram(StageProgram):
    """A stage of the encoder `name` of `whole`; the last stage projects, and sends tokens."""

    model: ModalEncoderModule
    whole: MultimodalModel

    def __init__(self, whole: MultimodalModel, name: str, part: StageModule | None) -> None:
        super().__init__(whole.encoders[name], part)
        self.__dict__["whole"] = whole
        self.name = name
        _check_single_output(name, whole.encoders[name])

    def run(self, _: nn.Module, inputs: Inputs) -> Any:
        with self.forward_context():
            return self.model.features(dict(inputs))

    def forward(self, inputs: Inputs, received: Mapping[int, Payload]) -> Any:
        given, device = split_encoder_inputs(self.whole, inputs).get(self.name), get_device(self)
        # Every rank must launch the same collectives, so an encoder also runs for a batch without its modality.
        own = move_to_device(given, device) if given is not None else self.whole.stand_in(self.name, device)
        assert own is not None
        if self.part is None:
            return _pack_features(self.run(self.model, own))
        output = self.part(own, next(iter(received.values()), None))
        return _pack_features(output) if self.part.last else output


class LanguageProgram(StageProgram):
    """A stage of the language model of a multimodal model, with the merging of tokens around it.

    Every stage runs the whole model's own forward: masks, positions and labels follow from the batch, and the number of
    tokens of each item travels with the activations. `sources` has the modality of each encoder stage that sends its
    tokens here, by stage number; with `runs_encoders` the encoders run inside this stage.
    """

    model: MultimodalModel

    def __init__(
        self, model: MultimodalModel, part: StageModule | None, sources: Mapping[int, str], runs_encoders: bool
    ) -> None:
        super().__init__(model, part)
        self.sources, self.runs_encoders = dict(sources), runs_encoders
        for name, encoder in {} if runs_encoders else model.encoders.items():
            _check_single_output(name, encoder)

    def forward(self, inputs: Inputs, received: Mapping[int, Payload]) -> Any:
        if self.part is None or self.part.first:
            features, touched = self._collect_features(inputs, received)
            before = None
        else:
            (payload,) = received.values()
            features, touched, before = self._build_dummy_features(payload["tokens"]), [], payload["activations"]
        with self.model.use_features(features, touched):
            if self.part is None:
                return self.run(self.model, inputs)
            output = self.part(inputs, before)
        if self.part.last:
            return output
        counts = {name: (len(one.tokens), _pack_features(one)["lengths"]) for name, one in features.items()}
        return {"activations": output, "tokens": counts}

    def _collect_features(
        self, inputs: Inputs, received: Mapping[int, Payload]
    ) -> tuple[dict[str, EncoderFeatures], list[Tensor]]:
        """Return the tokens of the batch's modalities, and the outputs for dummy inputs of the other modalities."""
        own = split_encoder_inputs(self.model, inputs)
        if self.runs_encoders:
            with self.forward_context():
                return self.model.encode({name: move_to_device(one, get_device(self)) for name, one in own.items()})
        features: dict[str, EncoderFeatures] = {}
        touched: list[Tensor] = []
        for stage, payload in received.items():
            found = EncoderFeatures(payload["tokens"], _to_list(payload["lengths"]))
            if (name := self.sources[stage]) in own:
                features[name] = found
            else:
                touched += found.tensors()  # they stay in the graph, so that all ranks run the same backward
        return {name: features[name] for name in self.model.encoders if name in features}, touched

    def _build_dummy_features(self, tokens: Mapping[str, Any]) -> dict[str, EncoderFeatures]:
        """Return placeholder features: only their number matters, because the first stage has merged their values."""
        table = self.model.language_model.get_input_embeddings().weight  # type: ignore[operator]
        zero = torch.zeros((), dtype=table.dtype, device=get_device(self))
        return {
            name: EncoderFeatures(zero.expand(count, table.shape[1]), _to_list(lengths))
            for name, (count, lengths) in tokens.items()
        }


def split_encoder_inputs(model: MultimodalModel, inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Return the inputs of each encoder for which the batch has any."""
    return model.split_batch({key: value for key, value in inputs.items() if key not in _LANGUAGE_INPUTS})[0]


def move_to_device(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    return {key: one.to(device) if isinstance(one, Tensor) else one for key, one in inputs.items()}


def get_device(module: nn.Module) -> torch.device:
    found = next((p.device for p in (*module.parameters(), *module.buffers()) if not p.is_meta), None)
    return torch.device("cpu") if found is None else found


def _check_single_output(name: str, encoder: nn.Module) -> None:
    habits = getattr(encoder, "behavior", None)
    if habits is not None and habits.passes_on_more:
        kind = type(unwrap(encoder.module)).__name__  # type: ignore[arg-type]
        raise UnsupportedModelError(
            f"{kind}, the {name} encoder, returns features for deeper layers of the language model besides its "
            "tokens: it cannot run on ranks of its own. Use one stage for the language model, on shared ranks."
        )


def _pack_features(features: EncoderFeatures) -> dict[str, Any]:
    lengths = None if features.lengths is None else torch.tensor(features.lengths, dtype=torch.int64)
    return {"tokens": features.tokens, "lengths": lengths}


def _to_list(lengths: Tensor | None) -> list[int] | None:
    return None if lengths is None else lengths.tolist()


def copy_with_shared_parameters(model: nn.Module, meshes: StageMeshes) -> nn.Module:
    """Return a copy of a model that has the same parameters and buffers, and uses the same process groups."""
    shared: list[Any] = [*model.parameters(), *model.buffers(), *meshes.all_meshes()]
    shared += [mesh.get_group(axis) for mesh in meshes.all_meshes() for axis in range(mesh.ndim)]
    copied = deepcopy(model, {id(one): one for one in shared})
    if isinstance(copied, MultimodalModel):
        mark_verified(unwrap(copied.language_model))  # its attention is the model's, which was verified when whole
    else:
        copy_analysis(copied, model)
    return copied


def register_stage_parameters(model: nn.Module, programs: Iterable[StageProgram]) -> None:
    """Let a model that is not run itself list the parameters of its copies after they were sharded."""
    listed = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, nn.Parameter] = {}
    for program in programs:
        prefix = f"{program.name}_encoder" if isinstance(program, EncoderProgram) else ""
        for name, parameter in program.model.named_parameters(prefix):
            if found.setdefault(id(listed[name]), parameter) is not parameter:
                raise ConfigError(
                    f"{name} is in two of the stages that one process holds, and would be sharded twice. Use "
                    "virtual_stages = 1, or the kind ddp or zero1."
                )
    replace_parameters(model.modules(), lambda parameter: found.get(id(parameter), parameter))
