"""What is said when a loss is no number, or memory runs out."""

from __future__ import annotations

import resource
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.config import ModelConfig, RunConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.loader import StepBatch
from cornstarch.engine.failure import LossWatch, TrainingError, out_of_memory
from cornstarch.engine.model_parts import split_into_parts
from cornstarch.parallel import distributed
from cornstarch.parallel.device import DevicePlacement, is_out_of_memory
from cornstarch.train import load_config
from tests import forked
from tests.models import small
from tests.parity.pool import pool

CPU, GPU = DevicePlacement(torch.device("cpu"), "fp32"), DevicePlacement(torch.device("cuda"), "bf16")
FINE, NAN, INFINITE = torch.tensor(1.5), torch.tensor(float("nan")), torch.tensor(float("inf"))


def config(**sections: Any) -> RunConfig:
    return load_config(None, base={"model": {"given": "Net"}, "data": {"train": "x.json"}, **sections})


def batch(*microbatches: list[str]) -> StepBatch:
    return StepBatch([CollatedBatch({}, ids, 1, 1, {}) for ids in microbatches], 0, 0, [])


# ------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize(
    ("loss", "norm", "message"),
    [
        (NAN, FINE, "The loss is nan in step 7"),
        (INFINITE, None, "The loss is inf in step 7"),
        (FINE, NAN, "The norm of the gradient is nan in step 7"),
        (FINE, -INFINITE, "The norm of the gradient is -inf in step 7"),
        (NAN.bfloat16(), FINE, "The loss is nan in step 7"),
    ],
)
def test_what_is_no_number_stops_at_once_on_a_cpu(loss: Tensor, norm: Tensor | None, message: str) -> None:
    watch = LossWatch(config(), CPU)
    watch.add(6, batch(["fine"]), FINE, FINE)
    assert watch.last == 1.5
    with pytest.raises(TrainingError, match=message) as error:
        watch.add(7, batch(["a.json:1", "a.json:2"], ["b.json:3"]), loss, norm)
    assert "Samples of this step: a.json:1, a.json:2, b.json:3." in str(error.value)
    assert "fine" not in str(error.value)


def read_wrong_loss() -> str:
    """Return what a rank says of a step in which the loss of rank 1 is NaN, and with it everyone's norm."""
    rank = distributed.rank()
    watch = LossWatch(config(), CPU)
    try:
        watch.add(3, batch([f"of-{rank}.json:1"]), NAN if rank == 1 else FINE, NAN)
    except TrainingError as error:
        return str(error)
    return "nothing"


def test_all_ranks_name_the_rank_and_the_samples_that_the_nan_came_from() -> None:
    said = pool().run(2, read_wrong_loss)
    assert said[0] == said[1]
    assert said[0].startswith("The loss is nan in step 3 on rank 1. Nothing was saved after it.")
    assert "Samples of this step on rank 1: of-1.json:1." in said[0] and "of-0" not in said[0]


def test_on_a_gpu_a_step_is_read_while_the_next_one_runs() -> None:
    watch = LossWatch(config(), GPU)
    watch.add(1, batch(["a"]), NAN, None)  # nobody waits for it
    with pytest.raises(TrainingError, match="in step 1"):
        watch.add(2, batch(["b"]), FINE, None)
    watch.check()  # step 2 is fine
    watch.add(3, batch(["c"]), NAN, None)
    with pytest.raises(TrainingError, match="in step 3"):
        watch.check()  # before anything is saved


def test_many_samples_are_counted() -> None:
    with pytest.raises(TrainingError, match=r"s0, s1, s2, s3, s4, s5, s6, s7 and 12 more\."):
        LossWatch(config(), CPU).add(1, batch([f"s{n}" for n in range(20)]), NAN, None)


