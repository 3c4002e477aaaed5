"""What one PPO step costs besides memory: passes, FLOPs, bytes moved, seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.planner.bill import Moment, Phase
from fourfold.planner.hardware.machine import Link

# What a stretch of work waits for.
Bound = Literal["compute", "memory", "link", "overhead"]


@dataclass(frozen=True, slots=True)
class Work:
    """One role's work in a phase of one PPO step, on one device."""

    moment: Moment
    forward_passes: float  # over the whole rollout; of generate: one, token by token
    backward_passes: float
    tokens: int  # that go through the role's layers, all passes together
    flops: float
    bytes_read: float  # weights, caches and activations from the device's memory
    seconds: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that cross a link in one PPO step, as the busiest device (or its host) sees it."""

    what: str  # such as "gradients of the actor, all-reduced"
    source: str
    target: str
    phase: Phase
    bytes: float
    link: Link
    seconds: float
    hidden: bool = False  # behind work that goes on meanwhile


@dataclass(frozen=True, slots=True)
class Costs:
    """The work and the traffic of one PPO step, and how long its phases take."""

    work: tuple[Work, ...]
    flows: tuple[Flow, ...]
    seconds: dict[Phase, float]  # of generate, score, learn; what overlaps another phase is not counted twice
    bubble: float  # seconds of scoring that no sampling hides
    hidden: float  # seconds of scoring that it does
    utilisation: float  # MFU: FLOPs of the step / (seconds x the device's FLOP/s)

    @property
    def step_seconds(self) -> float:
        """One PPO step."""
        return sum(self.seconds.values())

    @property
    def flops(self) -> float:
        """Of one PPO step, on one device."""
        return sum(work.flops for work in self.work)
