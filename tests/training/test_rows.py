"""A row of metrics holds what the table of metrics says, over the denominators that it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from fourfold.batch import Experience, ScoredRollout
from fourfold.diagnostics.metrics import METRICS, check_row
from fourfold.training import trainer as trainer_module
from fourfold.training.rows import truncation_row
from fourfold.training.trainer import Trainer
from training.runs import by_function, give_value_head, make_config, make_trainer, merged, settings, steps_of

ACTOR = (
    "entropy_per_token_mean", "policy_loss_per_token", "approx_kl_per_token_mean", "ratio_mean", "ratio_max",
    "policy_clip_fraction", "dual_clip_fraction", "actor_grad_norm",
)  # fmt: skip


def trainer_for(folder: Path, function: str, changes: dict[str, Any] | None = None, **ppo: Any) -> Trainer:
    tree = merged(by_function(function, **({"steps": 1} | ppo)), changes or {})
    trainer = make_trainer(make_config(settings(folder, tree)))
    give_value_head(trainer.models)
    return trainer


@pytest.fixture
def dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, float], ScoredRollout, np.ndarray, Experience]:
    """A row of a step in which three sets differ: what was sampled, what of it has a score, what is learned from."""
    seen: dict[str, Any] = {}
    make = trainer_module.training_row

    def keeping(progress: Any, experience: Any, scored: Any, valid: Any, *rest: Any, **named: Any) -> Any:
        seen.update(experience=experience, scored=scored, valid=valid)
        return make(progress, experience, scored, valid, *rest, **named)

    monkeypatch.setattr(trainer_module, "training_row", keeping)
    sizes = {"rollout_batch_size": 32, "mini_batch_size": 32, "micro_batch_size": 8}
    trainer = trainer_for(
        tmp_path, "pays_none_for_some", {"reward": {"on_failure": "drop"}}, truncation="drop", kl_coef=0.1, **sizes
    )
    # The actor has moved, so that the KL of a response is not 0.
    for parameter in trainer.models.actor.branch.parameters():
        parameter.data.mul_(1.05)
    [row] = steps_of(trainer)
    valid = seen["valid"].numpy()
    counts = [len(valid), int(valid.sum()), len(seen["experience"].sequences)]
    assert sorted(set(counts), reverse=True) == counts, "all three differ"
    return row, seen["scored"], valid, seen["experience"]


def test_sums_are_divided_by_the_denominators_that_the_table_names(dropped: Any) -> None:
    """Recomputed in float64; the other sets would give other numbers."""
    row, scored, valid, learned = dropped
    mask = learned.response_mask.numpy()
    denominators = {
        "responses of the rollout": len(valid),
        "responses of the rollout with a valid score": int(valid.sum()),
        "responses learned from": len(learned.sequences),
        "response tokens of the rollout": int(scored.response_mask.sum()),
        "response tokens of the responses learned from": int(mask.sum()),
        "response tokens of the responses learned from, less 1": int(mask.sum()) - 1,
    }
    assert len(set(denominators.values())) == len(denominators)

    def sum_of(tensor: Any, kept: Any) -> float:
        return float(tensor.double().numpy()[kept].sum())

    whole = scored.response_mask.numpy()
    sums = {
        "score_mean": sum_of(scored.scores, valid),
        "eos_share": sum_of(~scored.truncated, slice(None)),
        "reward_per_sequence_mean": sum_of(learned.rewards, mask),
        # No shaping is configured: scores go in as they are.
        "score_shaped_mean": sum_of(learned.scores, slice(None)),
        "response_length_mean": float(whole.sum()),
        "kl_per_sequence_mean": sum_of(scored.kl, whole),
        "kl_per_token_mean": sum_of(scored.kl, whole),
        "kl_k1_per_sequence_mean": sum_of(scored.log_probs - scored.ref_log_probs, whole),
        "sampler_gap_mean": sum_of((scored.sampler_log_probs - scored.log_probs).abs(), whole),
        "value_mean": sum_of(learned.values, mask),
        "return_mean": sum_of(learned.returns, mask),
        "advantage_mean": sum_of(learned.advantages, mask),
    }
    for name, total in sums.items():
        expected = total / denominators[METRICS["ppo_step"][name].denominator]
        assert row[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_spreads_and_correlations_are_of_the_sets_that_the_table_names(dropped: Any) -> None:
    row, scored, valid, learned = dropped
    mask = learned.response_mask.numpy()
    scores = scored.scores.double().numpy()[valid]
    values, returns, advantages = (
        tensor.double().numpy()[mask] for tensor in (learned.values, learned.returns, learned.advantages)
    )
    expected = {
        "score_std": scores.std(),
        "score_raw_min": scores.min(),
        "score_raw_max": scores.max(),
        "value_std": values.std(ddof=1),
        "return_std": returns.std(ddof=1),
        "advantage_std": advantages.std(ddof=1),
        "explained_variance": 1 - (returns - values).var() / returns.var(),
        "value_return_spearman": spearmanr(values, returns)[0],
        "response_length_max": int(scored.response_mask.sum(dim=1).max()),
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert row["invalid_scores"] == (~valid).sum()
    assert row["dropped_rows"] == len(valid) - len(learned.sequences)
    assert row["dropped_truncated_rows"] == int((scored.truncated.numpy() & valid).sum())
    assert not learned.truncated.any() and scored.truncated.any()


def test_kl_of_cut_responses_is_told_apart(dropped: Any) -> None:
    """By a loop over rows, of all that were sampled."""
    row, scored, _, _ = dropped
    sums, tokens = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for i, cut in enumerate(scored.truncated.tolist()):
        length = int(scored.response_mask[i].sum())
        ratio = scored.log_probs[i, :length].double() - scored.ref_log_probs[i, :length].double()
        sums[cut], tokens[cut] = sums[cut] + float(ratio.sum()), tokens[cut] + length
    assert all(tokens.values())
    assert row["kl_k1_truncated_per_token_mean"] == pytest.approx(sums[True] / tokens[True], rel=1e-4, abs=1e-6)
    assert row["kl_k1_ended_per_token_mean"] == pytest.approx(sums[False] / tokens[False], rel=1e-4, abs=1e-6)
    whole = row["kl_k1_per_sequence_mean"] * len(scored.sequences)
    assert whole == pytest.approx(sum(sums.values()), rel=1e-4, abs=1e-5)


def test_without_cut_responses_nothing_is_said_of_them(dropped: Any) -> None:
    scored = dropped[1]
    none = torch.zeros_like(scored.truncated)
    assert set(truncation_row(replace(scored, truncated=none))) == {"kl_k1_ended_per_token_mean"}
    assert set(truncation_row(replace(scored, truncated=~none))) == {"kl_k1_truncated_per_token_mean"}


def test_an_actor_that_stands_still_has_no_metrics(tmp_path: Path) -> None:
    """Entropy 0 and ratio 0 would read as a collapse; what the critic did is there all the same."""
    trainer = trainer_for(tmp_path, "pays_by_hash", {"critic": {"warmup_rollouts": 1}}, steps=2)
    waiting, learning = steps_of(trainer)
    assert not set(ACTOR) & set(waiting) and set(ACTOR) <= set(learning)
    others = {"actor_learn_peak_bytes", "entropy_first_epoch_per_token_mean"}
    assert learning.keys() - waiting.keys() == {*ACTOR, *others}
    assert waiting["actor_optimizer_steps"] == 0 and waiting["critic_grad_norm"] > 0
    for row in (waiting, learning):
        check_row(row, "ppo_step")


def test_an_actor_that_was_stopped_has_been_measured_and_has_no_gradient_norm(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, "pays_by_hash", target_kl=0.0)
    [row] = steps_of(trainer)
    assert row["early_stopped"] == row["mini_batches_skipped"] == 1
    assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-5) and row["entropy_per_token_mean"] > 0.1
    assert "actor_grad_norm" not in row
