"""Tokenize texts and conversations with placeholders.

Each placeholder stands for an item, and is repeated to its number of tokens. Chat templates of mistral-common return
tokens instead of a text.
"""

from __future__ import annotations

import base64
import copy
import io
import numbers
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import AddedToken, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import is_mistral_common_available

from cornstarch.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
"""A conversation: `role`, and `content` as a list of parts with a type (`{"type": "image", "image": …}`)."""

_PLAIN_TEXT = "The quick brown fox jumps over 12 lazy dogs."
_TRIED_TOKENS = 64
_FRAMES = ("{}", "a {} b", "a{}b", "A.\n{}\nB", "{} a", "a {}")  # texts around a placeholder


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that encodes plain text to nothing but special and unknown tokens.

    transformers builds such a tokenizer, without an error, from its class alone where a folder has no tokenizer files.
    """
    if _encodes(tokenizer, _PLAIN_TEXT):
        return
    # A tokenizer that does not know the plain text, such as one with few words, is tried on its own tokens.
    special = {*tokenizer.all_special_tokens, *map(str, _get_added_tokens(tokenizer).values())}
    own = [token for token in tokenizer.get_vocab() if token not in special]
    if any(_encodes(tokenizer, tokenizer.convert_tokens_to_string([token])) for token in own[:_TRIED_TOKENS]):
        return
    raise ConfigError(
        f"The tokenizer ({type(tokenizer).__name__}, {len(tokenizer)} tokens) encodes plain text to nothing: it knows "
        "its special tokens only. The folder that it was loaded from has no tokenizer files (tokenizer.json, or "
        "vocab.json and merges.txt, or tokenizer.model). Copy the tokenizer files of the model into the folder, or "
        "give another folder."
    )


def _encodes(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    known = set(ids) - {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    return any(str(tokenizer.decode([token])).strip() for token in known)  # an empty T5 tokenizer still knows spaces


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Refuse a tokenizer with ordinary tokens beyond the embedding table of a language model (without wrappers)."""
    rows = count_embedding_rows(model)
    if rows is None:
        return
    # Added tokens may lie beyond it: placeholders of modalities are never looked up, and published tokenizers have
    # added tokens that their model has no row for.
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    ordinary = sorted(beyond.keys() - _get_added_tokens(tokenizer).keys())
    if ordinary:
        last = ordinary[-1]
        raise ConfigError(
            f"The tokenizer ({type(tokenizer).__name__}, {len(tokenizer)} tokens) has {len(ordinary)} tokens beyond "
            f"the model's embedding table of {rows} rows, such as {beyond[last]!r} with number {last}: they do not "
            "belong together. Give the model's own tokenizer."
        )


def _get_added_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, Any]:
    found: Any = tokenizer.added_tokens_decoder
    return found if isinstance(found, Mapping) else {}  # of mistral-common's tokenizers it is a method that raises


def count_embedding_rows(model: Any) -> int | None:
    """Return the number of rows of a model's token embeddings; None if they are no plain `nn.Embedding`."""
    table = model.get_input_embeddings()
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


@dataclass(frozen=True)
class ItemLengths:
    """The items (images, clips) of one modality in a batch."""

    lengths: list[int]  # tokens per item, in the order of the items
    per_sample: list[int] | None = None
    """Items per sample; None if they were given as one flat list, to be assigned in order."""


def register_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, str]) -> dict[str, int]:
    """Add each modality's token to the tokenizer's special tokens, and return the ids."""
    for name, token in tokens.items():
        for other, longer in tokens.items():
            if other != name and token in longer:
                raise ConfigError(
                    f"The tokens of {name} and {other}, {token!r} and {longer!r}, cannot be told apart in a text. "
                    "Choose others with predefined_tokens."
                )
    new = [token for token in tokens.values() if token not in tokenizer.all_special_tokens]
    if new:
        special = [AddedToken(token, normalized=False, special=True) for token in new]
        tokenizer.add_special_tokens({"extra_special_tokens": special}, replace_extra_special_tokens=False)
    ids: Any = tokenizer.convert_tokens_to_ids(list(tokens.values()))
    return dict(zip(tokens, ids, strict=True))


