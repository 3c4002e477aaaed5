"""The fastest plan that fits, and the next two, among the levers that the user has left free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from fourfold.config.checks import is_given
from fourfold.planner.branching import Branching
from fourfold.planner.candidates import Candidate, Candidates, Evaluate, estimate
from fourfold.planner.choices import Option, dimensions, lever_keys
from fourfold.planner.layout import Layout
from fourfold.planner.lever import Change, Lever
from fourfold.planner.levers import LEVERS
from fourfold.planner.plan import Plan
from fourfold.planner.scene import Scene
from fourfold.planner.waterfall import plan_of

ANY_CHANGE: tuple[Change, ...] = ("exact", "bounded", "other parameters")
ALTERNATIVES = 2
# An alternative takes at most this part of what the plans before it take, or rounds less than they.
ROOMIER = 0.85


def search(
    scene: Scene,
    budget: int,
    host_budget: int = 0,
    evaluate: Evaluate = estimate,
    *,
    free: Collection[str] = (),
    refused: Collection[str] = (),
    layouts: Sequence[Layout] = (),
    changes: Collection[Change] = ANY_CHANGE,
) -> list[Plan]:
    """The best plan that fits and the next two, or alone the one that lacks least: then its `missing` is above 0.

    Settings that are given in the scene's configuration are kept, but for the keys in `free`; levers whose names are in
    `refused` are not taken. `changes` says which levers may be taken: "exact" ones and those that only add up in
    another order, "bounded" ones that round too, and such as train "other parameters", which are tried only where
    nothing else fits. Without `layouts` the scene's stays.
    """
    candidates = Candidates(scene, budget, host_budget, evaluate)
    fixed = {key for key in lever_keys() if is_given(scene.config, key) and key not in free}
    levers = [lever for lever in LEVERS if not lever.not_planned and lever.name not in refused]
    others = [lever for lever in levers if lever.change == "other parameters"]
    mechanisms = [lever for lever in levers if lever not in others and (not lever.rounds or "bounded" in changes)]
    spread = layouts or (scene.layout,)
    found = _best(candidates, [()], spread, fixed, mechanisms)
    if found is None and "other parameters" in changes:
        starts = [(option,) for dimension in dimensions(scene, fixed, others) for option in dimension]
        found = _best(candidates, starts, spread, fixed, mechanisms)
    if found is None:
        return [plan_of(_pared(candidates.nearest, candidates), candidates)]
    return [plan_of(each, candidates) for each in (found, *_alternatives(found, candidates.fitting))]


def as_given(
    scene: Scene, budget: int, host_budget: int = 0, evaluate: Evaluate = estimate, *, layouts: Sequence[Layout] = ()
) -> list[Plan]:
    """The settings as they are, in the best of the layouts, whether they fit or not."""
    candidates = Candidates(scene, budget, host_budget, evaluate)
    found = [candidates.get((), layout) for layout in layouts or (scene.layout,)]
    best = min((each for each in found if each is not None), key=lambda each: (each.missing, each.rank))
    return [plan_of(best, candidates)]


def _pared(nearest: Candidate, candidates: Candidates) -> Candidate:
    """The one that lacks least, without levers that take nothing off what is missing."""
    for option in sorted(nearest.options, key=lambda option: option.lever.name):
        without = candidates.get(nearest.options - {option}, nearest.scene.layout)
        if without is not None and without.missing <= nearest.missing and without.excess <= nearest.excess:
            nearest = without
    return nearest


def _best(
    candidates: Candidates,
    starts: Iterable[tuple[Option, ...]],
    layouts: Sequence[Layout],
    fixed: AbstractSet[str],
    levers: Sequence[Lever],
) -> Candidate | None:
    """The best of all that build on one of these starts, in one of these layouts."""
    best = None
    for start in starts:
        fastest = None
        roots = [root for layout in layouts if (root := candidates.get(start, layout)) is not None]
        for root in sorted(roots, key=lambda root: root.rank):  # with the fastest first, most others are soon beaten
            branching = Branching(candidates, root, root.scene.layout, best, fastest)
            best = branching.run(fixed, levers)
            fastest = branching.fastest
    return best


def _alternatives(best: Candidate, fitting: Sequence[Candidate]) -> list[Candidate]:
    """The next fastest that have something the plans before them lack: more room, or fewer roundings."""
    chosen = [best]
    for candidate in fitting:
        roomier = all(candidate.peak < ROOMIER * each.peak for each in chosen)
        truer = all(_roundings(candidate) < _roundings(each) for each in chosen)
        if (roomier or truer) and len(chosen) <= ALTERNATIVES:
            chosen.append(candidate)
    for candidate in fitting:
        if len(chosen) <= ALTERNATIVES and all(candidate.names != each.names for each in chosen):
            chosen.append(candidate)
    return sorted(chosen[1:], key=lambda each: each.rank)


def _roundings(candidate: Candidate) -> int:
    return sum(option.lever.rounds for option in candidate.options)