@pytest.mark.parametrize(
    ("sections", "there", "missing"),
    [
        ({}, ["learning_rate (now 0.0001)"], ["warm-up", "clip", "precision"]),
        ({"schedule": {"warmup": 0}}, ["schedule.warmup=0.03"], ["clip"]),
        ({"optimizer": {"clip": None, "learning_rate": 3.0}}, ["(now 3)", "optimizer.max_grad_norm=1.0"], ["warm-up"]),
        ({"precision": "fp16"}, ["precision=bf16 or fp32"], []),
    ],
)
def test_only_what_is_not_done_yet_is_advised(sections: dict[str, Any], there: list[str], missing: list[str]) -> None:
    with pytest.raises(TrainingError) as error:
        LossWatch(config(**sections), CPU).add(1, batch(["a"]), NAN, None)
    assert all(text in str(error.value) for text in there)
    assert not any(text in str(error.value) for text in missing)


# ------------------------------------------------------------------------------------------------ memory


class Greedy(nn.Module):
    """Needs more memory than any machine has: in its forward pass, or for its gradient."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        if self.when == "forward":
            return x + torch.empty(2**50)
        return Expensive.apply(x)


class Expensive(torch.autograd.Function):
    """What is needed for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.empty(2**50)


def explained(error: BaseException, module: nn.Module, run: RunConfig, placement: DevicePlacement = CPU) -> str:
    parts = split_into_parts(module, ModelConfig(given="Net"), run.optimizer)
    return str(out_of_memory(error, module, parts, run, placement))


@pytest.mark.parametrize(
    ("when", "place"), [("forward", "in the forward pass of the model"), ("backward", "in the backward pass")]
)
def test_it_says_where_memory_ran_out(when: str, place: str) -> None:
    module = Greedy(when)
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(1, 2)).sum().backward()
    assert is_out_of_memory(caught.value)
    assert explained(caught.value, module, config()).startswith(f"Memory ran out {place}")


def test_it_names_the_part_and_the_layer() -> None:
    model: Any = small.compose_model()

    layer = model.encoders["vision"].module.get_submodule("encoder.layers.1.mlp")
    layer.forward = lambda x: x + torch.empty(2**50)
    with pytest.raises(RuntimeError) as caught:
        model(**small.ragged())
    parts = split_into_parts(model, ModelConfig(given="Net"), config().optimizer)
    said = str(out_of_memory(caught.value, model, parts, config(), CPU))
    assert said.startswith("Memory ran out in the forward pass of the vision encoder, in vision_encoder.module.")
    assert "encoder.layers.1" in said.splitlines()[0]
    assert "weights of the vision encoder" in said and "weights of the language model" in said


