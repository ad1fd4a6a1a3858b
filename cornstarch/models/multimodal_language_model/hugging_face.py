"""The interface that Hugging Face libraries expect of a model.

`transformers.Trainer`, TRL, Accelerate and PEFT take any module, but read its config and embeddings, enable gradient
checkpointing, and ask how its loss is counted. A `MultimodalModel` delegates to its parts.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from cornstarch.attention import attend_through_masks, use_mask

from .configuration_multimodal_language_model import MultimodalModelConfig
from .unwrap import find_tied_names, unwrap

if TYPE_CHECKING:
    from .encoder import ModalEncoderModule
    from .modeling_multimodal_language_model import MultimodalModel

_UPLOAD_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


def checkpoint_activations(part: nn.Module, kwargs: Mapping[str, Any], **options: Any) -> None:
    """Enable gradient checkpointing of a Hugging Face model; `kwargs` are arguments of torch's `checkpoint`."""
    # transformers then makes embeddings require gradients, also frozen ones, which only reentrant checkpointing needs.
    # A frozen tower would keep a graph for nothing, so this is undone.
    had_gradients = bool(getattr(part, "_require_grads_hooks", None) or getattr(part, "_require_grads_hook", None))
    part.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kwargs), **options)  # type: ignore[operator]
    if not had_gradients and kwargs.get("use_reentrant") is False:
        part.disable_input_require_grads()  # type: ignore[operator]


