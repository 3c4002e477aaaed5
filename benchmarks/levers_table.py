"""Tables of levers: what each is declared to do, and the result of benchmarks/levers.py.

In every cell of the result stands the baseline's figure, then that with the lever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from benchmarks.lever_rows import DIFFERENCE, LOG_PROB_GAP, OTHER_WEIGHTS, SERVICE_PEAK, WITH, WITHOUT
from benchmarks.levers import ON_CUDA, ONLY_ON_A_GPU, SUBJECTS
from benchmarks.results import Result, number, origin, side_line
from benchmarks.worker import PHASES
from fourfold.planner.lever import Lever
from fourfold.planner.levers import LEVERS

# Levers whose copies are to be hidden behind what is computed meanwhile have a word of these in their name.
MOVING = {"stream", "park", "offload", "overlap"}
COLUMNS = {
    "seconds": "seconds per update",
    "peak MiB": "peak memory",
    **{f"in {phase}": f"peak in {phase}" for phase in PHASES},
    "weights MiB": "weights at start",
}


def levers_table(result: Result) -> list[str]:
    """The lines of the table, and those below it."""
    values = {figure.name: figure.value for figure in result.figures}
    lines = ["| lever | " + " | ".join(COLUMNS) + " | update | log p | against |", "|---" * (len(COLUMNS) + 4) + "|"]
    for name, about in result.config["levers"].items():
        cells = [
            f"{number(values[f'{name}: {what} {WITHOUT}'])} -> {number(values[f'{name}: {what} {WITH}'])}"
            for what in COLUMNS.values()
        ]
        cells += _changes(values, name, about["change"])
        lines.append(f"| {name} | {' | '.join(cells)} | {about['against']} |")
    return [*lines, "", *_notes(result, values), "", *_origins(result)]


def _changes(values: Mapping[str, float], name: str, change: str) -> tuple[str, str]:
    """How far update and log-probs of the same responses lie from the baseline's."""
    if change == "other parameters":
        return "of other parameters", "-"
    if change == "exact":
        return ("NOT bit-equal" if values[f"{name}: {OTHER_WEIGHTS}"] else "0"), "0"
    update, gap = (values[f"{name}: {what}"] for what in (DIFFERENCE, LOG_PROB_GAP))
    return number(update), number(gap) if gap else "0"


def _notes(result: Result, values: Mapping[str, float]) -> list[str]:
    """What the sides train, what a service holds, and what is not in the table."""
    rows = result.config["levers"]
    lines = [side_line(name, side) for name, side in result.config["sides"].items()]
    for name in rows:
        if (peak := values.get(f"{name}: {SERVICE_PEAK}")) is not None:
            lines.append(f"* {name}: the service itself takes {number(peak)} MiB at its peak.")
    for name in rows:
        if MOVING & set(name.split()) and f"{name}: seconds in score {WITH}" in values:
            spent = (
                f"{phase} {number(values[f'{name}: seconds in {phase} {WITHOUT}'])} -> "
                f"{number(values[f'{name}: seconds in {phase} {WITH}'])}"
                for phase in PHASES
            )
            lines.append(f"* {name}, seconds: {', '.join(spent)}.")
    on_a_gpu = result.name == ON_CUDA
    if missing := [each.name for each in SUBJECTS if each.name not in rows and (on_a_gpu or not each.only_on)]:
        lines.append(f"* Not measured yet: {', '.join(missing)}.")
    return lines if on_a_gpu else [*lines, f"* Not measured without a GPU: {', '.join(ONLY_ON_A_GPU)}."]


def _origins(result: Result) -> list[str]:
    """When and of what the rows were measured, those that were measured together in one line."""
    together: dict[str, list[str]] = {}
    for name, about in result.config["levers"].items():
        told = f"{origin(result, about)}; {about['rounds']} x {about['updates']} updates"
        together.setdefault(told, []).append(name)
    if len(together) == 1:
        return [f"{told}." for told in together]
    return [f"* {told}: {', '.join(names)}." for told, names in sorted(together.items())]


def declared_table() -> list[str]:
    """A line for each lever of fourfold/planner/levers.py."""
    columns = ("lever", "settings", "saves", "costs", "update", "not beside")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in LEVERS:
        # On a baseline of its own a lever's settings name that too: of a lever people want what is added.
        given = {key: value for key, value in each.settings.items() if each.baseline.get(key) != value}
        settings = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in given.items())
        name = f"{each.name} (CUDA only)" if each.only_on else each.name
        cells = (name, settings, each.saves, each.costs, _declared(each), ", ".join(each.excludes) or "-")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _declared(lever: Lever) -> str:
    if lever.rounding:
        return f"rounding within {lever.rounding:g}, all else within {lever.bound:g}"
    if lever.change == "bounded":
        return f"within {lever.bound:g}"
    if lever.trunk_bound:
        return f"exact; over a cached trunk within {lever.trunk_bound:g}"
    return "exact" if lever.change == "exact" else "of other parameters"
