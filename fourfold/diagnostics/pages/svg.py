"""Primitives of drawings: what fourfold's pictures are made of, in coordinates of their view box."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import Child, h, number

Point = tuple[float, float]
HEAD = 7.0  # of an arrow


def drawing(
    name: str, width: float, height: float, title: str, about: str, *inside: Child | Iterable[Child], class_: str
) -> Element:
    """A picture that is read out as its title and what it is about; `name` is its id in the page."""
    return h(
        "svg",
        h("title", title, id=f"{name}-title"),
        h("desc", about, id=f"{name}-about"),
        *inside,
        class_=class_,
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        aria_labelledby=f"{name}-title {name}-about",
    )


def strip(name: str, title: str, *inside: Child | Iterable[Child], height: int = 14) -> Element:
    """A horizontal bar, as wide as there is room: its shapes go from 0 to 1000 and have no text in them."""
    return h(
        "svg",
        h("title", title, id=f"{name}-title"),
        *inside,
        class_="strip",
        viewBox=f"0 0 1000 {height}",
        preserveAspectRatio="none",
        height=height,
        role="img",
        aria_labelledby=f"{name}-title",
    )


def text(x: float, y: float, said: str, class_: str = "", anchor: str | None = None) -> Element:
    """One line, from its base line."""
    return h("text", said, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, class_: str, *inside: Child, **more: float | str) -> Element:
    """A rectangle; what is inside is its tooltip."""
    return h("rect", *inside, x=x, y=y, width=width, height=height, class_=class_, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str, **more: float) -> Element:
    """A straight line."""
    return h("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, **more)


def polyline(points: Iterable[Point], class_: str, *inside: Child, **more: str) -> Element:
    """A line through points, to a tenth of a unit; what is inside is its tooltip."""
    steps = (f"{'L' if n else 'M'}{number(round(x, 1))} {number(round(y, 1))}" for n, (x, y) in enumerate(points))
    return h("path", *inside, d=" ".join(steps), class_=class_, **more)


def arrow(points: Sequence[Point], class_: str = "arrow", *, head: bool = True, radius: float = 8) -> list[Element]:
    """A line through points at right angles with round corners, and its head at the last one."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = _sign(x - x0), _sign(y - y0)
    ends = [*points[:-1], (x - dx * HEAD, y - dy * HEAD)] if head else points
    made = [h("path", d=_rounded(ends, radius), class_=class_)]
    if head:
        wing = HEAD * 0.55
        corners = (
            (x, y),
            (x - dx * HEAD - dy * wing, y - dy * HEAD - dx * wing),
            (x - dx * HEAD + dy * wing, y - dy * HEAD + dx * wing),
        )
        made.append(
            h("polygon", points=" ".join(f"{number(a)},{number(b)}" for a, b in corners), class_=f"{class_} head")
        )
    return made


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _rounded(points: Sequence[Point], radius: float) -> str:
    steps = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        near, far = _towards(corner, before, radius), _towards(corner, after, radius)
        steps.append(f"L{number(near[0])} {number(near[1])}")
        steps.append(f"Q{number(corner[0])} {number(corner[1])} {number(far[0])} {number(far[1])}")
    return " ".join([*steps, f"L{number(points[-1][0])} {number(points[-1][1])}"])


def _towards(corner: Point, other: Point, radius: float) -> Point:
    """From a corner `radius` along the line to another point, at most half of it."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = abs(dx) + abs(dy)
    part = min(radius, length / 2) / length if length else 0
    return corner[0] + dx * part, corner[1] + dy * part


def nice(rough: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
