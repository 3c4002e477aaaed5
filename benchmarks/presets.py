"""What the files in examples/levers come to: reads finished runs of them, several seeds each, and writes a result.

`python -m benchmarks.presets RUN [RUN ...]` takes the runs' folders, named after their file and, but for the first
seed, a number: runs/levers/lora, runs/levers/lora-1. Presets of which no run is given keep their figures. Medians and
spread are over the seeds of a file. Tensors are counted where a run was given `memory.count_tensors`, which makes its
seconds longer: one seed with it is enough.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import (
    ROOT,
    Figure,
    Result,
    cell,
    commit,
    hardware,
    newest,
    origin,
    stamp_of,
    today,
    versions,
    write_result,
)
from benchmarks.reviews import PACKAGES, STAGES, read_summary
from fourfold.config.loading import saved_config
from fourfold.diagnostics.run_files import TIMELINE
from fourfold.diagnostics.trackers import read_jsonl

Summary = dict[str, Any]
UNITS = {
    "judge": "VADER compound, after - before",
    "score": "standard deviations, after - before",
    "KL": "nats a sequence",
    "distinct-2": "after / before",
    "pairs": "share of held-out pairs ranked as people do",
    "seconds": "s",
    "peak": "MiB",
    "tensors": "MiB",
    "tensors in load": "MiB",
    "tensors in sft": "MiB",
    "tensors in reward": "MiB",
}


DEALS = 10_000  # of a permutation test
TARGETS = {"max-savings: tensors": "<= 358.4", "full: tensors": ">= 5120"}  # 0.35 and 5 GiB


def preset_of(run: Path) -> str:
    """The file that a run's folder is named after."""
    return re.sub(r"-\d+$", "", run.name)


def counted_bytes(run: Path) -> dict[str, int]:
    """The most bytes of live tensors (weights, gradients, states, activations) at any moment, where they were counted.

    By what ran: "load" (the base model, or the four roles of ppo), "sft", "reward", and "ppo" without its loading.
    """
    found: dict[str, int] = {}
    for row in read_jsonl(run / TIMELINE):
        size = row.get("tensor_peak_bytes")
        if size is not None and row["phase"] != "ppo":  # the whole stage, with its loading
            name = "load" if row["phase"] == "load" else row["stage"]
            found[name] = max(found.get(name, 0), size)
    return found


def measured(summary: Summary) -> dict[str, float]:
    """The figures of one run, by the names of UNITS; those of `tensors` where they were counted, in ppo and before."""
    before, after = summary["before"], summary["after"]
    counted = {name: size / 2**20 for name, size in summary["counted_bytes"].items()}
    return {
        "judge": after["judge_mean"] - before["judge_mean"],
        "score": after["score_mean"] - before["score_mean"],
        "KL": after["kl_per_sequence"],
        "distinct-2": after["distinct_2"] / before["distinct_2"],
        "pairs": summary["reward_model"]["pair_accuracy"],
        "seconds": sum(summary["seconds"][stage] for stage in STAGES),
        "peak": max(summary["peak_bytes"].values()) / 2**20,
        **{"tensors" if name == "ppo" else f"tensors in {name}": size for name, size in counted.items()},
    }


def figures(presets: Mapping[str, Sequence[Summary]]) -> list[Figure]:
    """Every figure of every preset: the median over its seeds, with the range."""
    found = []
    for preset, summaries in presets.items():
        runs = [measured(summary) for summary in summaries]
        for name, unit in UNITS.items():
            if values := [run[name] for run in runs if name in run]:
                found.append(Figure.of(f"{preset}: {name}", values, unit, TARGETS.get(f"{preset}: {name}")))
    return found


def presets_table(result: Result) -> list[str]:
    """The lines of the table: a row for each preset, medians with the range in brackets."""
    values = {figure.name: figure for figure in result.figures}
    rows = [f"| preset | seeds | {' | '.join(f'{name} ({unit})' for name, unit in UNITS.items())} |"]
    rows.append("|---" * (len(UNITS) + 2) + "|")
    for preset, about in result.config["presets"].items():
        cells = [cell(values.get(f"{preset}: {name}")) for name in UNITS]
        rows.append(f"| [{preset}](../examples/levers/{preset}.toml) | {len(about['seeds'])} | {' | '.join(cells)} |")
    return rows


