"""Whether a tokenizer can be used at all, and whether it can belong to a model.

transformers builds a tokenizer from its class alone where a folder has no tokenizer files. Such a tokenizer knows its
special tokens only: every text becomes nothing, or a row of unknown tokens, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from cornstarch.errors import ConfigError

_PLAIN_TEXT = "The quick brown fox jumps over 12 lazy dogs."
_TRIED_TOKENS = 64


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that encodes plain text to nothing but special and unknown tokens.

    A tokenizer that does not know the plain text, such as one of few words, is tried on its own tokens.
    """
    if _encodes(tokenizer, _PLAIN_TEXT):
        return
    special = {*tokenizer.all_special_tokens, *map(str, _added_tokens(tokenizer).values())}
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
    return any(str(tokenizer.decode([token])).strip() for token in known)  # T5's knows spaces, at least


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Refuse a tokenizer with ordinary tokens beyond the embedding table of a language model.

    Added tokens may lie beyond it: placeholders of modalities are never looked up, and published tokenizers have added
    tokens that their model has no row for.

    Args:
        tokenizer: The tokenizer.
        model: The language model, without wrappers.
    """
    rows = table_size(model)
    if rows is None:
        return
    added = _added_tokens(tokenizer)
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    ordinary = sorted(beyond.keys() - added.keys())
    if ordinary:
        last = ordinary[-1]
        raise ConfigError(
            f"The tokenizer ({type(tokenizer).__name__}, {len(tokenizer)} tokens) has {len(ordinary)} tokens beyond "
            f"the model's embedding table of {rows} rows, such as {beyond[last]!r} with number {last}: they do not "
            "belong together. Give the model's own tokenizer."
        )


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, Any]:
    found: Any = tokenizer.added_tokens_decoder
    return found if isinstance(found, Mapping) else {}  # a method that raises: mistral-common's have none


def table_size(model: Any) -> int | None:
    """Return the rows of a model's table of embeddings; None if it has no plain one."""
    table = model.get_input_embeddings()
    return table.num_embeddings if isinstance(table, nn.Embedding) else None
