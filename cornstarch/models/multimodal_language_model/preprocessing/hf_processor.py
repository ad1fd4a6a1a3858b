"""The processor of a whole Hugging Face multimodal model, with the interface that training uses.

The model's own chat template renders conversations, and its own `__call__` builds the inputs: the tokens around an
image, the number of placeholders, image tiles and audio padding. None of that is computed here.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cornstarch.compat.processors import load_processor_of
from cornstarch.errors import ConfigError

from ..unwrap import unwrap
from .modality_processors import build_noise_item
from .tokenization import Messages, TokenTemplate, check_tokenizer, check_vocabulary, missing_library, offsets_array

Style = Literal["parts", "text", "suffix", "tokens"]

# By modality: the name of its items in transformers, and the processor attributes that process them.
_KINDS = {"vision": "image", "audio": "audio"}
_ATTRIBUTES = {"vision": ("image_processor",), "audio": ("feature_extractor", "audio_processor")}


@dataclass(frozen=True)
class EncodedConversation:
    """A processor's output for one conversation."""

    inputs: dict[str, Any]  # the processor's output: a batch of one
    text: str | None
    """The text given to the tokenizer, with repeated placeholders; None if the tokenizer was not given a text."""
    offsets: np.ndarray | None
    """[S, 2]: the character range of each token in `text`; hidden characters are not counted."""


