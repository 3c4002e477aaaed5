"""What each model does in each phase: twelve cells, and the layers that several models stand on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.planner.bill import TIERS, Moment, Phase, Tier
from fourfold.planner.costs import WORKING
from fourfold.planner.holding import elsewhere, own_parameters, residency, trained_parameters
from fourfold.planner.passes import Cut
from fourfold.planner.plan import Plan
from fourfold.planner.scene import Scene
from fourfold.planner.units import quantity
from fourfold.planner.work import Work

Role = Literal["actor", "critic", "reference", "reward"]
ROLES: tuple[Role, ...] = ("actor", "critic", "reference", "reward")
DOES = {
    ("generate", "actor"): "samples responses",
    ("score", "actor"): "log-probs for the KL",
    ("score", "critic"): "values of tokens",
    ("score", "reference"): "log-probs of tokens",
    ("score", "reward"): "scores responses",
    ("learn", "actor"): "learns the policy",
    ("learn", "critic"): "learns the values",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A model (or shared layers) in a phase; without `does` it is idle there."""

    who: str
    phase: Phase
    does: str
    work: Work | None  # None: idle, or what the planner cannot count
    held: dict[Tier, int]  # bytes that it holds meanwhile

    @property
    def idle(self) -> bool:
        """Whether it does nothing."""
        return not self.does


@dataclass(frozen=True, slots=True)
class Model:
    """One of the four, or what several share ("trunk", "base"): a row of the drawing."""

    who: str
    trained: bool
    about: str  # its size
    place: str  # where its weights are, in words
    held: dict[Tier, int]  # the most of a step, by tier
    cells: tuple[Cell, ...]  # generate, score, learn


def passes(work: Work) -> str:
    """Passes over the whole rollout, in words; of those that generate, the first is made token by token."""
    if work.moment.phase == "generate":
        more = work.forward_passes - 1
        return "decodes" + (f", {more:g} forward" if more else "")
    return f"{work.forward_passes:g} forward" + (f", {work.backward_passes:g} backward" if work.backward_passes else "")


def where(scene: Scene, tier: Tier) -> str:
    """A tier in words: what is a device's memory on a GPU is memory on a CPU."""
    return "in memory" if scene.on_cpu and tier == "device" else f"on the {tier}"


def four_models(plan: Plan) -> list[Model]:
    """Actor, critic, reference and reward."""
    return [_model(plan, role) for role in ROLES]


def shared_layers(plan: Plan) -> list[Model]:
    """The trunk below the branches, and the base below the adapters, where there are such."""
    holders = {item.holder for item in plan.footprint.items}
    return [_model(plan, who) for who in ("base", "trunk") if who in holders]


def _model(plan: Plan, who: str) -> Model:
    scene = plan.scene
    trained = who in trained_parameters(scene)
    cells = tuple(_cell(plan, who, phase) for phase in WORKING)
    held = _some({tier: max(cell.held.get(tier, 0) for cell in cells) for tier in TIERS})
    return Model(who, trained, _about(scene, who), _place(scene, who), held, cells)


def _cell(plan: Plan, who: str, phase: Phase) -> Cell:
    scene, bill = plan.scene, plan.footprint
    work = next((each for each in plan.costs.work if each.moment == (phase, who)), None)
    moment = _moment(plan, phase, who)
    held = _some({tier: bill.by(lambda item: item.holder, moment, tier).get(who, 0) for tier in TIERS})
    if who in ROLES:
        counted = work is not None or (phase == "score" and who == "reward")
        does = DOES.get((phase, who), "") if counted else ""
        if who == "reward" and phase == "score" and not scene.config.reward.has_model:
            does = "a function scores"
    else:
        does = _shared_does(scene, who, phase, trained=who in trained_parameters(scene))
    return Cell(who, phase, does, work, held)


def _some(held: dict[Tier, int]) -> dict[Tier, int]:
    """Tiers on which anything is."""
    return {tier: count for tier, count in held.items() if count}


def _moment(plan: Plan, phase: Phase, who: str) -> Moment:
    """The one in which it works; where it does not, the fullest of the phase."""
    own = Moment(phase, who)
    there = any(moment.phase == phase for moment in plan.footprint.moments)
    if own in plan.footprint.moments:
        return own
    return plan.footprint.peak(phase)[0] if there else own


def _shared_does(scene: Scene, who: str, phase: Phase, *, trained: bool) -> str:
    if who == "base":
        return "in every pass above it"
    if trained:
        return {"generate": "in every pass", "score": "in every pass", "learn": "learns with both"}[phase]
    return "runs once, is cached" if phase == "generate" else "is read from the cache"


def _about(scene: Scene, who: str) -> str:
    cut = Cut.of(scene)
    if who == "reward" and not scene.config.reward.has_model:
        return "a Python function" if scene.config.reward.source == "function" else "parts without a model"
    if who == "trunk":
        return f"{cut.trunk} of {scene.base.layers} layers"
    if who == "base":
        return f"{cut.branch} of {scene.base.layers} layers"
    if who == "reward" and scene.config.reward.classifiers and not scene.classifiers:
        return "a model of its own"
    if who == "reference" and scene.config.reference.kind == "uniform":
        return "uniform" + (", and the actor of step 0" if scene.config.reference.holds_step_0 else "")
    layers = cut.critic if who == "critic" else cut.branch
    fewer = who == "critic" and scene.config.critic.layers > 0
    whole = f"the lowest {layers} layers" if fewer else "a model"
    kind = {"none": whole, "trunk": f"{layers} layers", "adapters": "adapters"}[scene.config.sharing.mode]
    kind = "a model" if who in scene.models else kind
    if who == "reward" and (others := len(scene.classifiers) - (who in scene.models)):
        kind = f"{kind} and {others} more" if scene.config.reward.of_the_base else f"{others} models"
    moves = ", follows the actor" if who == "reference" and scene.config.reference.kind == "moving" else ""
    return f"{kind}, {parameters(own_parameters(scene, who))}{moves}"


def parameters(count: int) -> str:
    """A number of parameters as models are called by it: 135 M, 7 B."""
    return quantity(count).strip().replace(" G", " B")


def _place(scene: Scene, who: str) -> str:
    if who == "reward" and not scene.config.reward.has_model:
        return "outside"
    if who == "reference" and scene.config.reference.kind == "uniform" and not scene.config.reference.holds_step_0:
        return "no weights"
    device = "memory" if scene.on_cpu else "device"
    if elsewhere(scene, who):
        return {"service": "at a service", "cpu": "on the host's processor"}[residency(scene, who)]
    below = "disk" if scene.on_cpu else "host"
    return {
        "keep": f"kept on the {device}" if not scene.on_cpu else "kept in memory",
        "park": f"parked on the {below}",
        "stream": f"streamed from the {below}",
    }[residency(scene, who)]
