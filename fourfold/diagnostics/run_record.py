"""Everything that a run has left in its folder so far, read for reports: running, interrupted and failed runs too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fourfold.config import RunConfig
from fourfold.config.loading import saved_config
from fourfold.diagnostics.metrics import METRICS, Band, table_name
from fourfold.diagnostics.metrics.rollout import QUANTISED
from fourfold.diagnostics.run_files import PLAN, SPENT, TIMELINE
from fourfold.diagnostics.run_state import RunState, read_state
from fourfold.diagnostics.trackers import read_jsonl

Read = TypeVar("Read")
Rows = list[dict[str, Any]]
Points = list[tuple[int, float]]
STAGES = ("sft", "reward", "ppo")
MOST_POINTS = 240  # of a drawn line: more than there are pixels in its width would not be seen


@dataclass(frozen=True)
class RunRecord:
    """A run as it stands: `problems` says which of its files cannot be read, and why."""

    root: Path
    config: RunConfig
    state: RunState
    steps: Rows
    evaluations: Rows
    timeline: Rows
    plan: Mapping[str, Any]
    spent: Mapping[str, Mapping[str, float]]
    stages: Mapping[str, Mapping[str, Any]]  # the metrics of those that have finished
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    preflight: Mapping[str, Any]
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the run is called: its folder's name."""
        return self.root.resolve().name

    @property
    def step(self) -> int:
        """PPO steps that are logged."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def finished(self) -> bool:
        """Whether all stages of the settings have been carried out."""
        return all(stage in self.stages for stage in self.config.stages)

    @property
    def stage(self) -> str:
        """The stage that is next to be carried out, or at work; "" when all have finished."""
        return next((stage for stage in self.config.stages if stage not in self.stages), "")

    def points(self, kind: str, metric: str) -> Points:
        """A metric's values by step; rows in which it was not measured have none."""
        rows = self.steps if kind == "ppo_step" else self.evaluations
        points = [(int(row["step"]), float(row[metric])) for row in rows if metric in row]
        if kind == "evaluation" and self.before is not None and points and points[0][0] > 0:
            start = self.before["metrics"].get(metric.removeprefix("eval_"))
            points = points if start is None else [(0, float(start)), *points]
        return points

    def names(self, kind: str, metric: str) -> list[str]:
        """The names that a declared metric has in the rows: itself, or one for each part of the reward (".../NAME")."""
        stem, has_parts, _ = metric.partition("/")
        if not has_parts:
            return [metric]
        rows = self.steps if kind == "ppo_step" else self.evaluations
        return list(dict.fromkeys(name for row in rows for name in row if name.startswith(f"{stem}/")))

    def band(self, kind: str, metric: str) -> Band | None:
        """What is healthy of a metric in this run, in numbers and in its unit."""
        declared = METRICS[kind].get(table_name(metric))
        where = QUANTISED if self.config.sampling.differs else self.config.precision.compute
        band = None if declared is None else declared.band_where(where)
        if band is None or not band.of_start:
            return band
        points = self.points(kind, metric)
        return band.seen_from(points[0][1]) if points else None


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many points: of each stretch the lowest and the highest, so that no spike is lost, and both ends."""
    if len(points) <= most:
        return points
    inner, stretches = points[1:-1], (most - 2) // 2
    kept = [points[0]]
    for n in range(stretches):
        piece = inner[n * len(inner) // stretches : (n + 1) * len(inner) // stretches]
        ends = {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def read_run(root: Path) -> RunRecord:
    """Read a run's folder; ValueError where it is none, or its settings are not those of this version."""
    problems: list[str] = []
    rows = _tried(lambda: _rows(root / "ppo" / "metrics.jsonl"), [], problems)
    done = {stage: _json(root / stage / "done.json", problems) for stage in STAGES}
    return RunRecord(
        root=root,
        config=saved_config(root),
        state=read_state(root),
        steps=[row for row in rows if row["kind"] == "ppo_step"],
        evaluations=[row for row in rows if row["kind"] == "evaluation"],
        timeline=_tried(lambda: _rows(root / TIMELINE), [], problems),
        plan=_json(root / PLAN, problems) or {},
        spent=_json(root / SPENT, problems) or {},
        stages={stage: record["metrics"] for stage, record in done.items() if record is not None},
        before=_json(root / "ppo" / "before.json", problems),
        after=_json(root / "ppo" / "after.json", problems),
        preflight=_json(root / "ppo" / "preflight.json", problems) or {},
        problems=tuple(problems),
    )


def _rows(path: Path) -> Rows:
    return read_jsonl(path) if path.is_file() else []


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    return _tried(lambda: json.loads(path.read_text(encoding="utf-8")), None, problems, str(path))


def _tried(read: Callable[[], Read], otherwise: Read, problems: list[str], where: str = "") -> Read:
    """A file that is damaged is told of, and the rest of the run is shown."""
    try:
        return read()
    except (ValueError, OSError) as error:
        problems.append(f"{where}: {error}" if where else str(error))
        return otherwise