class WholeModelProcessor:
    """A transformers processor with the interface that training uses.

    Args:
        original: The processor. Its chat template is used; if it has none, its tokenizer's.
        model: The `MultimodalModel` made from the whole model; its encoders name the modalities.
        chat_template: A template to use instead of the processor's own.
    """

    def __init__(self, original: ProcessorMixin, model: Any, chat_template: str | None = None) -> None:
        self.original = original
        self.llm_tokenizer: PreTrainedTokenizerBase = original.tokenizer
        check_tokenizer(self.llm_tokenizer)
        check_vocabulary(self.llm_tokenizer, unwrap(model.language_model))
        self.encoder_processors: dict[str, Any] = {}
        for name, keys in _ATTRIBUTES.items():
            if found := [one for key in keys if (one := getattr(original, key, None)) is not None]:
                self.encoder_processors[name] = found[0]
        missing = [name for name in model.encoders if name not in self.encoder_processors]
        if missing:
            raise ConfigError(
                f"{type(original).__name__} has no {' or '.join(_ATTRIBUTES[missing[0]])}, but the model has a "
                f"{missing[0]} encoder. Give the folder of the model's own processor: `processor: <folder>`."
            )
        self._has_encoders = bool(model.encoders)
        if self._has_encoders:
            self.encoder_processors = {name: self.encoder_processors[name] for name in model.encoders}
        self.modality_token_ids: dict[str, int] = dict(model.modality_token_ids)
        tokens = {name: self.llm_tokenizer.convert_ids_to_tokens(i) for name, i in self.modality_token_ids.items()}
        self.modality_tokens: dict[str, str] = {name: str(token) for name, token in tokens.items()}
        # An undivided model does not state the inputs of its encoders; their processors do.
        names = {name: encoder.input_names for name, encoder in model.encoders.items()}
        if not model.encoders:
            names = {name: p.model_input_names for name, p in self.encoder_processors.items()}
        self.input_names: dict[str, tuple[str, ...]] = {name: tuple(keys) for name, keys in names.items()}
        self._template: Any = chat_template or original.chat_template or self.llm_tokenizer.chat_template
        if isinstance(self._template, dict):
            self._template = self._template.get("default")
        self.style: Style = self._find_style()
        """The form of conversations: typed parts ("parts"; "tokens" renders no text), one text per message ("text"),
        or a prefix and a suffix ("suffix")."""
        self.token_template: TokenTemplate | None = None
        """The chat template, if it returns tokens instead of a text."""
        if self.style == "tokens":
            if chat_template is not None:
                raise ConfigError(
                    f"`data.chat_template`: {type(original).__name__} makes tokens of conversations without a template "
                    "that could be replaced. Leave it out."
                )
            known = {name: one for name, one in self.encoder_processors.items() if name in self.modality_token_ids}
            items = {_KINDS[n]: (build_noise_item(one), self.modality_token_ids[n]) for n, one in known.items()}
            rates = {"audio": known["audio"].sampling_rate} if "audio" in known else {}
            self.token_template = TokenTemplate(original, items, rates)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        model: Any,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
    ) -> WholeModelProcessor:
        """Load the processor of a folder, or of a name on the hub, as `AutoProcessor` does.

        `chat_template` replaces the stored one; with `trust_remote_code`, code in the folder may be run.
        """
        original = load_processor_of(str(folder), trust_remote_code)
        if not isinstance(original, ProcessorMixin) or getattr(original, "tokenizer", None) is None:
            raise ConfigError(
                f"{folder} has no processor for text and items together (AutoProcessor finds a "
                f"{type(original).__name__}). Copy the files of the model's own processor there "
                "(processor_config.json or preprocessor_config.json, tokenizer files, chat_template.jinja), or give "
                "their folder: `processor: <folder>`."
            )
        return cls(original, model, chat_template)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Save the processor; `AutoProcessor` loads it again."""
        self.original.save_pretrained(folder)

    def _find_style(self) -> Style:
        word = "word"
        conversation = [{"role": "user", "content": [{"type": "text", "text": word}]}]
        try:
            written = self._apply_template(conversation)
        except Exception:  # a template may raise any error at a content that is not a string
            written = None
        if isinstance(written, Mapping):
            return "tokens"
        if self._template is None:
            # The tokenizer's options are in the annotation of the processor's keyword arguments.
            parameters = inspect.signature(type(self.original).__call__).parameters.values()
            kinds = [typing.get_args(p.annotation) for p in parameters if p.kind is p.VAR_KEYWORD]
            listed = [getattr(kind, "__annotations__", {}).get("text_kwargs") for (kind, *_) in kinds if kind]
            if any("suffix" in getattr(options, "__annotations__", {}) for options in listed):
                return "suffix"
            advice = "Add chat_template.jinja to its folder, or set `data.chat_template`."
            raise ConfigError(
                f"{type(self.original).__name__} is stored without a chat template, so it is unknown how the model "
                f"was shown conversations. {missing_library(self.original) or advice}"
            )
        if written is None:
            return "text"
        return "parts" if word in written and "'type'" not in written and '"type"' not in written else "text"

    def placeholder(self, kind: str) -> str:
        """Return the placeholder of an item in a text that is given to the processor."""
        name = next(name for name, own_kind in _KINDS.items() if own_kind == kind)
        own = getattr(self.original, f"{kind}_token", None)
        return str(own) if own is not None else self.modality_tokens[name]

    def write(self, messages: Messages, *, prompt: bool = False) -> str:
        """Render a conversation with the chat template, with one placeholder for each item."""
        if self.style == "suffix":
            prefix, suffix = self._split_prefix_and_suffix(messages)
            return prefix + (suffix or "")
        if self.style != "parts":
            messages = [{**message, "content": self._render_parts(message["content"])} for message in messages]
        return str(self._apply_template(messages, prompt))

    def encode(
        self, messages: Messages, *, prompt: bool = False, hidden: str = "", text: str | None = None
    ) -> EncodedConversation:
        """Process a conversation with its items (`prompt`: an answer follows).

        The tokenizer does not see `hidden` characters; the returned text has them. `text`: what `write` returned for
        the conversation, which is then not rendered again.
        """
        return self._record(lambda worker: self._call(worker, [messages], {}, prompt, text), hidden)

    def encode_text(self, text: str, items: Mapping[str, list[Any]]) -> EncodedConversation:
        """Process a text without roles, which has a placeholder for each item."""
        arguments = self._build_item_arguments([items])
        return self._record(lambda worker: worker(text=[text], **arguments, return_tensors="pt"))

    def encode_batch(self, conversations: Sequence[Messages]) -> dict[str, Any]:
        """Process several conversations, padded on the right."""
        # For the text alone: processors of sounds and images have their own padding.
        options = {"text_kwargs": {"padding": True, "padding_side": "right"}}
        return dict(self._call(self.original, conversations, options, False))

    def _call(
        self,
        worker: Any,
        conversations: Sequence[Messages],
        options: dict[str, Any],
        prompt: bool,
        text: str | None = None,
    ) -> Any:
        if self.token_template is not None:
            return self.token_template.encode(conversations, prompt=prompt)
        items = [collect_items(messages) for messages in conversations]
        # Of a text, `apply_chat_template` does what follows below, and more for sounds; some processors have their own.
        is_plain = type(self.original).apply_chat_template is ProcessorMixin.apply_chat_template
        if self.style == "parts" and (text is None or not is_plain or any("audio" in one for one in items)):
            return worker.apply_chat_template(
                [[dict(message) for message in messages] for messages in conversations],
                chat_template=self._template,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                add_generation_prompt=prompt,
                processor_kwargs=dict(options),
            )
        absent = dict.fromkeys(("images", "videos", "audio")) if self.style == "parts" else {}  # as apply_chat_template
        options = {**absent, **options, **self._build_item_arguments(items)}
        if self.style == "suffix":
            pairs = [self._split_prefix_and_suffix(messages) for messages in conversations]
            options["text"] = [prefix for prefix, _ in pairs]
            if not prompt:
                options["suffix"] = [suffix or "" for _, suffix in pairs]
        else:
            texts = [self.write(messages, prompt=prompt) for messages in conversations] if text is None else [text]
            options["text"] = texts
            bos = self.llm_tokenizer.bos_token
            if bos is not None and options["text"][0].startswith(bos):
                options["add_special_tokens"] = False  # as apply_chat_template decides it
        return worker(**options, return_tensors="pt")

    def _build_item_arguments(self, items: Sequence[Mapping[str, list[Any]]]) -> dict[str, Any]:
        """Return the processor's arguments for items: images in a list per sample, sounds in one list."""
        given: dict[str, Any] = {}
        if any(sample.get("image") for sample in items):
            given["images"] = [list(sample.get("image", ())) for sample in items]
        if any(sample.get("audio") for sample in items):
            given["audio"] = [sound for sample in items for sound in sample.get("audio", ())]
        return given

    def _record(self, process: Callable[[Any], Any], hidden: str = "") -> EncodedConversation:
        """Call `process` with a copy of the processor whose tokenizer records the text it is given."""
        recorder, worker = _RecordingTokenizer(self.llm_tokenizer, hidden), copy.copy(self.original)
        worker.tokenizer = recorder
        return EncodedConversation(dict(process(worker)), recorder.text, recorder.offsets)

    def _apply_template(self, messages: Messages, prompt: bool = False) -> Any:
        return self.original.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=prompt,
        )

    def _render_parts(self, parts: Sequence[Mapping[str, Any]]) -> str:
        return "".join(p["text"] if p["type"] == "text" else self.placeholder(p["type"]) for p in parts)

    def _split_prefix_and_suffix(self, messages: Messages) -> tuple[str, str | None]:
        """Return a question and its answer, for a processor without a chat template."""
        roles = [message["role"] for message in messages]
        if roles not in (["user"], ["user", "assistant"]):
            raise ConfigError(
                f"{type(self.original).__name__} has no chat template: it takes one question and one answer, but the "
                f"turns are {', '.join(roles)}. Set `data.chat_template`, or give one question and one answer"
            )
        prefix, *suffix = [self._render_parts(message["content"]) for message in messages]
        return prefix, suffix[0] if suffix else None

    def stand_ins(self) -> dict[str, dict[str, Any]]:
        """Return, by modality, an encoder's input for an item of noise: see `MultimodalModel.keep_encoders_running`."""
        if not self._has_encoders:  # the encoders of an undivided model cannot be run alone
            return {}
        return {name: self.encoder_inputs(name, [build_noise_item(p)]) for name, p in self.encoder_processors.items()}

    def stand_in_rows(self) -> dict[str, dict[str, Any]]:
        """Return, by modality, a batch of one row with an item of noise: see `UndividedModel.keep_encoders_running`."""
        rows = {}
        for name, processor in self.encoder_processors.items():
            inputs = self.encode(build_message(_KINDS[name], [build_noise_item(processor)]), prompt=True).inputs
            tokens, items = self.split_inputs(inputs)
            rows[name] = {"tokens": tokens, "items": items}
        return rows

    def split_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Split a batch of one into the entries per token and the encoders' inputs."""
        taken = {key for names in self.input_names.values() for key in names}
        tokens = {key: value for key, value in inputs.items() if key not in taken and is_per_token(inputs, key)}
        return tokens, {key: value for key, value in inputs.items() if key not in tokens}

    def encoder_inputs(self, name: str, items: Sequence[Any]) -> dict[str, Any]:
        """Return an encoder's inputs for items, taken from a conversation that has nothing else."""
        if not self._has_encoders:
            return {}
        inputs = self.encode(build_message(_KINDS[name], items), prompt=True).inputs
        return {key: value for key, value in inputs.items() if key in self.input_names[name]}


