"""Actors made ill on purpose: too fast, too slow, exploiting the reward, or fed with others' responses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diagnostics.patients import (
    examined,
    found,
    has_other_weights,
    loses_a_fifth_of_its_sum,
    old_log_probs_at,
    only_the_best,
    patient,
    reference_with,
    replaying,
    sampling_by,
)
from fourfold.diagnostics.doctor.policy import _log_prob
from fourfold.diagnostics.doctor.records import read_records
from fourfold.training import ppo
from tiny import tiny_directory
from training.runs import Tree, merged

# What else a reward for every letter does to a tiny actor and its critic.
ALSO_OF_LENGTH = {"KL runaway", "reward length bias", "critic length bias", "critic underfit: bias", "reward hacking",
                  "critic underfit: variance", "clip fraction high", "entropy collapse", "critic plateau"}  # fmt: skip


def test_a_reward_for_one_letter_without_kl_is_hacked(tmp_path: Path) -> None:
    """FAULTS N7: the reward rises, and every prompt gets the same answer."""
    examination = examined(patient(tmp_path, "share_of_a", learning_rate=3e-2, kl_coef=0.0))
    also = {"KL runaway", "reward saturation", "reward length bias", "critic underfit: bias"}
    verdicts = found(examination, "reward hacking", "entropy collapse", also=also)
    assert verdicts["reward hacking"].remedy.startswith("ppo.kl_coef = 0.05")
    assert examination.verdicts[0].severity == "ill"


def test_a_reward_that_a_judge_does_not_share_is_hacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's other numbers stay healthy: texts stay different, and likely to the reference."""

    def dislikes_a(texts: list[str]) -> list[float]:
        return [-10 * text.count("a") / max(1, len(text)) for text in texts]

    monkeypatch.setattr(ppo, "make_judge", lambda name: dislikes_a)
    changes: Tree = {"evaluation": {"judge": "vader"}}
    tree = patient(tmp_path, "share_of_a", changes, learning_rate=1e-2, kl_controller="adaptive")
    also = {"critic plateau", "critic underfit: variance", "critic underfit: bias", "clip fraction high"}
    verdicts = found(examined(tree), "reward hacking", also=also)
    assert "while the judge's mean went from" in verdicts["reward hacking"].evidence
    assert verdicts["reward hacking"].remedy == "ppo.kl_target = 3  # is 6", "the coefficient is only where it starts"


def test_a_reference_that_goes_along_hides_no_hacking(tmp_path: Path) -> None:
    """Its own log-probs rise with the actor's; the actor as it was at step 0 finds the responses strange."""
    changes: Tree = {"reference": {"prior": "moving", "copy_every": 1}}
    tree = patient(tmp_path, "share_of_a", changes, learning_rate=3e-2)
    examination = examined(tree)
    also = {"KL runaway", "entropy collapse", "critic plateau", "reward saturation", "reward length bias",
            "critic underfit: bias", "critic underfit: variance", "clip fraction high"}  # fmt: skip
    verdicts = found(examination, "reward hacking", also=also)
    assert verdicts["reward hacking"].remedy.startswith("reference.copy_every = 4  # or reference.prior")
    records = read_records(Path(tree["output"]))
    (_, start), (_, end) = records.first_held_out(), records.last_held_out()
    told, said = (
        records.run.points("evaluation", "eval_step_0_log_prob_per_token")[-1][1],
        _log_prob(records, start, end)[1],
    )
    assert said.startswith("the step-0 policy's log-prob of a token went from") and f" to {told:.2f} nats" in said
    along = float(end.ref_log_probs[end.response_mask].mean())
    assert told < along - 0.1, "the reference has gone along"


def test_kl_runs_away_without_held_out_prompts_too(tmp_path: Path) -> None:
    changes: Tree = {"data": {"prompts_test": None}, "evaluation": None}
    examination = examined(patient(tmp_path, "count_of_a", changes, learning_rate=3e-2, kl_coef=0.0))
    found(examination, "KL runaway", also={"truncation drift"})
    reasons = {each.name: each.reason for each in examination.unjudged}
    assert "data.prompts_test" in reasons["reward hacking"]


