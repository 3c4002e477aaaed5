"""Hold the reference and the reward model of a run in a process of their own and score for others, over HTTP.

A run with reference.residency or reward.residency = "service" asks it, and then holds no such weights itself. Any
program may ask: docs/service.md has the format. SIGINT and SIGTERM end it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DEFAULT_PORT = 8777


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold serve`."""
    parser.add_argument("config", metavar="CONFIG|RUN", help="TOML file of settings, or the folder of a run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a setting"
    )
    parser.add_argument("--roles", default="", help="reference, reward or both with a comma (default: all the run has)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s); others need a token")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port; 0 takes a free one (%(default)s)")
    parser.add_argument(
        "--token-env",
        default="FOURFOLD_SERVICE_TOKEN",
        metavar="NAME",
        help="environment variable with the token that requests must carry (%(default)s)",
    )
    parser.add_argument("--token-file", default="", metavar="FILE", help="file with the token, instead")
    parser.add_argument("--max-request-mib", type=float, default=64, help="longest request (%(default)s MiB)")
    parser.add_argument("--answer-seconds", type=float, default=600, help="longest work on one request (%(default)s s)")


def run(args: argparse.Namespace) -> int:
    """`fourfold serve CONFIG|RUN`."""
    from fourfold.config import load_config

    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: allowed are 0 to 65535")
    for name in ("max_request_mib", "answer_seconds"):
        if not 0 < getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: allowed are numbers above 0")
    path = Path(args.config).expanduser()
    config = load_config(path / "config.toml" if path.is_dir() else path, args.overrides)
    given = [role.strip() for role in args.roles.split(",")] if args.roles else []
    if unknown := [role for role in given if role not in ("reference", "reward")]:
        raise ValueError(f"--roles {args.roles}: {unknown[0]!r} is no role here; allowed: reference, reward")
    from fourfold.scoring.service.server import Limits
    from fourfold.training.serve import roles_of, serve, token_from

    limits = Limits(max_request_bytes=int(args.max_request_mib * 2**20), answer_seconds=args.answer_seconds)
    roles = tuple(dict.fromkeys(given)) or roles_of(config)
    token = token_from(args.token_env, args.token_file)
    serve(config, roles, args.host, args.port, token, limits, lambda line: print(line, file=sys.stderr, flush=True))
    return 0
