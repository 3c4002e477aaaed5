"""What a run has left in its folder, as far as a diagnosis reads it; no model is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from fourfold.batch import Experience
from fourfold.config import RunConfig
from fourfold.diagnostics.doctor.robust import Estimate, Numbers, level
from fourfold.diagnostics.kept import KeptFiles, held_out_files, training_files
from fourfold.diagnostics.run_record import RunRecord, read_run

# A series is told by its first and its last third, of at most so many steps, at least so few.
MOST_STEPS, FEWEST_STEPS = 50, 3


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

    run: RunRecord
    held_out: KeptFiles
    training: KeptFiles
    _read: dict[tuple[KeptFiles, int], Experience] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return self.run.config

    @property
    def preflight(self) -> Mapping[str, Any]:
        """What was found before the first step."""
        return self.run.preflight

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of ppo's steps."""
        return self.run.steps

    @property
    def last_step(self) -> int:
        """The last step that has a row; 0 before the first."""
        return self.run.step

    @property
    def reward_stage(self) -> Mapping[str, Any]:
        """What the stage reward has noted."""
        return self.run.stages.get("reward", {})

    @property
    def failure(self) -> str:
        """The message of the error that ended the last process on the run, "" where none did."""
        return self.run.state.said if self.run.state.state == "failed" else ""

    @property
    def blamed(self) -> str:
        """Who was at fault (RunFailed) when an error ended the last process on the run, "" where nobody is named."""
        return self.run.state.blamed if self.run.state.state == "failed" else ""

    def series(self, name: str, fewest: int = 2 * FEWEST_STEPS) -> Series:
        """A metric of ppo's steps; CannotJudge with fewer steps than `fewest`."""
        found = [(int(row["step"]), float(row[name])) for row in self.rows if name in row]
        if len(found) < fewest:
            raise CannotJudge(f"{name} is in {len(found)} rows of ppo/metrics.jsonl; {fewest} are needed")
        steps, values = zip(*found, strict=True)
        return Series(name, steps, numpy.array(values))

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

    def kept_scores(self) -> Iterator[Numbers]:
        """Scores of every kept rollout, training before held-out ones."""
        for files in (self.training, self.held_out):
            for step in files.steps():
                yield self.kept(files, step).scores.double().numpy()


_NO_KEPT = "no {} rollout is kept; give data.prompts_test, evaluation.every, and leave evaluation.keep_rollouts at true"


def read_records(run: Path | RunRecord) -> Records:
    """Everything that is there; ValueError for what is not the folder of a run, or whose log cannot be read."""
    record = read_run(run) if isinstance(run, Path) else run
    if record.problems and not record.steps:
        raise ValueError("; ".join(record.problems))
    return Records(run=record, held_out=held_out_files(record.root), training=training_files(record.root))
