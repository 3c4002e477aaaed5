"""The default configuration beside the time that an ideal program would need: `fourfold bench limit` in processes.

`python -m benchmarks.limit` needs a quiet machine. Each round is a process of its own, in which steps, products and
memory are measured one after the other (docs/speed.md has the formula); medians and ranges are over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_trl import CACHE, MODEL, SHAPES, USUAL, write_prompts
from benchmarks.results import ROOT, Figure, Result, commit, hardware, number, today, versions, write_result
from fourfold.config.loading import dump_toml, parse_config
from fourfold.planner.costs import WORKING

PACKAGES = ("torch", "transformers")
WHOLE_STEP = "step"
TOKENS_A_SECOND, PRODUCTS, MEMORY = "response tokens a second", "best rate of products", "bandwidth of memory"
# At least half of the limit (docs/speed.md).
TARGETS = {"step: share of the limit": ">= 0.5"}


def settings(args: argparse.Namespace, prompts: Path, folder: Path) -> str:
    """The configuration of the comparison with TRL, as TOML: everything else is the default."""
    shape = SHAPES[args.shape]
    tree: dict[str, Any] = {
        "output": str(folder / "run"),
        "model": {"path": args.model},
        "system": {"threads": args.threads},
        "stages": ["ppo"],
        "data": {"prompts": {"path": str(prompts)}},
        "reward": {"source": "function", "function": "benchmarks.limit:pays_for_length"},
        "critic": {"init": "actor"},
        "sampling": {"max_new_tokens": shape["new_tokens"]},
        "ppo": {
            "steps": 1,
            "rollout_batch_size": shape["batch"],
            "mini_batch_size": shape["batch"],
            "micro_batch_size": shape["micro_batch"],
            "num_epochs": args.epochs,
        },
    }
    return dump_toml(parse_config(tree, "the benchmark"))


def pays_for_length(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward that costs nothing: one more model would be one more thing to know about the figures."""
    return [float(len(response)) for response in responses]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The report of every round."""
    from fourfold.models.loading import resolve_model

    model, reports = resolve_model(args.model, CACHE.expanduser()), []
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="limit-") as name:
        folder = Path(name)
        write_prompts(model, args.prompt_tokens, folder / "prompts.jsonl", SHAPES[args.shape]["batch"])
        (folder / "limit.toml").write_text(settings(args, folder / "prompts.jsonl", folder), encoding="utf-8")
        for turn in range(args.rounds):
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "fourfold", "bench", "limit", str(folder / "limit.toml")]
            out = ["--steps", str(args.steps), "--json", str(folder / "limit.json")]
            subprocess.run([*command, *out], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
            reports.append(json.loads((folder / "limit.json").read_text(encoding="utf-8")))
    return reports


def limit_table(result: Result) -> list[str]:
    """A line a phase: medians, seconds with the range in brackets."""
    values = {figure.name: figure for figure in result.figures}
    rows = ["| phase | seconds | limit | share | MFU | TFLOP | peak MiB |", "|---" + "|---:" * 6 + "|"]
    for phase in (*WORKING, WHOLE_STEP):
        spent = values[f"{phase}: seconds"]
        low, high = spent.spread or (spent.value, spent.value)
        share, mfu = (f"{values[f'{phase}: {what}'].value:.0%}" for what in ("share of the limit", "MFU"))
        best, flops, peak = (number(values[f"{phase}: {what}"].value) for what in ("limit", "FLOPs", "peak memory"))
        took = f"{number(spent.value)} ({number(low)} - {number(high)})"
        rows.append(f"| {phase} | {took} | {best} | {share} | {mfu} | {flops} | {peak} |")
    speed, rate, memory = (number(values[name].value) for name in (TOKENS_A_SECOND, PRODUCTS, MEMORY))
    compute = result.config["compute"]
    return [
        *rows,
        "",
        f"{speed} response tokens a second; {compute} at {rate} GFLOP/s at best, memory at {memory} GB/s.",
    ]


def figures(reports: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Of every phase and of the step: seconds, limit, share, MFU and bytes; and tokens a second."""
    found: list[Figure] = []
    for index, line in enumerate(reports[0]["lines"]):
        rounds = [report["lines"][index] for report in reports]
        for what, key, unit, scale in (
            ("seconds", "seconds", "s", 1.0),
            ("limit", "limit_seconds", "seconds at best", 1.0),
            ("share of the limit", "share_of_limit", "share of the limit", 1.0),
            ("MFU", "mfu", "MFU", 1.0),
            ("FLOPs", "flops", "TFLOP", 1e12),
            ("peak memory", "peak_bytes", "MiB", 2**20),
        ):
            name = f"{line['phase']}: {what}"
            found.append(Figure.of(name, [each[key] / scale for each in rounds], unit, TARGETS.get(name)))
    found.append(Figure.of(TOKENS_A_SECOND, [each["tokens_per_second"] for each in reports], "tokens/s"))
    best = [max(rate for one, rate in each["products"] if one[0] == each["compute"]) / 1e9 for each in reports]
    found.append(Figure.of(PRODUCTS, best, "GFLOP/s"))
    found.append(Figure.of(MEMORY, [each["bandwidth"] / 1e9 for each in reports], "GB/s"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limit", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="as model.path of a configuration (default %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default=USUAL, help="responses x new tokens (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="PPO steps that count in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="print the result instead of writing it")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.steps < 1:
        parser.error(f"--rounds {args.rounds} --steps {args.steps}: allowed: at least one of each")
    reports = measure(args)
    asked = {name: value for name, value in vars(args).items() if name != "dry"}
    result = Result(
        name="limit" if args.shape == USUAL else f"limit-{args.shape}",
        date=today(),
        hardware=hardware(),
        versions=versions(PACKAGES),
        commit=commit(),
        config={**asked, "compute": reports[0]["compute"]},
        figures=tuple(figures(reports)),
    )
    print(result.model_dump_json(indent=2) if args.dry else write_result(result).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