def count_items(items: Any, dimensions: int) -> int:
    """Return the number of items in a processor's argument: one, an array of several, or nested lists."""
    if isinstance(items, (list, tuple)):
        if items and isinstance(items[0], numbers.Number):  # one sound, as a list of samples
            return 1
        return sum(count_items(item, dimensions) for item in items)
    return len(items) if getattr(items, "ndim", 0) > dimensions else 1


def is_per_sample(items: Any) -> bool:
    return (
        isinstance(items, (list, tuple))
        and len(items) > 0
        and all(isinstance(sample, (list, tuple)) for sample in items)
        and not any(sample and isinstance(sample[0], numbers.Number) for sample in items)
    )


def parse_claim(claim: Any, n_items: int, source: str) -> ItemLengths:
    """Parse the result of a user's function: a number for all items, a list over the batch, or a list per sample."""
    claim = claim.tolist() if hasattr(claim, "tolist") else claim
    per_sample = None
    if isinstance(claim, int):
        lengths: Any = [claim] * n_items
    elif isinstance(claim, (list, tuple)) and any(isinstance(sample, (list, tuple)) for sample in claim):
        per_sample = [len(sample) for sample in claim]
        lengths = [length for sample in claim for length in sample]
    else:
        lengths = claim
    if not isinstance(lengths, (list, tuple)) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ConfigError(
            f"{source} returned {claim!r}; expected the number of tokens of an item: one integer for all, a list over "
            "the batch, or a list per sample."
        )
    if len(lengths) != n_items:
        raise ConfigError(f"{source} returned {len(lengths)} numbers for {n_items} items; expected one per item.")
    return ItemLengths(list(lengths), per_sample)


def tokenize_with_items(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Mapping[str, tuple[str, int]],
    texts: list[str],
    items: Mapping[str, ItemLengths],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Tokenize texts, one per sample, with each placeholder repeated to its item's tokens; never truncate an item.

    `tokens` are the placeholder of each modality and its id.
    """
    expanded, expected = texts, {}
    for name, (token, _) in tokens.items():
        found, given = [text.count(token) for text in texts], items.get(name, ItemLengths([]))
        _check_items(name, token, found, given)
        lengths = [given.lengths[start:end] for start, end in pairwise(accumulate(found, initial=0))]
        expected[name] = [sum(of_sample) for of_sample in lengths]
        expanded = [_expand(text, token, of_sample) for text, of_sample in zip(expanded, lengths, strict=True)]
    encoded = dict(tokenizer(expanded, **options))
    for name, (token, token_id) in tokens.items():
        for sample, (ids, wanted) in enumerate(zip(encoded["input_ids"], expected[name], strict=True)):
            kept = int((np.asarray(ids) == token_id).sum())
            if kept == wanted:
                continue
            if not options.get("truncation"):
                raise ConfigError(
                    f"Sample {sample} has {kept} tokens {token!r} instead of {wanted}: the tokenizer does not keep "
                    f"this token whole (options: {options})."
                )
            length = len(tokenizer(expanded[sample], verbose=False)["input_ids"])
            limit = options.get("max_length") or tokenizer.model_max_length
            raise ConfigError(
                f"Sample {sample} has {length} tokens, the limit is {limit}: truncation would leave {kept} of its "
                f"{wanted} {name} tokens, and an item is never cut. Raise max_length, or give fewer items or less text "
                "beside them (text beyond the last item may be cut)."
            )
    return encoded


def check_expansion(tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, tuple[str, int]]) -> None:
    """Refuse a tokenizer that does not encode a repeated placeholder as the repeated id, with the same text beside it.

    For all others the ids of a text are expanded, and the text is tokenized once.
    """
    for token, token_id in tokens.values():
        for frame in _FRAMES:
            once, thrice = (
                np.asarray(tokenizer(frame.format(token * n), add_special_tokens=False)["input_ids"]) for n in (1, 3)
            )
            if not np.array_equal(np.repeat(once, np.where(once == token_id, 3, 1)), thrice) or token_id not in once:
                raise ConfigError(
                    f"The tokenizer splits the text in another way beside a repeated placeholder {token!r}: it does "
                    "not keep this token whole. Choose another with predefined_tokens (`token` in a config)."
                )


def offsets_array(offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the characters of tokens as an array [S, 2]."""
    return np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)


