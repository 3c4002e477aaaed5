"""A curve of metrics over steps, with the band of what is healthy behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from fourfold.diagnostics.metrics import Band
from fourfold.diagnostics.numbers import short
from fourfold.diagnostics.pages.elements import Child, h, number
from fourfold.diagnostics.pages.svg import drawing, line, nice, polyline, rect, text
from fourfold.diagnostics.run_record import Points, thinned

WIDTH, HEIGHT = 360.0, 196.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 26.0
FEW_POINTS = 30  # up to which each is marked
# A band is brought into view while the curve keeps this share of the height.
LEAST_SHARE = 0.3


@dataclass(frozen=True)
class Line:
    """One line: its name, its values by step, and the style in which it is drawn: 0, 1 or 2."""

    name: str
    points: Points
    style: int = 0


@dataclass(frozen=True)
class Curve:
    """A picture of one or more lines that share an axis; `key` is its id in the page."""

    key: str
    title: str
    unit: str
    lines: Sequence[Line]
    band: Band | None = None
    more: Sequence[Child] = field(default=())


@dataclass(frozen=True)
class Axes:
    """From steps and values to the view box."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        """Where a step stands."""
        return LEFT + (step - self.first) / ((self.last - self.first) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Where a value stands; what lies outside is at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def band_words(band: Band) -> str:
    """A band in words: "0.98 to 1.02", "at most 10"."""
    if band.low is None or band.high is None:
        return f"at most {short(band.high)}" if band.high is not None else f"at least {short(band.low or 0)}"
    return f"{short(band.low)} to {short(band.high)}"


def axes_of(lines: Sequence[Line], band: Band | None) -> Axes:
    """Room for all points, and for the edges of the band where the curve stays large enough beside them."""
    steps = [step for each in lines for step, _ in each.points]
    values = [value for each in lines for _, value in each.points]
    low, high = min(values), max(values)
    for edge in (band.low, band.high) if band is not None else ():
        if edge is not None:
            wider = min(low, edge), max(high, edge)
            spread = high - low
            if low <= edge <= high or spread == 0 or spread >= LEAST_SHARE * (wider[1] - wider[0]):
                low, high = wider
    room = (abs(high) * 0.1 or 0.5) if high == low else (high - low) * 0.08
    # A value that cannot be negative does not get an axis below 0.
    return Axes(min(steps), max(steps), low - room if low < 0 or low > room else min(low, 0.0), high + room)


def curve(made: Curve) -> Element:
    """The picture with its head (the last value, and whether it is healthy), its legend and what belongs to it."""
    lines = [each for each in made.lines if each.points]
    axes = axes_of(lines, made.band)
    said = "; ".join(f"{each.name} {short(each.points[0][1])} to {short(each.points[-1][1])}" for each in lines)
    inside: list[Element] = []
    if made.band is not None:
        inside += _band(axes, made.band)
    inside += [*_value_axis(axes), *_step_axis(axes)]
    for each in lines:
        inside += _line(axes, each)
    picture = drawing(f"curve-{made.key}", WIDTH, HEIGHT, made.title, said, inside, class_="curve")
    picture.set("data-lines", json.dumps([_data(axes, each) for each in lines], separators=(",", ":")))
    picture.set("tabindex", "0")
    under = h("div", _legend(made, lines), h("p", class_="readout", aria_live="polite"), class_="under")
    return h("figure", _head(made, lines), picture, under, *made.more, class_="chart")


def _head(made: Curve, lines: Sequence[Line]) -> Element:
    value = lines[0].points[-1][1]
    unit = "" if made.unit in ("share", "factor", "correlation", "cosine", "count") else f" {made.unit}"
    mark: Element | None = None
    if made.band is not None:
        inside = made.band.holds(value)
        mark = h("span", "healthy" if inside else "outside", class_=f"mark {'in' if inside else 'out'}")
    now = h("p", h("strong", short(value)), unit, mark, class_="now")
    return h("figcaption", h("h3", made.title), now)


def _legend(made: Curve, lines: Sequence[Line]) -> Element | None:
    entries = [h("li", h("i", class_=f"key line-{each.style}"), each.name) for each in lines]
    if len(lines) == 1 and not lines[0].style and made.band is None:
        return None
    if made.band is not None:
        entries.append(h("li", h("i", class_="key band-key"), f"healthy: {band_words(made.band)}"))
    return h("ul", entries, class_="legend")


def _band(axes: Axes, band: Band) -> Iterator[Element]:
    top = axes.y(axes.high if band.high is None else band.high)
    bottom = axes.y(axes.low if band.low is None else band.low)
    if bottom > top:
        yield rect(LEFT, top, WIDTH - LEFT - RIGHT, bottom - top, "band")
    for edge in (band.low, band.high):
        if edge is not None and axes.low <= edge <= axes.high:
            yield line(LEFT, axes.y(edge), WIDTH - RIGHT, axes.y(edge), "band-edge")


def _value_axis(axes: Axes) -> Iterator[Element]:
    step = nice((axes.high - axes.low) / 4)
    at = math.ceil(axes.low / step) * step
    while at <= axes.high + step * 1e-6:
        y = axes.y(at)
        yield line(LEFT, y, WIDTH - RIGHT, y, "grid")
        yield text(LEFT - 7, y + 4, short(0.0 if abs(at) < step / 1e6 else at), "tick", "end")
        at += step


def _step_axis(axes: Axes) -> Iterator[Element]:
    base = HEIGHT - BOTTOM
    yield line(LEFT, base, WIDTH - RIGHT, base, "axis")
    if axes.last == axes.first:
        yield text(axes.x(axes.first), base + 17, f"step {axes.first:g}", "tick")
        return
    step = max(1.0, nice((axes.last - axes.first) / 5))
    if step == 2.5:  # there is no half step
        step = 5.0
    ends = {axes.first, axes.last}
    inner = [n * step for n in range(math.ceil(axes.first / step), math.floor(axes.last / step) + 1)]
    apart = (axes.last - axes.first) / 9
    for at in sorted({*ends, *(n for n in inner if min(abs(n - end) for end in ends) > apart)}):
        anchor = "start" if at == axes.first else "end" if at == axes.last else "middle"
        said = f"step {at:,.0f}" if at == axes.first else f"{at:,.0f}"
        yield text(axes.x(at), base + 17, said, "tick", anchor)


def _data(axes: Axes, made: Line) -> dict[str, object]:
    """What the script needs to tell the values at a step: the step, its place, the value and its place."""
    rows = [
        [step, round(axes.x(step), 1), short(value), round(axes.y(value), 1)] for step, value in thinned(made.points)
    ]
    return {"name": made.name, "points": rows}


def _line(axes: Axes, made: Line) -> Iterator[Element]:
    places = [(round(axes.x(step), 1), round(axes.y(value), 1)) for step, value in thinned(made.points)]
    yield polyline(places, f"line line-{made.style}")
    if len(places) <= FEW_POINTS:
        for x, y in places:
            yield _marker(x, y, made.style)


def _marker(x: float, y: float, style: int) -> Element:
    """A shape of its own for each line, for those who do not tell colours apart."""
    if style == 0:
        return h("circle", cx=x, cy=y, r=2.5, class_="dot line-0")
    if style == 1:
        return rect(x - 2.75, y - 2.75, 5.5, 5.5, "dot line-1")
    corners = ((x, y - 3.6), (x + 3.4, y + 2.6), (x - 3.4, y + 2.6))
    return h("polygon", points=" ".join(f"{number(a)},{number(b)}" for a, b in corners), class_=f"dot line-{style}")
