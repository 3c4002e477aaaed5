"""Every metric of the run as a line of a table, folded away by the sections of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from fourfold.diagnostics.metrics import METRICS, Metric
from fourfold.diagnostics.numbers import short
from fourfold.diagnostics.pages.elements import h, number
from fourfold.diagnostics.pages.svg import polyline
from fourfold.diagnostics.pages.tables import NOTHING, Row, table
from fourfold.diagnostics.report_page.charts import NAMES, coded
from fourfold.diagnostics.run_record import Points, RunRecord, thinned

WIDTH, HEIGHT = 96.0, 22.0
POINTS = 60


def metrics_section(record: RunRecord) -> Iterator[Element]:
    """A table for each kind of row: first, last, least and greatest value, and the way between them."""
    yield h("p", "What each is, what is healthy, and what to do if it is not. Names are those of docs/metrics.md.",
            class_="muted")  # fmt: skip
    for kind, declared in METRICS.items():
        rows = [
            _row(metric, name, points)
            for metric in declared.values()
            for name in record.names(kind, metric.name)
            if name != "step" and (points := record.points(kind, name))
        ]
        if rows:
            said = f"{len(rows)} metrics of {NAMES.get(kind, kind)} rows"
            heads = ("", "first", "last", "least", "greatest", "over steps", "healthy")
            yield h("details", h("summary", said), table(said, heads, rows, "all-metrics"))


def _row(metric: Metric, name: str, points: Points) -> Row:
    values = [value for _, value in points]
    figures = [short(value) for value in (values[0], values[-1], min(values), max(values))]
    way = _sparkline(points) if len(points) > 1 else NOTHING
    return Row(h("code", name), [*figures, h("td", way), h("td", coded(metric.healthy), class_="why")])


def _sparkline(points: Points) -> Element:
    shown = thinned(points, POINTS)
    low, high = min(v for _, v in shown), max(v for _, v in shown)
    first, last = shown[0][0], shown[-1][0]
    places = [
        ((step - first) / (last - first) * WIDTH, HEIGHT - 2 - (value - low) / ((high - low) or 1) * (HEIGHT - 4))
        for step, value in shown
    ]
    picture = polyline(places, "line line-0")
    return h(
        "svg", picture, class_="spark", viewBox=f"0 0 {number(WIDTH)} {number(HEIGHT)}", width=WIDTH, height=HEIGHT,
        aria_hidden="true",
    )  # fmt: skip
