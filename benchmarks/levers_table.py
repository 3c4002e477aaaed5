"""Tables of levers: what each is declared to do, and the result of benchmarks/levers.py.

In every cell of the result stands the baseline's figure, then that with the lever.
"""

from __future__ import annotations

import json

from benchmarks.results import Result, number
from benchmarks.worker import PHASES
from fourfold.planner.levers import LEVERS, Lever

COLUMNS = {
    "seconds": "seconds per update",
    "peak MiB": "peak memory",
    **{f"in {phase}": f"peak in {phase}" for phase in PHASES},
    "weights MiB": "weights at start",
}


def levers_table(result: Result) -> list[str]:
    """The lines of the table."""
    values = {figure.name: figure.value for figure in result.figures}
    rows = ["| lever | " + " | ".join(COLUMNS) + " | update | against |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name, about in result.config["levers"].items():
        against = about["against"]
        cells = [
            f"{number(values[f'{against}: {what}'])} -> {number(values[f'{name}: {what}'])}"
            for what in COLUMNS.values()
        ]
        update = _update(values, f"{name} / {against}", about["change"])
        rows.append(f"| {name} | {' | '.join(cells)} | {update} | {against} |")
    return rows


def _update(values: dict[str, float], pair: str, change: str) -> str:
    """How far the lever's update lies from the baseline's, as a share of the baseline's move."""
    if change == "other parameters":
        return "of other parameters"
    if change == "exact":
        return "NOT bit-equal" if values[f"{pair}: rounds with other weights"] else "0"
    return number(values[f"{pair}: difference of the update"])


def declared_table() -> list[str]:
    """A line for each lever of fourfold/planner/levers.py."""
    columns = ("lever", "settings", "saves", "costs", "update", "not beside")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in LEVERS:
        # On a baseline of its own a lever's settings name that too: of a lever people want what is added.
        given = {key: value for key, value in each.settings.items() if each.baseline.get(key) != value}
        settings = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in given.items())
        cells = (each.name, settings, each.saves, each.costs, _declared(each), ", ".join(each.excludes) or "-")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _declared(lever: Lever) -> str:
    if lever.change == "bounded":
        return f"within {lever.bound:g}"
    if lever.trunk_bound:
        return f"exact; over a cached trunk within {lever.trunk_bound:g}"
    return "exact" if lever.change == "exact" else "of other parameters"
