"""The published guide to parallelisation, on four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documented.hub import make_hub
from tests.documented.parallel_guide import pretrain, run_guide
from tests.parity.pool import pool


def test_the_example_trains_as_one_process_does(tmp_path: Path) -> None:
    hub = make_hub(tmp_path)
    workers = pool()
    workers.renew()  # torch remembers meshes that equal those of an earlier job
    found = workers.run(4, pretrain, hub, True)
    assert [last for _, last in found] == [False, False, True, True]
    expected, _ = pretrain(hub, False)
    for losses, last in found:
        assert losses == pytest.approx(expected if last else [], rel=1e-4)
    assert len(expected) == 3 and expected[-1] < expected[0]


def test_the_page(tmp_path: Path) -> None:
    found = pool().run(4, run_guide, make_hub(tmp_path))
    name = "PipelineTemplate(transformers.models.llama.modeling_llama.LlamaForCausalLM, 2 stages)"
    assert [said for said, _, _ in found] == [name] * 4
    assert [held for _, held, _ in found] == [
        ["vision_encoder"], ["audio_encoder"], ["language_model"], ["language_model"],
    ]  # fmt: skip
    assert [told for _, _, told in found] == [[False], [False], [False], [True]]
