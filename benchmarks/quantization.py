"""What fewer bits do to a run's own reference and reward model: `fourfold bench quantization`, kept as a result.

`python -m benchmarks.quantization RUN` takes the folder of a finished run of examples/reviews.toml, whose models after
sft and reward are measured in every kind; it needs the extras torchao, bitsandbytes, onnx and llama-cpp, and says in
the table which kind could not run. The table stands in docs/memory.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, versions, write_result

if TYPE_CHECKING:
    from fourfold.training.quantization_bench import Report

PACKAGES = ("torch", "transformers")
EXTRAS = ("torchao", "bitsandbytes", "onnxruntime", "llama-cpp-python")
# Of a line: the field, its unit, and how many of the unit one is.
MEASURED = {
    "reference_bytes": ("MiB", 2**-20),
    "reward_bytes": ("MiB", 2**-20),
    "kl_bias": ("nats a token", 1.0),
    "log_prob_gap": ("nats a token", 1.0),
    "kl_exact": ("nats a token", 1.0),
    "score_gap": ("standard deviations", 1.0),
    "score_rank_correlation": ("Spearman's", 1.0),
    "pair_accuracy": ("share", 1.0),
    "speed": ("ratio", 1.0),
}
COLUMNS = (
    "reference MiB", "reward MiB", "KL bias", "mean of the size of d log p", "exact KL", "mean of the size of d score",
    "rank correlation", "pairs", "speed",
)  # fmt: skip


def figures(report: Report) -> list[Figure]:
    """Every number of every kind that could be measured."""
    return [
        Figure(
            name=f"{line.kind}: {name}", value=getattr(line, name) * factor, unit=unit, spread=None,
            against="as held" if name == "speed" else None, target=None,
        )
        for line in report.lines
        for name, (unit, factor) in MEASURED.items()
        if getattr(line, name) is not None
    ]  # fmt: skip


def quantization_table(result: Result) -> list[str]:
    """A row for each kind, the weights as held first; below it on what it was measured, and what was noted."""
    values, about = {figure.name: figure.value for figure in result.figures}, result.config
    rows = [f"| weights | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind in about["notes"]:
        cells = (_cell(name, values.get(f"{kind}: {name}")) for name in MEASURED)
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    threads = f"{about['threads']} thread{'s' if about['threads'] != 1 else ''}"
    texts = f"{about['texts']} texts of {about['tokens']:,} tokens, {about['pairs']} pairs"
    rows += ["", f"* {texts}; as held: {about['held']}; {threads}."]
    return rows + [f"* {kind}: {note}." for kind, note in about["notes"].items() if note]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("bytes"):
        return f"{value:.1f}"
    if name == "pair_accuracy":
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "speed" else f"{value:+.4f}" if name == "kl_bias" else f"{value:.4f}"


def result_of(report: Report, example: str, threads: int) -> Result:
    """The result that is kept."""
    notes = {line.kind: line.note for line in report.lines}
    config = {"example": example, "threads": threads, "held": report.held, "notes": notes}
    counts = {name: getattr(report, name) for name in ("texts", "tokens", "pairs")}
    return Result(
        name="quantization",
        date=today(),
        hardware=hardware(),
        versions=versions([*PACKAGES, *_installed()]),
        commit=commit(),
        config=config | counts,
        figures=tuple(figures(report)),
    )


def _installed() -> list[str]:
    """The extras that are there; a kind whose library is missing has a note instead of figures."""
    have = {each.name for each in metadata.distributions()}
    return [name for name in EXTRAS if name in have]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    import torch

    from fourfold.cli.bench import KINDS
    from fourfold.config.loading import saved_config
    from fourfold.training.quantization_bench import bench_quantization

    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--rows", type=int, default=128, help="texts, and pairs, at most (default %(default)s)")
    given = parser.parse_args(arguments)
    report = bench_quantization(saved_config(given.run), KINDS, given.rows, lambda line: print(line, flush=True))
    print(write_result(result_of(report, given.run.name, torch.get_num_threads())).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
