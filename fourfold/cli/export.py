"""Write the trained actor as a plain Hugging Face folder: weights, tokenizer, generation config.

The folder's logits are the actor's; any library that loads Hugging Face models can use it.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold export`."""
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run (its `output`)")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of the weights: float32 keeps the trained ones exactly (default), bfloat16 halves the size and "
        "rounds them",
    )
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the last step")


def run(args: argparse.Namespace) -> int:
    """`fourfold export RUN OUT`."""
    from fourfold.training.results import export_actor

    path = export_actor(args.run_folder, args.out, dtype=args.dtype, best=args.best)
    print(f"wrote {path}")
    return 0
