"""The composed model on a GPU gives the numbers it gives on the CPU, packed and with images that see both ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from cornstarch import ModalEncoderModule, MultimodalModel
from tests.models.small import PATCHES, VISION, clip, compose_model, llama, ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def assert_same_on_gpu(model: MultimodalModel, batch: dict[str, Any], tolerance: float = 2e-4) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_gpu = copy.deepcopy(model).cuda()
    expected = model(**batch)
    found = on_gpu(**{name: value.cuda() for name, value in batch.items()})
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=tolerance, atol=tolerance)
    expected.loss.backward()
    found.loss.backward()
    for (name, p), q in zip(model.named_parameters(), on_gpu.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            difference = (q.grad.cpu() - p.grad).norm() / p.grad.norm().clamp(min=1e-6)
            assert difference < 20 * tolerance, (name, float(difference))


@pytest.mark.parametrize("left", [False, True])
def test_ragged_batch(left: bool) -> None:
    assert_same_on_gpu(compose_model(), ragged(left))


@pytest.mark.parametrize("attention", ["causal", "item", "modality"])
@pytest.mark.parametrize("packed", [False, True])
def test_long_rows_through_flex_attention(attention: Any, packed: bool) -> None:
    """300 tokens of head size 16: long enough for FlexAttention, and no multiple of its blocks."""
    language_model = llama(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    encoder = ModalEncoderModule(clip(), attention=attention)
    model = MultimodalModel(encoders={"vision": encoder}, language_model=language_model)
    model.set_modality_token_ids({"vision": VISION})
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, 64, (2, 300), generator=generator)
    for row, start in ((0, 4), (0, 120), (0, 126), (1, 200)):
        input_ids[row, start : start + PATCHES] = VISION
    batch: dict[str, Any] = {
        "input_ids": input_ids,
        "labels": input_ids.clone(),
        "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
    }
    if packed:
        documents = torch.ones(2, 300, dtype=torch.long)
        documents[0, 100:] = 2
        documents[1, 60:150] = 2
        documents[1, 150:290] = 3
        documents[1, 290:] = 0
        batch["documents"] = documents
    assert_same_on_gpu(model, batch)
