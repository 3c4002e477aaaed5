"""A sampler in fewer bits draws from what is trained but for their rounding, and touches nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.algorithms.off_policy import importance_weights
from fourfold.config import ConfigError
from fourfold.models.loading import Base
from fourfold.models.quantized import LOG_PROB_BOUNDS
from fourfold.models.roles import make_trainable
from fourfold.rollout.guarded import GuardedSampler, mean_gap
from fourfold.rollout.sampler import PromptBatch
from tiny_roles import random_prompts, tiny_base, tiny_sampler
from training.runs import SHARINGS, by_function, make_config, make_trainer, merged, settings, weights_of

PROMPTS = random_prompts([3, 5, 2, 4, 5, 3])


def trained_base(folder: Path, mode: str, **settings: Any) -> Base:
    base = tiny_base(folder / "m", mode=mode, **settings)
    make_trainable(base.policy, with_language_head=mode == "none")
    return base


@pytest.mark.parametrize("mode", ["trunk", "none"])
@pytest.mark.parametrize(("kind", "compute"), [("int8", "float32"), ("int8", "bfloat16"), ("nf4", "bfloat16")])
@torch.no_grad()
def test_it_is_near_the_trained_policy_whose_log_probs_and_activations_stay(
    tmp_path: Path, mode: str, kind: str, compute: str
) -> None:
    base = trained_base(tmp_path, mode, precision__compute=compute)
    kept = {name: p.clone() for name, p in base.policy.named_parameters()}
    sampler = tiny_sampler(base, weights=kind)
    rollout, activations = sampler.generate(PROMPTS, policy_version=0)
    assert 1e-5 < mean_gap(rollout) < LOG_PROB_BOUNDS[kind]
    assert all(torch.equal(p, kept[name]) and p.grad is None for name, p in base.policy.named_parameters())
    again, _ = base.policy.log_probs(activations, rollout, 1.0)
    tolerance = 1e-5 if compute == "float32" else 0.2
    torch.testing.assert_close(again, rollout.log_probs, rtol=0, atol=tolerance)
    if base.trunk is not None:
        plain = base.trunk(rollout.sequences, rollout.attention_mask)
        torch.testing.assert_close(
            activations.inputs[activations.mask], plain[activations.mask], rtol=0, atol=tolerance
        )
    for parameter in base.policy.branch.parameters():
        parameter.mul_(1.25)
    after, _ = sampler.generate(PROMPTS, policy_version=1)
    fresh, _ = tiny_sampler(base, weights=kind).generate(PROMPTS, policy_version=1)
    assert torch.equal(after.sequences, fresh.sequences)
    assert torch.equal(after.sampler_log_probs, fresh.sampler_log_probs), "FAULTS H9: an update is seen"
    assert not torch.equal(after.sampler_log_probs[:, 0], rollout.sampler_log_probs[:, 0])


def test_weights_of_a_tempered_sampler_are_near_1(tmp_path: Path) -> None:
    """FAULTS H11: both sides are log-probs of the distribution at the temperature that is drawn from."""
    base = trained_base(tmp_path, "none")
    rollout, _ = tiny_sampler(base, weights="nf4", temperature=0.7).generate(PROMPTS, policy_version=0)
    mask = rollout.response_mask
    weights = importance_weights(rollout.log_probs, rollout.sampler_log_probs, mask, "token", cap=2.0)
    assert 0.9 < float(weights[mask].mean()) < 1.1 and float((weights[mask] - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("max_gap", [1e-7, 1.0])
def test_a_rollout_beyond_the_bound_is_drawn_again_and_says_so(
    tmp_path: Path, max_gap: float, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS H10."""
    base = trained_base(tmp_path, "trunk", precision__compute="bfloat16")
    quick, exact = tiny_sampler(base, weights="nf4"), tiny_sampler(base)
    found, _ = GuardedSampler(quick, exact, max_gap).generate(PROMPTS, policy_version=0)
    expected, _ = (exact if max_gap < 1e-3 else quick).generate(PROMPTS, policy_version=0)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.sampler_log_probs, expected.sampler_log_probs)
    said = "nats a token apart (allowed by sampling.max_gap: 1e-07); the rollout is drawn again"
    assert (said in caplog.text) == (max_gap < 1e-3)


def test_numbers_that_are_none_are_drawn_again(tmp_path: Path) -> None:
    """A NaN is no gap within any bound."""

    class Broken:
        def generate(self, prompts: PromptBatch, *, policy_version: int) -> Any:
            rollout, activations = exact.generate(prompts, policy_version=policy_version)
            rollout.sampler_log_probs.fill_(torch.nan)
            return rollout, activations

    exact = tiny_sampler(trained_base(tmp_path, "trunk"))
    found, _ = GuardedSampler(Broken(), exact, 0.5).generate(PROMPTS, policy_version=0)
    assert mean_gap(found) < 1e-4


@pytest.mark.parametrize("sharing", ["trunk", "trained trunk"])
def test_a_run_that_always_falls_back_is_the_run_in_the_training_precision(tmp_path: Path, sharing: str) -> None:
    """Bit for bit, with rows scored while others are drawn; within the bound it learns from other responses."""
    changes = {"trunk": {"train": True}} if sharing == "trained trunk" else SHARINGS[sharing]
    tree = merged(settings(tmp_path, by_function("pays_by_hash", steps=1)), changes)
    tree = merged(tree, {"sampling": {"batch_size": 3, "overlap_scoring": True}, "ppo": {"importance": "none"}})

    def moved(**sampling: Any) -> dict[str, torch.Tensor]:
        trainer = make_trainer(make_config(merged(tree, {"sampling": sampling})))
        trainer.check()
        trainer.step()
        return weights_of(trainer.models.actor)

    plain, again = moved(), moved(weights="nf4", max_gap=1e-9)
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.items())
    narrow = moved(weights="nf4", max_gap=9.0)
    assert not all(torch.equal(narrow[name], tensor) for name, tensor in plain.items())


def test_importance_is_on_where_the_sampler_differs(tmp_path: Path) -> None:
    tree = settings(tmp_path, by_function("pays_by_hash", steps=1))
    for sampling, expected in (({}, "none"), ({"weights": "int8"}, "token")):
        config = make_config(merged(tree, {"sampling": sampling}))
        assert config.importance == expected and make_trainer(config).config.ppo.importance == expected
    given = make_config(merged(tree, {"sampling": {"weights": "int8"}, "ppo": {"importance": "sequence"}}))
    assert given.importance == "sequence"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"sampling": {"weights": "int8"}, "sharing": {"mode": "adapters"}, "trunk": None},
            r"sampling.weights: given 'int8' beside sharing.mode = 'adapters', .* set precision.frozen = 'int8'",
        ),
        ({"sampling": {"max_gap": 0.1}}, "sampling.max_gap: given, but the local sampler draws from what is trained"),
        ({"ppo": {"importance_cap": 3.0}}, "ppo.importance_cap: given, but ppo.importance = 'auto' weighs all tokens"),
    ],
)
def test_what_stands_against_it_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(merged(settings(tmp_path, by_function("pays_by_hash")), changes))
