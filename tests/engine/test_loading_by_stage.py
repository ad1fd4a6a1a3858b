"""Runs whose parts are read by stage do what one process does, and each process reads and holds its own stages only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import zoo
from tests.engine.loading_runs import (
    Alone,
    describe_run,
    farthest,
    make_anew,
    make_ready,
    measure_held_by_stage,
    resume,
    store_parts,
    train_run,
)
from tests.parallel.conftest import workers
from tests.parity.pool import Pool

__all__ = ["workers"]

ACCUMULATED = {"loop": {"steps": 1, "batch_size": 4, "accumulation": 2}}
LAYER = "model.layers.{}.self_attn.q_proj.weight"


def stages(count: int, **more: Any) -> dict[str, Any]:
    """Return a plan whose encoder is inside the first stage."""
    return {"modules": {"vision": {}, "language_model": {"stages": count, **more}}, "ranks": "first_stage"}


OWN = {"modules": {"vision": {}, "language_model": {"stages": 2}}, "ranks": "own"}
ADAPTERS = {
    "model": {
        "encoders": {"vision": {"train": "frozen"}},
        "language_model": {"train": "lora", "lora": {"rank": 2, "dropout": 0.0, "targets": "all-linear"}},
    }
}
MASKS = {"model": {"encoders": {"vision": {"attention": "item"}}}}

RUNS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "two stages": (2, "llama", stages(2), {}),
    "four stages": (4, "llama", stages(4), {}),
    "tied embeddings": (2, "tied", stages(2), {}),
    "tied embeddings, four stages": (4, "tied", stages(4), {}),
    "matrices cut, too": (4, "llama", {"modules": {"vision": {"tp": 2}, "language_model": {"stages": 2, "tp": 2}},
                                       "ranks": "first_stage"}, {}),
    "tokens cut, too": (4, "llama", {"modules": {"vision": {"cp": 2}, "language_model": {"stages": 2, "cp": 2}},
                                     "ranks": "first_stage"}, {}),
    "several stages in a process": (
        2, "llama", {**stages(2, virtual_stages=2), "schedule": "interleaved"}, {},
    ),
    "an encoder on ranks of its own": (3, "llama", OWN, {}),
    "an encoder in stages": (4, "llama", {"modules": {"vision": {"stages": 2}, "language_model": {"stages": 2}},
                                          "ranks": "own"}, {}),
    "sharded, too": (4, "llama", {**stages(2), "data": {"kind": "zero2"}}, {}),
    "adapters": (2, "llama", stages(2), ADAPTERS),
    "adapters, matrices cut": (4, "llama", {"modules": {"vision": {"tp": 2}, "language_model": {"stages": 2, "tp": 2}},
                                            "ranks": "first_stage"}, ADAPTERS),
    "spans that see both ways": (2, "llama", stages(2), MASKS),
}  # fmt: skip


def store(folder: Path, language_model: str) -> None:
    """Write the parts of a run; four layers, so that there can be four stages."""
    store_parts(folder)
    tied = language_model == "tied"
    model: Any = zoo.LANGUAGE_MODELS["llama"].build(num_hidden_layers=4, tie_word_embeddings=tied)
    model.save_pretrained(folder / language_model, max_shard_size="40KB")


@pytest.fixture(scope="module")
def in_one_process(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Return what one process does."""
    return Alone(workers, tmp_path_factory.mktemp("alone"), store)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process(workers: Pool, in_one_process: Alone, name: str, tmp_path: Path) -> None:
    ranks, language_model, parallel, sections = RUNS[name]
    run, alone = in_one_process(language_model, **{**ACCUMULATED, **sections})
    workers.renew()  # torch remembers meshes of groups that have ended
    found = workers.run(ranks, train_run, {**run, "parallel": parallel}, str(tmp_path / "several"))
    workers.renew()
    assert found[-1]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    together: dict[str, Any] = {}
    for one in found:
        assert one["reasons"] == {}
        assert one["dtypes"].items() <= alone["dtypes"].items()
        assert one["traits"] == alone["traits"]
        together |= one["parameters"]
    assert farthest(together, alone["parameters"]) < 1e-4
    layers = {number: [one for one in found if LAYER.format(number) in one["reads"]] for number in range(4)}
    copies = ranks // min(ranks, parallel["modules"]["language_model"]["stages"])
    for number, readers in layers.items():
        assert 1 <= len(readers) <= copies, (number, len(readers))
        tp = parallel["modules"]["language_model"].get("tp", 1)
        assert all(one["reads"][LAYER.format(number)] == 32 * 32 // tp for one in readers)


LARGE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any]]:
    """Store a larger model; return its folder, its bytes, and its config."""
    folder = tmp_path_factory.mktemp("large")
    model: Any = zoo.LANGUAGE_MODELS["llama"].build(**LARGE)
    model.save_pretrained(folder, max_shard_size="50MB")
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return folder, whole, {"model_type": "llama", **model.config.to_diff_dict(), **LARGE}


