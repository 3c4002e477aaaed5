"""From a request to its answer: the plans that fit, or what is missing and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.planner.candidates import Evaluate, estimate
from fourfold.planner.plan import Plan
from fourfold.planner.remedies import Remedy, remedies
from fourfold.planner.report import report
from fourfold.planner.request import Asked, Wanted, wanted
from fourfold.planner.search import as_given as given_plan
from fourfold.planner.search import search


@dataclass(frozen=True)
class Answer:
    """What was wanted, the plans (the best first; alone the nearest where none fits), and what would help then."""

    wanted: Wanted
    plans: list[Plan]
    helps: list[Remedy]

    def report(self) -> dict[str, Any]:
        """All of it as JSON takes it."""
        return report(self.wanted, self.plans, self.helps)


def answer(asked: Asked, *, as_given: bool = False, evaluate: Evaluate = estimate) -> Answer:
    """Find the plans; `as_given` takes the settings as they are, whether they fit or not."""
    from fourfold.planner.hardware.devices import GPUS
    from fourfold.planner.hierarchy import choose_layouts

    found = wanted(asked)
    layouts = choose_layouts(found.scene) if found.scene.cluster.devices > 1 else [found.scene.layout]
    within = (found.scene, found.budget, found.host_budget, evaluate)
    if as_given:
        plans = given_plan(*within, layouts=layouts)
    else:
        plans = search(*within, free=found.free, refused=found.refused, layouts=layouts)
    helps = [] if plans[0].fits else remedies(plans[0], found.free, tuple(GPUS.values()), evaluate)
    return Answer(found, plans, helps)
