"""What each way to keep replicas together would cost a run over a slow network, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Device, Link
from cornstarch.plan.cost import RunCost
from cornstarch.plan.holding import step_end
from cornstarch.plan.network import Choice, Exchanged, Step, choices, recommended
from cornstarch.plan.passes import Links, Way, passes
from cornstarch.train.config import RunConfig
from cornstarch.train.costing import run_cost
from cornstarch.train.costing.run import described_model


@dataclass(frozen=True)
class NetworkEstimate:
    """What a step takes over a network, with each choice."""

    link: Link
    ranks: int
    exchanged: Exchanged
    step: Step
    """Of one rank alone."""
    choices: tuple[Choice, ...]
    """Those that change training least first."""
    chosen: Choice

    @property
    def advice(self) -> str:
        """What to do, on one line."""
        plain, chosen = self.choices[0], self.chosen
        if chosen is plain:
            return "ddp is about as quick as anything here: nothing would be won by sending less."
        times = plain.seconds / chosen.seconds
        gain = f"a step would be {times:.1f} times as quick as with ddp"
        return f"{chosen.label}: {gain}; in the config: {setting(chosen)}."


def network_estimate(config: RunConfig, device: Device, world: int, link: Link) -> NetworkEstimate:
    """Return what steps of a run would take over a network.

    Args:
        config: The run.
        device: What each rank computes on.
        world: The number of ranks, each with a link of its own.
        link: That.
    """
    if world < 2:
        raise ConfigError("--network: one rank has nobody to send to. Say how many there are: --world 4.")
    model, _ = described_model(config, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("--network: nothing is trained, so nothing is exchanged.")
    exchanged = Exchanged(tuple(tuple(one.shape) for one in trained), max(one.element_size() for one in trained))
    step = step_of(config, run_cost(config, device), device, world)
    assert device.bandwidth is not None  # costs have been reckoned with it
    found = tuple(choices(exchanged, step, world, link, device.bandwidth))
    return NetworkEstimate(link, world, exchanged, step, found, recommended(found))


def step_of(config: RunConfig, cost: RunCost, device: Device, world: int) -> Step:
    """Return what a step takes on one of several ranks, without what they exchange."""
    portions = config.loop.accumulation
    rows = max(1, config.loop.batch_size // (portions * world))
    nothing = Link(float("inf"), 0.0)
    links = Links(nothing, nothing, nothing)
    forward = backward = optimizer = 0.0
    for module in cost.modules:
        way = Way(module.name, 1, 1, rows / cost.samples, links, checkpointing=config.recomputes)
        found = passes(cost, way, device)
        ahead, inputs, weights = found.sums
        forward, backward = forward + ahead, backward + inputs + weights
        end = step_end(found.layers, "ddp", 1, cost.state_bytes, links, device)
        optimizer += end.optimizer
    # Only the last portion's backward pass has something to send.
    return Step(portions * forward + (portions - 1) * backward, backward, optimizer)


def setting(choice: Choice) -> str:
    """Return what to write for a choice on the command line."""
    plan, said = choice.plan, []
    if plan.kind != "ddp":
        said.append(f"parallel.data.kind={plan.kind}")
    default = type(plan)()
    for section in ("compression", "local", "asynchronous", "gossip"):
        own, usual = getattr(plan, section), getattr(default, section)
        said += [
            f"parallel.data.{section}.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in vars(own).items()
            if value != getattr(usual, name)
        ]
    return " ".join(said)


__all__ = ["NetworkEstimate", "network_estimate", "setting", "step_of"]
