"""The first stage alone: supervised fine-tuning on `data.texts`."""

from __future__ import annotations

import argparse

from fourfold.cli.run import add_arguments, carry_out

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """`fourfold sft CONFIG`."""
    return carry_out(args, ("sft",))
