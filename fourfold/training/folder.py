"""The folder of a run: its settings, what each finished stage left behind, and what all of it has cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fourfold.config import RunConfig, dump_toml, load_config
from fourfold.config.loading import CONFIG
from fourfold.diagnostics.run_files import SPENT, SUMMARY
from fourfold.files import write_atomically
from fourfold.memory.meter import PhaseUsage
from fourfold.planner.advice import RESUMABLE

__all__ = ["SPENT", "SUMMARY", "RunFolder", "reward_model", "sft_model"]


class RunFolder:
    """Paths and records of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def stage(self, name: str) -> Path:
        """Folder of a stage."""
        return self.root / name

    def model(self, stage: str) -> Path:
        """Where a stage stores its role."""
        return self.root / stage / "model"

    def finished(self, stage: str) -> dict[str, Any] | None:
        """The record of a finished stage, None when it is not finished."""
        path = self.root / stage / "done.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def finish(self, stage: str, record: dict[str, Any]) -> None:
        """Mark a stage as finished; written after everything else of it."""
        self.write_json(f"{stage}/done.json", record)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read one, None when it is not there."""
        path = self.root / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def spent(self) -> dict[str, PhaseUsage]:
        """Seconds and peak bytes by phase and stage, over every process that has worked on this run."""
        return {name: PhaseUsage(**usage) for name, usage in (self.read_json(SPENT) or {}).items()}

    @cached_property
    def _spent_earlier(self) -> dict[str, PhaseUsage]:
        """What the processes before this one have spent: read before this one notes anything."""
        return self.spent()

    def note_spent(self, now: Mapping[str, PhaseUsage]) -> None:
        """Write down what this process has spent so far, on top of those before it; the last call counts.

        Called when a stage begins, at its steps or checkpoints and at its end, so that a killed process leaves its
        share behind.
        """
        none = PhaseUsage(0.0, 0)
        total = {}
        for name in self._spent_earlier | dict(now):
            earlier, here = self._spent_earlier.get(name, none), now.get(name, none)
            total[name] = PhaseUsage(earlier.seconds + here.seconds, max(earlier.peak_bytes, here.peak_bytes))
        self.write_json(SPENT, {name: usage._asdict() for name, usage in total.items()})

    def claim(self, config: RunConfig) -> None:
        """Save the resolved settings of a new run: from here on the folder is its own."""
        if not (self.root / CONFIG).is_file():
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.root / CONFIG, dump_toml(config))

    def require_same_settings(self, config: RunConfig) -> None:
        """Make sure that a run that was started here had these settings.

        `stages`, `system` and the settings of `RESUMABLE` may differ: they say how much is run, where and in how much
        room, not what comes out; so a run that memory has stopped can go on with a lever that saves some.
        """
        path = self.root / CONFIG
        if not path.is_file():
            return
        before, now = (_lasting(c) for c in (load_config(path), config))
        if changed := sorted(_differences(before, now)):
            raise ValueError(
                f"{path} was made with other settings: {'; '.join(changed[:8])}. A run goes on only with its own "
                "settings; use another output folder, or remove this one"
            )


def _lasting(config: RunConfig) -> dict[str, Any]:
    """The settings that a run keeps from its start to its end."""
    free: dict[str, Any] = {"stages": True, "system": True}
    for key in RESUMABLE:
        section, _, name = key.partition(".")
        free.setdefault(section, set()).add(name)
    return config.model_dump(exclude=free)


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} was {old!r}, is {new!r}")
    return found


def sft_model(config: RunConfig, folder: RunFolder) -> Path | None:
    """The policy that all others start from: one that is given, or what the stage sft has left, if it has finished."""
    if config.sft.checkpoint:
        return Path(config.sft.checkpoint).expanduser()
    return folder.model("sft") if folder.finished("sft") is not None else None


def reward_model(config: RunConfig, folder: RunFolder) -> Path | None:
    """The reward model that ppo uses; None where a function or a model of another family stands for it."""
    if not config.reward.of_the_base:
        return None
    if config.reward.stored:
        return Path(config.reward.stored).expanduser()
    if folder.finished("reward") is None:
        raise ValueError(
            f"ppo needs a reward model and {folder.stage('reward')} has none; run the stage reward first, "
            'or set reward.source = "checkpoint", "model" or "function"'
        )
    return folder.model("reward")
