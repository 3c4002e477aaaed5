"""The page of a study: a table of its variants and one chart a measure, in a file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import h, number, serialised
from fourfold.diagnostics.pages.svg import drawing, line, nice, text

Points = Sequence[Sequence[float]]
# Okabe and Ito's palette, which stays apart for the colour-blind; beyond it lines are told apart by their dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("none", "6 4", "2 3")
STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --ink: #1c1e21; --muted: #585d66; --rule: #d9d5cb; }
@media (prefers-color-scheme: dark) { :root { --paper: #131519; --ink: #e9e7e2; --muted: #a4a9b2; --rule: #363b44; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 20px 56px; max-width: 1200px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 6px; }
p { margin: 4px 0; color: var(--muted); } figure { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 32px 28px; }
.table { overflow-x: auto; margin: 20px 0 28px; }
table { border-collapse: collapse; font-size: 14px; } th, td { padding: 5px 12px 5px 0; text-align: right; }
th { font-weight: 600; vertical-align: bottom; border-bottom: 1px solid var(--muted); max-width: 13ch; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; max-width: none; }
td { border-bottom: 1px solid var(--rule); white-space: nowrap; }
td span, th span { color: var(--muted); font-weight: 400; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--muted); font-size: 14px; }
.key { display: inline-block; width: 26px; height: 10px; margin-right: 8px; } .key svg { overflow: visible; }
.grid { stroke: var(--rule); } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.seed { fill: none; stroke-width: 1; opacity: 0.35; }
"""


def study_page(report: Mapping[str, Any]) -> str:
    """HTML of what `fourfold study` found (its study.json)."""
    names = list(report["variants"])
    charts = [_figure(report, measure, names) for measure in report["measures"]]
    seeds = ", ".join(map(str, report["seeds"]))
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("title", f"{report['study']}: study"),
        h("style", STYLE),
    )
    body = h(
        "body",
        h("h1", f"Study: {report['study']}"),
        h("p", report["question"]),
        h("p", f"{report['steps']} steps of ppo, seeds {seeds}; thick lines are means over seeds."),
        h("div", _table(report, names), class_="table"),
        h("main", [each for each in charts if each is not None], class_="charts"),
        h("footer", h("p", "Made by `fourfold study`; docs/studies.md says how each number is made.")),
    )
    return serialised(h("html", head, body, lang="en"))


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
    path = " ".join(
        f"{'L' if place else 'M'}{number(frame.x(x))} {number(frame.y(y))}" for place, (x, y) in enumerate(points)
    )
    last = f"{name}: {points[-1][1]:.4g} at step {points[-1][0]:,g}"
    return h("path", h("title", last), d=path, class_=class_, data_of=name, **_stroke(index))


def mean_curve(runs: Sequence[Points]) -> list[tuple[float, float]]:
    """The mean over runs at every step that all of them have."""
    found = [{step: value for step, value in points} for points in runs]
    steps = sorted(set.intersection(*(set(points) for points in found)))
    return [(step, sum(points[step] for points in found) / len(found)) for step in steps]
