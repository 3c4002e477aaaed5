"""Write with the trained actor, beside the reference it started from.

Prompts come from --prompt (may be repeated) or from the run's held-out prompts.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold sample`."""
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run (its `output`)")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt, taken whole; may be repeated")
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt through the chat template as a user message"
    )
    parser.add_argument(
        "--count", type=int, default=4, help="held-out prompts to use when no --prompt is given (default 4)"
    )
    parser.add_argument("--max-new-tokens", type=int, help="longest response in tokens (default: as in the run)")
    parser.add_argument("--temperature", type=float, help="sampling temperature above 0 (default: as in the run)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other responses (default 0)")
    parser.add_argument(
        "--weights",
        default="",
        metavar="NAME=NUMBER,...",
        help="weights of the reward's parts that prompts are told of, e.g. safety=0.8, for a run with reward.weights = "
        "'sampled'; parts that are not named share the rest of 1 in proportion to their mean weights in the run "
        "(default: the mean weights)",
    )
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the last step")


def run(args: argparse.Namespace) -> int:
    """`fourfold sample RUN`."""
    if args.chat and not args.prompt:
        raise ValueError("--chat is for prompts given by --prompt: the run's own are encoded as in the run")
    if args.count < 1:
        raise ValueError(f"--count {args.count}: allowed are 1 or more")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: allowed are 1 or more")
    if args.temperature is not None and not 0 < args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature}: allowed are numbers above 0")
    from rich.console import Console

    from fourfold.diagnostics.tables import samples_table
    from fourfold.training.results import sample_beside_reference

    rows = sample_beside_reference(
        args.run_folder,
        prompts=args.prompt,
        chat=args.chat,
        count=args.count,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        best=args.best,
        weights=args.weights,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    Console().print(samples_table(rows, names=("reference", "actor")))
    return 0
