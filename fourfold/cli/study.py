"""Run variants of a configuration side by side, and show by which numbers they differ.

prior: what the KL is taken to. sharing: four models, or one trunk. critic-init: where the critic's weights are from.
ratio: how often the critic learns. Each variant is a run in OUTPUT/VARIANT/seed-N: finished ones are skipped, an
interrupted one goes on. OUTPUT/study.json and OUTPUT/study.html tell what came of them (docs/studies.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

NAMES = ("prior", "sharing", "critic-init", "ratio")
SOME_FAILED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold study`."""
    parser.add_argument("study", metavar="NAME", choices=NAMES, help=f"which study: {', '.join(NAMES)}")
    parser.add_argument("config", metavar="CONFIG", help="TOML file of settings that all variants start from")
    parser.add_argument("--variants", nargs="+", default=[], metavar="VARIANT", help="those alone (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="seeds of ppo (default: seed)")
    parser.add_argument("--steps", type=int, metavar="N", help="ppo.steps of every run")
    parser.add_argument("--output", default="", metavar="FOLDER", help="default: the configuration's output, -NAME")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a setting"
    )


def run(args: argparse.Namespace) -> int:
    """`fourfold study NAME CONFIG`."""
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps {args.steps}: allowed are 1 or more")
    if below := [str(seed) for seed in args.seeds if seed < 0]:
        raise ValueError(f"--seeds: given {', '.join(below)}; allowed: numbers from 0 on, each once")
    _each_once("--seeds", args.seeds)
    _each_once("--variants", args.variants)
    from fourfold.config import load_config

    config = load_config(args.config, args.overrides)
    from rich.console import Console

    from fourfold.diagnostics.tables import study_table
    from fourfold.training.studies import STUDIES
    from fourfold.training.study import PAGE, Asked, run_study

    asked = Asked(args.variants, args.seeds, args.steps, args.output)
    report = run_study(STUDIES[args.study], config, asked, lambda line: print(line, file=sys.stderr, flush=True))
    Console().print(study_table(report))
    print(f"{report['output']}/{PAGE} has the curves; open it in a browser")
    failed = any(run["status"] == "failed" for each in report["variants"].values() for run in each["runs"])
    return SOME_FAILED if failed else 0


def _each_once(option: str, given: Sequence[object]) -> None:
    if twice := [str(each) for each in dict.fromkeys(given) if given.count(each) > 1]:
        raise ValueError(f"{option}: given {', '.join(twice)} more than once; allowed: each once")