def test_eight_epochs_at_a_huge_rate_are_clipped(tmp_path: Path) -> None:
    verdicts = found(
        examined(patient(tmp_path, learning_rate=0.1, num_epochs=8)), "clip fraction high", also={"KL runaway"}
    )
    assert "ppo.num_epochs = 4" in verdicts["clip fraction high"].remedy


def test_old_log_probs_at_another_temperature_give_ratios_that_are_not_1(tmp_path: Path) -> None:
    with old_log_probs_at(0.7):
        examination = examined(patient(tmp_path, learning_rate=1e-3))
    found(examination, "ratio not 1", also={"clip fraction high", "KL negative"})


def test_a_reward_for_length_makes_the_actor_drift_into_the_limit(tmp_path: Path) -> None:
    """Many tokens end a response; paid by the letter, the actor stops drawing these."""
    examination = examined(patient(tmp_path, "length", learning_rate=1e-2, kl_coef=0.0, steps=40))
    verdict = found(examination, "truncation drift", also=ALSO_OF_LENGTH)["truncation drift"]
    assert verdict.remedy == "ppo.missing_eos_penalty = 1  # is 0"
    assert "of those that ended" in verdict.evidence


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


@pytest.mark.parametrize("prior", ["model", "uniform"])
def test_a_prior_that_was_chosen_is_no_fault(tmp_path: Path, prior: str) -> None:
    other = tiny_directory(tmp_path / "other", layers=2, seed=7)
    reference: Tree = {"model": str(other)} if prior == "model" else {"prior": "uniform"}
    examination = examined(patient(tmp_path, changes={"reference": reference}, steps=8))
    found(examination)
    reasons = {each.name: each.reason for each in examination.unjudged}
    assert "names another policy than the actor at step 0, as was asked for" in reasons["wrong reference"]


def test_a_reference_of_other_weights_than_the_actor_starts_with_is_named(tmp_path: Path) -> None:
    """Pre-flight stops the run."""
    with reference_with(has_other_weights):
        examination = examined(patient(tmp_path, steps=2))
    verdicts = found(examination, "wrong reference")
    assert "KL to the reference is not 0 at step 0" in verdicts["wrong reference"].evidence


def test_a_wrong_reference_is_named_as_the_cause_of_a_negative_kl(tmp_path: Path) -> None:
    """The same weights as a model of its own, whose log-probs are too high."""
    tree = patient(tmp_path, steps=8, learning_rate=1e-4)
    with reference_with(loses_a_fifth_of_its_sum):
        examination = examined(merged(tree, {"reference": {"model": str(tmp_path / "llama")}}))
    verdict = found(examination, "KL negative")["KL negative"]
    assert "; wrong reference: before the first step" in verdict.evidence
    assert not re.search("sampling options:|precision gap:", verdict.evidence)
    assert verdict.remedy.startswith("reference.model = ''")


def test_a_precision_gap_is_named_as_the_cause_of_a_negative_kl(tmp_path: Path) -> None:
    changes: Tree = {"precision": {"reference": "nf4", "max_reference_bias": 10.0}}
    with reference_with(loses_a_fifth_of_its_sum):
        examination = examined(patient(tmp_path, changes=changes, steps=8, learning_rate=1e-4))
    verdicts = found(examination, "KL negative", "precision gap")
    assert "; precision gap: the same weights differ by -" in verdicts["KL negative"].evidence
    assert not re.search("sampling options:|wrong reference:", verdicts["KL negative"].evidence)
    assert verdicts["KL negative"].remedy == verdicts["precision gap"].remedy


def test_a_reference_in_four_bits_biases_the_kl(tmp_path: Path) -> None:
    changes: Tree = {"precision": {"reference": "nf4", "max_reference_bias": 10.0}}
    verdicts = found(examined(patient(tmp_path, changes=changes, learning_rate=1e-4)), "precision gap")
    assert verdicts["precision gap"].remedy.startswith("precision.reference = 'bfloat16'"), "the bound stays read"
