"""Trackers of other projects: Weights & Biases and trackio. Their packages are imported when a run asks for them.

What was sent to them cannot be taken back: a resumed run sends no step twice, so where a broken-off process had gone
beyond its last checkpoint, its rows stay, and the rows that the same steps give the second time stand in metrics.jsonl
alone. A ledger beside metrics.jsonl says what they were given; it is written first, so that a process that is killed in
between leaves a row out rather than in twice.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.diagnostics.finite import Row, finite
from fourfold.files import write_atomically

LEDGER = "tracking.json"


@dataclass(frozen=True)
class Described:
    """How a run is called elsewhere: the project it belongs to, its name, and its settings."""

    project: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Ledger:
    """The run's key at a tracker, and the last step of each kind that it was given."""

    def __init__(self, folder: Path, tracker: str, *, resumed: bool) -> None:
        self._path, self._tracker = folder / LEDGER, tracker
        kept = self._read().get(tracker) if resumed else None
        self.key: str = kept["key"] if kept else uuid.uuid4().hex[:10]
        self._last: dict[str, int] = dict(kept["last"]) if kept else {}

    def takes(self, kind: str, step: int) -> bool:
        """Whether a row is new there; it is noted as given."""
        if step <= self._last.get(kind, -1):
            return False
        self._last[kind] = step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entry = {self._tracker: {"key": self.key, "last": self._last}}
        write_atomically(self._path, json.dumps(self._read() | entry, indent=2) + "\n")
        return True

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}


class _Outside:
    """A run at a tracker, by its package's own object."""

    _ledger: Ledger
    _run: Any

    def log(self, row: Row, kind: str) -> None:
        """Send a row, unless it was sent before."""
        numbers = finite(row)
        step = int(numbers["step"])
        if self._ledger.takes(kind, step):
            self._run.log(_named(kind, numbers), step=step)


class WandbTracker(_Outside):
    """Scalars named KIND/METRIC at Weights & Biases, in files below `folder` (`wandb sync` sends them).

    `WANDB_MODE` says otherwise: "online" sends them as they come.
    """

    def __init__(self, folder: Path, described: Described, *, resumed: bool) -> None:
        wandb = _imported("wandb")
        self._ledger = Ledger(folder, "wandb", resumed=resumed)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=described.project,
            name=described.name,
            id=self._ledger.key,
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            config=dict(described.settings),
            settings=wandb.Settings(console="off"),  # the run's own lines stay as they are
        )

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


class TrackioTracker(_Outside):
    """Scalars named KIND/METRIC in trackio's own folder (`TRACKIO_DIR`), which `trackio show` draws."""

    def __init__(self, folder: Path, described: Described, *, resumed: bool) -> None:
        self._trackio = trackio = _imported("trackio")
        self._ledger = Ledger(folder, "trackio", resumed=resumed)
        with _said_aside():
            self._run = trackio.init(
                project=described.project,
                name=f"{described.name}-{self._ledger.key}",  # runs are known by their names there
                resume="allow",
                config=dict(described.settings),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def close(self) -> None:
        """Wait until everything is written; the module's own function, so that it does not finish the run again."""
        with _said_aside():
            self._trackio.finish()


OUTSIDE: Mapping[str, type[WandbTracker] | type[TrackioTracker]] = {"wandb": WandbTracker, "trackio": TrackioTracker}


def _named(kind: str, numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"{kind}/{name}": value for name, value in numbers.items() if name != "step"}


def _said_aside() -> contextlib.AbstractContextManager[Any]:
    """trackio writes to stdout, which belongs to the command's own output."""
    return contextlib.redirect_stdout(sys.stderr)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(missing_package(name)) from error


def missing_package(name: str) -> str:
    """What to say where a tracker's package is not installed."""
    return (
        f"tracking.trackers names {name!r}, and that package is not installed; try `pip install 'fourfold[{name}]'`, "
        "or leave it out: metrics.jsonl is written always"
    )