@pytest.mark.parametrize("random", [False, True])
def test_the_memory_that_a_run_takes_before_its_first_step(
    workers: Pool, large: tuple[Path, int, dict[str, Any]], random: bool, tmp_path: Path
) -> None:
    """Of a model that is stored, and of one with random weights."""
    store(tmp_path, "llama")
    stored, whole, config = large
    assert whole > 150e6
    for ranks, most in ((2, 0.57), (4, 0.32)):  # random weights: and room for the largest, to draw what others have
        plan = {"parallel": stages(ranks)}
        runs = [{**describe_run(tmp_path, name, **ACCUMULATED), **plan} for name in ("llama", "large")]
        language_model = runs[1]["model"]["language_model"]
        if random:
            del language_model["path"]
            language_model["config"] = config
        else:
            language_model["path"] = str(stored)
        workers.close()  # memory is measured in processes that have used little
        for found in workers.run(ranks, make_ready, runs, str(tmp_path / f"run {ranks}")):
            assert found <= (most + 0.03 * random) * whole, f"{found / whole:.3f}"
    workers.renew()


def test_what_was_made_whole_is_given_up_at_once(workers: Pool, tmp_path: Path) -> None:
    """Of a model that is made whole, other stages' parameters are given up before anything is brought to a device."""
    store(tmp_path, "llama")
    run = describe_run(tmp_path, "llama", **ACCUMULATED)
    found = workers.run(2, measure_held_by_stage, {**run, "parallel": stages(2)}, str(tmp_path / "run"))
    assert all(one["before"] == one["after"] < one["whole"] for one in found)
    assert sum(one["before"] for one in found) == found[0]["whole"]
    workers.renew()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen2"])
def test_random_weights_are_those_of_one_process_to_the_bit(workers: Pool, name: str) -> None:
    for found in workers.run(2, make_anew, name):
        assert found["wrong"] == [] and found["reason"] is None
        assert found["draws_on_alike"] and 0 < found["held"] < found["all"]


def test_it_goes_on_from_a_checkpoint(workers: Pool, tmp_path: Path) -> None:
    store(tmp_path, "tied")
    sections = {"loop": {"steps": 3, "batch_size": 4, "accumulation": 2}, "checkpoint": {"every": 2}}
    run = describe_run(tmp_path, "tied", **sections)
    (alone,) = workers.run(1, train_run, run, str(tmp_path / "alone"))
    workers.renew()
    several = {**run, "parallel": stages(2)}
    together: dict[str, Any] = {}
    for one in workers.run(2, resume, several, str(tmp_path / "several")):
        assert one["begins_at"] == 2
        together |= one["parameters"]
    workers.renew()
    assert farthest(together, alone["parameters"]) < 1e-4


def test_what_is_read_whole_says_why(workers: Pool, tmp_path: Path) -> None:
    """A part of which some weights are not stored is read by all, which draw the same numbers for them."""
    store_parts(tmp_path)
    model: Any = zoo.LANGUAGE_MODELS["llama"].build(num_hidden_layers=4)
    model.save_pretrained(tmp_path / "headless")
    (file,) = (tmp_path / "headless").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    run = describe_run(tmp_path, "headless", **ACCUMULATED)
    (alone,) = workers.run(1, train_run, run, str(tmp_path / "alone"))
    workers.renew()
    together: dict[str, Any] = {}
    for one in workers.run(2, train_run, {**run, "parallel": stages(2)}, str(tmp_path / "several")):
        assert one["reasons"] == {"LlamaForCausalLM": "lm_head.weight is not stored as it is here, and made anew"}
        together |= one["parameters"]
    workers.renew()
    assert farthest(together, alone["parameters"]) < 1e-4


def test_a_language_model_that_is_described_whole(workers: Pool, tmp_path: Path) -> None:
    store(tmp_path, "llama")
    run = describe_run(tmp_path, "llama", **ACCUMULATED)
    text = [{"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "a b c"}]}] * 12
    (tmp_path / "text.json").write_text(json.dumps(text))
    run["model"] = {"whole": {"path": str(tmp_path / "llama"), "tokenizer": str(tmp_path / "tokenizer")}}
    run["data"]["train"] = [{"path": str(tmp_path / "text.json")}]
    (alone,) = workers.run(1, train_run, run, str(tmp_path / "alone"))
    workers.renew()
    several = {**run, "parallel": {"modules": {"language_model": {"stages": 2}}}}
    together: dict[str, Any] = {}
    for rank, one in enumerate(workers.run(2, train_run, several, str(tmp_path / "several"))):
        assert one["reasons"] == {} and (LAYER.format(0) in one["reads"]) == (rank == 0)
        together |= one["parameters"]
    workers.renew()
    assert farthest(together, alone["parameters"]) < 1e-4
