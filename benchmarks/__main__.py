"""Run the measurements, write their results and tables, and say what got worse: `python -m benchmarks [NAME ...]`.

Needs a quiet machine and the source checkout. Without names those run that take less than two hours together. What
reads runs that are finished has to be told which: benchmarks.reviews, benchmarks.presets.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks import regression, report
from benchmarks.results import ROOT

# Result: the program that writes it, with its arguments.
MEASUREMENTS: Mapping[str, tuple[str, ...]] = {
    "peer": ("benchmarks.peer_trl",),
    "peer-64x64": ("benchmarks.peer_trl", "--shape", "64x64"),
    "limit": ("benchmarks.limit",),
    "growth": ("benchmarks.growth",),
    "generation": ("benchmarks.generation",),
    "levers": ("benchmarks.levers",),
    "planner": ("benchmarks.planner",),
    "planner-time": ("benchmarks.planner_time",),
    "reward-accuracy": ("benchmarks.reward_accuracy",),
}
USUAL = ("peer", "peer-64x64", "limit", "growth", "generation")


def measure(names: Sequence[str]) -> list[str]:
    """Run them one after the other; the names of those that failed, whose messages stand above."""
    failed = []
    for name in names:
        print(f"== {name}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", *MEASUREMENTS[name]], cwd=ROOT, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            failed.append(name)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all were measured and nothing got worse, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)} (default: {', '.join(USUAL)})"
    )
    names = parser.parse_args(arguments).names or USUAL
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        parser.error(f"{', '.join(unknown)}: no such measurement; allowed: {', '.join(MEASUREMENTS)}")
    failed = measure(names)
    tables = report.main([])
    worse = regression.main(list(names))
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed or tables or worse else 0


if __name__ == "__main__":
    sys.exit(main())
