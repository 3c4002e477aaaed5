"""The table of benchmarks/planner.py: what was measured, and how far what was predicted is off, a row a config."""

from __future__ import annotations

from benchmarks.results import Result, number

PHASES = ("generate", "score", "learn")


def planner_table(result: Result) -> list[str]:
    """The lines of the table; above it the errors over all configs."""
    values = {figure.name: figure for figure in result.figures}
    cases = result.config["planner"]
    rows = [
        f"* {figure.name}: {_share(figure.value) if figure.unit == 'share' else f'{number(figure.value)} MiB'}"
        + ("" if figure.target is None else f" (target {figure.target}: {'met' if figure.met else 'missed'})")
        for figure in result.figures
        if not any(figure.name.startswith(f"{case}: ") for case in cases)
    ]
    rows += ["", f"| config | {' | '.join(f'{phase} MiB' for phase in PHASES)} |", "|---" * 4 + "|"]
    for case in cases:
        cells = []
        for phase in PHASES:
            measured, predicted = (values[f"{case}: {phase} {what}"].value for what in ("measured", "predicted"))
            cells.append(f"{number(measured)} ({predicted / measured - 1:+.1%})")
        rows.append(f"| {case} | {' | '.join(cells)} |")
    return rows


def _share(value: float) -> str:
    return f"{value:.1%}"
