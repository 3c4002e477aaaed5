"""Follow a run in the terminal: last values and their way, seconds by phase, what the doctor says.

It ends when no process works on the run any more; Ctrl-C leaves the run alone. Without a terminal it writes a line a
step.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold watch`."""
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run (its `output`)")
    parser.add_argument("--once", action="store_true", help="print the run as it stands, and end")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="look again after (default 2)")


def run(args: argparse.Namespace) -> int:
    """`fourfold watch RUN`."""
    if not 0 < args.every < math.inf:
        raise ValueError(f"--every {args.every}: allowed: a finite number of seconds above 0")
    from rich.console import Console

    from fourfold.diagnostics.watch import Watch

    console = Console(highlight=False)
    watch = Watch(Path(args.run_folder).expanduser(), console, args.every)
    try:
        (watch.once if args.once else watch.live if console.is_terminal else watch.lines)()
    except KeyboardInterrupt:  # the way to end it
        console.print()
    return 0
