"""Scores become rewards and advantages in the order that is promised, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.algorithms.rewards import RunningMoments
from fourfold.batch import ScoredRollout
from fourfold.config.schema import PpoSection
from fourfold.errors import RunFailed
from fourfold.scoring.pipeline import learnable
from fourfold.training.experience import Shaping, estimate_advantages, shape_scores

START = Shaping(0.1, RunningMoments())


def scored(
    scores: list[float], lengths: list[int], truncated: list[bool], *, values: float = 0.0, kl: float = 0.0
) -> ScoredRollout:
    """Rows with prompts of one token; every value and every KL is the same number, every last value 7."""
    rows, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]

    def on_tokens(number: float) -> Tensor:
        return torch.where(mask, number, 0.0)

    return ScoredRollout(
        prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
        response_mask=mask,
        sequences=torch.zeros(rows, 1 + longest, dtype=torch.int64),
        log_probs=on_tokens(-1.0),
        sampler_log_probs=on_tokens(-1.0),
        truncated=torch.tensor(truncated),
        policy_version=torch.zeros(rows, dtype=torch.int64),
        prompt_id=torch.arange(rows),
        ref_log_probs=on_tokens(-1.0 - kl),
        kl=on_tokens(kl),
        values=on_tokens(values),
        last_values=torch.full((rows,), 7.0),
        scores=torch.tensor(scores),
        score_parts=torch.tensor(scores)[:, None],
        score_weights=torch.ones(rows, 1),
    )


def ppo(**settings: Any) -> PpoSection:
    return PpoSection(**{"whiten_advantages": False, "gamma": 1.0, "gae_lambda": 1.0, **settings})


def close(found: Tensor, expected: list[Any]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected))


def test_scores_are_normalised_then_clipped_then_penalised() -> None:
    """Standard deviation of 0, 4 and 8 is 4: -1, 0, 1; clipped to 0.5; minus 0.25 a missing EOS; minus 0.1 a token.

    In any other order the numbers differ: penalties first would be normalised away, clipping first would flatten.
    """
    rollout = scored([0.0, 4.0, 8.0], [2, 4, 6], [False, True, False])
    settings = ppo(
        reward_normalization="batch", score_clip=0.5, missing_eos_penalty=0.25, length_penalty=0.1, length_range=(3, 4)
    )
    close(shape_scores(rollout, settings, START), [-0.5 - 0.1, 0.0 - 0.25, 0.5 - 0.2])


def test_normalisation_needs_no_stored_statistics() -> None:
    """FAULTS M3: running moments are those of all scores seen; the raw scores stay as they are, and both are logged."""
    moments = RunningMoments().update(torch.tensor([0.0, 2.0])).update(torch.tensor([4.0]))
    rollout = scored([4.0, 6.0], [1, 1], [False, False])
    shaped = shape_scores(rollout, ppo(reward_normalization="running"), Shaping(0.1, moments))
    close(shaped, [1.0, 2.0])  # mean 2, standard deviation 2
    close(rollout.scores, [4.0, 6.0])
    close(shape_scores(rollout, ppo(), START), [4.0, 6.0])


def test_a_cut_response_counts_as_it_stands_by_default() -> None:
    """truncation = "terminal": its score lies on the last token, KL of 0.5 costs 0.05 on every token."""
    found = estimate_advantages(scored([2.0, 3.0], [2, 3], [False, True], values=1.0, kl=0.5), ppo(), START)
    close(found.rewards, [[-0.05, 1.95, 0.0], [-0.05, -0.05, 2.95]])
    close(found.returns, [[1.9, 1.95, 0.0], [2.85, 2.9, 2.95]])
    close(found.advantages, [[0.9, 0.95, 0.0], [1.85, 1.9, 1.95]])


def test_a_cut_response_goes_on_with_the_value_of_its_last_state() -> None:
    """truncation = "bootstrap": no score, V = 7 of the state after the last token instead, and KL as ever.

    The row that ended by itself has nothing after it; gamma 0.5, lambda 1.
    """
    rollout = scored([2.0, 3.0], [2, 2], [False, True], values=1.0, kl=0.5)
    found = estimate_advantages(rollout, ppo(truncation="bootstrap", gamma=0.5), START)
    close(found.rewards, [[-0.05, 1.95], [-0.05, -0.05]])
    close(found.returns, [[-0.05 + 0.5 * 1.95, 1.95], [-0.05 + 0.5 * 3.45, -0.05 + 0.5 * 7.0]])


def test_gae_weighs_by_lambda() -> None:
    """delta = r + gamma V' - V; A_1 = delta_1, A_0 = delta_0 + gamma lambda A_1 with gamma 0.5, lambda 0.8."""
    found = estimate_advantages(scored([2.0], [2], [False], values=1.0), ppo(gamma=0.5, gae_lambda=0.8), START)
    close(found.advantages, [[0.0 + 0.5 - 1.0 + 0.4 * 1.0, 1.0]])
    close(found.returns, [[0.9, 2.0]])


def test_advantages_are_whitened_after_the_returns_are_formed() -> None:
    rollout = scored([2.0, -1.0, 5.0], [1, 3, 2], [False, False, False], values=1.0, kl=0.2)
    plain = estimate_advantages(rollout, ppo(), START)
    white = estimate_advantages(rollout, ppo(whiten_advantages=True), START)
    assert torch.equal(plain.returns, white.returns) and torch.equal(plain.rewards, white.rewards)
    tokens = white.advantages[rollout.response_mask]
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-6) and float(tokens.std()) == pytest.approx(1.0, abs=1e-5)
    expected = plain.advantages[rollout.response_mask]
    torch.testing.assert_close(tokens, (expected - expected.mean()) / expected.std())
    assert not bool(white.advantages[~rollout.response_mask].any())


def test_a_cut_response_may_be_left_out() -> None:
    """truncation = "drop": neither its score nor its tokens reach statistics or losses; all cut is an error."""
    rollout = scored([0.0, 100.0, 8.0], [2, 3, 1], [False, True, False])
    rows = learnable(rollout, torch.ones(3, dtype=torch.bool), truncation="drop", on_failure="stop")
    assert rows.tolist() == [0, 2]
    found = estimate_advantages(rollout.select(rows), ppo(reward_normalization="batch"), START)
    close(found.scores, [0.0, 8.0])
    half = 0.5**0.5  # (0 - 4) and (8 - 4) by the standard deviation 4 * sqrt(2)
    close(found.rewards.sum(dim=1), [-half, half])
    with pytest.raises(RunFailed, match="3 cut by length"):
        learnable(
            scored([1.0] * 3, [1] * 3, [True] * 3),
            torch.ones(3, dtype=torch.bool),
            truncation="drop",
            on_failure="stop",
        )
