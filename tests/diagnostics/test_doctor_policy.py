"""Actors made ill on purpose: too fast, too slow, exploiting the reward, or fed with others' responses."""

from __future__ import annotations

from pathlib import Path

from diagnostics.patients import (
    examined,
    found,
    old_log_probs_at,
    only_the_best,
    patient,
    replaying,
    sampling_by,
)
from tiny import tiny_directory
from training.runs import Tree


def test_a_reward_for_one_letter_without_kl_is_hacked(tmp_path: Path) -> None:
    """FAULTS N7: the reward rises, and every prompt gets the same answer."""
    examination = examined(patient(tmp_path, "share_of_a", learning_rate=3e-2, kl_coef=0.0))
    also = {"KL runaway", "reward saturation", "reward length bias", "critic underfit: bias"}
    verdicts = found(examination, "reward hacking", "entropy collapse", also=also)
    assert verdicts["reward hacking"].remedy.startswith("ppo.kl_coef = 0.05")
    assert examination.verdicts[0].severity == "ill"


def test_kl_runs_away_without_held_out_prompts_too(tmp_path: Path) -> None:
    changes: Tree = {"data": {"prompts_test": None}, "evaluation": None}
    examination = examined(patient(tmp_path, "count_of_a", changes, learning_rate=3e-2, kl_coef=0.0))
    found(examination, "KL runaway")
    reasons = {each.name: each.reason for each in examination.unjudged}
    assert "data.prompts_test" in reasons["reward hacking"] and "data.prompts_test" in reasons["critic overfit"]


def test_eight_epochs_at_a_huge_rate_are_clipped(tmp_path: Path) -> None:
    verdicts = found(
        examined(patient(tmp_path, learning_rate=0.1, num_epochs=8)), "clip fraction high", also={"KL runaway"}
    )
    assert "ppo.num_epochs = 4" in verdicts["clip fraction high"].remedy


def test_old_log_probs_at_another_temperature_give_ratios_that_are_not_1(tmp_path: Path) -> None:
    with old_log_probs_at(0.7):
        examination = examined(patient(tmp_path, learning_rate=1e-3))
    found(examination, "ratio not 1", also={"clip fraction high", "KL negative"})


def test_an_actor_that_does_not_move_stands_still(tmp_path: Path) -> None:
    found(examined(patient(tmp_path, learning_rate=1e-9)), "actor stands still")


def test_an_actor_that_is_no_number_any_more(tmp_path: Path) -> None:
    found(examined(patient(tmp_path, learning_rate=1e30)), "actor NaN")


def test_truncated_sampling_is_told_by_the_entropy(tmp_path: Path) -> None:
    """The sampler reports the policy's own log-probs, so that no gap shows."""
    with sampling_by(only_the_best):
        examination = examined(patient(tmp_path, learning_rate=1e-3))
    verdicts = found(examination, "sampling mismatch")
    assert " -0." in verdicts["sampling mismatch"].evidence


def test_replayed_rollouts_are_stale_and_make_kl_negative_by_their_sampling(tmp_path: Path) -> None:
    with replaying():
        examination = examined(patient(tmp_path, learning_rate=3e-3))
    also = {"critic overfit", "KL runaway"}
    verdicts = found(examination, "stale data", "KL negative", "sampling mismatch", also=also)
    assert "sampling options:" in verdicts["KL negative"].evidence
    assert verdicts["KL negative"].remedy == verdicts["sampling mismatch"].remedy
    assert "up to 13 steps old" in verdicts["stale data"].evidence


def test_another_model_as_reference_is_named(tmp_path: Path) -> None:
    other = tiny_directory(tmp_path / "other", layers=2, seed=7)
    verdicts = found(examined(patient(tmp_path, changes={"reference": {"model": str(other)}})), "wrong reference")
    assert verdicts["wrong reference"].remedy.startswith("reference.model = ''")


def test_a_reference_in_four_bits_biases_the_kl(tmp_path: Path) -> None:
    changes: Tree = {"precision": {"reference": "nf4", "max_reference_bias": 10.0}}
    verdicts = found(examined(patient(tmp_path, changes=changes, learning_rate=1e-4)), "precision gap")
    assert verdicts["precision gap"].remedy.startswith("precision.reference = 'auto'")
