"""Make a smaller critic out of a run's reward model: by leaving out layers, and teaching the rest its values.

Layers that change texts least are left out, MLPs are narrowed where that is asked for, and what is left learns the
reward model's values at every position of the run's texts. Says how well it ranks held-out texts and how large it is.
Give the folder of a run whose stage reward has finished, or its configuration; OUT is what critic.model takes.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold distill`."""
    parser.add_argument("target", metavar="RUN|CONFIG", help="folder of a run (its `output`), or its TOML file")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--size",
        type=float,
        metavar="SHARE",
        help="as many layers as leave it at most this share of the reward model's parameters (default: a third)",
    )
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="keep so many layers, whatever their size")
    parser.add_argument("--mlp", type=int, default=0, metavar="N", help="keep so many neurons of every MLP")
    parser.add_argument(
        "--lowest", action="store_true", help="keep the lowest layers instead of those that change texts most"
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over the texts (default 8)")
    parser.add_argument("--batch-size", type=int, default=16, help="texts an optimizer step (default 16)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="peak learning rate (default 5e-4)")
    parser.add_argument("--max-texts", type=int, default=0, metavar="N", help="learn from so many texts (default: all)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a setting, e.g. --set data.texts.path=texts.jsonl; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """`fourfold distill RUN|CONFIG OUT`."""
    for name, least in (("layers", 0), ("mlp", 0), ("epochs", 0), ("batch_size", 1), ("max_texts", 0)):
        if (given := getattr(args, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} {given}: allowed are {least} or more")
    if args.size is not None and args.layers:
        raise ValueError(
            f"--size {args.size:g} beside --layers {args.layers}, which says how many layers stay; leave one out"
        )
    if args.size is not None and not 0 < args.size <= 1:
        raise ValueError(f"--size {args.size:g}: allowed are shares above 0 and up to 1; try 0.33")
    if not 0 < args.learning_rate < float("inf"):
        raise ValueError(f"--learning-rate {args.learning_rate:g}: allowed are numbers above 0; try 5e-4")
    from fourfold.training.distill import Wanted, distill

    wanted = Wanted(
        size=Wanted.size if args.size is None else args.size,
        layers=args.layers,
        mlp=args.mlp,
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        max_texts=args.max_texts,
        lowest=args.lowest,
    )
    made = distill(args.target, args.out, wanted, args.overrides, lambda line: print(line, file=sys.stderr, flush=True))
    for line in made.describe():
        print(line)
    print(f"wrote {args.out}: critic.model = {args.out!r}")
    return 0
