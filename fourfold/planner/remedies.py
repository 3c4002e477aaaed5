"""What would make a run fit that no plan makes fit: one change at a time, the least first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fourfold.config.checks import is_given
from fourfold.config.loading import Contradiction, with_settings
from fourfold.config.template import toml_value
from fourfold.planner.candidates import Evaluate, estimate
from fourfold.planner.choices import dimensions, lever_keys, value_of, with_options
from fourfold.planner.hardware.machine import Device
from fourfold.planner.levers import LEVERS
from fourfold.planner.plan import Plan
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.units import size

# What is halved, in the order in which it is proposed, and how small it may become.
HALVED = (("sampling.max_new_tokens", 32), ("data.max_prompt_tokens", 32), ("ppo.rollout_batch_size", 8))


@dataclass(frozen=True)
class Remedy:
    """A change, and what is missing with it; 0: it fits."""

    text: str
    missing: int

    def __str__(self) -> str:
        return f"{self.text}: {'it fits' if not self.missing else f'{size(self.missing)} still missing'}"


def shortage(plan: Plan) -> str:
    """By how much a plan does not fit, when, and whose and what the most of it is."""
    moment, held = plan.peak
    over = held - plan.budget
    if over <= 0:
        host, most = plan.footprint.peak(tier="host")
        return (
            f"does not fit: in {host} host memory would hold {size(most)}, {size(most - plan.host_budget)} more than "
            f"the budget of {size(plan.host_budget)}"
        )
    largest = plan.footprint.by(lambda item: f"{item.kind} of the {item.holder}", moment)
    names = sorted(largest, key=lambda name: -largest[name])[:3]
    most = ", ".join(f"{name} {size(largest[name])}" for name in names)
    return (
        f"does not fit: in {moment} the device would hold {size(held)}, {size(over)} more than the budget of "
        f"{size(plan.budget)}, with every free lever that helps. The most of it: {most}"
    )


def remedies(
    plan: Plan, free: Collection[str] = (), devices: Sequence[Device] = (), evaluate: Evaluate = estimate
) -> list[Remedy]:
    """Changes to a plan that does not fit, those that make it fit first; each alone.

    Levers that the user's own settings rule out, half the lengths or rows (as often as it takes), other devices.
    """
    found = [*_refused_levers(plan, free, evaluate), *_halved(plan, evaluate), *_larger(plan, devices)]
    return sorted((each for each in found if each.missing < plan.missing), key=lambda each: each.missing > 0)


def _missing(plan: Plan, scene: Scene, evaluate: Evaluate) -> int:
    bill, costs = evaluate(scene)
    return replace(plan, scene=scene, footprint=bill, costs=costs).missing


def _refused_levers(plan: Plan, free: Collection[str], evaluate: Evaluate) -> Iterator[Remedy]:
    """Levers whose keys the user has set otherwise."""
    config = plan.scene.config
    mine = {key for step in plan.steps for key in step.settings} | set(free)
    given = [key for key in lever_keys() if is_given(config, key) and key not in mine]
    levers = [lever for lever in LEVERS if not lever.not_planned]
    for dimension in dimensions(plan.scene, frozenset(mine), levers):
        tried = []
        for option in dimension:
            scene = with_options(plan.scene, [option])
            if scene is not None:
                tried.append(Remedy(_permission(option.settings, given), _missing(plan, scene, evaluate)))
        if tried:
            yield min(tried, key=lambda each: each.missing)


def _permission(settings: Mapping[str, object], given: Sequence[str]) -> str:
    text = ", ".join(f"{key} = {toml_value(value)}" for key, value in settings.items())
    refused = [f"--allow {key}" for key in settings if key in given]
    return f"{text} ({' '.join(refused)})" if refused else text


def _halved(plan: Plan, evaluate: Evaluate) -> Iterator[Remedy]:
    """Shorter texts and smaller rollouts."""
    for key, least in HALVED:
        config, value = plan.scene.config, int(value_of(plan.scene.config, key))
        missing = plan.missing
        while value // 2 >= least and missing:
            value //= 2
            settings: dict[str, object] = {key: value}
            if key == "ppo.rollout_batch_size":
                for rows in ("ppo.mini_batch_size", "ppo.micro_batch_size"):
                    settings[rows] = min(int(value_of(config, rows)), value)
            try:
                config = with_settings(config, settings)
            except Contradiction:
                break
            lengths = Lengths.longest(config.data.max_prompt_tokens, config.sampling.max_new_tokens)
            missing = _missing(plan, replace(plan.scene, config=config, lengths=lengths), evaluate)
        if missing < plan.missing:
            yield Remedy(f"{key} = {value_of(config, key)}", missing)


def _larger(plan: Plan, devices: Sequence[Device]) -> Iterator[Remedy]:
    """The smallest devices on which it would fit."""
    peak = plan.peak[1]
    enough = sorted((device for device in devices if device.memory >= peak), key=lambda device: device.memory)
    if enough:
        same = [device.name for device in enough if device.memory == enough[0].memory]
        yield Remedy(f"a device of {size(enough[0].memory)}, such as {' or '.join(same[:3])}", 0)
