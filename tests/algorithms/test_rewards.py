"""Reward shaping by hand-computed numbers, and running moments against those of all values at once."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.algorithms.rewards import (
    RunningMoments,
    clip_scores,
    normalise_by_batch,
    normalise_by_moments,
    per_token_rewards,
    subtract_length_penalty,
    subtract_missing_eos,
)

NAN = float("nan")
BATCHES = st.lists(st.lists(st.floats(-100, 100, width=32), max_size=5), min_size=1, max_size=6)


@given(BATCHES)
def test_running_moments_equal_those_of_all_values_at_once(batches: list[list[float]]) -> None:
    seen = [value for batch in batches for value in batch]
    moments = RunningMoments()
    for batch in batches:
        moments = moments.update(torch.tensor(batch))
    assert moments.count == len(seen)
    assert moments.mean == pytest.approx(statistics.fmean(seen) if seen else 0.0, abs=1e-9)
    assert moments.std == pytest.approx(statistics.stdev(seen) if len(seen) > 1 else 1.0, rel=1e-6, abs=1e-6)


@given(BATCHES)
def test_running_moments_survive_json_bit_for_bit(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments = moments.update(torch.tensor(batch))
    assert RunningMoments.from_dict(json.loads(json.dumps(moments.to_dict()))) == moments


def test_running_moments_keep_a_small_spread_on_a_large_mean() -> None:
    """Sums of squares in float32 would lose it."""
    moments = RunningMoments().update(torch.tensor([1e4, 1e4 + 1])).update(torch.tensor([1e4 + 2, 1e4 + 3]))
    assert moments.std == pytest.approx(statistics.stdev([0, 1, 2, 3]), rel=1e-9)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_bad_score_cannot_enter_the_statistics(bad: float) -> None:
    """FAULTS M5."""
    with pytest.raises(ValueError, match="1 of 2 are NaN or infinite"):
        RunningMoments().update(torch.tensor([1.0, bad]))


def test_normalisation_by_batch() -> None:
    scores = normalise_by_batch(torch.tensor([1.0, 3.0, 5.0]))
    assert scores.tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert normalise_by_batch(torch.tensor([4.0])).tolist() == [0.0]
    assert normalise_by_batch(torch.full((3,), 4.0)).tolist() == [0.0, 0.0, 0.0]


def test_normalisation_by_running_moments_differs_from_the_raw_scores() -> None:
    """FAULTS M3: before anything is known it changes nothing, afterwards it does."""
    scores = torch.tensor([1.0, 5.0])
    assert normalise_by_moments(scores, RunningMoments()).tolist() == [1.0, 5.0]
    moments = RunningMoments().update(torch.tensor([1.0, 3.0, 5.0]))
    assert normalise_by_moments(scores, moments).tolist() == pytest.approx([-1.0, 1.0])


def test_clipping_limits_both_sides() -> None:
    assert clip_scores(torch.tensor([-9.0, 1.0, 9.0]), 5.0).tolist() == [-5.0, 1.0, 5.0]
    with pytest.raises(ValueError, match="bound = 0"):
        clip_scores(torch.ones(1), 0.0)


def test_only_truncated_rows_pay_for_the_missing_eos() -> None:
    scores = subtract_missing_eos(torch.tensor([2.0, -2.0]), torch.tensor([False, True]), 0.5)
    assert scores.tolist() == [2.0, -2.5]


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [
        (3, 5, [-0.2, 0.0, 0.0, -0.3]),
        (0, 5, [0.0, 0.0, 0.0, -0.3]),
        (3, 0, [-0.2, 0.0, 0.0, 0.0]),
        (0, 0, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_length_penalty_counts_the_tokens_outside_the_range(shortest: int, longest: int, expected: list[float]) -> None:
    lengths = torch.tensor([1, 3, 5, 8])
    scores = subtract_length_penalty(torch.zeros(4), lengths, 0.1, shortest, longest)
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx(expected)


def test_a_range_that_frees_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="shortest = 6"):
        subtract_length_penalty(torch.zeros(1), torch.tensor([1]), 0.1, 6, 5)


def test_the_score_is_on_the_last_token_and_kl_on_every_token() -> None:
    """FAULTS B7, B12: nothing after the end, the last real token counted, the NaN of padding unread."""
    kl = torch.tensor([[1.0, 2.0, NAN], [1.0, 2.0, 3.0], [4.0, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    rewards = per_token_rewards(torch.tensor([10.0, 20.0, 0.0]), kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 9.0, 0.0], [-0.5, -1.0, 18.5], [-2.0, 0.0, 0.0]]


def test_the_score_finds_the_last_trainable_token_after_a_masked_span() -> None:
    """FAULTS B6."""
    mask = torch.tensor([[True, True, False, False, True]])
    rewards = per_token_rewards(torch.ones(1), torch.zeros(1, 5), mask, kl_coef=0.1)
    assert rewards.tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0]]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.floats(0, 1))
def test_the_rewards_of_a_row_sum_to_score_minus_penalised_kl(lengths: list[int], kl_coef: float) -> None:
    """FAULTS C8: without a coefficient they sum to the score exactly."""
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    kl = torch.arange(1.0, 7.0).expand(len(lengths), 6)
    scores = torch.arange(float(len(lengths)))
    sums = per_token_rewards(scores, kl, mask, kl_coef).sum(dim=1)
    expected = [score - kl_coef * n * (n + 1) / 2 for score, n in enumerate(lengths)]
    assert sums.tolist() == pytest.approx(expected, abs=1e-4)
    assert torch.equal(per_token_rewards(scores, kl, mask, 0.0).sum(dim=1), scores)
