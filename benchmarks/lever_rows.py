"""The rows of the table of levers in a result: made from reports, and merged, so that a table can be filled in pieces.

A lever's figures are called "<lever>: <what>". Each row says of itself when, where, of which commit and in how many
rounds it was measured; the result itself says so of the last ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peer_trl import Comparison, compared
from benchmarks.results import Figure, Result
from benchmarks.worker import PHASES, WorkerReport
from fourfold.planner.lever import Change
from fourfold.planner.levers import LEVERS

PLAIN = "four separate models"
WITHOUT, WITH = "without it", "with it"
OTHER_WEIGHTS = "rounds with other weights"
DIFFERENCE = "difference of the update"
LOG_PROB_GAP = "difference of log-probs"
SERVICE_PEAK = "peak memory of the service"


def row_of(change: Change, against: str, args: argparse.Namespace) -> dict[str, Any]:
    """What stood against what, and how often."""
    return {"against": against, "change": change, "rounds": args.rounds, "updates": args.updates}


def figures_of(
    name: str, change: Change, against: str, mine: Sequence[WorkerReport], base: Sequence[WorkerReport]
) -> list[Figure]:
    """Seconds, peaks and resident bytes of both sides, their ratios, and what the lever did to the update."""
    found: list[Figure] = []
    for side, runs in ((WITHOUT, base), (WITH, mine)):
        measured = {
            "seconds per update": [run.steady_seconds for run in runs],
            "weights at start": [sum(run.resident_mib.values()) for run in runs],
            "peak memory": [run.peak_rss_mib for run in runs],
            **{f"peak in {phase}": [run.phase_peak_mib[phase] for run in runs] for phase in PHASES},
            **{f"seconds in {phase}": [run.phases[phase] for run in runs] for phase in PHASES},
        }
        for what, values in measured.items():
            found.append(Figure.of(f"{name}: {what} {side}", values, "s" if "seconds" in what else "MiB"))
    if any(run.service_peak_mib for run in mine):
        found.append(Figure.of(f"{name}: {SERVICE_PEAK}", [run.service_peak_mib for run in mine], "MiB"))
    found += compared(Comparison(f"{name}: {WITH}", WITHOUT, None, None), mine, base)
    return found + _changes(name, change, against, mine, base)


def _changes(
    name: str, change: Change, against: str, mine: Sequence[WorkerReport], base: Sequence[WorkerReport]
) -> list[Figure]:
    """Differing weights where there may be none, else the sizes of the differences; the worst of the rounds."""
    pairs = list(zip(mine, base, strict=True))
    if change == "other parameters":
        return []
    if change == "exact":
        differing = [float(a.weights != b.weights) for a, b in pairs]
        figures = [Figure.of(f"{name}: {OTHER_WEIGHTS}", differing, "share", "<= 0")]
    else:
        updates, gaps = [difference(b.moves(), a.moves()) for a, b in pairs], [a.log_prob_gap for a, _ in pairs]
        figures = [
            Figure.of(f"{name}: {DIFFERENCE}", updates, "ratio", _promise(name)),
            Figure.of(f"{name}: {LOG_PROB_GAP}", gaps, "nats a token"),
        ]
    # A promise is not kept on the median.
    return [each.model_copy(update={"value": max(each.spread or ()), "against": against}) for each in figures]


def _promise(name: str) -> str | None:
    """What a declared lever may change; a variation of one that is only measured has promised nothing."""
    declared = next((each for each in LEVERS if each.name == name), None)
    return None if declared is None else f"<= {declared.bound + declared.rounding:g}"


def difference(base: Sequence[float], other: Sequence[float]) -> float:
    """|difference of the moves| / |move|."""
    gap = sum((a - b) ** 2 for a, b in zip(base, other, strict=True))
    return (gap / sum(a**2 for a in base)) ** 0.5


def merged(earlier: Result | None, found: Result, order: Sequence[str]) -> Result:
    """`found` with those rows of `earlier` that it has not measured anew; rows of levers that `order` lacks go."""
    if earlier is None:
        return found
    where = {"hardware": earlier.hardware}  # of rows that do not say
    kept = {name: {**where, **about} for name, about in earlier.config["levers"].items()}
    rows = {**kept, **found.config["levers"]}
    rows = {name: rows[name] for name in order if name in rows}
    sides = {**earlier.config["sides"], **found.config["sides"]}
    sides = {name: sides[name] for name in (PLAIN, *rows) if name in sides}
    figures = [
        each
        for name in rows
        for each in (found if name in found.config["levers"] else earlier).figures
        if each.name.startswith(f"{name}: ")
    ]
    config = {**found.config, "sides": sides, "levers": rows}
    return found.model_copy(update={"config": config, "figures": tuple(figures)})


def conflict(earlier: Result | None, shape: Mapping[str, Any], measured: Sequence[str]) -> str:
    """Why new rows of this shape cannot stand in a table with those that are kept; nothing: they can."""
    if earlier is None or set(earlier.config["levers"]) <= set(measured):
        return ""
    differing = [
        f"{key} = {earlier.config[key]}, not {value}" for key, value in shape.items() if earlier.config[key] != value
    ]
    if not differing:
        return ""
    return (
        f"{earlier.file_name} has other rows, measured with {', '.join(differing)}; give the same, or measure all "
        "levers at once, or take --dry"
    )
