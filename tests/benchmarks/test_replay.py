"""Given responses are learned from as if the sampler had drawn them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks.replay import Replay
from fourfold.batch_files import read_batch
from training.runs import SHARINGS, by_function, make_config, make_trainer, merged, settings


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_replayed_rollout_is_the_one_that_was_drawn(tmp_path: Path, sharing: str) -> None:
    tree = merged(settings(tmp_path, by_function("pays_by_hash")), SHARINGS[sharing])
    trainer = make_trainer(make_config(tree))
    prompts = trainer.prompts.batch(0)
    drawn, activations = trainer.sampler.generate(prompts, policy_version=0)
    replay = Replay(trainer, tmp_path / "drawn.parquet")
    for _ in ("drawn and given", "given"):
        given, again = replay.generate(prompts, policy_version=0)
        for each in fields(drawn):
            # With a trunk one pass over all tokens rounds otherwise than one token after the other.
            torch.testing.assert_close(getattr(given, each.name), getattr(drawn, each.name), rtol=0, atol=1e-5)
        mask = drawn.attention_mask
        torch.testing.assert_close(again.inputs[mask], activations.inputs[mask], rtol=0, atol=1e-4)
    assert torch.equal(read_batch(tmp_path / "drawn.parquet").log_probs, drawn.log_probs)
    assert 0 <= replay.log_prob_gap < 1e-5


def test_the_log_probs_are_those_of_the_policy_that_is_given_the_responses(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(settings(tmp_path, by_function("pays_by_hash"))))
    prompts = trainer.prompts.batch(0)
    replay = Replay(trainer, tmp_path / "drawn.parquet")
    drawn, _ = replay.generate(prompts, policy_version=0)
    with torch.no_grad():
        next(p for p in trainer.models.actor.parameters() if p.ndim == 2).mul_(1.1)
    given, _ = replay.generate(prompts, policy_version=0)
    assert torch.equal(given.sequences, drawn.sequences)
    gaps = (given.log_probs - drawn.log_probs).abs()[drawn.response_mask]
    assert replay.log_prob_gap == pytest.approx(float(gaps.mean()), abs=1e-6) and replay.log_prob_gap > 1e-3


def test_scoring_ahead_hears_of_given_responses(tmp_path: Path) -> None:
    ahead = {"sampling": {"overlap_scoring": True, "batch_size": 3}}
    plain, overlapped = (
        make_trainer(make_config(merged(settings(tmp_path, by_function("pays_by_hash")), changes)))
        for changes in ({}, ahead)
    )
    for trainer in (plain, overlapped):
        trainer.sampler = Replay(trainer, tmp_path / "drawn.parquet")
    rows = [trainer.step() for trainer in (plain, overlapped)]
    for name in ("score_mean", "kl_per_sequence_mean", "actor_grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4, abs=1e-6)


def test_responses_to_other_prompts_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(settings(tmp_path, by_function("pays_by_hash"))))
    replay = Replay(trainer, tmp_path / "drawn.parquet")
    replay.generate(trainer.prompts.batch(0), policy_version=0)
    with pytest.raises(
        ValueError, match=r"has responses to the prompts .* asked for are .* give both sides the same seed"
    ):
        replay.generate(trainer.prompts.batch(1), policy_version=1)
