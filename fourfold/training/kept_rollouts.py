"""Rollouts that a run keeps on disk for diagnoses: of every evaluation, and of the training step before it.

Nothing is ever learned from a held-out rollout; it has rewards, advantages and returns, with the settings of the run,
because only beside them can be said how well the critic's values fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fourfold.batch import Experience, ScoredRollout
from fourfold.config.schema import RunConfig
from fourfold.diagnostics.kept import EVALUATIONS, ROLLOUTS, KeptFiles
from fourfold.errors import RunFailed
from fourfold.training.experience import estimate_advantages
from fourfold.training.state import Progress


@dataclass(frozen=True)
class KeptRollouts:
    """Writes them where `evaluation.keep_rollouts` says so; `folder` is that of the stage ppo."""

    folder: Path
    config: RunConfig

    @property
    def held_out_files(self) -> KeptFiles:
        """Where held-out rollouts go."""
        return KeptFiles(self.folder / EVALUATIONS)

    @property
    def training_files(self) -> KeptFiles:
        """Where training rollouts go."""
        return KeptFiles(self.folder / ROLLOUTS)

    def go_on_from(self, step: int) -> None:
        """Remove what an interrupted run kept of steps after this one."""
        for files in (self.held_out_files, self.training_files):
            files.delete(later for later in files.steps() if later > step)

    def training(self, step: int, experience: Experience) -> None:
        """Keep what is learned from in a step after which an evaluation comes."""
        if self.config.evaluated_after(step) and self.config.evaluation.keep_rollouts:
            self.training_files.write(step, experience)

    def held_out(self, scored: ScoredRollout, valid: Tensor, progress: Progress) -> Experience:
        """The rows of an evaluation with a valid score, as they would be learned from; kept.

        Under `ppo.truncation` = "drop" rows that were cut by length are among them.
        """
        if not bool(valid.any()):
            raise RunFailed("evaluation: no held-out response got a valid score; mend the reward", blamed="reward")
        scored = scored.select(valid.nonzero()[:, 0])
        experience = estimate_advantages(scored, self.config.ppo, progress.shaping_of(scored))
        if self.config.evaluation.keep_rollouts:
            self.held_out_files.write(progress.step, experience)
        return experience