def test_it_says_when_the_optimizer_ran_out() -> None:
    module = nn.Linear(1, 1)

    class Hungry(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            torch.empty(2**50)

    with pytest.raises(RuntimeError) as caught:
        Hungry(module.parameters()).step()
    assert "in the optimizer's step" in explained(caught.value, module, config())


def test_it_says_when_the_model_itself_does_not_fit() -> None:
    huge = nn.Sequential(nn.Linear(2**24, 2**24, device="meta"))
    with pytest.raises(RuntimeError) as caught:
        huge.to_empty(device="cpu")
    assert "ran out when the model was moved to the device" in explained(caught.value, huge, config())


def exhaust(limit: int) -> str:
    """Fill this process's memory up to a limit inside of a module's forward pass; return what is said of it."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + limit, held + limit))

    class Filling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pieces = []
            for size in (2**23, 2**18, 2**12, 64):  # until nothing is left at all
                with suppress(MemoryError, RuntimeError):
                    while True:
                        pieces.append(bytearray(size))
            return x + torch.empty(2**50)

    model, run = nn.Sequential(*[nn.Linear(1, 1) for _ in range(2000)], Filling()), config()
    parts = split_into_parts(model, ModelConfig(given="Net"), run.optimizer)
    try:
        model[-1](torch.ones(1))
    except (MemoryError, RuntimeError) as error:
        return str(out_of_memory(error, model, parts, run, CPU))
    return "nothing"


def write_explanation(path: str) -> None:
    Path(path).write_text(exhaust(2**28))


def test_the_report_of_too_little_memory_does_not_run_out_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "said"
    process = forked.process(write_explanation, str(path))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert path.read_text().startswith("Memory ran out in the forward pass of the model, in 2000.")


@pytest.mark.parametrize("second", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_it_says_less_if_there_is_no_memory_to_say_more(second: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise second

    monkeypatch.setattr("psutil.virtual_memory", fail)
    said = explained(MemoryError(), nn.Linear(1, 1), config())
    assert said.startswith("Memory ran out, also for saying where.") and "Try: " in said


def test_what_a_failed_step_holds_is_released() -> None:
    class Tracked:
        pass

    def fail() -> None:
        tensor = Tracked()
        alive.append(weakref.ref(tensor))
        try:
            raise RuntimeError("inner")
        except RuntimeError:
            raise MemoryError from None

    alive: list[Any] = []
    with pytest.raises(MemoryError) as caught:
        fail()
    error = caught.value
    del caught
    explained(error, nn.Linear(1, 1), config())
    assert alive[0]() is None and error.__traceback__ is None


def test_it_counts_what_is_held() -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(500_000_000, device="meta"))
            self.frozen = nn.Parameter(torch.empty(250_000_000, device="meta"), requires_grad=False)

    error = MemoryError()
    said = explained(error, Big(), config())
    assert "weights of the model: 3.00 GB" in said  # 4 bytes each
    assert "gradients: 2.00 GB" in said
    assert "states of the optimizer (about): 4.00 GB" in said  # two moments
    assert "states of the optimizer (about): 2.00 GB" in explained(error, Big(), config(optimizer={"name": "sgd"}))


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "expected"),
    [
        (12, 2, "loop.gradient_accumulation_steps=4, microbatches of 3 samples instead of 6"),
        (12, 1, "loop.gradient_accumulation_steps=2, microbatches of 6 samples instead of 12"),
        (12, 4, "loop.gradient_accumulation_steps=12, microbatches of 1 samples instead of 3"),
        (9, 1, "loop.gradient_accumulation_steps=3, microbatches of 3 samples instead of 9"),
        (7, 1, "loop.gradient_accumulation_steps=7, microbatches of 1 samples instead of 7"),
        (8, 4, "loop.gradient_accumulation_steps=8, microbatches of 1 samples instead of 2"),
        (8, 8, None),
        (1, 1, None),
    ],
)
def test_smaller_microbatches_divide_the_batch(batch_size: int, accumulation: int, expected: str | None) -> None:
    run = config(loop={"batch_size": batch_size, "accumulation": accumulation})
    said = explained(MemoryError(), nn.Linear(1, 1), run)
    assert (expected in said) if expected is not None else ("loop.gradient_accumulation_steps" not in said)
    assert "loop.activation_checkpointing=true" in said and "data.max_length (now 2048)" in said


def test_only_what_is_not_done_yet_would_help() -> None:
    run = config(loop={"activation_checkpointing": True, "batch_size": 1}, precision="bf16")
    said = explained(MemoryError(), nn.Linear(1, 1), run)
    assert "activation_checkpointing" not in said and "precision" not in said and "max_length" in said
    assert "precision=bf16" in explained(MemoryError(), nn.Linear(1, 1), config(precision="fp32"))


def test_weights_that_do_not_fit_at_all() -> None:
    huge = nn.Linear(2**20, 2**20, device="meta")  # 4 TB
    said = explained(MemoryError(), huge, config())
    assert "train fewer weights" in said and "optimizer.name=sgd" in said and "accumulation" not in said
    assert "optimizer.name=sgd" not in explained(MemoryError(), huge, config(optimizer={"name": "sgd"}))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_too_little_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
