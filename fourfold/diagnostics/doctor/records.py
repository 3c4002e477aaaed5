"""What a run has left in its folder, as far as a diagnosis reads it; no model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from fourfold.batch import Experience
from fourfold.config import RunConfig
from fourfold.config.loading import saved_config
from fourfold.diagnostics.doctor.robust import Estimate, Numbers, level
from fourfold.diagnostics.kept import KeptFiles, held_out_files, training_files
from fourfold.diagnostics.trackers import read_jsonl

# A series is told by its first and its last third, of at most so many steps, at least so few.
MOST_STEPS, FEWEST_STEPS = 50, 3
METRICS, DONE, STOPPED, PREFLIGHT = "ppo/metrics.jsonl", "done.json", "stopped.json", "preflight.json"


class CannotJudge(Exception):
    """The run has not left what a diagnosis needs: the message says what would be needed."""


@dataclass(frozen=True)
class Series:
    """A metric over the steps that have it."""

    name: str
    steps: tuple[int, ...]
    values: Numbers

    @property
    def third(self) -> int:
        """How many steps the first and the last third have."""
        return min(max(len(self.steps) // 3, FEWEST_STEPS), MOST_STEPS)

    @property
    def start(self) -> Estimate:
        """Its level in the first third."""
        return level(self.values[: self.third])

    @property
    def end(self) -> Estimate:
        """Its level in the last third."""
        return level(self.values[-self.third :])

    @property
    def end_steps(self) -> tuple[int, int]:
        """First and last step of the last third."""
        return self.steps[-self.third], self.steps[-1]

    @property
    def all_steps(self) -> tuple[int, int]:
        """First and last step."""
        return self.steps[0], self.steps[-1]


@dataclass(frozen=True)
class Records:
    """Settings, rows of metrics by kind, kept rollouts by step, and what stages have noted."""

    config: RunConfig
    rows: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    held_out: KeptFiles
    training: KeptFiles
    preflight: Mapping[str, Any]
    before: Mapping[str, Any]  # metrics of the evaluation before the first step
    reward_stage: Mapping[str, Any]  # metrics of the stage reward
    failure: str  # what stopped the run, "" where nothing did
    finished: bool
    _read: dict[tuple[KeptFiles, int], Experience] = field(default_factory=dict)

    def series(self, name: str, fewest: int = 2 * FEWEST_STEPS) -> Series:
        """A metric of ppo's steps; CannotJudge with fewer steps than `fewest`."""
        found = [(int(row["step"]), float(row[name])) for row in self.rows if name in row]
        if len(found) < fewest:
            raise CannotJudge(f"{name} is in {len(found)} rows of ppo/metrics.jsonl; {fewest} are needed")
        steps, values = zip(*found, strict=True)
        return Series(name, steps, numpy.array(values))

    def evaluation(self, name: str) -> list[tuple[int, float]]:
        """A metric of held-out prompts by step, the one before training at step 0."""
        found = [(int(row["step"]), float(row[name])) for row in self.evaluations if name in row]
        start = self.before.get(name.removeprefix("eval_"))
        return ([] if start is None else [(0, float(start))]) + found

    def last_held_out(self) -> tuple[int, Experience]:
        """The newest held-out rollout of a step after training began."""
        return self._newest(self.held_out, "held-out")

    def first_held_out(self) -> tuple[int, Experience]:
        """The oldest one: that of step 0, as a rule."""
        steps = self.held_out.steps()
        if not steps:
            raise CannotJudge(_NO_KEPT.format("held-out"))
        return steps[0], self.kept(self.held_out, steps[0])

    def last_training(self) -> tuple[int, Experience]:
        """The newest kept training rollout."""
        return self._newest(self.training, "training")

    def _newest(self, files: KeptFiles, what: str) -> tuple[int, Experience]:
        steps = [step for step in files.steps() if 0 < step <= self.last_step]
        if not steps:
            raise CannotJudge(_NO_KEPT.format(f"{what} (after step 0)"))
        return steps[-1], self.kept(files, steps[-1])

    def kept(self, files: KeptFiles, step: int) -> Experience:
        """A kept rollout, read once; CannotJudge for a damaged file."""
        if (files, step) not in self._read:
            try:
                self._read[files, step] = files.read(step)
            except (ValueError, OSError) as error:
                raise CannotJudge(str(error)) from error
        return self._read[files, step]

    def stopped_by_numbers_of(self, role: str) -> bool:
        """Whether the run stopped because a loss, gradient, weight or output of a role was NaN or infinite."""
        return role in self.failure and re.search(r"\b(nan|inf|finite)\b", self.failure) is not None

    @property
    def last_step(self) -> int:
        """The last step that has a row; 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def kept_scores(self) -> Iterator[tuple[int, Numbers]]:
        """Scores of every kept rollout, training before held-out ones."""
        for files in (self.training, self.held_out):
            for step in files.steps():
                yield step, self.kept(files, step).scores.double().numpy()


_NO_KEPT = "no {} rollout is kept; give data.prompts_test, evaluation.every, and leave evaluation.keep_rollouts at true"


def read_records(run: Path) -> Records:
    """Everything that is there; ValueError for what is not the folder of a run."""
    log = run / METRICS
    rows = read_jsonl(log) if log.is_file() else []
    return Records(
        config=saved_config(run),
        rows=[row for row in rows if row["kind"] == "ppo_step"],
        evaluations=[row for row in rows if row["kind"] == "evaluation"],
        held_out=held_out_files(run),
        training=training_files(run),
        preflight=_json(run / "ppo" / PREFLIGHT),
        before=_json(run / "ppo" / "before.json").get("metrics", {}),
        reward_stage=_json(run / "reward" / DONE).get("metrics", {}),
        failure=str(_json(run / "ppo" / STOPPED).get("error", "")),
        finished=(run / "ppo" / DONE).is_file(),
    )


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where it is missing."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
