"""Several rewards at once become the learning signal that their weighted sum would, unless they are whitened apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.algorithms.rewards import RunningMoments
from fourfold.batch import ScoredRollout
from fourfold.training.experience import Shaping, estimate_advantages, shape_scores
from training.test_experience import ppo, scored

LENGTHS, TRUNCATED = [3, 1, 5, 2], [False, True, True, False]
PARTS = 2


def several(seed: int, parts: int = PARTS) -> ScoredRollout:
    """Rows with random scores, weights of their own, random KL, and a value for each part and the penalties."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch = scored([0.0] * len(LENGTHS), LENGTHS, TRUNCATED)
    rows, longest = batch.response_mask.shape
    mask = batch.response_mask
    scores, weights = random(rows, parts), random(rows, parts)
    return replace(
        batch,
        kl=torch.where(mask, random(rows, longest), 0.0),
        values=torch.where(mask[..., None], random(rows, longest, parts + 1), 0.0),
        last_values=random(rows, parts + 1),
        scores=(scores * weights).sum(dim=1),
        score_parts=scores,
        score_weights=weights,
    )


def of_the_total(batch: ScoredRollout) -> ScoredRollout:
    """The same rows for a scalar critic whose every value is the weighted sum."""
    return replace(batch, values=batch.total(batch.values), last_values=batch.total(batch.last_values))


PENALISED = {"missing_eos_penalty": 0.5, "length_penalty": 0.1, "length_range": (2, 3)}


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([{}, PENALISED, {"truncation": "bootstrap"}, {"whiten_advantages": True}]),
)
def test_advantages_are_those_of_the_weighted_total(
    seed: int, parts: int, gamma: float, lam: float, more: dict[str, Any]
) -> None:
    """Penalties and KL in a dimension of their own, cut responses, whitening of the total: all the same number."""
    batch, shaping = several(seed, parts), Shaping(0.1, RunningMoments(), (RunningMoments(),) * parts)
    given = ppo(gamma=gamma, gae_lambda=lam, **more)
    vector = estimate_advantages(batch, given, shaping)
    scalar = estimate_advantages(of_the_total(batch), given, shaping)
    torch.testing.assert_close(vector.advantages, scalar.advantages, atol=1e-4, rtol=1e-4)
    for name in ("rewards", "returns"):
        found = getattr(vector, name)
        assert found.shape == (*batch.response_mask.shape, parts + 1)
        torch.testing.assert_close(batch.total(found), getattr(scalar, name), atol=1e-4, rtol=1e-4)


def test_a_part_has_its_score_at_the_end_and_the_penalties_have_the_rest() -> None:
    batch = replace(several(0), score_parts=torch.tensor([[1.0, 2.0]] * 4), kl=torch.full((4, 5), 0.5))
    batch = replace(batch, kl=torch.where(batch.response_mask, batch.kl, 0.0))
    shaping = Shaping(0.1, RunningMoments(), (RunningMoments(),) * PARTS)
    rewards = estimate_advantages(batch, ppo(missing_eos_penalty=0.25), shaping).rewards
    assert rewards[0].tolist() == pytest.approx(
        torch.tensor([[0, 0, -0.05], [0, 0, -0.05], [1, 2, -0.05], [0, 0, 0], [0, 0, 0]])
    )
    assert rewards[1, 0].tolist() == pytest.approx([1.0, 2.0, -0.05 - 0.25])  # cut by length
    assert rewards[1, 1:].abs().max().item() == 0.0


def test_each_part_is_normalised_and_clipped_by_itself() -> None:
    """In units of 1 and of 1000, both have mean 0 and deviation 1 of the batch; the penalties are left as they are."""
    batch = replace(several(0), score_parts=torch.tensor([[0.0, 5000.0], [4.0, 1000.0], [8.0, 9000.0], [4.0, 5000.0]]))
    shaping = Shaping(0.1, RunningMoments(), (RunningMoments(), RunningMoments()))
    shaped = shape_scores(batch, ppo(reward_normalization="batch", missing_eos_penalty=0.5), shaping)
    for k in range(PARTS):
        assert shaped[:, k].mean().item() == pytest.approx(0.0, abs=1e-6)
        assert shaped[:, k].std().item() == pytest.approx(1.0, abs=1e-5)
    assert shaped[:, 2].tolist() == [0.0, -0.5, -0.5, 0.0]
    assert shape_scores(batch, ppo(score_clip=3.0), shaping)[:, 0].tolist() == [0.0, 3.0, 3.0, 3.0]


def test_running_moments_are_those_of_each_part() -> None:
    batch = replace(several(0), score_parts=torch.tensor([[1.0, 100.0]] * 4))
    moments = (RunningMoments(2, 0.0, 4.0), RunningMoments(2, 100.0, 1.0))
    shaped = shape_scores(batch, ppo(reward_normalization="running"), Shaping(0.1, RunningMoments(), moments))
    assert shaped[:, :2].tolist() == [pytest.approx([0.5, 0.0])] * 4


def test_whitened_dimensions_do_not_depend_on_the_units_of_a_part() -> None:
    """Seconds or milliseconds: without KL, the advantages are the same; without the option they are not."""
    batch = replace(several(3), kl=torch.zeros(4, 5), score_weights=torch.ones(4, 2))
    units = torch.tensor([1.0, 1000.0, 1.0])
    other = replace(
        batch,
        score_parts=batch.score_parts * units[:2],
        values=batch.values * units,
        last_values=batch.last_values * units,
    )
    shaping = Shaping(0.0, RunningMoments(), (RunningMoments(),) * PARTS)
    for whiten in (True, False):
        given = ppo(whiten_dimensions=whiten)
        one, two = (estimate_advantages(each, given, shaping).advantages for each in (batch, other))
        assert torch.allclose(one, two, atol=1e-3) == whiten
