"""Carries out runs of which each is killed (SIGKILL) after an optimizer step, and does not go on with them.

Run by test_spent.py: arguments are a TOML file, an optimizer's name and the number of its step, and so on for others.
"""

from __future__ import annotations

import os
import signal
import sys

from fourfold.backends.local import LocalOptimizer
from fourfold.config import load_config
from fourfold.models.loading import load_base
from fourfold.training import pipeline
from training.kill_while_running import kill_when, optimizer_of, run_in_child


def main(arguments: list[str]) -> None:
    """Each run in a child of this process, which imports the libraries and the models' code for all."""
    load_base(pipeline.prepare(load_config(arguments[0])))
    for config, optimizer, step in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        status = run_in_child(config, kill_when(LocalOptimizer, "step", optimizer_of(optimizer), count=int(step)))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{config}: ended with {status}"


if __name__ == "__main__":
    main(sys.argv[1:])
