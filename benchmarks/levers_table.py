"""The result of benchmarks/levers.py as a table: in every cell the baseline's figure, then that with the lever."""

from __future__ import annotations

from benchmarks.results import Result, number
from benchmarks.worker import PHASES

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
