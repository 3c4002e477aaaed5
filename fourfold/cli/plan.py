"""Know before you run: memory by role and phase, time, traffic, and the fastest settings that fit.

Give a configuration, of which settings that are written down are kept (--allow leaves some to the planner), or a model
(a folder, a .gguf file, a hub id that is cached, or a published name such as llama-2-7b). Nothing is loaded.
Exit codes: 0 a plan fits, 2 bad input, 3 no plan fits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

NOTHING_FITS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold plan`."""
    parser.add_argument("target", metavar="CONFIG|MODEL", help="TOML file of settings, or a model")
    parser.add_argument("--reward-model", default="", metavar="MODEL", help="a reward model of another family")
    parser.add_argument(
        "--hardware",
        default="detect",
        metavar="NAME",
        help="such as a100-80, 4xa100-80, 2x8xh100, or a TOML file; detect is this machine (default)",
    )
    parser.add_argument("--budget", default="", metavar="SIZE", help="memory of a device, such as 40GiB (default: all)")
    parser.add_argument(
        "--host-budget", default="", metavar="SIZE", help="host memory for a device (default: its share)"
    )
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="longest prompt")
    parser.add_argument("--response-tokens", type=int, metavar="N", help="longest response")
    parser.add_argument("--rollout", type=int, metavar="N", help="responses a rollout")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="let the planner set this key, or all of this table, though it is given; may be repeated",
    )
    parser.add_argument(
        "--refuse", action="append", default=[], metavar="LEVER", help="a lever not to take, such as 'nf4 base'"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="give a setting"
    )
    parser.add_argument("--as-given", action="store_true", help="take no lever: what the settings cost as they are")
    parser.add_argument("--json", action="store_true", help="print everything as JSON (docs/plan.md)")
    parser.add_argument("--save", metavar="PLAN.toml", help="write the best plan as a configuration for `fourfold run`")
    parser.add_argument("--page", metavar="FILE.html", help="write the plans as one HTML page with drawings")


def run(args: argparse.Namespace) -> int:
    """`fourfold plan CONFIG|MODEL`."""
    for option, given, name in (("--save", args.save, "plan.toml"), ("--page", args.page, "plan.html")):
        file = Path(given or name).expanduser()
        if given and file.is_dir():
            raise ValueError(f"{option} {given}: is a folder; give the name of a file, such as {given}/{name}")
        if not file.parent.is_dir():
            raise ValueError(f"{option} {given}: there is no folder {str(file.parent)!r}; make it, or give another one")
    import json

    from rich.console import Console

    from fourfold.diagnostics.plan_tables import show_plan
    from fourfold.files import write_atomically
    from fourfold.planner.answer import answer
    from fourfold.planner.request import Asked
    from fourfold.planner.saved import plan_toml

    asked = Asked(
        target=args.target,
        reward_model=args.reward_model,
        hardware=args.hardware,
        budget=args.budget,
        host_budget=args.host_budget,
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        rollout=args.rollout,
        allow=args.allow,
        refuse=args.refuse,
        overrides=args.overrides,
    )
    with _without_collector():
        found = answer(asked, as_given=args.as_given)
    best = found.plans[0]
    if args.save and best.fits:
        write_atomically(Path(args.save).expanduser(), plan_toml(best))
    if args.page:
        from fourfold.diagnostics.plan_page import plan_page

        page = plan_page(found.plans, found.wanted.notes, found.helps, Path(args.target).name)
        write_atomically(Path(args.page).expanduser(), page)
    if args.json:
        print(json.dumps(found.report(), indent=2))
    else:
        show_plan(Console(highlight=False), found.plans, found.wanted.notes, found.helps, Path(args.target).name)
        if args.save and best.fits:
            print(f"{args.save} written; start it with: fourfold run {args.save}")
        if args.page:
            print(f"{args.page} written; open it in a browser")
    return 0 if best.fits else NOTHING_FITS


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Within, Python looks for no cycles: a search makes a million small objects, none of which is part of one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
