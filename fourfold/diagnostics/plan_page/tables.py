"""Tables of bytes: role by kind, moment by kind, and the whole bill with its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.tables import NOTHING, Row, table
from fourfold.diagnostics.plan_page.memory import unit_of
from fourfold.planner.bill import HOLDERS, KINDS, Moment
from fourfold.planner.plan import Plan
from fourfold.planner.units import size


def bytes_section(plan: Plan) -> Iterator[Element]:
    """Who holds what at the peak, what is held when, and every item of the bill."""
    bill, peak = plan.footprint, plan.peak[0]
    unit, one = unit_of(plan)
    at_peak = bill.by(lambda item: f"{item.holder}/{item.kind}", peak)
    holders = [holder for holder in HOLDERS if any(key.startswith(f"{holder}/") for key in at_peak)]
    yield _grid(
        f"Who holds what at the peak, in {peak}, in {unit}", holders, plan.peak[1],
        lambda holder, kind: at_peak.get(f"{holder}/{kind}", 0), one,
    )  # fmt: skip
    by_moment = {str(moment): bill.by(lambda item: item.kind, moment) for moment in bill.moments}
    yield _grid(
        f"What is held when, on the device, in {unit}", list(by_moment), plan.peak[1],
        lambda moment, kind: by_moment[moment].get(kind, 0), one, sums=False,
    )  # fmt: skip
    yield h("details", h("summary", f"The whole bill: {len(bill.items)} items and their arithmetic"), _bill(plan))


def _grid(
    caption: str, rows: Sequence[str], most: int, count: Callable[[str, str], int], one: int, *, sums: bool = True
) -> Element:
    """Rows by kinds of memory; cells are shaded by their share of the peak."""
    kinds = [kind for kind in KINDS if any(count(row, kind) for row in rows)]
    made = []
    for row in rows:
        values = [count(row, kind) for kind in kinds]
        made.append(Row(row, [*(_shaded(value, most, one) for value in values), h("b", f"{sum(values) / one:,.2f}")]))
    if sums:
        totals = [sum(count(row, kind) for row in rows) for kind in kinds]
        cells = [f"{value / one:,.2f}" for value in (*totals, sum(totals))]
        made.append(Row("together", cells, "together"))
    return table(caption, ("", *kinds, "together"), made, "numbers")


def _shaded(value: int, most: int, one: int) -> Element:
    said = f"{value / one:,.2f}" if round(value / one, 2) else NOTHING if not value else "<0.01"
    return h("td", said, style=f"--share:{value / most:.3f}", title=f"{value:,} bytes")


def _bill(plan: Plan) -> Element:
    bill = plan.footprint
    rows = [
        Row(
            f"{item.kind} of the {item.holder}",
            [item.tier, size(item.bytes), _when(item.moments, bill.moments), h("td", item.why, class_="why")],
        )
        for item in sorted(bill.items, key=lambda item: -item.bytes)
    ]
    return table("Every item of the bill, the largest first", ("what", "on", "bytes", "held in", "how"), rows)


def _when(moments: frozenset[Moment], all_moments: Sequence[Moment]) -> str:
    there = [moment for moment in all_moments if moment in moments]
    if len(there) == len(all_moments):
        return "all moments"
    missing = [str(moment) for moment in all_moments if moment not in moments]
    if len(missing) < len(there) and len(missing) <= 2:
        return f"all but {', '.join(missing)}"
    return ", ".join(map(str, there))