def count_repeats(
    ids: np.ndarray, tokens: Mapping[str, tuple[str, int]], lengths: Mapping[str, Sequence[int]]
) -> np.ndarray:
    """Return how often each id of a text is repeated; `lengths` has, by modality, the tokens of each item in order."""
    repeats = np.ones(len(ids), dtype=np.int64)
    for name, (token, token_id) in tokens.items():
        given, places = list(lengths.get(name, ())), ids == token_id
        _check_items(name, token, [int(places.sum())], ItemLengths(given))
        repeats[places] = given
    return repeats


def _check_items(modality: str, token: str, found: list[int], items: ItemLengths) -> None:
    """Refuse texts whose number of placeholders (`found`, per sample) is not that of their items."""
    given = len(items.lengths)
    if items.per_sample is None and sum(found) != given:
        short = next((sample for sample, end in enumerate(accumulate(found)) if end > given), None)
        left = f"{given - sum(found)} items are left over"
        where = left if short is None else f"sample {short} runs out of items"
        raise ConfigError(
            f"The texts have {sum(found)} placeholders {token!r} (per sample: {found}), but {given} {modality} items "
            f"are given: {where}. {_advise(token, found)}"
        )
    per_sample = found if items.per_sample is None else items.per_sample
    if len(found) != len(per_sample):
        raise ConfigError(f"There are {len(found)} texts, but {modality} items for {len(per_sample)} samples.")
    for sample, (placeholders, n_items) in enumerate(zip(found, per_sample, strict=True)):
        if placeholders != n_items:
            raise ConfigError(
                f"Sample {sample} has {placeholders} placeholders {token!r} in its text, but {n_items} {modality} "
                f"items. {_advise(token, [placeholders])}"
            )


def _advise(token: str, found: list[int]) -> str:
    if not any(found):
        return f"The text does not say where its items belong: write {token!r} there."
    return f"Write one {token!r} for each item, and give one item for each {token!r}."


def _expand(text: str, token: str, lengths: list[int]) -> str:
    first, *rest = text.split(token)
    return first + "".join(token * length + piece for length, piece in zip(lengths, rest, strict=True))


def missing_library(original: ProcessorMixin) -> str | None:
    """Return which library a processor's chat template needs and lacks; None if there is none."""
    source, tekken = str(original.tokenizer.name_or_path), "tekken.json"
    has_tekken = Path(source, tekken).exists()
    if not Path(source).is_dir():
        with suppress(ValueError):  # not a name on the hub
            has_tekken = isinstance(try_to_load_from_cache(source, tekken), str)
    if is_mistral_common_available() or not has_tekken:
        return None
    return (
        "Its tekken.json is read by mistral-common, which is missing or too old: "
        '`pip install "transformers[mistral-common]"`.'
    )


