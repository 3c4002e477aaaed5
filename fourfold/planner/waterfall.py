"""From a candidate to a plan: its levers in the order in which each was worth most, with what each did and why."""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.config.checks.precision import precision_warnings
from fourfold.planner.bill import Moment
from fourfold.planner.candidates import Candidate, Candidates
from fourfold.planner.choices import Option
from fourfold.planner.plan import LeverStep, Plan
from fourfold.planner.units import size

AS_GIVEN = "the settings as given"


def plan_of(candidate: Candidate, candidates: Candidates) -> Plan:
    """The plan that a candidate is."""
    return Plan(
        scene=candidate.scene,
        footprint=candidate.footprint,
        costs=candidate.costs,
        budget=candidate.budget,
        host_budget=candidate.host_budget,
        steps=tuple(_steps(candidate, candidates)),
        warnings=tuple(_warnings(candidate)),
    )


def _steps(candidate: Candidate, candidates: Candidates) -> Iterator[LeverStep]:
    layout = candidate.scene.layout
    start = candidates.get((), layout)
    assert start is not None, "the search begins with the settings as given"
    now: Candidate = start
    reason = AS_GIVEN if layout.devices == 1 else f"{AS_GIVEN}, on {layout.devices} devices: {layout}"
    yield LeverStep("", reason, {}, now.peak, now.costs.step_seconds)
    left = sorted(candidate.options, key=lambda option: option.lever.name)
    while left:
        tried = {option: candidates.get(now.options | {option}, layout) for option in left}
        # Where none of the rest is allowed without another one, they are put on together.
        allowed = {option: then for option, then in tried.items() if then} or dict.fromkeys(left, candidate)
        option, then = max(allowed.items(), key=lambda pair: _worth(now, pair[1]))
        reason = _reason(now, then, option)
        yield LeverStep(option.lever.name, reason, dict(option.settings), then.peak, then.costs.step_seconds)
        left.remove(option)
        now = then


def _worth(now: Candidate, then: Candidate) -> tuple[float, float]:
    """What is still to be done while something does not fit: bytes for each second; afterwards seconds."""
    seconds = then.costs.step_seconds - now.costs.step_seconds
    saved = now.excess - then.excess
    free = 1e-6 * now.costs.step_seconds
    return saved / max(seconds, free), -seconds


def _reason(now: Candidate, then: Candidate, option: Option) -> str:
    moment, over = _eased(now, then)
    if over > 0:
        return f"{moment} is {size(over)} over the budget; this saves {option.lever.saves}"
    if now.host_missing > then.host_missing:
        return f"host memory is {size(now.host_missing)} over the budget"
    seconds = now.costs.step_seconds - then.costs.step_seconds
    if seconds > 0:
        return f"{seconds / now.costs.step_seconds:.0%} less time a step; this saves {option.lever.saves}"
    return f"needed by the others; this saves {option.lever.saves}"


def _eased(now: Candidate, then: Candidate) -> tuple[Moment, int]:
    """Of the moments that are over the budget, the one that becomes smaller by most, and by how much it is over."""
    saved = {
        moment: min(held - then.held.get(moment, 0), held - now.budget)
        for moment, held in now.held.items()
        if held > now.budget
    }
    moment = max(saved, key=lambda moment: saved[moment], default=None)
    if moment is None or saved[moment] <= 0:
        return max(now.held, key=lambda moment: now.held[moment]), 0
    return moment, now.held[moment] - now.budget


def _warnings(candidate: Candidate) -> Iterator[str]:
    config = candidate.scene.config
    resolved = config.precision.model_copy(update={"compute": candidate.scene.compute})
    yield from precision_warnings(config.model_copy(update={"precision": resolved}))
    for option in sorted(candidate.options, key=lambda option: option.lever.name):
        if option.lever.rounds:
            yield f"{option.lever.name} rounds: {option.lever.costs}"
        elif option.lever.change == "other parameters":
            yield f"{option.lever.name} trains other parameters than the settings as given: {option.lever.costs}"
    if candidate.scene.layout.devices > 1:
        yield f"the layout {candidate.scene.layout} is on paper: `fourfold run` of this version works on one device"
