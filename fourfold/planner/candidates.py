"""Ways to run that a search has looked at: settings with options on, what they take, and how they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from fourfold.planner.bill import Footprint, Moment
from fourfold.planner.choices import Option, with_options
from fourfold.planner.layout import Layout
from fourfold.planner.levers import LEVERS
from fourfold.planner.scene import Scene
from fourfold.planner.work import Costs

Evaluate = Callable[[Scene], tuple[Footprint, Costs]]

# A lever that rounds an update must make the step at least this much faster than the best plan without it.
WORTH_ROUNDING = 1.05
# So must any lever at all: what gains nothing is not taken. Least of all what comes late in the list of levers.
WORTH_TAKING = 1.001
_PLACES = {lever.name: place for place, lever in enumerate(LEVERS)}


def estimate(scene: Scene) -> tuple[Footprint, Costs]:
    """What a scene takes, by the planner's own arithmetic."""
    from fourfold.planner.costs import costs
    from fourfold.planner.footprint import footprint

    bill = footprint(scene)
    return bill, costs(scene, bill)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A scene with some options on, against a budget of bytes of a device and of its host (0: no limit there)."""

    scene: Scene
    options: frozenset[Option]
    footprint: Footprint
    costs: Costs
    budget: int
    host_budget: int

    @cached_property
    def held(self) -> dict[Moment, int]:
        """Bytes on the device by moment."""
        return {moment: self.footprint.held(moment) for moment in self.footprint.moments}

    @cached_property
    def host_peak(self) -> int:
        """The most bytes of host memory."""
        return self.footprint.peak(tier="host")[1]

    @cached_property
    def peak(self) -> int:
        """The most bytes on the device."""
        return max(self.held.values())

    @property
    def host_missing(self) -> int:
        """Bytes that the host lacks."""
        return max(self.host_peak - self.host_budget, 0) if self.host_budget else 0

    @property
    def missing(self) -> int:
        """Bytes that device or host lacks, whichever lacks more."""
        return max(self.peak - self.budget, self.host_missing, 0)

    @property
    def excess(self) -> int:
        """Bytes over the budget, added up over the moments: what levers take away bit by bit."""
        return sum(max(held - self.budget, 0) for held in self.held.values()) + self.host_missing

    @cached_property
    def rank(self) -> tuple[int, float]:
        """Better is less: who trains what was asked for before who does not, then the faster.

        A rounding lever's seconds count for WORTH_ROUNDING times as many, so that exact ones win where both are alike.
        """
        others = sum(option.lever.change == "other parameters" for option in self.options)
        rounding = sum(option.lever.rounds for option in self.options)
        taken = sum(1 + (_PLACES[option.lever.name] + option.halvings) / 1000 for option in self.options)
        return others, self.costs.step_seconds * WORTH_ROUNDING**rounding * WORTH_TAKING**taken

    @property
    def names(self) -> frozenset[str]:
        """Of the levers taken."""
        return frozenset(option.lever.name for option in self.options)


class Candidates:
    """Evaluates each set of options once."""

    def __init__(self, scene: Scene, budget: int, host_budget: int, evaluate: Evaluate) -> None:
        self.scene = scene
        self.budget, self.host_budget = budget, host_budget
        self._evaluate = evaluate
        self._seen: dict[tuple[Layout, frozenset[Option]], Candidate | None] = {}

    def get(self, options: Iterable[Option], layout: Layout | None = None) -> Candidate | None:
        """The scene with these options and layout, None where that is refused."""
        layout, options = layout or self.scene.layout, frozenset(options)
        key = (layout, options)
        if key not in self._seen:
            scene = with_options(replace(self.scene, layout=layout), options)
            self._seen[key] = (
                None
                if scene is None
                else Candidate(scene, options, *self._evaluate(scene), self.budget, self.host_budget)
            )
        return self._seen[key]

    @property
    def fitting(self) -> list[Candidate]:
        """All that fit, the best first."""
        found = [each for each in self._seen.values() if each is not None and not each.missing]
        return sorted(found, key=lambda each: each.rank)

    @property
    def nearest(self) -> Candidate:
        """The one that lacks least; one there always is."""
        return min(
            (each for each in self._seen.values() if each is not None), key=lambda each: (each.missing, each.rank)
        )
