"""Rewards made ill on purpose: saturated, failing, of length, or of a reward model that has learned a coin."""

from __future__ import annotations

from pathlib import Path

from diagnostics.patients import examined, found, patient, write_pairs
from training.runs import Tree

NOISE = {"critic underfit: variance", "critic plateau"}


def test_a_reward_that_15_of_16_responses_get_in_full_is_saturated(tmp_path: Path) -> None:
    found(examined(patient(tmp_path, "almost_all_right", learning_rate=1e-3)), "reward saturation", also=NOISE)


def test_a_clip_below_the_scores_saturates_too(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, score_clip=0.2)), "reward saturation", also=NOISE)
    assert verdicts["reward saturation"].remedy.startswith("ppo.score_clip = ")


def test_scores_that_are_none_are_counted(tmp_path: Path) -> None:
    examination = examined(patient(tmp_path, "none_for_some", {"reward": {"on_failure": "drop"}}))
    verdicts = found(examination, "failing scorer")
    assert "of 480 responses got no valid score" in verdicts["failing scorer"].evidence


def test_scores_that_are_none_and_have_stopped_the_run(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, "none_for_some", {"reward": {"retries": 0}})), "failing scorer")
    assert "the run stopped" in verdicts["failing scorer"].evidence


def test_a_function_that_raises_is_a_failing_scorer(tmp_path: Path) -> None:
    found(examined(patient(tmp_path, "raises", {"reward": {"retries": 0}})), "failing scorer")


def test_a_reward_of_length_is_named(tmp_path: Path) -> None:
    also = {"critic underfit: bias", "critic plateau", "critic underfit: variance"}
    found(examined(patient(tmp_path, "length")), "reward length bias", also=also)


def test_a_reward_model_that_has_learned_a_coin_by_heart(tmp_path: Path) -> None:
    """FAULTS N9: the stage that is bad is named; 24 pairs twelve times over are known by heart."""
    reward = {"source": "train", "function": None, "init": "base", "standardise": False, "num_epochs": 12}
    changes: Tree = {
        "stages": ["reward", "ppo"],
        "reward": {**reward, "learning_rate": 1e-2, "batch_size": 8, "micro_batch_size": 8},
        "data": write_pairs(tmp_path / "pairs", held_out=200),
        "critic": {"init": "reward"},
    }
    examination = examined(patient(tmp_path, changes=changes, steps=1))
    also = {"critic overfit", "critic underfit: bias", "critic underfit: variance", "sampling mismatch"}
    verdicts = found(examination, "reward model near chance", "reward miscalibration", also=also)
    assert "of 200 held-out pairs" in verdicts["reward model near chance"].evidence
