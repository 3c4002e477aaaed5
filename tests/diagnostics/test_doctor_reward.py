"""Rewards made ill on purpose: saturated, failing, of length, or of a reward model that has learned a coin."""

from __future__ import annotations

from pathlib import Path

from diagnostics.patients import by, by_parts, examined, found, patient, write_pairs
from scoring.service.test_texts import answering, lengths, says
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


def test_a_part_that_raises_is_a_failing_scorer(tmp_path: Path) -> None:
    """The remedy is a setting of that part."""
    parts = by_parts(known=by("healthy"), gone=by("raises", retries=0))
    examination = examined(patient(tmp_path, changes=parts))
    verdict = found(examination, "failing scorer")["failing scorer"]
    assert "the function of reward.parts.gone failed 1 times, last with ConnectionError" in verdict.evidence
    assert verdict.remedy.startswith("reward.parts.gone.on_failure = 'drop'")
    assert examination.state.startswith("failed")


def test_a_service_that_goes_away_is_a_failing_scorer(tmp_path: Path) -> None:
    with answering(*[lengths] * 4, says(500, {"error": "out of order"})) as server:
        tone: Tree = {"source": "http", "url": server.url, "retries": 0, "on_failure": "stop"}
        examination = examined(patient(tmp_path, changes=by_parts(known=by("healthy"), tone=tone)))
    verdict = found(examination, "failing scorer")["failing scorer"]
    assert "out of order" in verdict.evidence and verdict.remedy.startswith("reward.parts.tone.on_failure = 'drop'")


def test_a_part_that_leaves_rows_out_is_counted_and_named(tmp_path: Path) -> None:
    """Not `reward.retries`, which nothing reads here."""
    parts = by_parts(known=by("healthy"), some=by("none_for_some", on_failure="drop", retries=1))
    verdict = found(examined(patient(tmp_path, changes=parts)), "failing scorer")["failing scorer"]
    assert "of 480 responses got no valid score" in verdict.evidence and "reward.parts.some" in verdict.evidence
    assert verdict.remedy.startswith("reward.parts.some.retries = 4 ")


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
