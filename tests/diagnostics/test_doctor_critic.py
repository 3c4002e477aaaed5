"""Critics made ill on purpose: each disease is named, and nothing that is not there."""

from __future__ import annotations

from pathlib import Path

from diagnostics.patients import examined, found, patient, write_pairs
from fourfold.diagnostics.doctor.critic import _less_by_heart
from training.runs import Tree, make_config


def test_a_learning_rate_of_0_is_a_plateau(tmp_path: Path) -> None:
    examination = examined(patient(tmp_path, changes={"critic": {"learning_rate": 0.0}}))
    verdicts = found(examination, "critic plateau", also={"critic underfit: variance"})
    assert verdicts["critic plateau"].remedy.startswith("critic.learning_rate = ")


def test_returns_that_no_critic_can_know_are_variance(tmp_path: Path) -> None:
    """The evidence: responses to one prompt differ as much as values miss."""
    verdicts = found(examined(patient(tmp_path, "noise")), "critic underfit: variance", also={"critic plateau"})
    assert verdicts["critic underfit: variance"].remedy.startswith("sampling.responses_per_prompt = ")


def test_a_critic_that_lags_behind_is_biased(tmp_path: Path) -> None:
    changes: Tree = {"critic": {"learning_rate": 1e-3}}
    verdicts = found(examined(patient(tmp_path, "rising", changes)), "critic underfit: bias", also={"critic plateau"})
    assert "return - value is +" in verdicts["critic underfit: bias"].evidence


def test_a_reward_whose_scale_changes_makes_the_loss_oscillate(tmp_path: Path) -> None:
    found(examined(patient(tmp_path, "restless")), "critic oscillation")


def test_one_score_of_1000_is_a_spike_and_an_outlier(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, "outlier")), "critic spike or NaN", "reward outliers")
    assert verdicts["reward outliers"].remedy.startswith("ppo.score_clip = ")
    assert verdicts["critic spike or NaN"].steps[1] == verdicts["reward outliers"].steps[0]


def test_a_clip_that_holds_outliers_is_enough(tmp_path: Path) -> None:
    """The other way round: the remedy that was proposed cures."""
    found(examined(patient(tmp_path, "outlier", score_clip=5.0)))


def test_a_loss_that_is_no_number_is_the_critics(tmp_path: Path) -> None:
    """A run that has failed is read as far as it got."""
    examination = examined(patient(tmp_path, "too_large"))
    verdicts = found(examination, "critic spike or NaN")
    assert "loss is inf" in verdicts["critic spike or NaN"].evidence
    assert examination.state.startswith("failed, 2 of 15 steps: step 3: learn: the critic's loss is inf")


def test_a_critic_that_knows_16_prompts_by_heart_overfits(tmp_path: Path) -> None:
    changes: Tree = {"data": {"prompts": {"max_rows": 16}}, "sampling": {"responses_per_prompt": 1}}
    verdicts = found(
        examined(patient(tmp_path, "by_prompt", changes, num_epochs=8, learning_rate=1e-3)), "critic overfit"
    )
    assert verdicts["critic overfit"].remedy.startswith("ppo.num_epochs = 4 ")


def test_a_critic_that_goes_often_through_a_rollout_is_told_to_go_less_often(tmp_path: Path) -> None:
    changes: Tree = {
        "data": {"prompts": {"max_rows": 16}}, "sampling": {"responses_per_prompt": 1},
        "critic": {"updates_per_actor": 4},
    }  # fmt: skip
    examination = examined(patient(tmp_path, "by_prompt", changes, num_epochs=2, learning_rate=1e-3))
    remedy = found(examination, "critic overfit")["critic overfit"].remedy
    assert remedy.startswith("critic.updates_per_actor = 2 ")


def test_a_critic_that_knows_every_rollout_by_heart_overfits(tmp_path: Path) -> None:
    """No prompt comes twice, so that nothing of training rollouts differs from held-out ones."""
    changes: Tree = {"critic": {"updates_per_actor": 8}}
    examination = examined(patient(tmp_path, "noise", changes, learning_rate=1e-3))
    overfit = found(examination, "critic overfit", also={"critic plateau", "critic underfit: variance"})[
        "critic overfit"
    ]
    assert "in the last pass over them" in overfit.evidence
    assert overfit.remedy.startswith("critic.updates_per_actor = 4")


def test_without_passes_to_spare_a_critic_is_made_to_remember_less() -> None:
    config = make_config({"output": "x", "stages": ["ppo"], "model": {"path": "m"}, "ppo": {"num_epochs": 1},
                          "data": {"prompts": {"path": "p"}}, "critic": {"init": "actor"},
                          "reward": {"source": "function", "function": "m:f"}})  # fmt: skip
    assert list(_less_by_heart(config)) == ["critic.dropout = 0.1", "critic.weight_decay = 0.1"]


def test_a_critic_of_a_reward_model_that_likes_length(tmp_path: Path) -> None:
    """The reward model has seen pairs whose longer text was chosen; the clip takes that out of the reward."""
    pairs = write_pairs(tmp_path / "pairs", 20, 4, count=48)
    reward = {"source": "train", "function": None, "init": "base", "standardise": False, "num_epochs": 8}
    changes: Tree = {
        "stages": ["reward", "ppo"],
        "reward": {**reward, "learning_rate": 1e-2, "batch_size": 8, "micro_batch_size": 8},
        "data": pairs,
        "critic": {"init": "reward", "learning_rate": 0.0},
    }
    examination = examined(patient(tmp_path, changes=changes, steps=2, score_clip=0.01, kl_coef=0.0))
    found(examination, "critic length bias", also={"critic underfit: bias", "reward saturation"})


def test_a_trunk_that_moves_twenty_times_as_fast_as_the_branches_drifts(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, changes={"trunk": {"train": True, "lr_scale": 20.0}})), "trunk drift")
    assert verdicts["trunk drift"].remedy.startswith("trunk.lr_scale = 2 ")
