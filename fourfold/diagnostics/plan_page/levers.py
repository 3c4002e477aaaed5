"""What each lever took away: peak memory before and after it, the seconds that it costs, and why it was taken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.svg import rect, strip
from fourfold.diagnostics.plan_bars import FAR, lever_shown, settings_shown
from fourfold.planner.levers import lever
from fourfold.planner.plan import LeverStep, Plan
from fourfold.planner.units import seconds, size

MINUS = "\N{MINUS SIGN}"
CHANGES = {
    "exact": "the update is the same, bit for bit",
    "bounded": "the update is the same but for rounding",
    "other parameters": "other parameters are trained",
}


def waterfall(plan: Plan) -> Element:
    """A list: the settings as given, then lever by lever in the order in which they were taken."""
    first, most = plan.steps[0], max(step.peak_bytes for step in plan.steps)
    scale = max(most, plan.budget if plan.budget <= FAR * most else 0) * 1.02
    items = [_step(plan, first, first, scale, 0)]
    items += [_step(plan, before, step, scale, n) for n, (before, step) in enumerate(pairwise(plan.steps), start=1)]
    said = "Peak memory of the device with each lever, in the order in which they were taken"
    drawn = f"; the upright mark is the budget of {size(plan.budget)}" if plan.budget <= scale else ""
    return h("div", h("p", f"{said}{drawn}.", class_="muted"), h("ol", items, class_="levers"))


def _step(plan: Plan, before: LeverStep, step: LeverStep, scale: float, index: int) -> Element:
    name = lever_shown(step) if step.lever else "as given"
    return h(
        "li",
        h(
            "div",
            h("h3", name),
            h("p", _figures(before, step), class_="figure"),
            class_="lever-head",
        ),
        strip(f"lever-{index}", f"{name}: {_said(before, step)}", *_bars(plan, before, step, scale), height=22),
        _explained(step),
    )


def _figures(before: LeverStep, step: LeverStep) -> Iterator[Element | str]:
    """Peak before and after, and what the step takes then."""
    if step is before:
        yield h("strong", size(step.peak_bytes))
        yield f" at the peak, {seconds(step.step_seconds)} a step"
        return
    change = step.peak_bytes - before.peak_bytes
    yield "" if not change else f"{size(before.peak_bytes)} → "
    yield h("strong", size(step.peak_bytes))
    said = "as before" if not change else f"{'+' if change > 0 else MINUS}{size(abs(change))}"
    yield f" ({said}), {seconds(step.step_seconds)} a step"


def _said(before: LeverStep, step: LeverStep) -> str:
    said = f"{size(step.peak_bytes)} at the peak"
    return said if step is before else f"{size(before.peak_bytes)} before, {said} after; {step.reason}"


def _bars(plan: Plan, before: LeverStep, step: LeverStep, scale: float) -> Iterator[Element]:
    """The peak that is left, what the lever took away or added, and the budget."""
    at = 1000 / scale
    kept = min(step.peak_bytes, before.peak_bytes)
    yield rect(0, 0, 1000, 22, "track")
    yield rect(0, 3, kept * at, 16, "kept", data_bytes=kept)
    changed = abs(step.peak_bytes - before.peak_bytes)
    if changed:
        style = "gone" if step.peak_bytes < before.peak_bytes else "added"
        yield rect(kept * at, 3, changed * at, 16, style, data_bytes=changed)
    if plan.budget <= scale:
        yield rect(plan.budget * at - 1, 0, 2, 22, "budget-mark")


def _explained(step: LeverStep) -> Element:
    """Why it was taken and what it sets; what it costs and changes on demand."""
    if not step.lever:
        return h("p", step.reason, class_="muted")
    known = lever(step.lever)
    return h(
        "details",
        h("summary", h("code", settings_shown(step.settings)), " ", h("span", step.reason)),
        h("p", f"Saves {known.saves}. Costs: {known.costs or 'nothing'}. Of what is learned: {CHANGES[known.change]}."),
    )
