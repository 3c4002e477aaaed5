"""A tiny run that has everything a report shows, made once, and copies of it that have come to some harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.diagnostics.doctor import Examination
from training.runs import by_function, merged, run, settings

# What a model could write, or a user could name: markup, quotes, direction marks, control codes, half a character.
HOSTILE = "</script><img src=x onerror=alert(1)> & \"q\" 'a' \u202eevil\u200f \x00\x1b[2J \U0001f642 \ud83d"
STEPS = 4


@dataclass(frozen=True)
class Said:
    """A verdict as the doctor gives it."""

    name: str
    severity: str
    evidence: str
    confidence: float
    remedy: str
    steps: tuple[int, int]


ILL = Said("entropy collapse", "ill", "entropy fell from 4.7 to 0.1", 0.9, "ppo.entropy_coef = 0.02", (2, 4))


@dataclass(frozen=True)
class Unsaid:
    """What the doctor could not judge."""

    name: str
    reason: str


def said(*verdicts: Any, unjudged: tuple[Any, ...] = ()) -> Any:
    """An examination with these verdicts."""
    return Examination("", verdicts, unjudged)


GOOD = Said("ratio", "good", "1.00 in every step", 1.0, "", (1, 4))


def make_run(folder: Path) -> Path:
    """Four steps of ppo with an evaluation every two; returns the run's folder."""
    changes = {"ppo": {"steps": STEPS}, "evaluation": {"every": 2}}
    run(merged(merged(settings(folder), by_function("pays_by_hash")), changes))
    return folder / "run"


def copy_of(source: Path, target: Path, change: Callable[[Path], None] = lambda folder: None) -> Path:
    """A copy of the run with something changed."""
    shutil.copytree(source, target)
    change(target)
    return target


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    """Read, change and write a JSON file."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def set_state(folder: Path, state: str, said: str = "") -> None:
    """As if the last process had ended so; the stage ppo is not finished any more."""
    (folder / "ppo" / "done.json").unlink(missing_ok=True)
    change_json(folder / "state.json", lambda value: value.update(state=state, said=said, host="elsewhere"))
