"""`Pipe` and `PipelineModule` in every process of a job, and the same layers in one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.api.pipe import SequentialLayers
from cornstarch.pipeline import LayerSpec, Pipe, PipelineModule, initialize

STEPS, BATCH, WIDTH, CLASSES = 3, 12, 10, 4

State = dict[str, Any]


def small_layers() -> list[nn.Module]:
    """Return six layers whose weights are the same every time."""
    torch.manual_seed(3)
    return [
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 12), nn.Linear(12, CLASSES),
    ]  # fmt: skip


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels of some steps."""
    torch.manual_seed(11)
    return [(torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))) for _ in range(count)]


def numbers(tensors: Any) -> State:
    """Return tensors as arrays, which can be sent to another process."""
    return {name: None if one is None else one.detach().numpy().copy() for name, one in tensors}


def train_run(model: nn.Module, layers: nn.Module, *others: nn.Module) -> tuple[list[float], State, State]:
    """Take three steps; return losses, the gradients of the first, and the parameters at the end."""
    own = [*layers.parameters(), *(p for other in others for p in other.parameters())]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    named = [*layers.named_parameters()]
    named += [(f"other{n}.{name}", p) for n, other in enumerate(others) for name, p in other.named_parameters()]
    losses: list[float] = []
    gradients: State = {}
    for inputs, labels in batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or numbers((name, p.grad) for name, p in named)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, numbers(named)


def run_in_one_process() -> tuple[list[float], State, State]:
    """Return what the plain layers do."""
    model = nn.Sequential(*small_layers())
    return train_run(model, model)


def pipe(chunks: int, checkpoint: str) -> tuple[list[float], State, State]:
    """Return what this process's part of the pipe does."""
    model = Pipe(nn.Sequential(*small_layers()), chunks, checkpoint)  # type: ignore[arg-type]
    with torch.no_grad():
        whole = nn.Sequential(*small_layers())
        inputs = batches()[0][0]
        torch.testing.assert_close(model.eval()(inputs), whole(inputs))
    return train_run(model.train(), model.module)


class Around(nn.Module):
    """A module in front of the layers and one behind them, as every process has them."""

    def __init__(self, inside: Callable[[nn.Sequential], nn.Module]) -> None:
        super().__init__()
        self.inside = inside(nn.Sequential(*small_layers()))
        torch.manual_seed(5)
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(CLASSES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Run all three."""
        made: Tensor = self.behind(self.inside(self.before(inputs)))
        return made


def around(is_pipe: bool) -> tuple[list[float], State, State]:
    """Return what happens to modules around the layers, too."""
    model = Around(partial(Pipe, chunks=3) if is_pipe else lambda layers: layers)
    layers = model.inside.module if isinstance(model.inside, Pipe) else model.inside
    return train_run(model, layers, model.before, model.behind)


def twice(is_pipe: bool, shared: bool) -> State:
    """Return gradients added up over two batches; shared: the first layer is the last one again."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 2 if shared else small_layers()
    torch.manual_seed(2)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
    plain = SequentialLayers.of({str(number): layer for number, layer in enumerate(layers)})
    model = Pipe(nn.Sequential(*layers), 2) if is_pipe else plain
    for inputs, _ in batches(2):
        model(inputs).square().mean().backward()
    return numbers((n, p.grad) for n, p in (model.module if isinstance(model, Pipe) else plain).named_parameters())


def normed(deferred: bool, checkpoint: str = "always") -> State:
    """Return the running statistics of this process's batch norms after two batches of two chunks."""
    torch.manual_seed(3)
    layers = nn.Sequential(
        nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2)
    )
    model = Pipe(layers, 2, checkpoint, deferred_batch_norm=deferred)  # type: ignore[arg-type]
    for inputs, _ in batches(2):
        model(inputs).square().mean().backward()
    return numbers(model.module.named_buffers())


