"""Where a run keeps rollouts for diagnoses, and how well the critic's values fit them; no model is needed to read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fourfold.algorithms.masking import masked_mean
from fourfold.algorithms.statistics import explained_variance, spearman
from fourfold.batch import Experience
from fourfold.batch_files import read_batch, write_batch

# Folders in that of the stage ppo.
EVALUATIONS, ROLLOUTS = "evaluations", "rollouts"
_NAME = re.compile(r"step-(\d{6,})\.parquet")


def value_fit(experience: Experience) -> dict[str, float]:
    """How well values, as they were when the rollout was scored, fit the returns of its tokens.

    Of a critic with several dimensions: the weighted totals of both.
    """
    mask = experience.response_mask
    values, returns = (experience.total(each) for each in (experience.values, experience.returns))
    return {
        "explained_variance": explained_variance(values, returns, mask),
        "value_return_spearman": spearman(values[mask], returns[mask]),
        "value_bias": float(masked_mean(values - returns, mask)),
    }


@dataclass(frozen=True)
class KeptFiles:
    """Files of one kind, one a step: `step-NNNNNN.parquet`, each an Experience (batch_files.py)."""

    folder: Path

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step-{step:06d}.parquet"

    def steps(self) -> list[int]:
        """The steps that have one, rising."""
        names = (path.name for path in self.folder.glob("step-*.parquet")) if self.folder.is_dir() else ()
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def read(self, step: int) -> Experience:
        """The rollout of a step; ValueError for a file that is damaged or of another schema."""
        batch = read_batch(self.path(step))
        if not isinstance(batch, Experience):
            raise ValueError(f"{self.path(step)}: a {type(batch).__name__}; a run keeps Experience; delete the file")
        return batch

    def write(self, step: int, experience: Experience) -> None:
        """Write the rollout of a step, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_batch(self.path(step), experience)

    def delete(self, steps: Iterable[int]) -> None:
        """Remove the files of these steps."""
        for step in steps:
            self.path(step).unlink()


def held_out_files(run: Path) -> KeptFiles:
    """Of held-out prompts, one an evaluation (step 0 is before training): values of the critic at that step."""
    return KeptFiles(run / "ppo" / EVALUATIONS)


def training_files(run: Path) -> KeptFiles:
    """What was learned from in the step before an evaluation."""
    return KeptFiles(run / "ppo" / ROLLOUTS)


def response_tokens(experience: Experience) -> list[list[int]]:
    """The response's ids of every row, without padding."""
    ids = experience.sequences[:, experience.prompt_length :]
    return [row[keep].tolist() for row, keep in zip(ids, experience.response_mask, strict=True)]


def sums(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the response tokens of every row: [batch]."""
    return torch.where(mask, numbers, 0.0).sum(dim=1)
