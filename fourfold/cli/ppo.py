"""The third stage alone: PPO on `data.prompts`, from what sft and reward have left in the output folder."""

from __future__ import annotations

import argparse

from fourfold.cli.run import add_arguments, carry_out

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """`fourfold ppo CONFIG`."""
    return carry_out(args, ("ppo",))
