"""How the cost of an update grows with tokens, rows and epochs, each over a decade: `python -m benchmarks.growth`.

One of the three is varied while the others stay; each point is a Fourfold worker of its own, as in the comparison with
TRL. The exponent is the slope of log(seconds) against log(size) by least squares: 1 is proportional, less has a part
that does not grow, more grows faster than the work. The middle point over the straight line between the ends says how
straight the line is: 1 on it, less where the cost bends upwards.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peer_trl import SIDES, measure, parse_arguments
from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, write_result
from benchmarks.worker import PHASES, WorkerReport

# Option: the name of what grows, and its sizes; and what stays while another one grows.
AXES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "new-tokens": ("tokens", (8, 24, 80)),
    "batch": ("rows", (8, 24, 80)),
    "epochs": ("epochs", (1, 3, 10)),
}
STAYS = {"new-tokens": 24, "batch": 16, "epochs": 2, "micro-batch": 8}
SIDE = "Fourfold trunk bfloat16"
ASKED = ("model", "updates", "rounds", "threads")
UPDATE = "update"
# Attention's part that grows with the square is small at these lengths; the rest must not grow faster than its work.
TARGET = "<= 1.1"
Points = Mapping[int, Sequence[WorkerReport]]  # by size, one report a round


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of log(seconds) against log(size) by least squares."""
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope


def straightness(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The middle point over the straight line through the first and the last."""
    first, middle, last = range(0, len(sizes), len(sizes) // 2)
    slope = (seconds[last] - seconds[first]) / (sizes[last] - sizes[first])
    return seconds[middle] / (seconds[first] + slope * (sizes[middle] - sizes[first]))


def size_of(what: str, given: int, run: WorkerReport, args: argparse.Namespace) -> float:
    """What has grown: of tokens those that were drawn, with their prompts; a response may end early."""
    return run.steady_tokens + args.batch * args.prompt_tokens if what == "tokens" else float(given)


def figures(what: str, points: Points, args: argparse.Namespace) -> list[Figure]:
    """Seconds at each size, then what they say of the growth, round by round."""
    found = [
        Figure.of(f"{what} {given}: seconds an update", [run.steady_seconds for run in runs], "s")
        for given, runs in points.items()
    ]
    rounds = list(zip(*points.values(), strict=True))
    sizes = [[size_of(what, given, run, args) for given, run in zip(points, runs, strict=True)] for runs in rounds]
    for phase in (UPDATE, *PHASES):
        spent = [[run.steady_seconds if phase == UPDATE else run.phases[phase] for run in runs] for runs in rounds]
        grown = [exponent(x, y) for x, y in zip(sizes, spent, strict=True)]
        found.append(Figure.of(f"{what}: exponent of the {phase}", grown, "exponent", TARGET))
        if phase == UPDATE:
            lines = [straightness(x, y) for x, y in zip(sizes, spent, strict=True)]
            found.append(Figure.of(f"{what}: middle over the straight line", lines, "ratio"))
    return found


def points_of(option: str, given: argparse.Namespace) -> tuple[Points, argparse.Namespace]:
    """A worker for each size; and the arguments of the last."""
    side = next(side for side in SIDES if side.name == SIDE)
    points: dict[int, Sequence[WorkerReport]] = {}
    args = given
    for size in AXES[option][1]:
        asked = {name: getattr(given, name) for name in ASKED}
        shape = STAYS | {option: size} | asked
        args = parse_arguments([text for name, value in shape.items() for text in (f"--{name}", str(value))])
        print(f"{AXES[option][0]}: {size}", file=sys.stderr, flush=True)
        points[size] = measure(args, [side])[SIDE]
    return points, args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    defaults = parse_arguments([])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--axis", action="append", choices=AXES, help="only this one; may be repeated")
    parser.add_argument("--model", default=defaults.model, help="as model.path of a configuration (%(default)s)")
    parser.add_argument("--updates", type=int, default=3, help="updates a run; the first warms up and is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every size; the medians are reported")
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--dry", action="store_true", help="print the result instead of writing it")
    given = parser.parse_args(arguments)
    found: list[Figure] = []
    versions: dict[str, str] = {}
    for option in given.axis or AXES:
        points, args = points_of(option, given)
        found += figures(AXES[option][0], points, args)
        versions |= next(iter(points.values()))[0].versions
    config: dict[str, Any] = {"stays": STAYS, "axes": {option: list(AXES[option][1]) for option in given.axis or AXES}}
    result = Result(
        name="growth",
        date=today(),
        hardware=hardware(),
        versions=versions,
        commit=commit(),
        config=config | {name: getattr(given, name) for name in ASKED},
        figures=tuple(found),
    )
    print(result.model_dump_json(indent=2) if given.dry else write_result(result).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
