"""Names of the files in a run's folder that are read outside training, and the settings that lie there."""

from __future__ import annotations

from pathlib import Path

from fourfold.config import RunConfig, load_config

CONFIG = "config.toml"
PLAN = "plan.json"
SPENT = "spent.json"
STATE = "state.json"
SUMMARY = "summary.json"
TIMELINE = "memory.jsonl"


def saved_config(root: Path) -> RunConfig:
    """The settings of the run in a folder."""
    path = root / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{str(root)!r} is not the folder of a run: it has no {CONFIG}; give the `output` of a configuration"
        )
    return load_config(path)
