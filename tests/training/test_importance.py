"""What importance weights do to an update, and what is logged of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold.batch import Experience
from fourfold.models.roles import Activations
from fourfold.training.trainer import Trainer
from training.runs import make_experience
from training.test_update import gradients, padded, trainer_for

Drawn = tuple[Trainer, Experience, Activations]
CAP = 1.2


@pytest.fixture
def drawn(tmp_path: Path) -> Drawn:
    """Responses of a sampler whose log-probs are off by 0.3 nats a token, to either side."""
    trainer = trainer_for(tmp_path)
    experience, activations = make_experience(trainer)
    noise = torch.randn(experience.log_probs.shape, generator=torch.Generator().manual_seed(0))
    return trainer, replace(experience, sampler_log_probs=experience.log_probs - 0.3 * noise), activations


def weights_by_hand(experience: Experience, level: str) -> Tensor:
    rows = []
    for ours, theirs, mask in zip(
        experience.log_probs, experience.sampler_log_probs, experience.response_mask, strict=True
    ):
        ratios = [math.exp(a) / math.exp(b) for a, b in zip(ours[mask].tolist(), theirs[mask].tolist(), strict=True)]
        numbers = ratios if level == "token" else [math.prod(ratios)] * len(ratios)
        rows.append([min(number, CAP) for number in numbers] + [0.0] * int((~mask).sum()))
    return torch.tensor(rows)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_actor_learns_with_weighted_advantages_and_the_critic_as_ever(drawn: Drawn, level: str) -> None:
    trainer, experience, activations = drawn
    by_hand = weights_by_hand(experience, level)
    weighted = replace(experience, advantages=by_hand * experience.advantages)
    expected = gradients(trainer, weighted, activations)
    plain = gradients(*drawn)
    actor, critic = gradients(*drawn, importance=level, importance_cap=CAP)
    torch.testing.assert_close(actor, expected[0], rtol=1e-4, atol=1e-6)
    assert float((actor - plain[0]).norm() / plain[0].norm()) > 0.05
    assert torch.equal(critic, plain[1])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighted_gradients_depend_on_neither_micro_batches_nor_padding(drawn: Drawn, level: str) -> None:
    trainer, experience, activations = drawn
    given = {"importance": level, "importance_cap": CAP}
    whole = gradients(*drawn, **given)
    for found in (
        gradients(*drawn, micro_batch_size=3, **given),
        gradients(trainer, *padded(experience, activations, 2, 3), **given),
    ):
        for ours, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_kl_in_the_loss_is_weighted_too(drawn: Drawn) -> None:
    """It is a mean over drawn tokens as well: where all weigh 1.5, the gradient of the whole objective is 1.5 times."""
    trainer, experience, activations = drawn
    moved = replace(
        experience,
        sampler_log_probs=experience.log_probs - math.log(1.5),
        ref_log_probs=experience.ref_log_probs - 0.7,
    )
    given = {"kl_coef": 0.0, "kl_loss_coef": 0.5}
    plain = gradients(trainer, moved, activations, **given)[0]
    actor = gradients(trainer, moved, activations, importance="token", importance_cap=9.0, **given)[0]
    torch.testing.assert_close(actor, 1.5 * plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("level", "cap"), [("token", 2.0), ("sequence", 2.0), ("token", 0.5), ("none", 2.0)])
def test_what_is_logged_of_the_weights(tmp_path: Path, level: str, cap: float) -> None:
    """FAULTS H10. The local sampler in float32 draws from what is trained: weights are 1 but for rounding."""
    given = {"importance": level} if level == "none" else {"importance": level, "importance_cap": cap}
    row = trainer_for(tmp_path, {"ppo": given}).step()
    assert 0 <= row["sampler_kl_k3_per_token_mean"] < 1e-6
    names = {"importance_weight_mean", "importance_capped_share", "effective_sample_share"}
    assert names & row.keys() == (set() if level == "none" else names)
    if level != "none":
        assert row["importance_weight_mean"] == pytest.approx(min(cap, 1.0), abs=1e-4)
        assert row["importance_capped_share"] == float(cap < 1)
        assert row["effective_sample_share"] == pytest.approx(1.0, abs=1e-4)
