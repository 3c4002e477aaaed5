"""Memory and time: what the run has measured beside what the planner says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import get_args
from xml.etree.ElementTree import Element

from fourfold.diagnostics.numbers import short
from fourfold.diagnostics.pages.elements import Child, h
from fourfold.diagnostics.pages.svg import rect, strip
from fourfold.diagnostics.pages.tables import NOTHING, Row, table
from fourfold.diagnostics.predicted import Prediction, Timing, measured_peaks
from fourfold.diagnostics.report_page.curves import Curve, Line, curve
from fourfold.diagnostics.run_record import STAGES, RunRecord
from fourfold.planner.bill import HOLDERS, MOMENTS, Phase
from fourfold.planner.units import seconds, size

PHASES: tuple[Phase, ...] = get_args(Phase)
WORKING: tuple[Phase, ...] = ("generate", "score", "learn", "save")
# The parts of a run's seconds: stages, and within ppo its phases.
OF_PPO = ("generate", "score", "learn", "save", "evaluate", "preflight")


def time_section(record: RunRecord, planned: Timing) -> Iterator[Child]:
    """The whole run as a bar, the seconds of a step by phase over steps, and a table beside the plan."""
    parts = _parts(record)
    if parts:
        whole = sum(parts.values())
        yield _bar("spent", f"The run so far: {seconds(whole)}", parts, seconds, 26)
    if not record.steps:
        return
    said = h("p", f"Planned: {planned.said}.", class_="muted")
    yield h("div", _seconds_curve(record), h("div", _time_table(record, planned), said), class_="beside")


def _parts(record: RunRecord) -> dict[str, float]:
    """Seconds that add up to the run's: loading, stages, and ppo taken apart where it has begun."""
    spent = {name: usage["seconds"] for name, usage in record.spent.items()}
    parts = {name: spent[name] for name in ("load", *STAGES[:2]) if spent.get(name)}
    inner = {name: spent[name] for name in OF_PPO if spent.get(name)}
    rest = spent.get("ppo", 0.0) - sum(inner.values())
    return parts | inner | ({"other": rest} if rest > 0 else {})


def _bar(name: str, title: str, parts: Mapping[str, float], said: Callable[[float], str], height: int) -> Element:
    """Parts of a whole beside each other, with a legend."""
    whole, x = sum(parts.values()), 0.0
    shapes, entries = [], []
    for part, value in parts.items():
        width = 1000 * value / whole
        shapes.append(rect(x, 0, width, height, f"of-{part}", h("title", f"{part}: {said(value)}")))
        entries.append(h("li", h("i", class_=f"swatch of-{part}"), f"{part} ", h("b", said(value))))
        x += width
    return h("div", h("p", title, class_="bar-title"), strip(name, title, *shapes, height=height),
             h("ul", entries, class_="legend"), class_="bar")  # fmt: skip


def _seconds_curve(record: RunRecord) -> Element:
    lines = [Line(phase, record.points("ppo_step", f"{phase}_seconds"), n) for n, phase in enumerate(WORKING[:3])]
    return curve(Curve("seconds", "Seconds of a step by phase", "s", lines))


def _time_table(record: RunRecord, planned: Timing) -> Element:
    rows = []
    whole = median(row["step_seconds"] for row in record.steps)
    roles = _role_seconds(record)
    for phase in WORKING:
        value = median(row[f"{phase}_seconds"] for row in record.steps)
        rows.append(_time_row(phase, value, planned.seconds.get(phase), whole))
        inner = {role: spent for (of, role), spent in roles.items() if of == phase}
        for role, spent in inner.items() if phase != "save" else ():
            rows.append(_time_row(f"{phase}/{role}", spent, planned.seconds.get(f"{phase}/{role}"), whole))
    sums = sum(planned.seconds.get(phase, 0.0) for phase in WORKING) or None
    rows.append(_time_row("step", whole, sums, whole, "together"))
    heads = ("", "measured", "planned", "measured / planned", "share")
    return table("Seconds of a step, medians over all steps", heads, rows)


def _time_row(name: str, value: float, planned: float | None, whole: float, class_: str | None = None) -> Row:
    phase, has_role, role = name.partition("/")
    ratio = NOTHING if not planned else short(value / planned)
    cells = [seconds(value), NOTHING if planned is None else seconds(planned), ratio, f"{value / whole:.0%}"]
    return Row(role if has_role else phase, cells, "within" if has_role else class_)


def _role_seconds(record: RunRecord) -> dict[tuple[str, str], float]:
    """Medians over steps of the seconds in which a role worked in a phase."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in record.timeline:
        if row["kind"] == "span" and row["stage"] == "ppo" and row["step"] and row["role"]:
            found.setdefault((row["phase"], row["role"]), []).append(row["seconds"])
    return {key: median(values) for key, values in found.items()}


def memory_section(record: RunRecord, planned: Prediction) -> Iterator[Child]:
    """Peaks by phase and role as bars beside the plan, peaks over steps, and what each role holds."""
    measured = measured_peaks(record.timeline)
    said = f"Bars are measured, upright marks planned: {planned.said}." if planned.peaks else f"{planned.said}."
    table_and_note = h("div", _peaks(measured, planned.peaks), h("p", said[0].upper() + said[1:], class_="muted"))
    picture: Element | None = None
    if record.steps:
        mib = 2**20
        lines = [
            Line(phase, [(step, peak / mib) for step, peak in record.points("ppo_step", f"{phase}_peak_bytes")], n)
            for n, phase in enumerate(WORKING[:3])
        ]
        picture = curve(Curve("peaks", "Peak memory by phase", "MiB", lines))
    yield h("div", picture, table_and_note, class_="beside")
    held = next((row for row in reversed(record.timeline) if row["kind"] == "resident"), None)
    if held is not None:
        sizes = {name: held[name] for name in HOLDERS if held.get(name)}
        yield _bar("resident", f"Weights as ppo began: {size(sum(sizes.values()))}", sizes, size, 18)


def _peaks(measured: Mapping[str, int], planned: Mapping[str, int]) -> Element:
    names = _in_order(measured)
    most = max([measured[name] for name in names] + [planned.get(name, 0) for name in names]) * 1.02
    rows = []
    for name in names:
        phase, has_role, role = name.partition("/")
        value, expected = measured[name], planned.get(name)
        shapes = [rect(0, 0, 1000, 14, "track"), rect(0, 0, 1000 * value / most, 14, f"of-{phase}")]
        if expected:
            shapes.append(rect(1000 * expected / most - 3, 0, 6, 14, "planned-mark"))
        said = f"{name}: {size(value)} measured" + (f", {size(expected)} planned" if expected else "")
        picture = strip(f"peak-{name.replace('/', '-')}", said, *shapes)
        error = NOTHING if not expected else f"{expected / value - 1:+.0%}".replace("-", "\N{MINUS SIGN}")
        cells = [h("td", picture, class_="bar-cell"), size(value), NOTHING if not expected else size(expected), error]
        rows.append(Row(role if has_role else phase, cells, "within" if has_role else None))
    return table("Peak memory by phase and role", ("", "", "measured", "planned", "planned is off by"), rows, "peaks")


def _in_order(measured: Mapping[str, int]) -> Sequence[str]:
    """Each phase with its roles below it, as they follow in a run."""
    order = [name for phase in PHASES for name in (phase, *(str(m) for m in MOMENTS if m.phase == phase and m.role))]
    return [name for name in order if name in measured]
