"""Seconds of a step's phases as `fourfold.planner` predicts them for this machine, beside those that runs take.

`python -m benchmarks.planner_time` measures the machine as `fourfold bench machine` does, then runs each case for a few
PPO steps in a process of its own, on models of random weights, and compares the medians of all steps but the first.
--case TEXT runs those with that text in their names, --dry prints the result. Seconds are those of a quiet machine:
nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner import (
    ADAPTERS,
    HALF,
    PACKAGES,
    PHASES,
    SEPARATE,
    TRUNK,
    Case,
    Work,
    asked,
    carry_out,
    in_a_process,
    scene_of,
)
from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, versions, write_result
from fourfold.planner.candidates import estimate
from fourfold.planner.hardware.machine import Cluster

STEPS = 3  # that are measured, after one in which the allocator and the kernels' caches fill
TARGET = "<= 0.25"
BATCH = (16, 32, 32, 8)
CASES = (
    Case("smollm2-135m", (TRUNK,), BATCH),
    Case("smollm2-135m", (TRUNK, HALF), BATCH),
    Case("smollm2-135m", (ADAPTERS,), BATCH),
    Case("smollm2-135m", (SEPARATE,), BATCH),
    Case("llama", (SEPARATE,), BATCH),
    Case("llama", (SEPARATE, 'memory.checkpointing="layers"'), BATCH),
)


@dataclass(frozen=True)
class Timed:
    """Seconds of one case's phases."""

    case: Case
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    @property
    def share_errors(self) -> dict[str, float]:
        """How far each phase's predicted share of a step is off, relative to the measured one."""
        whole, planned = sum(self.measured.values()), sum(self.predicted.values())
        return {
            phase: self.predicted[phase] / planned / (seconds / whole) - 1 for phase, seconds in self.measured.items()
        }

    @property
    def step_error(self) -> float:
        """How far the predicted seconds of a whole step are off."""
        return sum(self.predicted.values()) / sum(self.measured.values()) - 1


def time_case(
    case: Case, folder: Path, cluster: Cluster, threads: int, steps: int = STEPS, work: Work = in_a_process
) -> Timed:
    """A run of the case with so many threads, and the planner's seconds of the same run on this hardware."""
    run = Case(case.model, (*case.settings, "memory.count_tensors=false", f"system.threads={threads}"), case.batch)
    found, lengths = carry_out(run, folder, 1 + steps, work)
    _, costs = estimate(scene_of(run, folder, lengths, cluster))
    measured = {phase: statistics.median(found["seconds"][phase][1:]) for phase in PHASES}
    return Timed(case, measured, {phase: costs.seconds[phase] for phase in PHASES})  # type: ignore[index]


def figures(found: Sequence[Timed]) -> list[Figure]:
    """Errors over all cases, then the seconds of every phase of every case."""
    shares = [abs(error) for each in found for error in each.share_errors.values()]
    steps = [abs(each.step_error) for each in found]
    listed = [
        _figure("error of a phase's share of a step, worst", max(shares), "ratio", TARGET),
        _figure("error of a phase's share of a step, median", statistics.median(shares), "ratio"),
        _figure("error of a step's seconds, worst", max(steps), "ratio"),
    ]
    for each in found:
        for phase in PHASES:
            name = f"{each.case.name}: {phase}"
            listed.append(_figure(f"{name} measured", each.measured[phase], "s"))
            listed.append(_figure(f"{name} predicted", each.predicted[phase], "s"))
    return listed


def _figure(name: str, value: float, unit: str, target: str | None = None) -> Figure:
    return Figure(name=name, value=value, unit=unit, spread=None, against=None, target=target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_time", description=__doc__)
    args, cases = asked(parser, CASES, arguments)
    import torch

    from fourfold.diagnostics.machine import measure

    cluster = measure(_say).cluster
    found = []
    with tempfile.TemporaryDirectory(prefix="fourfold-planner-time-") as folder:
        for case in cases:
            found.append(time_case(case, Path(folder), cluster, torch.get_num_threads()))
            _say(f"{case.name}: {', '.join(f'{phase} {e:+.0%}' for phase, e in found[-1].share_errors.items())}")
    result = Result(
        name="planner-time",
        date=today(),
        hardware=hardware(),
        versions=versions(PACKAGES),
        commit=commit(),
        config={"cases": [case.name for case in cases], "steps": STEPS, "threads": torch.get_num_threads()},
        figures=tuple(figures(found)),
    )
    print(result.model_dump_json(indent=2) if args.dry else write_result(result).relative_to(ROOT))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
