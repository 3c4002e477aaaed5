"""The page of a study: a table of its variants and one chart a measure, in a file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.document import document
from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.svg import drawing, line, nice, polyline, text

Points = Sequence[Sequence[float]]
# Okabe and Ito's palette, which stays apart for the colour-blind; beyond it lines are told apart by their dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("none", "6 4", "2 3")


def study_page(report: Mapping[str, Any]) -> str:
    """HTML of what `fourfold study` found (its study.json)."""
    names = list(report["variants"])
    charts = [_figure(report, measure, names) for measure in report["measures"]]
    seeds = ", ".join(map(str, report["seeds"]))
    about = f"{report['steps']} steps of ppo, seeds {seeds}; thick lines are means over seeds."
    body = [
        h(
            "header",
            h("p", "Fourfold study", class_="eyebrow"),
            h("h1", report["study"]),
            h("p", report["question"], class_="verdict"),
            h("p", about, class_="muted"),
        ),
        h("div", _table(report, names), class_="scroll variants"),
        h("main", [each for each in charts if each is not None], class_="charts"),
        h("footer", h("p", "Made by `fourfold study`; docs/studies.md says how each number is made.")),
    ]
    return document(f"{report['study']}: study", body, __name__.rpartition(".")[0])


def _table(report: Mapping[str, Any], names: Sequence[str]) -> Element:
    measures = _measured(report)
    rows = []
    for index, name in enumerate(names):
        variant = report["variants"][name]
        cells = [h("td", _cell(variant, measure["name"])) for measure in measures]
        failed = [run for run in variant["runs"] if run["status"] == "failed"]
        said = f"{variant['about']}; {len(failed)} of {len(variant['runs'])} failed" if failed else variant["about"]
        rows.append(h("tr", h("td", _key(index), name, h("br"), h("span", said)), cells))
    heads = [h("th", measure["title"], h("br"), h("span", measure["unit"])) for measure in measures]
    return h("table", h("thead", h("tr", h("th", "variant"), heads)), h("tbody", rows))


def _measured(report: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """The measures that any variant has a number of."""
    there = {name for variant in report["variants"].values() for name in variant["mean"]}
    return [measure for measure in report["measures"] if measure["name"] in there]


def _cell(variant: Mapping[str, Any], name: str) -> str:
    """The mean over seeds, with the standard deviation where there are several."""
    if name not in variant["mean"]:
        return "-"
    spread = variant["std"].get(name)
    return f"{variant['mean'][name]:.3g}" + ("" if spread is None else f" ± {spread:.2g}")


def _key(index: int) -> Element:
    stroke = h("line", x1=0, y1=5, x2=26, y2=5, **_stroke(index), stroke_width=2)
    return h("span", h("svg", stroke, viewBox="0 0 26 10", aria_hidden="true"), class_="key")


def _stroke(index: int) -> dict[str, str]:
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"stroke": COLOURS[index % len(COLOURS)], "stroke_dasharray": dashes}


@dataclass(frozen=True)
class Frame:
    """Where numbers lie in a chart."""

    x_end: float
    low: float
    high: float
    step: float  # between the lines of the grid
    width: float = 560.0
    height: float = 300.0
    left: float = 56.0
    right: float = 10.0
    top: float = 12.0
    bottom: float = 34.0

    @classmethod
    def around(cls, curves: Sequence[Points]) -> Frame:
        """With room for all points, between round figures."""
        values = [y for points in curves for _, y in points]
        low, high = min(values), max(values)
        room = (high - low) or abs(high) or 1.0
        step = nice(room / 5)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return cls(max(x for points in curves for x, _ in points) or 1.0, low, high if high > low else low + step, step)

    def x(self, value: float) -> float:
        """Of a step."""
        return self.left + value / self.x_end * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Of a number."""
        return self.top + (self.high - value) / (self.high - self.low) * (self.height - self.top - self.bottom)


def _figure(report: Mapping[str, Any], measure: Mapping[str, str], names: Sequence[str]) -> Element | None:
    """The curves of all variants; None where no run has any."""
    name = measure["name"]
    curves = {each: [run["curves"].get(name, []) for run in report["variants"][each]["runs"]] for each in names}
    drawn = [points for runs in curves.values() for points in runs if points]
    if not drawn:
        return None
    frame = Frame.around(drawn)
    inside = [*_grid(frame)]
    for index, each in enumerate(names):
        runs = [points for points in curves[each] if points]
        if len(runs) > 1:
            inside += [_curve(frame, points, index, "seed", each) for points in runs]
        if runs:
            inside.append(_curve(frame, mean_curve(runs), index, "curve", each))
    about = f"{measure['unit']} over the steps of ppo, a line for each of {', '.join(names)}"
    picture = drawing(f"chart-{name}", frame.width, frame.height, measure["title"], about, inside, class_="chart")
    return h("figure", h("h2", measure["title"]), h("p", measure["unit"]), picture)


def _grid(frame: Frame) -> Iterator[Element]:
    for count in range(round((frame.high - frame.low) / frame.step) + 1):
        value = frame.low + count * frame.step
        yield line(frame.left, frame.y(value), frame.width - frame.right, frame.y(value), "grid")
        shown = 0.0 if abs(value) < frame.step / 1e6 else value
        yield text(frame.left - 8, frame.y(value) + 4, f"{shown:,.4g}", "tick", "end")
    step = max(nice(frame.x_end / 6), 1.0)
    for count in range(int(frame.x_end / step) + 1):
        yield text(frame.x(count * step), frame.height - 12, f"{count * step:,g}", "tick", "middle")


def _curve(frame: Frame, points: Points, index: int, class_: str, name: str) -> Element:
    last = h("title", f"{name}: {points[-1][1]:.4g} at step {points[-1][0]:,g}")
    places = [(frame.x(x), frame.y(y)) for x, y in points]
    return polyline(places, class_, last, data_of=name, **_stroke(index))


def mean_curve(runs: Sequence[Points]) -> list[tuple[float, float]]:
    """The mean over runs at every step that all of them have."""
    found = [{step: value for step, value in points} for points in runs]
    steps = sorted(set.intersection(*(set(points) for points in found)))
    return [(step, sum(points[step] for points in found) / len(found)) for step in steps]
