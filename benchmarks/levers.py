"""What each declared lever saves and costs on a real model: a process with it beside one without it, in turn.

`python -m benchmarks.levers` needs a quiet machine; --lever NAME measures one. Levers come from planner/levers.py with
their settings, their baselines and what they promise: an exact one must leave actor and critic bit for bit as they are
without it. How far the others change an update is measured on its first, after which the sides sample other responses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peer_trl import SHAPE, Comparison, Side, compared, measure, parse_arguments
from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, write_result
from benchmarks.worker import PHASES, WorkerReport
from fourfold.planner.levers import LEVERS, SEPARATE, Change

# A baseline that names them means one micro-batch, and names the sizes of the tests' tiny runs; here it is one anyway.
BATCH_SIZES = ("ppo.mini_batch_size", "ppo.micro_batch_size")
PLAIN = "four separate models"


@dataclass(frozen=True)
class Subject:
    """Settings put on a baseline, and what they do to an update."""

    name: str
    settings: Mapping[str, Any]
    change: Change = "exact"
    baseline: Mapping[str, Any] = field(default_factory=dict)

    @property
    def without(self) -> Side:
        """The baseline; those of several subjects may be one."""
        return _side(self._baseline)

    @property
    def having(self) -> Side:
        """The baseline with the lever."""
        added = {key: value for key, value in self.settings.items() if self.baseline.get(key) != value}
        return _side(self._baseline | added, self.name)

    @property
    def _baseline(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.baseline.items() if key not in BATCH_SIZES}
        return {**SEPARATE, **kept}


def _side(settings: Mapping[str, Any], name: str = "") -> Side:
    """How the worker is started; a side without a name is called by its settings."""
    other = {key: value for key, value in settings.items() if SEPARATE.get(key) != value}
    chosen = [f"{key}={json.dumps(value)}" for key, value in other.items()]
    arguments = [text for setting in chosen for text in ("--set", setting)]
    return Side(name or ", ".join([PLAIN, *chosen]), "fourfold", "float32", ("--sharing", "none", *arguments))


CHECKPOINTING = {"memory.checkpointing": "layers"}
# What is not a lever of its own: others of their strengths, and those that save more where they are on together.
MORE = (
    Subject("adapters over a trunk: 4 layers", {"sharing.mode": "adapters", "adapters.layers": 4}, "other parameters"),
    Subject("checkpointing: every second layer", {**CHECKPOINTING, "memory.checkpoint_every": 2}),
    Subject("micro-batches of 4", {"ppo.micro_batch_size": 4}, "bounded"),
    Subject("park reference and reward", {"reference.residency": "park", "reward.residency": "park"}),
    Subject("stream reference and reward", {"reference.residency": "stream", "reward.residency": "stream"}),
)
SUBJECTS = (
    *(Subject(each.name, each.settings, each.change, each.baseline) for each in LEVERS if not each.not_benchmarked),
    *MORE,
)


def figures(subjects: Sequence[Subject], reports: Mapping[str, Sequence[WorkerReport]]) -> list[Figure]:
    """Seconds, peaks and resident bytes of each side, then each lever against its baseline."""
    found: list[Figure] = []
    for name, runs in reports.items():
        found += [
            Figure.of(f"{name}: seconds per update", [run.steady_seconds for run in runs], "s"),
            Figure.of(f"{name}: weights at start", [sum(run.resident_mib.values()) for run in runs], "MiB"),
            Figure.of(f"{name}: peak memory", [run.peak_rss_mib for run in runs], "MiB"),
        ]
        found += [
            Figure.of(f"{name}: peak in {phase}", [run.phase_peak_mib[phase] for run in runs], "MiB")
            for phase in PHASES
        ]
    for subject in subjects:
        base, mine = reports[subject.without.name], reports[subject.having.name]
        found += compared(Comparison(subject.having.name, subject.without.name, None, None), mine, base)
        found += _changes(subject, mine, base)
    return found


def _changes(subject: Subject, mine: Sequence[WorkerReport], base: Sequence[WorkerReport]) -> list[Figure]:
    """What the lever did to the update: differing weights where there may be none, else the size of the difference."""
    pairs = list(zip(mine, base, strict=True))
    if subject.change == "other parameters":
        return []
    if subject.change == "exact":
        of, values, target = "rounds with other weights", [float(a.weights != b.weights) for a, b in pairs], "<= 0"
    else:
        of, values, target = "difference of the update", [difference(b.moves(), a.moves()) for a, b in pairs], None
    name = f"{subject.name} / {subject.without.name}: {of}"
    worst = max(values)  # a promise is not kept on the median
    figure = Figure.of(name, values, "share" if target else "ratio", target)
    return [figure.model_copy(update={"value": worst, "against": subject.without.name})]


def difference(base: Sequence[float], other: Sequence[float]) -> float:
    """|difference of the moves| / |move|."""
    gap = sum((a - b) ** 2 for a, b in zip(base, other, strict=True))
    return (gap / sum(a**2 for a in base)) ** 0.5


def result(
    subjects: Sequence[Subject], reports: Mapping[str, Sequence[WorkerReport]], args: argparse.Namespace
) -> Result:
    """All that is kept: the figures, what stood against what, and what is trained (unless as on the first side)."""
    told = [next(iter(reports)), *(each.name for each in subjects if each.change == "other parameters")]
    sides = {
        name: {"what": run.what, "dtype": run.dtype, "trainable_parameters": run.trainable_parameters}
        for name, run in ((name, reports[name][0]) for name in told)
    }
    levers = {each.name: {"against": each.without.name, "change": each.change} for each in subjects}
    shape = {name: getattr(args, name) for name in ("model", "rounds", *SHAPE)}
    return Result(
        name="levers",
        date=today(),
        hardware=hardware(),
        versions=next(iter(reports.values()))[0].versions,
        commit=commit(),
        config={**shape, "sides": sides, "levers": levers},
        figures=tuple(figures(subjects, reports)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levers", description=__doc__, add_help=False)
    parser.add_argument("--lever", action="append", choices=[each.name for each in SUBJECTS])
    own, rest = parser.parse_known_args(arguments)
    args = parse_arguments(rest)
    subjects = [each for each in SUBJECTS if not own.lever or each.name in own.lever]
    sides = {side.name: side for each in subjects for side in (each.without, each.having)}
    found = result(subjects, measure(args, list(sides.values())), args)
    print(found.model_dump_json(indent=2) if args.dry else write_result(found).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