def judges_apart(result: Result) -> list[str]:
    """Whether the presets end at the same held-out gain within the noise of seeds: a permutation test.

    The statistic is the share of the variance over all seeds that lies between presets; it is compared with that of the
    same gains dealt to the presets at random (Fisher 1935, "The Design of Experiments", section 21).
    """
    presets = result.config["presets"]
    groups = {name: about["judges"] for name, about in presets.items() if len(about.get("judges", ())) > 1}
    if len(groups) < 2:
        return []
    sizes, gains = [len(each) for each in groups.values()], [gain for each in groups.values() for gain in each]
    generator, dealt = random.Random(0), 0
    found = between(gains, sizes)
    for _ in range(DEALS):
        shuffled = generator.sample(gains, len(gains))
        dealt += between(shuffled, sizes) >= found - 1e-12
    without = [name for name in presets if name not in groups]
    left_out = f" (without {', '.join(without)}, of which no gains of several seeds are kept)" if without else ""
    return [
        f"Judge: which preset it is explains {found:.0%} of the variance over seeds of {', '.join(groups)}{left_out}; "
        f"the same gains dealt at random explain as much in {dealt / DEALS:.1%} of {DEALS:,} deals."
    ]


def between(gains: Sequence[float], sizes: Sequence[int]) -> float:
    """The share of the variance that lies between groups of these sizes, which stand one after the other."""
    mean, rest, explained = statistics.fmean(gains), list(gains), 0.0
    total = sum((gain - mean) ** 2 for gain in gains)
    for size in sizes:
        group, rest = rest[:size], rest[size:]
        explained += size * (statistics.fmean(group) - mean) ** 2
    return explained / total if total else 0.0


def presets_origins(result: Result) -> list[str]:
    """Where and when the presets were measured: a line for those that were measured together."""
    told: dict[str, list[str]] = {}
    for preset, about in result.config["presets"].items():
        told.setdefault(origin(result, about.get("measured")), []).append(preset)
    return [f"* {', '.join(names)}: {where}." for where, names in told.items()]


def merged(earlier: Result | None, found: Result) -> Result:
    """The result with the presets of the earlier one that were not measured again, and where they were."""
    if earlier is None:
        return found
    measured = stamp_of(earlier)
    new = found.config["presets"]
    kept = {
        name: {"measured": measured, **about} for name, about in earlier.config["presets"].items() if name not in new
    }
    figures = [each for each in earlier.figures if each.name.partition(": ")[0] in kept]
    config = {"presets": dict(sorted({**kept, **new}.items()))}
    return found.model_copy(update={"config": config, "figures": (*figures, *found.figures)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the runs and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    runs: list[Path] = parser.parse_args(arguments).runs
    presets: dict[str, list[Summary]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for run in runs:
        name, summary = preset_of(run), read_summary(run) | {"counted_bytes": counted_bytes(run)}
        apart = {"output": True, "seed": True, "memory": {"count_tensors"}}
        config = saved_config(run).model_dump(mode="json", exclude=apart)
        if configs.setdefault(name, config) != config:
            parser.error(f"{run} has other settings than the runs of {name!r} before it; give runs that differ in seed")
        presets.setdefault(name, []).append(summary)
    stamp = {"date": today(), "hardware": hardware(), "commit": commit(), "versions": versions(PACKAGES)}
    about = {
        name: {
            "settings": configs[name],
            "seeds": [each["seed"] for each in given],
            "judges": [measured(each)["judge"] for each in given],
            "measured": stamp,
        }
        for name, given in presets.items()
    }
    found = Result(name="presets", config={"presets": about}, figures=tuple(figures(presets)), **stamp)  # type: ignore[arg-type]
    earlier = newest("presets")
    print(write_result(merged(earlier, found), instead_of=earlier).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