class HuggingFaceModel(nn.Module):
    """The base of `MultimodalModel` with the interface that Hugging Face libraries expect."""

    language_model: nn.Module

    @property
    def encoders(self) -> dict[str, ModalEncoderModule]:
        raise NotImplementedError

    main_input_name = "input_ids"
    base_model_prefix = ""
    loss_type = "ForCausalLM"  # labels are shifted inside: the first label of a row is not used
    output_modalities = ("text",)
    _keys_to_ignore_on_save = None

    def __init__(self) -> None:
        super().__init__()
        self.warnings_issued: dict[str, Any] = {}
        self.model_tags: list[str] | None = None
        self._config = MultimodalModelConfig()
        self._generate_function: Callable[[Tensor, Tensor | None, dict[str, Any]], Any] | None = None
        self.register_state_dict_post_hook(_drop_tied_names)
        self.register_load_state_dict_post_hook(_accept_tied_names)

    @property
    def config(self) -> MultimodalModelConfig:
        """The configs of the parts as one: `text_config`, and `<name>_config` of each encoder."""
        encoders = {name: encoder.config[0] for name, encoder in self.encoders.items()}
        self._config.describe(getattr(unwrap(self.language_model), "config", None), encoders)
        return self._config

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """The modalities that the model reads."""
        return ("text", *self.encoders)

    def get_output_embeddings(self) -> nn.Module | None:
        return unwrap(self.language_model).get_output_embeddings()  # type: ignore[operator]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Change the number of rows of the language model's tables. Placeholders do not need it."""
        return unwrap(self.language_model).resize_token_embeddings(*args, **kwargs)  # type: ignore[operator]

    def tie_weights(self, **kwargs: Any) -> None:
        self._call_parts("tie_weights", **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters, optionally only trained ones or without the token embeddings."""
        model = cast("MultimodalModel", self)
        left_out = {id(one) for one in model.get_input_embeddings().parameters()} if exclude_embeddings else set()
        counted = [one for one in self.parameters() if one.requires_grad or not only_trainable]
        return sum(one.numel() for one in counted if id(one) not in left_out)

    def _bare_parts(self) -> list[nn.Module]:
        return [unwrap(part) for part in (*(one.module for one in self.encoders.values()), self.language_model)]

    def _call_parts(self, method: str, **kwargs: Any) -> None:
        for part in self._bare_parts():
            if hasattr(part, method):
                getattr(part, method)(**kwargs)

    @property
    def generation_config(self) -> Any:
        """The generation config of the language model."""
        return unwrap(self.language_model).generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        unwrap(self.language_model).generation_config = value

    def can_generate(self) -> bool:
        """Whether the language model can continue a text."""
        ask = getattr(unwrap(self.language_model), "can_generate", None)
        return ask is not None and bool(ask())

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return unwrap(self.language_model).prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[operator]

    def set_generate_function(self, function: Callable[[Tensor, Tensor | None, dict[str, Any]], Any] | None) -> None:
        """Let a function of (input_ids, attention_mask, other arguments) implement `generate`: a pipeline, say."""
        self._generate_function = function

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Continue the text; the result starts with the prompt, as with Hugging Face's own multimodal models.

        Takes a batch as `forward` does, and the arguments of the language model's `generate`.
        """
        if self._generate_function is not None:
            return self._generate_function(input_ids, attention_mask, kwargs)
        model = cast("MultimodalModel", self)
        # These belong to the batch; everything else is an argument of the language model's `generate`.
        keys = {"position_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", *model.encoder_names}
        keys.update(*(encoder.input_names for encoder in model.encoders.values()))
        encoder_inputs, rest = model.split_batch({name: value for name, value in kwargs.items() if name in keys})
        options = {name: value for name, value in kwargs.items() if name not in keys}
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        features = {name: model.run_encoder(name, inputs) for name, inputs in encoder_inputs.items()}
        llm_inputs, spec = model.merge(features, input_ids=input_ids, attention_mask=attention_mask, **rest)
        if "inputs_embeds" not in llm_inputs:  # no encoders at all
            return model.language_model.generate(**llm_inputs, **options)  # type: ignore[operator]
        if spec is not None:
            attend_through_masks(model.language_model)
        with use_mask(spec) if spec is not None else nullcontext():
            output = model.language_model.generate(**llm_inputs, **options)  # type: ignore[operator]
        # A language model that is given embeddings returns the new tokens only: put the prompt in front.
        new = output if isinstance(output, Tensor) else output.sequences
        prompt = input_ids.repeat_interleave(new.shape[0] // input_ids.shape[0], dim=0)
        sequences = torch.cat([prompt, new], dim=1)
        if isinstance(output, Tensor):
            return sequences
        output.sequences = sequences
        return output

    @property
    def supports_gradient_checkpointing(self) -> bool:
        return any(getattr(part, "supports_gradient_checkpointing", False) for part in self._bare_parts())

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(getattr(part, "is_gradient_checkpointing", False) for part in self._bare_parts())

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Enable gradient checkpointing in every part that supports it; takes the arguments of transformers' method."""
        for part in self._bare_parts():
            if getattr(part, "supports_gradient_checkpointing", False):
                checkpoint_activations(part, gradient_checkpointing_kwargs or {"use_reentrant": False}, **options)

    def gradient_checkpointing_disable(self) -> None:
        for part in self._bare_parts():
            if getattr(part, "supports_gradient_checkpointing", False):
                part.gradient_checkpointing_disable()  # type: ignore[operator]

    def enable_input_require_grads(self) -> None:
        """Make frozen embeddings require gradients: reentrant checkpointing needs it for adapters."""
        self._call_parts("enable_input_require_grads")

    def disable_input_require_grads(self) -> None:
        """Undo `enable_input_require_grads`."""
        self._call_parts("disable_input_require_grads")

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the loss can be divided by a given number of tokens: `num_items_in_batch`."""
        inner = unwrap(self.language_model)
        stated: bool | None = getattr(inner, "accepts_loss_kwargs", None)
        if stated is not None:
            return stated
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(inner).forward).parameters.values())

    def add_model_tags(self, tags: Sequence[str] | str) -> None:
        """Add tags for the model's page on the hub."""
        given = [tags] if isinstance(tags, str) else tags
        self.model_tags = list(dict.fromkeys([*(self.model_tags or []), *given]))

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Save the model: each part in a sub-folder that transformers itself loads.

        Args:
            folder: The target folder.
            state_dict: Weights to save instead of the model's own, by their names in the model: gathered from shards.
            is_main_process: Whether this process writes; with several processes, one does.
            push_to_hub: Upload the model afterwards; see `push_to_hub`.
            options: `repo_id`, `token` and other arguments of `push_to_hub`. Options of how transformers writes weights
                (`max_shard_size`, `save_function`, …) have no effect.
        """
        from .pretrained import save_pretrained

        if is_main_process:
            save_pretrained(self, folder, state_dict)  # type: ignore[arg-type]
        if is_main_process and push_to_hub:
            taken = {name: options[name] for name in _UPLOAD_OPTIONS if name in options}
            self.push_to_hub(options.get("repo_id") or Path(folder).name, **taken)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], **options: Any) -> MultimodalModel:
        """Load a model saved by `save_pretrained`; see `pretrained.from_pretrained` for the options."""
        from .pretrained import from_pretrained

        return from_pretrained(folder, **options)

    @classmethod
    def from_multimodal(cls, model: nn.Module) -> MultimodalModel:
        """Decompose a whole Hugging Face multimodal model; the parts are shared with it, not copied."""
        from .import_hf.decompose import decompose

        return decompose(model)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = None,
        tags: Sequence[str] | None = None,
    ) -> str:
        """Upload the saved model to the Hugging Face hub, and return the address of the commit.

        The arguments are those of the transformers method of this name. Download the folder with
        `huggingface_hub.snapshot_download(repo_id)`, and load it with `from_pretrained`.
        """
        from huggingface_hub import HfApi, ModelCard, ModelCardData

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        all_tags = list(dict.fromkeys(["cornstarch", *(self.model_tags or []), *(tags or [])]))
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            card = ModelCard(f"---\n{ModelCardData(library_name='cornstarch', tags=all_tags).to_yaml()}\n---\n")
            card.save(folder / "README.md")
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or "Upload model",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )
        return str(commit)


def _drop_tied_names(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Keep a tied weight once in a state dict: tensors in safetensors files cannot share memory."""
    for name, first in find_tied_names(model).items():
        if f"{prefix}{first}" in state:
            state.pop(f"{prefix}{name}", None)


def _accept_tied_names(model: nn.Module, incompatible: Any) -> None:
    """Do not report further names of a tied weight as missing if the first name is present."""
    missing = incompatible.missing_keys
    for name, first in find_tied_names(model).items():
        # The model may be inside another module, whose prefix precedes the name.
        for key in [key for key in missing if key == name or key.endswith(f".{name}")]:
            if key.removesuffix(name) + first not in missing:
                missing.remove(key)
