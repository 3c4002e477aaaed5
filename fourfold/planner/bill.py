"""The memory bill: what is held, by whom, where, and in which moments of a run.

Phases and roles are those that the meter measures (fourfold.memory.meter), so that every line can be compared with what
a run has measured: a moment is a phase with the role at work in it. The most that is held in any moment is the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["load", "generate", "score", "learn", "save"]
Tier = Literal["device", "host", "disk"]
Kind = Literal[
    "weights",
    "gradients",
    "masters",
    "optimizer",
    "activations",
    "logits",
    "KV cache",
    "trunk cache",
    "experience",
    "buffers",
    "framework",
]
PHASES: tuple[Phase, ...] = ("load", "generate", "score", "learn", "save")
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
KINDS: tuple[Kind, ...] = (
    *("weights", "gradients", "masters", "optimizer", "activations", "logits"),
    *("KV cache", "trunk cache", "experience", "buffers", "framework"),
)
# Who holds something: a role, what several share ("base": under adapters, "trunk"), or the run as a whole.
HOLDERS = ("actor", "critic", "reference", "reward", "trunk", "base", "run")


class Moment(NamedTuple):
    """A phase and who works in it; "" where it is nobody in particular (loading, saving)."""

    phase: Phase
    role: str = ""

    def __str__(self) -> str:
        return f"{self.phase}/{self.role}" if self.role else self.phase


# In the order of a run. "trunk" learns where it is trained: then actor and critic learn with it in one pass.
MOMENTS: tuple[Moment, ...] = (
    Moment("load"),
    Moment("generate", "actor"),
    *(Moment("score", role) for role in ("actor", "reference", "critic", "reward")),
    *(Moment("learn", role) for role in ("critic", "actor", "trunk")),
    Moment("save"),
)


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one kind, held by `holder` on one tier in some moments; `why` is the arithmetic, for people."""

    holder: str
    kind: Kind
    bytes: int
    moments: frozenset[Moment]
    tier: Tier = "device"
    why: str = ""

    def __post_init__(self) -> None:
        assert self.holder in HOLDERS and self.kind in KINDS and self.tier in TIERS, self
        assert self.bytes >= 0 and self.moments <= frozenset(MOMENTS), self


@dataclass(frozen=True, slots=True)
class Footprint:
    """The whole bill, of the device that holds the most of it, and of its host and disk."""

    items: tuple[Item, ...]

    def held(self, moment: Moment, tier: Tier = "device") -> int:
        """Bytes held in a moment."""
        return sum(item.bytes for item in self.items if item.tier == tier and moment in item.moments)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments that this run has, in their order: those in which something is at work."""
        there = {moment for item in self.items for moment in item.moments}
        return tuple(moment for moment in MOMENTS if moment in there)

    def peak(self, phase: Phase | None = None, tier: Tier = "device") -> tuple[Moment, int]:
        """The moment (of a phase, or of the run) in which most is held, and how much."""
        among = [moment for moment in self.moments if phase in (None, moment.phase)]
        assert among, f"nothing runs in {phase}"
        most = max(among, key=lambda moment: self.held(moment, tier))
        return most, self.held(most, tier)

    def by(self, key: Callable[[Item], str], moment: Moment, tier: Tier = "device") -> dict[str, int]:
        """Bytes of a moment by what `key` makes of an item, such as its kind or its holder; zeros left out."""
        sums: dict[str, int] = {}
        for item in self.items:
            if item.tier == tier and moment in item.moments and item.bytes:
                sums[key(item)] = sums.get(key(item), 0) + item.bytes
        return sums

    def with_items(self, more: Iterable[Item]) -> Footprint:
        """The same with more on it."""
        return Footprint((*self.items, *more))
