"""What each lever saves and costs on a real model: a process with it beside one without it, in turn.

`python -m benchmarks.levers` needs a quiet machine. An exact lever must leave actor and critic bit for bit as they are
without it; those that train other parameters say so by what they train.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peer_trl import SHAPE, Comparison, Side, compared, measure, parse_arguments
from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, write_result
from benchmarks.worker import WorkerReport


@dataclass(frozen=True)
class Lever:
    """Settings put on a baseline, and whether the update must be bit-equal to the baseline's."""

    name: str
    against: str
    sharing: str
    overrides: tuple[str, ...] = ()
    exact: bool = False
    dtype: str = "float32"

    def side(self) -> Side:
        """How its worker is started."""
        chosen = [text for override in self.overrides for text in ("--set", override)]
        return Side(self.name, "fourfold", self.dtype, ("--sharing", self.sharing, *chosen))


PARKED = ("reference.residency=park", "reward.residency=park")
STREAMED = ("reference.residency=stream", "reward.residency=stream")
UNCLIPPED = ("ppo.max_grad_norm=0", "critic.max_grad_norm=0")
BASELINE = Lever("four separate models", "", "none")
LEVERS = (
    Lever("trunk of 26 layers", BASELINE.name, "trunk"),
    Lever("adapters on every layer", BASELINE.name, "adapters"),
    Lever("adapters on 4 layers over a trunk", BASELINE.name, "adapters", ("adapters.layers=4",)),
    Lever("checkpointing: layers", BASELINE.name, "none", ("memory.checkpointing=layers",), exact=True),
    Lever(
        "checkpointing: every second layer",
        BASELINE.name,
        "none",
        ("memory.checkpointing=layers", "memory.checkpoint_every=2"),
        exact=True,
    ),
    Lever("checkpointing: attention", BASELINE.name, "none", ("memory.checkpointing=attention",), exact=True),
    Lever("park reference", BASELINE.name, "none", ("reference.residency=park",), exact=True),
    Lever("stream reference", BASELINE.name, "none", ("reference.residency=stream",), exact=True),
    Lever("park reference and reward", BASELINE.name, "none", (*PARKED,), exact=True),
    Lever("stream reference and reward", BASELINE.name, "none", (*STREAMED,), exact=True),
    Lever("park optimizer", BASELINE.name, "none", ("memory.optimizer_residency=park",), exact=True),
    Lever("bfloat16", BASELINE.name, "none", dtype="bfloat16"),
    Lever(
        "offload optimizer",
        "bfloat16",
        "none",
        ("memory.optimizer_residency=offload",),
        exact=True,
        dtype="bfloat16",
    ),
    Lever("no clipping", BASELINE.name, "none", UNCLIPPED),
    Lever(
        "optimizer in backward", "no clipping", "none", (*UNCLIPPED, "memory.optimizer_in_backward=true"), exact=True
    ),
    Lever("adamw_8bit", BASELINE.name, "none", ("ppo.optimizer=adamw_8bit", "critic.optimizer=adamw_8bit")),
    Lever("activation offload to a file", BASELINE.name, "none", ("memory.activation_offload=true",), exact=True),
)


def figures(reports: Mapping[str, Sequence[WorkerReport]]) -> list[Figure]:
    """Seconds, peak and resident bytes of each, then each lever against its baseline."""
    found: list[Figure] = []
    for name, runs in reports.items():
        found += [
            Figure.of(f"{name}: seconds per update", [run.steady_seconds for run in runs], "s"),
            Figure.of(f"{name}: weights at start", [sum(run.resident_mib.values()) for run in runs], "MiB"),
            Figure.of(f"{name}: peak memory", [run.peak_rss_mib for run in runs], "MiB"),
        ]
    for lever in LEVERS:
        if lever.name in reports and lever.against in reports:
            mine, base = reports[lever.name], reports[lever.against]
            found += compared(Comparison(lever.name, lever.against, None, None), mine, base)
            if lever.exact:
                found.append(_difference(lever, mine, base))
    return found


def _difference(lever: Lever, mine: Sequence[WorkerReport], base: Sequence[WorkerReport]) -> Figure:
    """Share of the rounds whose actor and critic are not the baseline's, bit for bit."""
    differing = [float(a.weights != b.weights) for a, b in zip(mine, base, strict=True)]
    name = f"{lever.name} / {lever.against}: rounds with other weights"
    return Figure.of(name, differing, "share", "<= 0").model_copy(update={"against": lever.against})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    names = [lever.name for lever in LEVERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levers", description=__doc__, add_help=False)
    parser.add_argument("--lever", action="append", choices=names)
    own, rest = parser.parse_known_args(arguments)
    args = parse_arguments(rest)
    wanted = set(own.lever or names)
    wanted |= {lever.against for lever in LEVERS if lever.name in wanted}
    chosen = [BASELINE, *(lever for lever in LEVERS if lever.name in wanted)]
    reports = measure(args, [lever.side() for lever in chosen])
    sides = {
        name: {"what": runs[0].what, "dtype": runs[0].dtype, "trainable_parameters": runs[0].trainable_parameters}
        for name, runs in reports.items()
    }
    found = Result(
        name="levers",
        date=today(),
        hardware=hardware(),
        versions=next(iter(reports.values()))[0].versions,
        commit=commit(),
        config={**{name: getattr(args, name) for name in ("model", "rounds", *SHAPE)}, "sides": sides},
        figures=tuple(figures(reports)),
    )
    print(found.model_dump_json(indent=2) if args.dry else write_result(found).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
