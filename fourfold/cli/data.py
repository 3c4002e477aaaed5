"""Make a data set ready for training, such as the movie reviews of the example."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold data`."""
    datasets = parser.add_subparsers(dest="dataset", metavar="DATASET", required=True)
    text = "10,415 movie-review snippets with human ratings: texts, prompts and preference pairs"
    reviews = datasets.add_parser("reviews", help=text, description=text, allow_abbrev=False)
    reviews.add_argument("--out", type=Path, default=Path("data/reviews"), help="folder to write (%(default)s)")
    reviews.add_argument(
        "--sdist", type=Path, metavar="FILE", help="source distribution of vaderSentiment 3.3.2, instead of a download"
    )
    reviews.add_argument("--force", action="store_true", help="make the files again even where they are complete")


def run(args: argparse.Namespace) -> int:
    """Make the data set; files that are complete are kept unless --force is given."""
    from fourfold.data.reviews import prepare_reviews

    prepare_reviews(args.out, sdist=args.sdist, force=args.force)
    return 0