def collect_refusal(make: Callable[[], Any]) -> str:
    """Return the message of the error that a function raises."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return "nothing"


def pipe_of(layers: int, chunks: int, rows: int) -> str:
    """Return the error message of a pipe with the given numbers of layers, chunks and rows."""
    return collect_refusal(lambda: Pipe(nn.Sequential(*small_layers()[:layers]), chunks)(torch.ones(rows, WIDTH)))


def module_of(stages: int, method: str = "uniform", layers: int = 6) -> str:
    """Return the error message of a module with the given numbers of stages and layers."""
    return collect_refusal(lambda: PipelineModule(small_layers()[:layers], stages, partition_method=method))


class Failing(nn.Linear):
    """Fails the third time."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        """Count."""
        self.calls += 1
        if self.calls == 3:
            raise ValueError("a bad number")
        return super().forward(input)


def failing_pipe() -> list[str]:
    """Return the error messages of a step in which the last stage fails, and of the step after it."""
    model = Pipe(nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), Failing(4, 4)), 4, "never")
    messages = []
    for _ in range(2):
        try:
            model(batches()[0][0]).sum().backward()
        except RuntimeError as error:
            messages.append(str(error))
    del model
    gc.collect()  # as when the process ends: only then its lines are closed
    return messages


def frozen_pipe(stage: int | None) -> tuple[bool, list[str], str]:
    """Freeze a stage of two, or both; return whether the output takes a gradient, who has one, and a complaint."""
    layers = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 8))
    for number in (0, 2):
        layers[number].requires_grad_(stage is not None and number != 2 * stage)
    model = Pipe(layers, 2)
    inputs = batches()[0][0]
    output = model(inputs)
    if output.requires_grad:
        output.sum().backward()
    named = [name for name, parameter in model.module.named_parameters() if parameter.grad is not None]
    return output.requires_grad, named, collect_refusal(lambda: model(inputs.clone().requires_grad_()))


# ---------------------------------------------------------------------------------------------------- PipelineModule


def specs() -> list[Any]:
    """Return layers, functions, descriptions, and a layer that is there twice."""
    torch.manual_seed(3)
    again = nn.Linear(16, 16)
    return [
        LayerSpec(nn.Linear, WIDTH, 16), torch.tanh, again, lambda x: x * 0.5, again, LayerSpec(nn.Linear, 16, 12),
        nn.GELU(), LayerSpec(nn.Linear, 12, CLASSES, bias=False),
    ]  # fmt: skip


def engine(stages: int, method: str, interval: int, replicas: int = 1) -> tuple[list[float], float, State, list[int]]:
    """Train three steps of `replicas * 2` microbatches in all; return losses, evaluation, parameters and the cut."""
    model = PipelineModule(specs(), stages, nn.CrossEntropyLoss(), method, interval)
    made = initialize(
        model, partial(torch.optim.AdamW, lr=1e-2), microbatches=2 * replicas // model.replicas, gradient_clipping=0.5
    )
    source = drawn(model.replica, model.replicas, 2 * replicas)
    losses = [made.train_batch(source).item() for _ in range(STEPS)]
    assert made.step == STEPS
    found = numbers(model.layers.named_parameters())
    return losses, made.eval_batch(drawn(model.replica, model.replicas, 2 * replicas)).item(), found, model.starts


def drawn(replica: int, replicas: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the microbatches of a replica, of `count` in each step."""
    for inputs, labels in batches(STEPS + 1):
        pairs = list(zip(inputs.chunk(count), labels.chunk(count), strict=True))
        yield from pairs[replica * count // replicas : (replica + 1) * count // replicas]


def own_layers(stages: int) -> tuple[int, list[str]]:
    """Return how many layers this process has built, and the names of its parameters."""
    built: list[int] = []

    class Counted(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            if not self.weight.is_meta:
                built.append(1)

    model = PipelineModule([LayerSpec(Counted, 4, 4) for _ in range(6)], stages, partition_method="uniform")
    return len(built), [name for name, _ in model.layers.named_parameters()]


def alexnet(page: str) -> tuple[list[float], int, list[str]]:
    """Run the example of the documentation; return its losses, its steps and the names of this process's parameters."""
    code = page.partition("<!-- alexnet -->\n```python\n")[2].partition("```")[0]
    assert "AlexNet" in code
    names: dict[str, Any] = {}
    exec(compile(code, "alexnet.py", "exec"), names)
    return names["losses"], names["engine"].step, [name for name, _ in names["net"].layers.named_parameters()]
