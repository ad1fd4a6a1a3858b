"""Inside `positions_in_order`, and only there, transformers does not search positions for packed documents."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.compat import positions_in_order


def test_documents_are_searched_for_outside_the_block_only() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    ).eval()
    ids, twice = torch.arange(8)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])

    def logits(**options: Tensor) -> Tensor:
        return model(ids, use_cache=False, **options).logits

    alone, apart = logits(), logits(position_ids=twice)
    with positions_in_order():
        torch.testing.assert_close(logits(), alone, rtol=0, atol=0)
        assert not torch.allclose(logits(position_ids=twice), apart), "the second document sees the first"
        elsewhere: list[Tensor] = []
        other = threading.Thread(target=lambda: elsewhere.append(logits(position_ids=twice)))
        other.start()
        other.join()
        torch.testing.assert_close(elsewhere[0], apart, rtol=0, atol=0)  # other threads are not meant
    torch.testing.assert_close(logits(position_ids=twice), apart, rtol=0, atol=0)