class TokenTemplate:
    """Encodes conversations with a processor whose `apply_chat_template` returns tokens, as mistral-common's does.

    There is no text whose characters could locate the answers; the tokens before an answer are a prefix of those with
    it. `items` has, for each kind (image, audio), an item of noise and its placeholder token; `rates` the sampling
    rates of the kinds that are sounds.
    """

    def __init__(
        self, original: ProcessorMixin, items: Mapping[str, tuple[Any, int]], rates: Mapping[str, int]
    ) -> None:
        self._rates, self._for_prompts, tokenizer = rates, original, original.tokenizer
        # A copy of the processor takes conversations that end with an answer.
        self._for_answers: Any = copy.copy(original)
        if hasattr(tokenizer, "mode"):  # mistral-common's tokenizers take either these or prompts
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                answers = type(tokenizer).from_pretrained(folder, mode="finetuning", padding_side="right")
        else:
            answers = copy.copy(tokenizer)
            answers.padding_side = "right"
        self._for_answers.tokenizer = answers
        self._forms = {kind: self._find_form(kind, noise, token) for kind, (noise, token) in items.items()}

    def _find_form(self, kind: str, noise: Any, token: int) -> Callable[[str, Any], dict[str, Any]]:
        """Return how the processor takes items of a kind; raise ConfigError if it takes none, or drops them."""
        problem = ""

        def as_part(kind: str, item: Any) -> dict[str, Any]:
            return {"type": kind, kind: item}

        for form in (as_part, self._as_file) if kind in self._rates else (as_part,):
            try:
                encoded = self._apply(self._for_prompts, [[{"role": "user", "content": [form(kind, noise)]}]], True)
            except Exception as error:  # a template may raise any error at a part that it does not know
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            if token in encoded["input_ids"][0].tolist() and len(encoded) > 2:  # ids, a mask, and the item
                return form
            problem = "it silently leaves them out"
        raise ConfigError(
            f"{type(self._for_prompts).__name__} ({type(self._for_prompts.tokenizer).__name__}) does not take {kind} "
            f"items in conversations: {problem}. {missing_library(self._for_prompts) or ''}".rstrip()
        )

    def _as_file(self, kind: str, item: Any) -> dict[str, Any]:
        """Return a sound as the bytes of a lossless fp32 file, for templates that read files."""
        try:
            import soundfile
        except ImportError as error:
            raise ConfigError("sounds are given to this chat template as files: `pip install soundfile`") from error
        file = io.BytesIO()
        soundfile.write(file, np.asarray(item, dtype=np.float32), self._rates[kind], format="WAV", subtype="FLOAT")
        return {"type": kind, "base64": base64.b64encode(file.getvalue()).decode()}

    def _convert_messages(self, messages: Messages) -> list[dict[str, Any]]:
        def part(one: Mapping[str, Any]) -> dict[str, Any]:
            kind = one["type"]
            return self._forms[kind](kind, one[kind]) if kind in self._forms else dict(one)

        return [{**message, "content": [part(one) for one in message["content"]]} for message in messages]

    @staticmethod
    def _apply(worker: Any, conversations: Sequence[Messages], prompt: bool) -> Any:
        return worker.apply_chat_template(
            list(conversations), tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=prompt
        )

    def encode(self, conversations: Sequence[Messages], *, prompt: bool) -> Any:
        """Process conversations with their items; those with answers are padded on the right."""
        worker = self._for_prompts if prompt else self._for_answers
        return self._apply(worker, [self._convert_messages(messages) for messages in conversations], prompt)

    def tokens(self, messages: Messages, *, prompt: bool = False) -> list[int]:
        """Return the tokens of a conversation without processing its items."""
        return self._tokenize(self._convert_messages(messages), prompt)

    def _tokenize(self, given: Messages, prompt: bool) -> list[int]:
        tokenizer: Any = (self._for_prompts if prompt else self._for_answers).tokenizer
        encoded = tokenizer.apply_chat_template([given], tokenize=True, return_dict=True, add_generation_prompt=prompt)
        return list(encoded["input_ids"][0])

    def answers(self, messages: Messages, input_ids: list[int]) -> list[tuple[int, int]]:
        """Return the ranges of a conversation's answers in its `input_ids`, each including the end token."""
        given = self._convert_messages(messages)
        spans = []
        for number, message in enumerate(given):
            if message["role"] != "assistant":
                continue
            before, after = self._tokenize(given[:number], True), self._tokenize(given[: number + 1], False)
            if after[: len(before)] != before or input_ids[: len(after)] != after:
                raise ConfigError(
                    "the tokens of the conversation up to an answer are others than those that the whole conversation "
                    "begins with, so it is unknown which tokens the answer is; train on everything"
                )
            spans.append((len(before), len(after)))
        return spans
