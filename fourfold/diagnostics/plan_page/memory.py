"""Memory over a step: what is held in each moment, by kind or by holder, against the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.svg import drawing, line, nice, rect, text
from fourfold.diagnostics.plan_bars import FAR, GROUPS
from fourfold.planner.bill import HOLDERS, Item, Moment, Phase, Tier
from fourfold.planner.plan import Plan
from fourfold.planner.units import size

By = Literal["kind", "holder"]
KEYS: Mapping[By, Callable[[Item], str]] = {"kind": lambda item: item.kind, "holder": lambda item: item.holder}
# From the bottom of a bar to its top; kinds that are much alike lie together.
ORDER: Mapping[By, tuple[str, ...]] = {
    "kind": tuple(kind for group in GROUPS for kind in group.kinds),
    "holder": HOLDERS,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a chart's bars stand, in its view box."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    bars: int
    most: float  # bytes at the top

    @property
    def base(self) -> float:
        """Where the bars begin."""
        return self.height - self.bottom

    @property
    def end(self) -> float:
        """Where the lines end."""
        return self.width - self.right

    @property
    def slot(self) -> float:
        """Width for a bar and the room beside it."""
        return (self.width - self.left - self.right) / self.bars

    @property
    def bar(self) -> float:
        """Width of a bar."""
        return min(self.slot * 0.72, 92.0)

    def x(self, index: int) -> float:
        """Where a bar begins."""
        return self.left + self.slot * index + (self.slot - self.bar) / 2

    def length(self, count: float) -> float:
        """Height of so many bytes."""
        return count / self.most * (self.base - self.top)


def unit_of(plan: Plan, tier: Tier = "device") -> tuple[str, int]:
    """In which figures of a tier are given."""
    return ("GiB", 2**30) if plan.footprint.peak(tier=tier)[1] >= 2**30 else ("MiB", 2**20)


def budget_of(plan: Plan, tier: Tier) -> int:
    """What a tier may hold; 0: no limit is known."""
    return {"device": plan.budget, "host": plan.host_budget, "disk": 0}[tier]


def shown_budget(plan: Plan, tier: Tier) -> int:
    """The budget where it is drawn: far above the peak nothing else would be seen."""
    peak, budget = plan.footprint.peak(tier=tier)[1], budget_of(plan, tier)
    return budget if 0 < budget <= FAR * peak else 0


def memory_chart(plan: Plan, tier: Tier, by: By, *, narrow: bool = False) -> Element:
    """Bars of all moments in their order; heights are in proportion to bytes."""
    bill, budget = plan.footprint, shown_budget(plan, tier)
    moments, (fullest, peak) = bill.moments, bill.peak(tier=tier)
    tall = tier == "device"
    frame = Frame(
        width=344.0 if narrow else 1180.0,
        height=(340.0 if tall else 240.0) if narrow else (400.0 if tall else 240.0),
        left=34.0 if narrow else 52.0,
        right=0.0 if narrow else 84.0,
        top=44.0 if narrow else 36.0,
        bottom=96.0 if narrow else 64.0,
        bars=len(moments),
        most=max(peak, budget) * 1.04,
    )
    inside = [*_grid(frame, *unit_of(plan, tier))]
    for index, moment in enumerate(moments):
        inside += _bar(plan, frame, index, moment, tier, by)
        inside += _under(frame, index, moment, narrow=narrow)
    if not narrow:
        inside += _phases(frame, moments)
    if budget:
        inside += _budget(frame, budget, narrow=narrow)
    for index, moment in enumerate(moments):
        inside += _figures(plan, frame, index, moment, tier, peak=moment == fullest)
    name = f"memory-{tier}-{by}" + ("-narrow" if narrow else "")
    about = "; ".join(f"{moment} {size(bill.held(moment, tier))}" for moment in moments)
    title = f"Memory of the {tier} by moment and {by}, most in {fullest}: {size(peak)}"
    return drawing(name, frame.width, frame.height, title, about, inside, class_="memory")


def _budget(frame: Frame, budget: int, *, narrow: bool) -> Iterator[Element]:
    """A line over all bars; what it is stands beside it, or above the bars where there is no room."""
    y = frame.base - frame.length(budget)
    yield line(frame.left - 6, y, frame.end, y, "budget", data_bytes=budget)
    if narrow:
        yield text(frame.width, 12, f"- - budget {size(budget)}", "budget-name", "end")
    else:
        yield text(frame.end + 8, y - 3, "budget", "budget-name")
        yield text(frame.end + 8, y + 12, size(budget), "budget-name")


def _grid(frame: Frame, unit: str, one: int) -> Iterator[Element]:
    """Horizontal lines at round figures."""
    step = nice(frame.most / one / 5)
    count = 0
    while count * step * one <= frame.most:
        y = frame.base - frame.length(count * step * one)
        yield line(frame.left, y, frame.end, y, "grid" if count else "axis")
        yield text(frame.left - 8, y + 4, f"{count * step:,g}", "tick", "end")
        count += 1
    yield text(0, 12, unit, "tick")


def _bar(plan: Plan, frame: Frame, index: int, moment: Moment, tier: Tier, by: By) -> Iterator[Element]:
    sums = plan.footprint.by(KEYS[by], moment, tier)
    held, x, y = plan.footprint.held(moment, tier), frame.x(index), frame.base
    for name in ORDER[by]:
        count = sums.get(name, 0)
        if count:
            height = frame.length(count)
            y -= height
            told = h("title", f"{name} in {moment}: {size(count)}, {count / held:.0%} of {size(held)}")
            more = {"data_bytes": count, "data_moment": str(moment), "data_of": name}
            yield rect(x, y, frame.bar, height, f"part {by}-{name.replace(' ', '-')}", told, **more)
    limit = shown_budget(plan, tier)
    if limit and held > limit:
        over = frame.length(held - limit)
        yield rect(x - 2, frame.base - frame.length(held), frame.bar + 4, over, "over")


def _figures(plan: Plan, frame: Frame, index: int, moment: Moment, tier: Tier, *, peak: bool) -> Iterator[Element]:
    """The sum above a bar, and which is the fullest."""
    held = plan.footprint.held(moment, tier)
    shown = held / unit_of(plan, tier)[1]
    figure = f"{shown:,.{0 if shown >= 100 else 1 if shown >= 10 else 2}f}"
    middle, y = frame.x(index) + frame.bar / 2, frame.base - frame.length(held)
    yield text(middle, y - 7, figure, "value peak" if peak else "value", "middle")
    if peak:
        yield text(middle, y - 21, "peak", "value peak", "middle")


def _under(frame: Frame, index: int, moment: Moment, *, narrow: bool) -> Iterator[Element]:
    x = frame.x(index) + frame.bar / 2
    if narrow:
        turned = text(x + 3, frame.base + 13, str(moment), "tick", "end")
        turned.set("transform", f"rotate(-52 {x + 3:.1f} {frame.base + 13:.1f})")
        yield turned
    else:
        yield text(x, frame.base + 18, moment.role, "tick", "middle")


def _phases(frame: Frame, moments: tuple[Moment, ...]) -> Iterator[Element]:
    """A bracket below the moments of each phase."""
    phases: dict[Phase, list[int]] = {}
    for index, moment in enumerate(moments):
        phases.setdefault(moment.phase, []).append(index)
    y = frame.base + 32
    for phase, indices in phases.items():
        start, end = frame.x(indices[0]), frame.x(indices[-1]) + frame.bar
        yield line(start, y, end, y, "bracket")
        yield text((start + end) / 2, y + 18, phase, "phase-name", "middle")
