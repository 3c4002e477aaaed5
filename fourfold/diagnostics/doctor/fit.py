"""Values of the critic against returns, on a kept rollout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from fourfold.algorithms.statistics import spearman
from fourfold.batch import Experience
from fourfold.diagnostics.doctor.records import CannotJudge, Records
from fourfold.diagnostics.doctor.robust import Estimate, Indices, Numbers, jackknife, least_squares

FEWEST_ROWS = 8
# Scores that differ by less than this part of themselves are one score.
ALIKE = 1e-6


@dataclass(frozen=True)
class Fit:
    """Values against returns of a kept rollout, token by token; `row` says which response a token belongs to.

    Of a critic with several dimensions: the weighted totals of both.
    """

    values: Numbers
    returns: Numbers
    so_far: Numbers  # tokens of the response before this one: what a state knows of its length
    row: Indices
    rows: int

    @classmethod
    def of(cls, kept: Experience) -> Fit:
        """CannotJudge for a few responses, or for returns that are all alike."""
        mask, rows = kept.response_mask, len(kept.sequences)
        if rows < FEWEST_ROWS:
            raise CannotJudge(f"the kept rollout has {rows} responses; {FEWEST_ROWS} are needed")
        row = torch.arange(rows)[:, None].expand_as(mask)[mask].numpy()
        values, returns = (kept.total(each)[mask].double().numpy() for each in (kept.values, kept.returns))
        if float(kept.scores.std()) <= ALIKE * (1 + float(kept.scores.abs().max())):
            raise CannotJudge("all scores of the kept rollout are alike: there is nothing for a critic to know")
        so_far = torch.arange(mask.shape[1]).expand_as(mask)[mask].double().numpy()
        return cls(values, returns, so_far, row, rows)

    def chosen(self, rows: Indices) -> Fit:
        """Of these responses only."""
        keep = numpy.isin(self.row, rows)
        return Fit(self.values[keep], self.returns[keep], self.so_far[keep], self.row[keep], len(rows))

    @property
    def explained(self) -> float:
        """1 - mean (return - value)^2 / variance of returns: unlike explained variance it counts an offset."""
        return 1.0 - float(((self.returns - self.values) ** 2).mean()) / float(self.returns.var())

    @property
    def systematic(self) -> float:
        """Mean square of what a straight line in value and length so far finds of return - value, over var(return).

        What is left is scatter: noise of the returns, or of values that follow nothing.
        """
        error = self.returns - self.values
        _, left = least_squares(error, [self.values, self.so_far])
        return float((error**2).mean() - (left**2).mean()) / float(self.returns.var())

    def means(self) -> tuple[Numbers, Numbers, Numbers]:
        """Of each response: mean value, mean return, and its length in tokens."""
        length = numpy.bincount(self.row, minlength=self.rows).astype(numpy.float64)
        value, got = (numpy.bincount(self.row, each, self.rows) / length for each in (self.values, self.returns))
        return value, got, length


def newest_kept(records: Records) -> tuple[int, Experience, str]:
    """The newest held-out rollout, or the newest training rollout where none is held out."""
    try:
        return *records.last_held_out(), "held-out"
    except CannotJudge:
        return *records.last_training(), "training"


def newest_fit(records: Records) -> tuple[int, Fit, str]:
    """Of that rollout."""
    step, kept, where = newest_kept(records)
    return step, Fit.of(kept), where


def over_rows(fit: Fit, name: str) -> Estimate:
    """A number of the fit with its error; CannotJudge where returns differ in a few responses alone."""

    def number(rows: Indices) -> float:
        chosen = fit.chosen(rows)
        if not chosen.returns.var() > 0:
            raise CannotJudge(
                "all but a few returns of the kept rollout are alike: a critic has next to nothing to know"
            )
        return getattr(chosen, name)

    return jackknife(fit.rows, number)


def first_states(kept: Experience) -> tuple[float, float] | None:
    """At the first token: mean square of return - value, and of returns around their prompt's mean (unbiased).

    The second is what no value of the prompt can know; None where no prompt has two responses.
    """
    values, returns = (kept.total(each)[:, 0].double() for each in (kept.values, kept.returns))
    squares, free = 0.0, 0
    for prompt in kept.prompt_id.unique():
        of_prompt = returns[kept.prompt_id == prompt]
        squares += float((of_prompt - of_prompt.mean()).square().sum())
        free += len(of_prompt) - 1
    return None if free == 0 else (float((returns - values).square().mean()), squares / free)


def rank_correlation(fit: Fit) -> float:
    return spearman(torch.from_numpy(fit.values), torch.from_numpy(fit.returns))
