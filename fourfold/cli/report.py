"""Show a run as one page: curves, verdicts, samples, tokens, memory and time.

The page needs no network and can be sent as it is. Of a run that is at work, was stopped or failed it shows what is
there and says what is missing. Nothing is loaded but the tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold report`."""
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run (its `output`)")
    parser.add_argument("--out", metavar="FILE.html", help="the page (default: report.html in the run's folder)")
    parser.add_argument(
        "--samples", type=int, default=6, metavar="N", help="responses of the token x-ray (default 6; 0: none)"
    )
    parser.add_argument(
        "--training", action="store_true", help="x-ray of the last kept training rollout instead of held-out prompts"
    )


def run(args: argparse.Namespace) -> int:
    """`fourfold report RUN`."""
    root = Path(args.run_folder).expanduser()
    file = Path(args.out).expanduser() if args.out else root / "report.html"
    if args.samples < 0:
        raise ValueError(f"--samples {args.samples}: allowed are 0 or more")
    if args.out and file.is_dir():
        raise ValueError(f"--out {args.out}: is a folder; give the name of a file, such as {args.out}/report.html")
    if args.out and not file.parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {str(file.parent)!r}; make it, or give another one")
    from fourfold.diagnostics.report import Asked, write_report
    from fourfold.diagnostics.report_page import missing

    contents = write_report(root, file, Asked(args.samples, args.training))
    for each in missing(contents):
        print(f"not there: {each}")
    print(f"{file} written; open it in a browser")
    return 0