class _RecordingTokenizer:
    """Wraps a processor's tokenizer: hides characters from it, and records the text and the offsets of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: str) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self.text: str | None = None
        self.offsets: np.ndarray | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # during copy.copy
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
            return self._tokenizer(text, *args, **options)
        plain = [self._hide(one) for one in texts]
        given = plain[0] if isinstance(text, str) else plain
        if not getattr(self._tokenizer, "is_fast", False) or len(plain) != 1:
            return self._tokenizer(given, *args, **options)
        asked, kind = options.pop("return_offsets_mapping", False), options.pop("return_tensors", None)
        encoded = self._tokenizer(given, *args, return_offsets_mapping=True, **options)
        offsets = encoded["offset_mapping"] if asked else encoded.pop("offset_mapping")
        self.text, self.offsets = texts[0], offsets_array(offsets if isinstance(text, str) else offsets[0])
        # Only now, and as arrays: transformers converts the offsets, too, and looks at number after number.
        if kind == "pt" and not isinstance(text, str):
            encoded.update({key: torch.from_numpy(np.asarray(value, np.int64)) for key, value in encoded.items()})
        return encoded if kind is None else encoded.convert_to_tensors(kind, prepend_batch_axis=isinstance(text, str))

    def _hide(self, text: str) -> str:
        for character in self._hidden:
            text = text.replace(character, "")
        return text


def build_message(kind: str, items: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: item} for item in items]}]


def collect_items(messages: Messages) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for message in messages:
        for part in message["content"]:
            if part["type"] in _KINDS.values() and part["type"] in part:
                found.setdefault(part["type"], []).append(part[part["type"]])
    return found


def is_per_token(inputs: Mapping[str, Any], key: str) -> bool:
    value = inputs[key]
    return isinstance(value, Tensor) and value.shape == inputs["input_ids"].shape
