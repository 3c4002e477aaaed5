"""Measure what a lever does to a run's own models, what this machine can do, and how near to that a run comes.

quantization: reference and reward model with their weights in 8 or 4 bits, and run by llama.cpp (extra llama-cpp: in
float16, in Q8_0, or the .gguf file that model.path names), beside the same as the run holds them; the reward model by
ONNX Runtime too (extra onnx: in float32 and in INT8). The models are those that the stages sft and reward have left in
the output folder, or the base model.
machine: products, memory, disk and the way to a GPU, for plans with `--hardware detect`.
limit: PPO steps of a configuration, phase by phase, beside the time that an ideal program would need.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fourfold.planner.quantization import BY_LLAMA_CPP, BY_ONNX, QUANTIZED

KINDS = (*QUANTIZED, *BY_LLAMA_CPP, *BY_ONNX)

COLUMNS = """\
Columns: reference MiB and reward MiB, the whole models with embedding and head. KL bias: mean of log p(as held) -
log p(quantised), nats a token, which such a reference adds to the KL that is measured; |d log p|: mean of its size; KL:
the exact KL over the vocabulary. |d score|: mean difference of scores in their standard deviations; rank corr.:
Spearman's; pairs: held-out pairs ranked as people do. speed: tokens a second relative to as held, of the reference, or
of the reward model where ONNX Runtime runs it.
"""

LIMIT_COLUMNS = """\
Columns: limit, the seconds of the same work at the measured rates of its products and of memory, whichever takes longer
in each pass (docs/speed.md); share, limit / seconds; MFU, FLOPs / (seconds x the best rate of the compute type); FLOPs,
those that the algorithm cannot do without; waits for, what the limit waits for; peak, bytes as in metrics.jsonl.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold bench`."""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    quantization = what.add_parser(
        "quantization",
        help="weights in int8, NF4, GGUF and ONNX: bytes, errors in KL and score, speed",
        description=__doc__,
        epilog=COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _with_config(quantization)
    quantization.add_argument("--kinds", default=",".join(KINDS), help="kinds, by commas (default: %(default)s)")
    quantization.add_argument("--rows", type=int, default=128, help="texts, and pairs, at most (default %(default)s)")
    quantization.set_defaults(bench=_quantization)
    machine = what.add_parser(
        "machine",
        help="this machine: products, memory, disk, the way to a GPU",
        description="Measure this machine in seconds and keep the figures for plans with `--hardware detect`.",
        allow_abbrev=False,
    )
    machine.add_argument("--folder", metavar="FOLDER", help="where the disk is measured (default: the temporary one)")
    machine.set_defaults(bench=_machine)
    limit = what.add_parser(
        "limit",
        help="PPO steps by phase: seconds, share of the limit, MFU, tokens a second, peak bytes",
        description="Run a few PPO steps of a configuration and set beside them the time that an ideal program needs.",
        epilog=LIMIT_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _with_config(limit)
    limit.add_argument("--steps", type=int, default=3, help="steps that count, after one that warms up (%(default)s)")
    limit.set_defaults(bench=_limit)


def _with_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="TOML file of settings, as for `fourfold run`")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a setting"
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything there")


def run(args: argparse.Namespace) -> int:
    """`fourfold bench WHAT`."""
    return args.bench(args)


def _machine(args: argparse.Namespace) -> int:
    from pathlib import Path

    folder = None if args.folder is None else Path(args.folder).expanduser()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--folder {args.folder!r}: no such folder; allowed: one that may be written to")
    from fourfold.diagnostics.machine import measure
    from fourfold.planner.hardware.measured import measurement_file

    measured = measure(lambda line: print(line, flush=True), folder)
    for note in measured.cluster.notes:
        print(f"note: {note}")
    print(f"kept in {measurement_file()}")
    return 0


def _quantization(args: argparse.Namespace) -> int:
    kinds = [kind.strip() for kind in args.kinds.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--kinds: given {', '.join(map(repr, unknown))}; allowed: {', '.join(KINDS)}")
    if args.rows < 1:
        raise ValueError(f"--rows {args.rows}: allowed are 1 or more")
    from fourfold.config import load_config

    config = load_config(args.config, args.overrides)
    from rich.console import Console

    from fourfold.training.quantization_bench import bench_quantization, table

    report = bench_quantization(config, kinds, args.rows, _say)
    Console().print(table(report))
    _write(args.json, report.as_dict())
    return 0


def _limit(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: allowed are 1 or more")
    from fourfold.config import load_config

    config = load_config(args.config, args.overrides)
    if "ppo" not in config.stages:
        raise ValueError(f"{args.config}: stages are {list(config.stages)}; measured are steps of ppo; add it")
    from rich.console import Console

    from fourfold.training.limit_bench import bench_limit, table

    report = bench_limit(config, args.steps, _say)
    Console().print(table(report))
    _write(args.json, report.as_dict())
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(file: str | None, report: dict[str, Any]) -> None:
    """Where `--json` names a file."""
    if not file:
        return
    import json
    from pathlib import Path

    from fourfold.files import write_atomically

    write_atomically(Path(file).expanduser(), json.dumps(report, indent=2) + "\n")
