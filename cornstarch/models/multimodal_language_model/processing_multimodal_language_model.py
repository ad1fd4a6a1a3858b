"""The processor: texts, images and sounds become the batch of a multimodal model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BatchFeature, PreTrainedTokenizerBase

from cornstarch.errors import ConfigError

from .encoder import LANGUAGE_MODEL_INPUTS
from .preprocessing import modality_processors as processors
from .preprocessing import tokenization
from .preprocessing.token_count import FeatureCounter
from .preprocessing.tokenization import ItemLengths
from .unwrap import get_argument_names, unwrap

FeatureFunction = Callable[..., int | Sequence[int] | Sequence[Sequence[int]]]

# Options of the text, although feature extractors have arguments of the same names: the context limit must not
# truncate the sound.
_TEXT_OPTIONS = frozenset({"padding", "truncation", "max_length", "pad_to_multiple_of", "padding_side", "stride"})


class MultimodalBatch(BatchFeature):
    """A batch whose `to` also reaches the inputs that are nested by modality."""

    def to(self, *args: Any, **kwargs: Any) -> MultimodalBatch:
        super().to(*args, **kwargs)
        for name, value in self.items():
            if isinstance(value, Mapping):
                self.data[name] = BatchFeature(dict(value)).to(*args, **kwargs).data
        return self


class MultimodalProcessor:
    """One tokenizer and one processor per modality.

    Each modality has a placeholder token, by default `<name>`, registered as a special token of the tokenizer. In a
    text it stands for one item (image, clip), and is repeated to the number of tokens that the encoder makes of it.
    The number comes from the user's function, or from the encoder itself if `model` is given; with both, the
    function's number is checked against the encoder's.

    Args:
        encoder_processors: Image processors and feature extractors by modality name (a class is built with its
            defaults).
        llm_tokenizer: The tokenizer of the language model; `tokenizer` is another name for it.
        model: The `MultimodalModel`; its placeholder token ids are set.
        num_feature_calculation_funcs: By modality, a function of (the processor's inputs, its outputs) that returns
            the tokens of an item: one number for all, a list over the batch, or a list per sample.
        predefined_tokens: Placeholder tokens by modality, where `<name>` is not wanted.
        image_processor: Short for `encoder_processors={"vision": …}`.
        feature_extractor: Short for `encoder_processors={"audio": …}`.
        num_features_calculation_funcs: Another spelling of `num_feature_calculation_funcs`.
    """

    def __init__(
        self,
        encoder_processors: Mapping[str, Any] | None = None,
        llm_tokenizer: PreTrainedTokenizerBase | None = None,
        model: nn.Module | None = None,
        num_feature_calculation_funcs: Mapping[str, FeatureFunction] | None = None,
        predefined_tokens: Mapping[str, str] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_processor: Any = None,
        feature_extractor: Any = None,
        num_features_calculation_funcs: Mapping[str, FeatureFunction] | None = None,
    ) -> None:
        self.llm_tokenizer: PreTrainedTokenizerBase = _pick_one(llm_tokenizer=llm_tokenizer, tokenizer=tokenizer)
        if self.llm_tokenizer is None:
            raise ConfigError("The processor needs the language model's tokenizer: pass llm_tokenizer=….")
        tokenization.check_tokenizer(self.llm_tokenizer)
        self.encoder_processors = processors.collect_processors(encoder_processors, image_processor, feature_extractor)
        functions = _pick_one(
            num_feature_calculation_funcs=num_feature_calculation_funcs,
            num_features_calculation_funcs=num_features_calculation_funcs,
        )
        self._functions: dict[str, FeatureFunction] = dict(functions or {})
        tokens = dict(predefined_tokens or {})
        for name in (*self._functions, *tokens):
            self._check_modality(name)
        self.modality_tokens: dict[str, str] = {name: tokens.get(name, f"<{name}>") for name in self.encoder_processors}
        self.modality_token_ids: dict[str, int] = tokenization.register_tokens(self.llm_tokenizer, self.modality_tokens)
        # By modality: the batch keys that would reach its encoder if they were given flat.
        self._flat_keys: dict[str, frozenset[str]] = {
            name: frozenset(getattr(processor, "model_input_names", ()))
            for name, processor in self.encoder_processors.items()
        }
        self._arguments: dict[str, frozenset[str]] = {}
        self._counters: dict[str, FeatureCounter] = {}
        self._expands_exactly = False  # whether the tokenizer was tried with repeated placeholders
        if model is not None:
            self._connect(unwrap(model))

    def _connect(self, model: Any) -> None:
        """Read the signatures of the model's encoders, and set the model's placeholder token ids."""
        if not hasattr(model, "encoders"):
            raise ConfigError(f"model is a {type(model).__name__}; expected a MultimodalModel.")
        missing = [name for name in self.encoder_processors if name not in model.encoders]
        if missing:
            raise ConfigError(
                f"The processor has {missing}, the model has encoders {list(model.encoders)}. "
                "Name the processors like the encoders: encoder_processors={name: processor}."
            )
        tokenization.check_vocabulary(self.llm_tokenizer, unwrap(model.language_model))
        for name, encoder in model.encoders.items():
            self._flat_keys[name] = frozenset(encoder.input_names)
            if name in self.encoder_processors:
                self._counters[name] = FeatureCounter(encoder)
                if encoder.preprocess_callback is None:
                    self._arguments[name] = self._flat_keys[name].union(get_argument_names(encoder.module))
        model.set_modality_token_ids(self.modality_token_ids)

    @property
    def runs_encoders(self) -> bool:
        """Whether an encoder itself had to be run to count the tokens of an item."""
        return any(counter.runs_encoder for counter in self._counters.values())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the language model."""
        return self.llm_tokenizer

    def __call__(
        self,
        encoder_inputs: Mapping[str, Mapping[str, Any] | None] | None = None,
        llm_inputs: Mapping[str, Any] | None = None,
        return_tensors: str | None = None,
        *,
        text: str | Sequence[str] | None = None,
        images: Any = None,
        audio: Any = None,
        videos: Any = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Process texts and the items they mention.

        A modality's outputs are flat in the batch (`pixel_values`), or nested under the modality's name where a key
        would be taken for another encoder's or the language model's. Outputs that the encoder has no argument for are
        left out.

        Args:
            encoder_inputs: By modality, the arguments of its processor: `{"vision": {"images": images}}`. Items are
                one flat list over the batch, or a list per sample.
            llm_inputs: The arguments of the tokenizer: `{"text": texts, "padding": True}`.
            return_tensors: "pt" or "np". None leaves the tokens as lists; encoders' inputs are then torch tensors.
            text: Short for `llm_inputs={"text": …}`.
            images: Short for `encoder_inputs` of the one modality whose processor takes images.
            audio: The same for sounds.
            videos: The same for videos.
            kwargs: Passed to the tokenizer and to each processor that has such an argument. Padding and truncation
                apply to the text: for an encoder's, use `encoder_inputs`.
        """
        given = self._collect_items(encoder_inputs, {"images": images, "audio": audio, "videos": videos})
        texts, options = _parse_texts(llm_inputs, text)
        takers = (self.llm_tokenizer, *self.encoder_processors.values())
        known = {key for one in takers for key in processors.get_keywords(one)}
        for name in kwargs:
            if name not in known:
                hint = processors.suggest_nearest(name, known)
                raise ConfigError(f"Neither the tokenizer nor a processor takes {name!r}{hint}.")
        outputs = {name: self._run(name, inputs, kwargs) for name, inputs in given.items()}
        batch: dict[str, Any] = {}
        if texts is not None:
            items = {name: self._count(name, given[name], outputs[name]) for name in given}
            own = processors.get_keywords(self.llm_tokenizer)
            passed = {key: value for key, value in kwargs.items() if key in own}
            batch.update(self._tokenize(texts, items, {"return_tensors": return_tensors, **passed, **options}))
        return MultimodalBatch({**batch, **self._merge_outputs(outputs, as_arrays=return_tensors == "np")})

    def _merge_outputs(self, outputs: Mapping[str, dict[str, Any]], *, as_arrays: bool = False) -> dict[str, Any]:
        """Return the processors' outputs as one batch, nested by modality where keys would be mistaken."""
        merged: dict[str, Any] = {}
        reserved = LANGUAGE_MODEL_INPUTS.union(self.llm_tokenizer.model_input_names)
        for name, output in outputs.items():
            if as_arrays:
                output = {key: value.numpy() if isinstance(value, Tensor) else value for key, value in output.items()}
            others = [keys for keyed in (self._flat_keys, outputs) for other, keys in keyed.items() if other != name]
            merged.update({name: output} if reserved.union(*others).intersection(output) else output)
        return merged

    def encode_items(
        self, encoder_inputs: Mapping[str, Mapping[str, Any] | None]
    ) -> tuple[dict[str, Any], dict[str, list[int]]]:
        """Run the processors without a text; return their part of the batch and, by modality, the tokens of items."""
        found = self.process_items(encoder_inputs)
        outputs = {name: output for name, (output, _) in found.items()}
        return self._merge_outputs(outputs), {name: lengths for name, (_, lengths) in found.items()}

    def expand_placeholders(self, ids: np.ndarray, lengths: Mapping[str, Sequence[int]]) -> np.ndarray:
        """Return how often each id of a tokenized text is repeated: a placeholder as often as its item has tokens."""
        tokens = {name: (token, self.modality_token_ids[name]) for name, token in self.modality_tokens.items()}
        if not self._expands_exactly:
            tokenization.check_expansion(self.llm_tokenizer, tokens)
            self._expands_exactly = True
        return tokenization.count_repeats(ids, tokens, lengths)

    def process_items(
        self, encoder_inputs: Mapping[str, Mapping[str, Any] | None]
    ) -> dict[str, tuple[dict[str, Any], list[int]]]:
        """Run the processors without a text; return, by modality, its encoder's inputs and the tokens of each item."""
        given = self._collect_items(encoder_inputs, {})
        outputs = {name: self._run(name, inputs, {}) for name, inputs in given.items()}
        return {name: (outputs[name], list(self._count(name, given[name], outputs[name]).lengths)) for name in given}

    def _tokenize(self, texts: list[str], items: dict[str, ItemLengths], options: dict[str, Any]) -> dict[str, Any]:
        tokens = {name: (token, self.modality_token_ids[name]) for name, token in self.modality_tokens.items()}
        return tokenization.tokenize_with_items(self.llm_tokenizer, tokens, texts, items, options)

    def stand_ins(self) -> dict[str, dict[str, Any]]:
        """Return, by modality, an encoder's input for an item of noise: see `MultimodalModel.keep_encoders_running`."""
        return {
            name: self._run(name, processors.build_noise_inputs(p), {}) for name, p in self.encoder_processors.items()
        }

    def _collect_items(
        self, encoder_inputs: Mapping[str, Mapping[str, Any] | None] | None, short: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return the processor's arguments for each modality that has items."""
        given: dict[str, Mapping[str, Any]] = {}
        for name, inputs in (encoder_inputs or {}).items():
            self._check_modality(name)
            if inputs is not None and not isinstance(inputs, Mapping):
                raise ConfigError(
                    f"encoder_inputs[{name!r}] is a {type(inputs).__name__}; expected the arguments of its processor: "
                    f"{{{processors.get_item_argument(self.encoder_processors[name])!r}: …}}."
                )
            given[name] = inputs or {}
        for kind, value in short.items():
            if value is not None:
                name = self._find_modality(kind)
                if given.get(name):
                    raise ConfigError(f"{name} items are given twice: encoder_inputs[{name!r}] and {kind}=.")
                given[name] = {kind: value}
        named = {name: processors.name_items(self.encoder_processors[name], i) for name, i in given.items()}
        items = {name: self._get_items(name, inputs) for name, inputs in named.items() if inputs}
        filled = [n for n, i in items.items() if not isinstance(i, (list, tuple)) or tokenization.count_items(i, 0)]
        return {name: named[name] for name in filled}

    def _get_items(self, name: str, inputs: Mapping[str, Any]) -> Any:
        argument = processors.get_item_argument(self.encoder_processors[name])
        if inputs.get(argument) is None:
            raise ConfigError(
                f"The {name} processor ({type(self.encoder_processors[name]).__name__}) takes its items as "
                f"{argument!r}, but got {list(inputs)}."
            )
        return inputs[argument]

    def _run(self, name: str, inputs: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Run one modality's processor and keep the outputs that its encoder takes."""
        processor = self.encoder_processors[name]
        known = processors.get_keywords(processor)
        passed = {key: value for key, value in kwargs.items() if key in known and key not in _TEXT_OPTIONS}
        passed.update(inputs)
        if "return_tensors" in known:
            passed["return_tensors"] = "pt"
        items = self._get_items(name, inputs)
        if tokenization.is_per_sample(items) and not all(items):
            # Image processors fail on a sample without images.
            passed[processors.get_item_argument(processor)] = [item for sample in items for item in sample]
        results = processor(**passed).items()
        outputs = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in results}
        masks = [key for key in self._flat_keys[name] if key.endswith("mask") and key not in outputs]
        if "attention_mask" in outputs and len(masks) == 1:
            # The encoder has its own name for the feature extractor's attention_mask, which is not the text's.
            outputs[masks[0]] = outputs.pop("attention_mask")
        taken = self._arguments.get(name)
        return {key: value for key, value in outputs.items() if taken is None or key in taken}

    def _count(self, name: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> ItemLengths:
        items = self._get_items(name, inputs)
        dimensions = processors.get_item_dimensions(self.encoder_processors[name])
        n_items = tokenization.count_items(items, dimensions)
        per_sample = None
        if tokenization.is_per_sample(items):
            per_sample = [tokenization.count_items(sample, dimensions) for sample in items]
        function, counter = self._functions.get(name), self._counters.get(name)
        if function is not None:
            source = f"num_feature_calculation_funcs[{name!r}]"
            claimed = tokenization.parse_claim(function(inputs, outputs), n_items, source)
            if counter is not None:
                counter.confirm(claimed.lengths, counter.arguments(outputs), source)
            return ItemLengths(claimed.lengths, claimed.per_sample or per_sample)
        if counter is None:
            raise ConfigError(
                f"How many tokens a {name} item takes is unknown. Pass model=<the MultimodalModel> to the processor, "
                f"or num_feature_calculation_funcs={{{name!r}: lambda inputs, outputs: <number>}}."
            )
        lengths = counter.lengths(counter.arguments(outputs))
        if n_items == 1:
            lengths = [sum(lengths)]  # the processor may have made several items of one (crops)
        elif n_items != len(lengths):
            raise ConfigError(
                f"The {name} processor made {len(lengths)} items out of {n_items}, so it is unknown which belong "
                f"together. Pass num_feature_calculation_funcs={{{name!r}: …}} that returns the tokens of each of the "
                f"{n_items}."
            )
        return ItemLengths(lengths, per_sample)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the text of token ids, as the tokenizer does."""
        return self.llm_tokenizer.decode(*args, **kwargs)

    def batch_decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the texts of several rows of token ids, as the tokenizer does."""
        return self.llm_tokenizer.batch_decode(*args, **kwargs)

    def post_process_image_text_to_text(self, generated_outputs: Any, **kwargs: Any) -> list[str]:
        """Return the texts of generated rows; transformers' pipelines call it after `generate`."""
        return self.llm_tokenizer.batch_decode(generated_outputs, **{"skip_special_tokens": True, **kwargs})

    def apply_chat_template(self, conversation: Sequence[Any], tokenize: bool = False, **kwargs: Any) -> Any:
        """Write a chat, or a list of chats, as text with the tokenizer's chat template.

        The content of a message is a string, or a list of parts: `{"type": "text", "text": …}`, and for an item
        `{"type": "image"}`, `{"type": "audio"}` or `{"type": <modality>}`, which becomes the modality's placeholder.

        Args:
            conversation: A list of messages, or a list of such lists.
            tokenize: False returns the text, to be given to the processor together with the items.
            kwargs: Passed to the tokenizer's `apply_chat_template`.
        """
        if tokenize:
            raise ConfigError(
                "A chat is tokenized together with its items: write it with tokenize=False, then call "
                "processor(text=…, images=…, add_special_tokens=False)."
            )
        if not kwargs.get("chat_template") and not self.llm_tokenizer.chat_template:
            raise ConfigError("The tokenizer has no chat template: pass chat_template=…, or set it on the tokenizer.")
        if conversation and isinstance(conversation[0], (list, tuple)):
            chats: list[Any] = [[self._as_text(message) for message in chat] for chat in conversation]
        else:
            chats = [self._as_text(message) for message in conversation]
        return self.llm_tokenizer.apply_chat_template(chats, tokenize=False, **kwargs)

    def _as_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if content is None or isinstance(content, str):
            return dict(message)
        texts = []
        for part in content:
            kind = str(part.get("type"))
            if kind != "text" and kind not in self.modality_tokens:
                kind = self._find_modality(processors.get_item_kind(kind) or kind)
            texts.append(part["text"] if kind == "text" else self.modality_tokens[kind])
        return {**message, "content": "".join(texts)}

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Save the tokenizer and the processors, each in a sub-folder that transformers loads.

        Functions cannot be stored; they are passed to `from_pretrained` again.
        """
        own = (self.llm_tokenizer, self.encoder_processors, self.modality_tokens)
        processors.save_processor(Path(folder), *own, self._functions)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        model: nn.Module | None = None,
        num_feature_calculation_funcs: Mapping[str, FeatureFunction] | None = None,
        classes: Mapping[str, type] | None = None,
        trust_remote_code: bool = False,
    ) -> MultimodalProcessor:
        """Load a processor saved by `save_pretrained`.

        Args:
            folder: A local folder.
            model: As in the constructor.
            num_feature_calculation_funcs: The functions that the saved processor had; not needed with `model`.
            classes: By modality, the class of a processor that is not in transformers.
            trust_remote_code: Whether code in the tokenizer's folder may be run.
        """
        functions = dict(num_feature_calculation_funcs or {})
        counted = functions if model is None else None  # a model counts all of them
        tokenizer, loaded, tokens = processors.load_processor(Path(folder), counted, classes, trust_remote_code)
        return cls(loaded, tokenizer, model, functions, tokens)

    def _check_modality(self, name: str) -> None:
        if name not in self.encoder_processors:
            raise ConfigError(
                f"There is no modality {name!r}{processors.suggest_nearest(name, self.encoder_processors)}; "
                f"this processor has {list(self.encoder_processors)}."
            )

    def _find_modality(self, kind: str) -> str:
        arguments = {name: processors.get_item_argument(one) for name, one in self.encoder_processors.items()}
        kinds = {name: processors.get_item_kind(argument) for name, argument in arguments.items()}
        names = [name for name, found in kinds.items() if found == kind]
        if len(names) != 1:
            raise ConfigError(
                f"{kind!r} fits {names or 'none'} of the modalities {list(kinds)}; expected exactly one. "
                "Name the modality: encoder_inputs={name: {…}}, or {'type': name} in a chat."
            )
        return names[0]


def _pick_one(**names: Any) -> Any:
    """Return the value that was given under one of several names of the same argument."""
    given = {name: value for name, value in names.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are names of one argument: pass one of them.")
    return next(iter(given.values()), None)


def _parse_texts(
    llm_inputs: Mapping[str, Any] | None, text: str | Sequence[str] | None
) -> tuple[list[str] | None, dict[str, Any]]:
    """Return the texts, one per sample, and the tokenizer's options."""
    options = dict(llm_inputs or {})
    texts = _pick_one(llm_inputs=options.pop("text", None), text=text)
    if texts is None:
        if options:
            raise ConfigError(f"llm_inputs has {list(options)} but no 'text'.")
        return None, {}
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not all(isinstance(one, str) for one in texts):
        raise ConfigError("text must be a string, or a list of strings, one per sample.")
    if options.get("return_overflowing_tokens"):
        raise ConfigError("return_overflowing_tokens would split an item over several rows; leave it out.")
    return texts, options


MultimodalModelProcessor = MultimodalProcessor
