"""The comparison with TRL as two tables: a line a side, then a line a comparison."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results import Figure, Result, number

# Column: the figure of a side, "SIDE: FIGURE".
COLUMNS: Mapping[str, str] = {
    "s an update": "seconds per update",
    "generate": "generate",
    "score": "score",
    "learn": "learn",
    "episodes/s": "episodes per second",
    "peak MiB": "peak memory",
}
TOKENS = "response tokens per update"
COMPARED = ("seconds", "peak memory")


def peer_table(result: Result) -> list[str]:
    """Medians with the range in brackets; tokens a second are the medians of both over each other."""
    figures = {figure.name: figure for figure in result.figures}
    rows = [f"| side | {' | '.join(COLUMNS)} | tokens/s |", "|---" + "|---:" * (len(COLUMNS) + 1) + "|"]
    for side in result.config["sides"]:
        cells = [_cell(figures[f"{side}: {name}"]) for name in COLUMNS.values()]
        tokens = figures[f"{side}: {TOKENS}"].value / figures[f"{side}: seconds per update"].value
        rows.append(f"| {side} | {' | '.join(cells)} | {number(tokens)} |")
    pairs = dict.fromkeys(name.rpartition(":")[0] for name, each in figures.items() if each.against is not None)
    if pairs:
        rows += ["", f"| ratio | {' | '.join(COMPARED)} |", "|---" + "|---:" * len(COMPARED) + "|"]
    for pair in pairs:
        cells = [_ratio(figures[f"{pair}: {what}"]) for what in COMPARED]
        rows.append(f"| {pair} | {' | '.join(cells)} |")
    return rows


def _cell(figure: Figure) -> str:
    low, high = figure.spread or (figure.value, figure.value)
    return number(figure.value) if low == high else f"{number(figure.value)} ({number(low)} - {number(high)})"


def _ratio(figure: Figure) -> str:
    target = "" if figure.target is None else f", {figure.target}: {'met' if figure.met else 'missed'}"
    return _cell(figure) + target
