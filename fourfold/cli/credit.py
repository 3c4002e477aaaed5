"""Which tokens helped one part of the reward and hurt another, as a vector critic sees it.

For runs with critic.heads = 'vector' or 'multi', from the rollouts that they keep at every evaluation.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold credit`."""
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run (its `output`)")
    parser.add_argument("--step", type=int, help="a step with a kept rollout (default: the last)")
    parser.add_argument("--training", action="store_true", help="the rollout learned from instead of the held-out one")
    parser.add_argument("--top", type=int, default=12, help="tokens and places to show (default 12)")
    parser.add_argument("--json", action="store_true", help="everything as JSON, unrounded")


def run(args: argparse.Namespace) -> int:
    """`fourfold credit RUN`."""
    if args.top < 1:
        raise ValueError(f"--top {args.top}: allowed are 1 or more")
    from fourfold.training.credit import credit_report

    step, credit = credit_report(args.run_folder, step=args.step, training=args.training, top=args.top)
    if args.json:
        import json

        print(json.dumps({"step": step, **credit.as_dict()}, indent=2, ensure_ascii=False))
        return 0
    from rich.console import Console

    from fourfold.diagnostics.credit_tables import credit_tables

    console = Console()
    kind = "learned from" if args.training else "held out"
    console.print(f"step {step}, {kind}: {credit.tokens:,} response tokens", highlight=False)
    for table in credit_tables(credit):
        console.print(table)
    return 0
