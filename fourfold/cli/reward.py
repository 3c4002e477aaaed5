"""The second stage alone: the reward model, trained on `data.pairs`."""

from __future__ import annotations

import argparse

from fourfold.cli.run import add_arguments, carry_out

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """`fourfold reward CONFIG`."""
    return carry_out(args, ("reward",))
