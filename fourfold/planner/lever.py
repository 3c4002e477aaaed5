"""What a lever is: one memory or compute measure, as fourfold/planner/levers.py and engines.py declare them.

How far a lever may change an update is |difference of the weights' moves| / |move| over one step of PPO on a tiny
model, actor and critic together. Both sides learn from the same responses, which the side without the lever draws, so
that it is the lever and not another draw; all else (log-probs, values, scores) each side computes itself. Two updates
that have nothing in common are sqrt(2) apart. Levers that hold weights in fewer bits have two bounds: by `bound` the
update is that of the same rounded weights held in float32, so that nothing is lost but by rounding, and by
`rounding` that one is near the update of the weights as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# What a lever does to an update: nothing, bit for bit; no more than its bound; or other parameters are trained at all.
Change = Literal["exact", "bounded", "other parameters"]
# The largest bound of levers that change an update by nothing but the order in which the same numbers are added up.
# On tiny models it is 2e-5; over adapters, whose first moves have few digits, 4e-4 by products for AVX2.
ORDER_OF_SUMS = 1e-3

# What several levers are compared on.
SEPARATE: Mapping[str, Any] = {"sharing.mode": "none"}
HALF: Mapping[str, Any] = {"precision.compute": "bfloat16"}


@dataclass(frozen=True)
class Lever:
    """One memory or compute measure."""

    name: str
    where: str  # the module with the mechanism
    settings: Mapping[str, Any]  # dotted keys that switch it on, as in a configuration
    saves: str
    costs: str
    change: Change
    bound: float = 0.0  # "bounded": largest change of an update
    rounding: float = 0.0  # for weights in fewer bits: largest change by their rounding alone, to which `bound` adds
    trunk_bound: float = 0.0  # the same for one that is exact but not over a cached trunk
    baseline: Mapping[str, Any] = field(default_factory=dict)  # what it is compared with, where that is not the default
    excludes: tuple[str, ...] = ()  # names of levers that are refused beside it
    package: str = ""  # without which it cannot be tried
    only_on: Literal["", "cuda"] = ""  # the only kind of device that has it; elsewhere it is refused
    not_planned: str = ""  # why a search for a plan never takes it; nothing: it may (fourfold.planner.search)
    planned: Mapping[str, Any] = field(default_factory=dict)  # what a plan sets, where `settings` suit tiny models only
    halves: tuple[str, str] | None = None  # a key, and that of all rows: a plan takes a half of them, a quarter, ...
    every: str = ""  # the key by which it acts on every second layer only: a plan may take that

    @property
    def switches(self) -> Mapping[str, Any]:
        """What a plan sets, besides a part of the rows: not what only makes a comparison a fair one."""
        part = self.halves[0] if self.halves else ""
        return self.planned or {
            key: value
            for key, value in self.settings.items()
            if key != part and (key not in self.baseline or self.baseline[key] != value)
        }

    @property
    def rounds(self) -> bool:
        """Whether an update is another one than that without it by more than the order of sums makes it."""
        return self.change == "bounded" and max(self.bound, self.rounding) > ORDER_OF_SUMS

    def bound_over(self, *, trunk: bool) -> float:
        """The bound with or without a cached trunk; 0 is bit-equality."""
        return self.bound + (self.trunk_bound if trunk else 0.0)
