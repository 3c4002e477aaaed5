"""Carry out the stages of a configuration: sft, reward, ppo.

Finished stages are skipped and an interrupted one goes on from its last checkpoint, so the same command resumes.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that every command with a configuration has."""
    parser.add_argument("config", help="TOML file of settings; `fourfold init` writes a commented one")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a setting, e.g. --set ppo.kl_coef=0.1; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """`fourfold run CONFIG`."""
    return carry_out(args)


def carry_out(args: argparse.Namespace, stages: tuple[str, ...] = ()) -> int:
    """Load the settings, run the stages (those of the settings, or the given ones), show what came out."""
    from fourfold.config import load_config

    overrides = list(args.overrides)
    if stages:
        overrides.append(f"stages={list(stages)!r}")
    config = load_config(args.config, overrides)
    from fourfold.training.pipeline import run_stages

    # Stages stop after a step; while a model loads or the trunk's cache is filled, SIGTERM acts as SIGINT does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        summary = run_stages(config, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    show(config, summary, args.config, args.overrides)
    return 0


def show(config: RunConfig, summary: dict[str, Any], config_path: str, overrides: Sequence[str] = ()) -> None:
    """The table before and after, samples side by side, where the files are, and what to try next."""
    from rich.console import Console

    from fourfold.diagnostics.tables import before_after_table, memory_table, samples_table
    from fourfold.training.folder import RunFolder

    console = Console()
    stages = summary["stages"]
    if "test_nll_after" in stages.get("sft", {}):
        sft = stages["sft"]
        console.print(f"sft: held-out loss {sft['test_nll_before']:.3f} -> {sft['test_nll_after']:.3f} nats a token")
    if "pair_accuracy" in stages.get("reward", {}):
        reward = stages["reward"]
        console.print(
            f"reward: {reward['pair_accuracy']:.1%} of {reward['test_pairs']} held-out pairs ranked as people do"
        )
    if "after" in summary:
        console.print(
            before_after_table(summary["before"], summary["after"], title="held-out prompts, before and after PPO")
        )
        folder = RunFolder(_path(config.output))
        before, after = folder.read_json("ppo/before.json"), folder.read_json("ppo/after.json")
        if before and after:
            rows = list(zip(before["prompts"], before["responses"], after["responses"], strict=False))
            step = max(1, len(rows) // max(1, config.evaluation.samples))
            console.print(samples_table(rows[::step][: config.evaluation.samples]))
    if "memory" in summary:
        console.print(memory_table(summary["memory"]))
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    console.print(f"time: {spent}", highlight=False)
    made = ("summary.json", "plan.json", "sft/model", "reward/model", "ppo/metrics.jsonl", "ppo/model")
    names = ", ".join(name for name in made if (_path(config.output) / name).exists())
    console.print(f"files: {config.output} ({names})", highlight=False, soft_wrap=True, markup=False)
    if "ppo" in config.stages:
        console.print("try next:", highlight=False)
        for command in _next_commands(config.output, config_path, overrides):
            console.print(f"  fourfold {shlex.join(command)}", highlight=False, soft_wrap=True, markup=False)


def _next_commands(output: str, config_path: str, overrides: Sequence[str]) -> list[list[str]]:
    """Commands, as lists of arguments, that work after this run."""
    settings = [text for override in overrides for text in ("--set", override)]
    settings += ["--set", "ppo.kl_coef=0.2", "--set", f"output={output.rstrip('/')}-kl02"]
    return [
        ["report", output],
        ["sample", output, "--prompt", "The film"],
        ["export", output, "exported-model"],
        ["run", config_path, *settings],
    ]


def _path(output: str) -> Any:
    from pathlib import Path

    return Path(output).expanduser()
