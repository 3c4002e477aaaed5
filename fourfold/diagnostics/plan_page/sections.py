"""The two large drawings with what belongs to them: legends, the drawing in words, the same chart by holder."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.document import switch
from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.plan_bars import FAR
from fourfold.diagnostics.plan_page.cells import Model, four_models, shared_layers
from fourfold.diagnostics.plan_page.flow import cell_lines, flow_drawing, style_of
from fourfold.diagnostics.plan_page.memory import KEYS, ORDER, By, budget_of, memory_chart, shown_budget
from fourfold.diagnostics.plan_page.tensors import BATCH, Tensor, dimensions, small, trunk_cache
from fourfold.planner.bill import Tier
from fourfold.planner.costs import WORKING
from fourfold.planner.passes import Cut
from fourfold.planner.plan import Plan
from fourfold.planner.units import seconds, size

STYLES = {"learns": "learns", "works": "works, learns in another phase", "frozen": "frozen", "idle": "idle"}
TIER_NAMES: dict[Tier, str] = {"device": "Device", "host": "Host memory", "disk": "Disk"}


def flow_section(plan: Plan) -> Iterator[Element]:
    """The drawing, what its names and styles stand for, and the same in words for narrow screens."""
    known = ", ".join(f"{name} = {count:,}" for name, count in dimensions(plan.scene).items() if "+" not in name)
    yield h("p", f"Shapes are of the whole rollout: {known}.{_spread(plan)}", class_="muted")
    yield h("div", flow_drawing(plan), class_="scroll drawing", tabindex=0, role="region", aria_label="Data flow")
    yield h("ul", [h("li", h("i", class_=f"swatch cell-{s}"), said) for s, said in STYLES.items()], class_="legend")
    yield h("div", _words(plan), class_="words")


def _spread(plan: Plan) -> str:
    layout = plan.scene.layout
    if layout.devices == 1:
        return ""
    return f" Bytes, FLOP and seconds are of one of {layout.devices} devices ({layout})."


def _words(plan: Plan) -> Iterator[Element]:
    models = [*four_models(plan), *shared_layers(plan)]
    for index, phase in enumerate(WORKING):
        tensors = [tensor for tensor in BATCH if tensor.phase == phase]
        if phase == "generate" and any(m.who == "trunk" for m in models) and not Cut.of(plan.scene).trunk_trained:
            tensors.append(trunk_cache(plan.scene))
        yield h(
            "section",
            h("h3", phase, " ", h("span", seconds(plan.costs.seconds.get(phase, 0.0)), class_="figure")),
            h("ul", [_card(plan, model, index) for model in models], class_="cells"),
            h("p", "makes" if phase != "learn" else "learns from", class_="makes"),
            h("ul", [_tensor(plan, tensor) for tensor in tensors], class_="tensors"),
        )


def _card(plan: Plan, model: Model, index: int) -> Element:
    cell = model.cells[index]
    lines = [h("span", said) for said in cell_lines(plan, cell)]
    kind = "trained" if model.trained else "frozen"
    return h(
        "li", h("b", model.who), " ", h("em", kind), h("strong", cell.does or "idle"), lines,
        class_=style_of(model, cell), data_role=model.who, data_phase=cell.phase,
    )  # fmt: skip


def _tensor(plan: Plan, tensor: Tensor) -> Element:
    said = f"{tensor.numbers(plan.scene)} {tensor.weight(plan.scene)}"
    return h("li", h("code", tensor.name), " ", h("span", tensor.shape), " ", h("small", said))


def memory_section(plan: Plan) -> Iterator[Element]:
    """A chart of each tier, by kind and by holder."""
    yield switch("by", "What the bars are divided by", {"by-kind": "by kind", "by-holder": "by holder"})
    for tier, name in TIER_NAMES.items():
        held = plan.footprint.peak(tier=tier)[1]
        if {item.kind for item in plan.footprint.items if item.tier == tier and item.bytes} == {"framework"}:
            yield h("p", f"{name}: {size(held)} in every moment, of interpreter and libraries alone.", class_="muted")
        elif held:
            yield h("h3", "Memory" if tier == "device" and plan.scene.on_cpu else name)
            yield from _charts(plan, tier)


def _charts(plan: Plan, tier: Tier) -> Iterator[Element]:
    ways: tuple[By, ...] = ("kind", "holder")
    for by in ways:
        wide = h("div", memory_chart(plan, tier, by), class_="wide")
        narrow = h("div", memory_chart(plan, tier, by, narrow=True), class_="narrow")
        yield h("div", wide, narrow, _legend(plan, tier, by), class_=f"chart chart-{by}")
    budget = budget_of(plan, tier)
    if budget and not shown_budget(plan, tier):
        peak = plan.footprint.peak(tier=tier)[1]
        yield h("p", f"The budget of {size(budget)} is {budget / peak:,.0f} times the peak and not drawn (beyond {FAR} "
                "times nothing else could be seen).", class_="muted")  # fmt: skip


def _legend(plan: Plan, tier: Tier, by: By) -> Element:
    """Colours, with the bytes in the fullest moment."""
    bill = plan.footprint
    sums = bill.by(KEYS[by], bill.peak(tier=tier)[0], tier)
    ever = {KEYS[by](item) for item in bill.items if item.tier == tier and item.bytes}
    items = [
        h("li", h("i", class_=f"swatch {by}-{name.replace(' ', '-')}"), f"{name} ",
          h("b", small(sums[name])) if name in sums else None)
        for name in ORDER[by] if name in ever
    ]  # fmt: skip
    return h("ul", h("li", "at the peak:"), items, class_="legend")
