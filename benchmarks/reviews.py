"""The example's figures: reads the summaries of finished runs of examples/reviews.toml and writes a result.

`python -m benchmarks.reviews RUN [RUN ...]` takes the runs' folders; medians and spread are over the runs given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, versions, write_result
from fourfold.config.loading import saved_config

# (metric, unit, target)
CHANGES = (
    ("judge_mean", "VADER compound, after - before", ">= 0.4"),
    ("score_mean", "standard deviations of the sft texts' score, after - before", None),
)
AFTER = (
    ("kl_per_sequence", "nats", "< 10"),
    ("eos_share", "share", ">= 0.9"),
    ("mean_length", "tokens", None),
    ("ref_log_prob_per_token", "nats", None),
)
PACKAGES = ("torch", "transformers", "numpy")
STAGES = ("sft", "reward", "ppo")


def read_summary(run: Path) -> dict[str, Any]:
    """A run's summary; the seconds of a stage are the stage's own, because it may have been run by itself before."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    for stage in STAGES:
        done = json.loads((run / stage / "done.json").read_text(encoding="utf-8"))
        summary["seconds"][stage] = done["seconds"]
        summary["peak_bytes"][stage] = done["peak_bytes"]
    return summary


def figures(summaries: Sequence[dict[str, Any]]) -> list[Figure]:
    """Medians over the runs, with the range."""
    found = []
    for name, unit, target in CHANGES:
        gains = [s["after"][name] - s["before"][name] for s in summaries]
        found.append(Figure.of(f"{name}: gain on held-out prompts", gains, unit, target))
    for name, unit, target in AFTER:
        found.append(Figure.of(f"{name} after PPO", [s["after"][name] for s in summaries], unit, target))
    kept = [s["after"]["distinct_2"] / s["before"]["distinct_2"] for s in summaries]
    found.append(Figure.of("distinct_2: after / before", kept, "ratio", ">= 0.85"))
    accuracy = [s["reward_model"]["pair_accuracy"] for s in summaries]
    found.append(Figure.of("reward model: accuracy on held-out pairs of the example's length", accuracy, "share"))
    for phase in ("load", *STAGES):
        found.append(Figure.of(f"seconds of {phase}", [s["seconds"][phase] for s in summaries], "s"))
    stages = [sum(s["seconds"][phase] for phase in STAGES) for s in summaries]
    found.append(Figure.of("seconds of the three stages", stages, "s", "< 300"))
    peaks = [max(s["peak_bytes"].values()) / 2**20 for s in summaries]
    found.append(Figure.of("peak resident memory", peaks, "MiB"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the runs and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reviews", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    runs = parser.parse_args(arguments).runs
    summaries = [read_summary(run) for run in runs]
    configs = [saved_config(run).model_dump(mode="json", exclude={"output", "seed"}) for run in runs]
    if any(config != configs[0] for config in configs):
        parser.error("the runs have different settings; give runs that differ in seed and output only")
    result = Result(
        name="reviews",
        date=today(),
        hardware=hardware(),
        versions=versions(PACKAGES),
        commit=commit(),
        config={**configs[0], "seeds": [summary["seed"] for summary in summaries]},
        figures=tuple(figures(summaries)),
    )
    print(write_result(result).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
