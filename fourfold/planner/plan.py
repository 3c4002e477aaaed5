"""A plan: settings that `fourfold run` carries out, what they cost, and why each lever was taken."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.planner.bill import Footprint, Moment
from fourfold.planner.scene import Scene
from fourfold.planner.work import Costs


@dataclass(frozen=True, slots=True)
class LeverStep:
    """One lever of a plan, in the order in which it was taken: the bars of the waterfall."""

    lever: str  # the name in fourfold.planner.levers; "" for the settings as given
    reason: str
    settings: dict[str, object]  # dotted keys that it sets
    peak_bytes: int  # with it
    step_seconds: float  # with it


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run: `scene.config` is what `fourfold run` executes unchanged."""

    scene: Scene
    footprint: Footprint
    costs: Costs
    budget: int  # bytes of a device that may be used
    host_budget: int
    steps: tuple[LeverStep, ...]
    warnings: tuple[str, ...] = ()

    @property
    def peak(self) -> tuple[Moment, int]:
        """When most is held on a device, and how much."""
        return self.footprint.peak()

    @property
    def missing(self) -> int:
        """Bytes by which the plan does not fit, of the device or of its host, whichever lacks more; 0: it fits."""
        host = self.footprint.peak(tier="host")[1] - self.host_budget if self.host_budget else 0
        return max(self.peak[1] - self.budget, host, 0)

    @property
    def fits(self) -> bool:
        """Whether both device and host have room."""
        return self.missing == 0
