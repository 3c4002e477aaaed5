"""Pictures of a plan in a terminal: memory by moment against the budget, and what each lever took away.

Each kind of memory has a glyph of its own, so that the picture reads without colour; 80 columns are enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from fourfold.planner.bill import Footprint, Kind, Moment
from fourfold.planner.levers import lever
from fourfold.planner.plan import LeverStep, Plan
from fourfold.planner.units import seconds, size

LABEL, FIGURES = 16, 25
# A budget that is more than this many times the peak is left out of the picture, in which nothing else would be seen.
FAR = 3


@dataclass(frozen=True)
class Group:
    """Kinds of memory that are drawn alike."""

    name: str
    kinds: tuple[Kind, ...]
    glyph: str
    plain: str  # where the terminal has no other characters than ASCII
    style: str


GROUPS: tuple[Group, ...] = (
    Group("weights", ("weights", "masters"), "█", "#", "blue"),
    Group("optimizer", ("optimizer",), "▓", "%", "magenta"),
    Group("gradients", ("gradients",), "▒", "=", "red"),
    Group("activations, buffers", ("activations", "logits", "buffers"), "░", "+", "yellow"),
    Group("caches, experience", ("KV cache", "trunk cache", "experience"), "≡", "-", "green"),
    Group("framework", ("framework",), "·", ".", "bright_black"),
)


@dataclass(frozen=True)
class Marks:
    """Characters of bars, and how wide the whole picture is."""

    width: int
    ascii_only: bool = False

    @property
    def bar(self) -> int:
        """Cells of a bar."""
        return max(self.width - LABEL - FIGURES, 10)

    @property
    def line(self) -> str:
        """The budget."""
        return "|" if self.ascii_only else "│"

    @property
    def here(self) -> str:
        """Points at the peak."""
        return "<" if self.ascii_only else "◀"

    def of(self, group: Group) -> str:
        """The glyph of a group."""
        return group.plain if self.ascii_only else group.glyph


def memory_bars(plan: Plan, marks: Marks) -> Iterator[Text]:
    """A line for each moment: bytes by kind against the budget, which is a vertical line."""
    bill, peak = plan.footprint, plan.peak[1]
    scale = _cell(peak, plan.budget, marks)
    for moment in bill.moments:
        held = bill.held(moment)
        line = Text(f"{moment!s:<{LABEL}}")
        line.append_text(_bar(_segments(bill, moment, marks), scale, plan.budget, marks))
        over = held > plan.budget
        line.append(f"{size(held):>11}{held / plan.budget:>6.0%}", "bold red" if over else "")
        if moment == plan.peak[0]:
            line.append(f" {marks.here} peak", "bold")
        yield line
    used = {item.kind for item in bill.items if item.bytes and item.tier == "device"}
    shown = [group for group in GROUPS if used & set(group.kinds)]
    entries = [(marks.of(group), group.name, group.style) for group in shown]
    far = f" ({plan.budget / peak:,.0f} times the peak: not drawn)" if plan.budget > FAR * peak else ""
    yield from _legend([*entries, (marks.line, f"budget {size(plan.budget)}{far}", "bold")], marks)


def _cell(peak: int, budget: int, marks: Marks) -> float:
    """Bytes that a cell of a bar stands for."""
    return max(peak, budget if budget <= FAR * peak else 0) / marks.bar


def _legend(entries: Sequence[tuple[str, str, str]], marks: Marks) -> Iterator[Text]:
    """What each glyph is, in as many lines as it takes."""
    line = Text(" " * LABEL)
    for glyph, name, style in entries:
        if len(line) > LABEL and len(line) + len(name) + 2 > marks.width:
            yield line
            line = Text(" " * LABEL)
        line.append(glyph, style).append(f" {name}  ", "bright_black")
    yield line


def _segments(bill: Footprint, moment: Moment, marks: Marks) -> list[tuple[str, str, int]]:
    kinds = bill.by(lambda item: item.kind, moment)
    return [(marks.of(group), group.style, sum(kinds.get(kind, 0) for kind in group.kinds)) for group in GROUPS]


def _bar(segments: Sequence[tuple[str, str, int]], scale: float, budget: int, marks: Marks) -> Text:
    """Cells filled in proportion; ends are rounded from the start of the bar on, so that no error adds up."""
    cells: list[tuple[str, str]] = []
    total = 0
    for glyph, style, count in segments:
        total += count
        cells += [(glyph, style)] * (round(total / scale) - len(cells))
    cells += [(" ", "")] * (marks.bar - len(cells))
    if budget <= (marks.bar + 1) * scale:
        cells[min(round(budget / scale), marks.bar - 1)] = (marks.line, "bold")
    text = Text()
    for glyph, style in cells:
        text.append(glyph, style)
    return text


def waterfall(plan: Plan, marks: Marks) -> Iterator[RenderableType]:
    """A bar for each lever in the order in which it was taken: peak and time with it, settings, and why."""
    scale = _cell(max(step.peak_bytes for step in plan.steps), plan.budget, marks)
    block, gone = ("#", ".") if marks.ascii_only else ("█", "░")
    before = plan.steps[0].peak_bytes
    for number, step in enumerate(plan.steps):
        name = step.lever or "as given"
        if len(name) > LABEL - 1:
            yield Text(name, "bold")
            name = ""
        line = Text(f"{name:<{LABEL}}", "bold")
        kept = min(step.peak_bytes, before)
        segments = [(block, "blue", kept), (gone, "bright_black", before - kept)]
        if step.peak_bytes > before:
            segments = [(block, "blue", step.peak_bytes)]
        line.append_text(_bar(segments, scale, plan.budget, marks))
        line.append(f"{size(step.peak_bytes):>11}{seconds(step.step_seconds):>10}")
        yield line
        if number:
            yield Padding(Text(settings_shown(step.settings)), (0, 0, 0, 2), expand=False)
            yield Padding(Text(step.reason, "bright_black"), (0, 0, 0, 2), expand=False)
        before = step.peak_bytes


def lever_shown(step: LeverStep) -> str:
    """A lever's name, with the rows or layers where it takes a part of them."""
    declared = lever(step.lever)
    if declared.every in step.settings:
        return f"{step.lever}, every second layer"
    rows = [str(value) for value in step.settings.values() if type(value) is int and declared.halves]
    return f"{step.lever} of {rows[0]}" if rows else step.lever


def settings_shown(settings: Mapping[str, object]) -> str:
    """Settings as --set takes them."""
    from fourfold.config.template import toml_value

    return ", ".join(f"{key} = {toml_value(value)}" for key, value in settings.items())
