"""The reward model on all held-out pairs: the example's stages sft and reward with more pairs, once a seed.

`python -m benchmarks.reward_accuracy` keeps nothing but its result; every run is a `fourfold run` of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, versions, write_result

EXAMPLE = ROOT / "examples" / "reviews.toml"
PACKAGES = ("torch", "transformers", "numpy")
# The example drops long snippets and takes few pairs, to be done in minutes; here every test pair counts.
SETTINGS: dict[str, Any] = {
    "stages": ["sft", "reward"],
    "data.max_text_tokens": 128,
    "reward.max_pairs": 6000,
    "reward.learning_rate": 6e-4,
    "reward.weight_decay": 0.1,
    "reward.batch_size": 32,
    "reward.micro_batch_size": 16,
}


def run(seed: int, folder: Path) -> dict[str, Any]:
    """The summary of one seed."""
    values = {**SETTINGS, "seed": seed, "output": str(folder)}
    overrides = [text for key, value in values.items() for text in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "fourfold", "run", str(EXAMPLE)]
    subprocess.run([*command, *overrides], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def figures(summaries: Sequence[dict[str, Any]]) -> tuple[Figure, ...]:
    """Mean accuracy over the seeds with its range, and what it took."""
    accuracy = [summary["reward_model"]["pair_accuracy"] for summary in summaries]
    seconds = [summary["seconds"]["sft"] + summary["seconds"]["reward"] for summary in summaries]
    pairs = summaries[0]["stages"]["reward"]["test_pairs"]

    name = f"reward model: accuracy on {pairs:,} held-out pairs, mean of {len(summaries)} seeds"
    mean = Figure.of(name, accuracy, "share", ">= 0.87").model_copy(update={"value": statistics.mean(accuracy)})
    return mean, Figure.of("seconds of sft and reward", seconds, "s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_accuracy", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args(arguments).seeds
    with tempfile.TemporaryDirectory(prefix="reward-accuracy-") as folder:
        summaries = [run(seed, Path(folder) / str(seed)) for seed in seeds]
    result = Result(
        name="reward-accuracy",
        date=today(),
        hardware=hardware(),
        versions=versions(PACKAGES),
        commit=commit(),
        config={**SETTINGS, "example": "examples/reviews.toml", "seeds": seeds},
        figures=figures(summaries),
    )
    print(write_result(result).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
