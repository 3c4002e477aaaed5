"""Where a step's seconds go: a bar of its phases, the work of each role, and what crosses links."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.svg import rect, strip
from fourfold.diagnostics.pages.tables import Row, measure, table
from fourfold.diagnostics.plan_page.cells import passes
from fourfold.planner.bill import Phase
from fourfold.planner.plan import Plan
from fourfold.planner.units import quantity, seconds
from fourfold.planner.work import Costs, Work


def time_section(plan: Plan) -> Iterator[Element]:
    """The step as a bar, what is hidden and what is not, and work by role and phase."""
    costs = plan.costs
    yield strip("step", f"One PPO step: {_shares(costs)}", *_step_bar(costs), height=26)
    yield h("ul", [_legend(costs, phase) for phase in costs.seconds], class_="legend")
    yield h("p", _overlap(costs), class_="muted")
    yield _work(plan)


def _shares(costs: Costs) -> str:
    return ", ".join(f"{phase} {seconds(value)}" for phase, value in costs.seconds.items())


def _step_bar(costs: Costs) -> Iterator[Element]:
    x = 0.0
    for phase, value in costs.seconds.items():
        width = 1000 * value / costs.step_seconds
        yield rect(x, 0, width, 26, f"phase-{phase}", h("title", f"{phase}: {seconds(value)}"))
        x += width


def _legend(costs: Costs, phase: Phase) -> Element:
    value = costs.seconds[phase]
    share = f"{seconds(value)}, {value / costs.step_seconds:.0%}"
    return h("li", h("i", class_=f"swatch phase-{phase}"), f"{phase} ", h("b", share))


def _overlap(costs: Costs) -> str:
    said = f"The device reaches {costs.utilisation:.1%} of its FLOP/s over the step (MFU). "
    said += f"Scoring that sampling does not hide takes {seconds(costs.bubble)}"
    return said + (f"; {seconds(costs.hidden)} of it are hidden behind sampling." if costs.hidden else ".")


def _work(plan: Plan) -> Element:
    most = max(each.seconds for each in plan.costs.work)
    rows = [Row(str(each.moment), [*_of(each), measure(each.seconds / most, seconds(each.seconds)), each.bound])
            for each in plan.costs.work]  # fmt: skip
    heads = ("work", "passes", "tokens", "FLOP", "read", "time", "waits for")
    return table("Work of one PPO step" + _each(plan), heads, rows)


def _each(plan: Plan) -> str:
    """Whose figures these are, where there are several devices."""
    count = plan.scene.layout.devices
    return f", on each of {count} devices (tokens: of all)" if count > 1 else ""


def _of(work: Work) -> list[str]:
    return [passes(work), f"{work.tokens:,}", quantity(work.flops).strip(), f"{quantity(work.bytes_read)}B"]


def traffic_section(plan: Plan) -> Iterator[Element]:
    """What crosses links, most seconds first; nothing is said where nothing does."""
    flows = sorted(plan.costs.flows, key=lambda flow: (-flow.seconds, -flow.bytes))
    if not flows:
        yield h("p", "Nothing crosses a link in a step: all weights, states and activations stay where they are.")
        return
    most = max(flow.bytes for flow in flows)
    rows = [
        Row(
            flow.what,
            [
                flow.phase,
                flow.link,
                measure(flow.bytes / most, f"{quantity(flow.bytes)}B"),
                f"{seconds(flow.seconds)}, hidden" if flow.hidden else seconds(flow.seconds),
            ],
        )
        for flow in flows
    ]
    yield table("Traffic of one PPO step" + _each(plan).replace(" (tokens: of all)", ""),
                ("what", "phase", "over", "bytes", "time"), rows)  # fmt: skip
