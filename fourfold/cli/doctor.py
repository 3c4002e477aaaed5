"""Say what is wrong with a run: what, by which numbers, how surely, and the setting to change (docs/doctor.md).

The run may have finished, go on, have been interrupted or have failed. Exit codes: 0 it could be read, 2 bad input.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold doctor`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run: the `output` of its settings")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """`fourfold doctor RUN`."""
    import json
    from pathlib import Path

    from rich.console import Console

    from fourfold.diagnostics.doctor import examine
    from fourfold.diagnostics.doctor.table import examination_table

    examination = examine(Path(args.run).expanduser())
    if args.json:
        print(json.dumps(examination.as_dict(), indent=2))
    else:
        Console(highlight=False).print(examination_table(examination))
    return 0
