"""Whole tiny runs with a critic that has a value for each part of the reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.algorithms.balance import gradient_norm_weights, uncertainty_weights
from fourfold.batch import Experience
from fourfold.cli.main import main
from fourfold.diagnostics.kept import training_files
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import Interrupted
from fourfold.models.heads import MultiHead, VectorHead
from fourfold.models.roles import Activations
from fourfold.training.learner import Learner
from fourfold.training.trainer import Trainer
from fourfold.training.update import update
from training.runs import (
    SHARINGS,
    Tree,
    by_function,
    give_value_head,
    interrupt_at,
    make_config,
    make_experience,
    make_trainer,
    merged,
    outcome,
    run,
    settings,
    steps_of,
    weights_of,
)
from training.test_combined_runs import PARTS, by_parts
from training.test_resume import same
from training.test_update import Recording

NAMES = ("letters", "hash", "penalties")


def vector(heads: str = "vector", parts: Tree = PARTS, ppo: Tree | None = None, **critic: Any) -> Tree:
    """Only the stage ppo, paid by parts, with a critic of several values."""
    return merged(by_parts(parts, **(ppo or {})), {"critic": {"heads": heads, **critic}})


def trainer_for(folder: Path, changes: Tree) -> Trainer:
    trainer = make_trainer(make_config(settings(folder, changes)))
    give_value_head(trainer.models)
    if isinstance(head := trainer.models.critic.head, MultiHead):
        torch.nn.init.normal_(head.outer, generator=torch.Generator().manual_seed(2))
    return trainer


def test_rows_tell_the_dimensions_apart(tmp_path: Path) -> None:
    """Losses and shares add up to those of the whole, and a run with one value has none of it."""
    rows = steps_of(make_trainer(make_config(settings(tmp_path, vector(ppo={"steps": 2})))))
    for row in rows:
        shares = [row[f"value_loss_share/{name}"] for name in NAMES]
        assert sum(shares) == pytest.approx(1.0)
        assert all(row[f"value_loss_weight/{name}"] == 1.0 for name in NAMES)
        losses = [row[f"value_loss_per_token/{name}"] for name in NAMES]
        assert sum(losses) == pytest.approx(row["value_loss_per_token"], rel=1e-5)
        assert {f"{kind}/{name}" for kind in ("explained_variance", "advantage_std") for name in NAMES} <= row.keys()
        assert -1 <= row["score_correlation/letters:hash"] <= 1
    scalar = steps_of(make_trainer(make_config(settings(tmp_path / "scalar", by_parts(steps=1)))))
    assert "explained_variance/letters" not in scalar[0] and "score_correlation/letters:hash" in scalar[0]


def critic_gradient(trainer: Trainer, experience: Experience, activations: Activations, micro: int) -> torch.Tensor:
    models = trainer.models
    actor, critic = Recording("actor", models.actor), Recording("critic", models.critic)
    learner = Learner(models.actor, models.critic, actor, critic, values=trainer.learner.values)
    everything = {"num_epochs": 1, "mini_batch_size": len(experience.sequences), "micro_batch_size": micro}
    ppo = trainer.config.ppo.model_copy(update=everything)
    update(learner, experience, activations, ppo, temperature=0.8, seed=1)
    [found] = critic.gradients
    return torch.cat([g.flatten() for g in found.values()])


@pytest.mark.parametrize("balance", ["fixed", "uncertainty", "grad_norm"])
@pytest.mark.parametrize("heads", ["vector", "multi"])
def test_the_critics_gradient_does_not_depend_on_micro_batches(tmp_path: Path, heads: str, balance: str) -> None:
    """Nor does what is measured in a mini-batch for the next one."""
    trainer = trainer_for(tmp_path, vector(heads, loss_balance=balance))
    experience, activations = make_experience(trainer)
    head = trainer.models.critic.head
    assert isinstance(head, VectorHead) and (experience.values.std(dim=(0, 1)) > 0).all()
    found = []
    for micro in (8, 4, 1):
        head.loss_weights.fill_(1.0)
        gradient = critic_gradient(trainer, experience, activations, micro)
        found.append((gradient, head.loss_weights.clone()))
    for gradient, weights in found[1:]:
        torch.testing.assert_close(gradient, found[0][0], atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(weights, found[0][1], rtol=1e-3, atol=1e-6)
    assert (found[0][1] == 1.0).all() == (balance == "fixed")


def test_what_each_loss_counts(tmp_path: Path) -> None:
    """By hand: one over the mean squared error; one over the norm of the gradient at the hidden states."""
    trainer = trainer_for(tmp_path, vector(loss_balance="uncertainty"))
    experience, activations = make_experience(trainer)
    head, mask = trainer.models.critic.head, experience.response_mask
    assert isinstance(head, VectorHead)
    critic_gradient(trainer, experience, activations, 4)
    errors = (experience.values - experience.returns)[mask]
    torch.testing.assert_close(head.loss_weights, uncertainty_weights(errors.square().mean(dim=0)))

    trainer = trainer_for(tmp_path / "norms", vector(loss_balance="grad_norm", ppo={"value_clip_eps": 0.0}))
    experience, activations = make_experience(trainer)
    head = trainer.models.critic.head
    assert isinstance(head, VectorHead)
    critic_gradient(trainer, experience, activations, 4)
    # dL_k / dh_t = (V - R) weight_k, so its norm over all tokens is |V - R| |weight_k|.
    errors = (experience.values - experience.returns)[experience.response_mask]
    norms = errors.norm(dim=0) * head.linear.weight.norm(dim=1)
    torch.testing.assert_close(head.loss_weights, gradient_norm_weights(norms), rtol=1e-3, atol=1e-5)


def test_fixed_weights_scale_the_losses_and_0_learns_nothing(tmp_path: Path) -> None:
    counts = {"letters": 2.0, "hash": 0.0}
    trainer = trainer_for(tmp_path, vector(loss_weights=counts, ppo={"steps": 1, "num_epochs": 1}))
    before = weights_of(trainer.models.critic)["head.linear.weight"]
    [row] = steps_of(trainer)
    after = weights_of(trainer.models.critic)["head.linear.weight"]
    assert [row[f"value_loss_weight/{name}"] for name in NAMES] == pytest.approx([2.0, 0.0, 1.0])
    assert (before != after).any(dim=1).tolist() == [True, False, True]


def test_a_clip_range_of_its_own(tmp_path: Path) -> None:
    """So small that every value has moved out of it after the first step; the others' is as wide as can be."""
    ppo = {"steps": 1, "value_clip_eps": 1000.0, "num_epochs": 4}
    trainer = trainer_for(tmp_path, vector(value_clip_eps={"hash": 1e-6}, ppo=ppo, learning_rate=1e-2))
    [row] = steps_of(trainer)
    assert row["value_clip_fraction/hash"] > 0.1
    assert row["value_clip_fraction/letters"] == row["value_clip_fraction/penalties"] == 0.0


RUNS: dict[str, Tree] = {
    "separate models": SHARINGS["none"],
    "adapters": SHARINGS["adapters"],
    "a trained trunk": {"trunk": {"branch_layers": 2, "train": True}},
    "in turns": {"trunk": {"branch_layers": 2, "train": True, "alternate": 1}},
    "bfloat16": {"precision": {"compute": "bfloat16"}},
    "float16": {"precision": {"compute": "float16"}},
    "offloaded masters": {"memory": {"optimizer_residency": "offload"}},
    "checkpointing": {"memory": {"checkpointing": "layers", "activation_offload": True}},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("heads", ["vector", "multi"])
def test_every_way_to_hold_and_train_takes_several_values(tmp_path: Path, name: str, heads: str) -> None:
    """With the balance that looks into the graph."""
    changes = merged(vector(heads, loss_balance="grad_norm", ppo={"steps": 2}), RUNS[name])
    trainer = make_trainer(make_config(settings(tmp_path, changes)))
    rows = steps_of(trainer)
    assert rows[-1]["critic_optimizer_steps"] > 0 and rows[-1]["explained_variance/hash"] < 1
    head = trainer.models.critic.head
    assert isinstance(head, VectorHead) and head.linear.weight.any(dim=1).all(), "every dimension has learned"
    assert not (head.loss_weights == 1.0).all()


def test_an_interrupted_run_with_several_values_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """What the losses count, and the moments of each part, are part of a checkpoint; so are drawn weights."""
    parts = {
        "noisy": {"source": "function", "function": "training.runs:pays_and_interrupts"},
        "letters": {"source": "function", "function": "training.runs:pays_for_a"},
    }
    changes = merged(
        vector("multi", parts, ppo={"steps": 4, "reward_normalization": "running"}, loss_balance="grad_norm"),
        {"reward": {"weights": "sampled"}, "data": {"max_prompt_tokens": 64}, "evaluation": {"every": 2}},
    )
    interrupt_at(0, "")
    run(settings(tmp_path, merged(changes, {"output": str(tmp_path / "straight")})))
    expected = outcome(tmp_path / "straight")
    interrupt_at(12, "SIGINT")  # in the second step: one call in pre-flight, four in each rollout of eight
    stopped = settings(tmp_path, merged(changes, {"output": str(tmp_path / "stopped")}))
    with pytest.raises(Interrupted):
        run(stopped)
    interrupt_at(0, "")
    run(stopped)
    same(outcome(tmp_path / "stopped"), expected)


def test_one_source_may_have_its_penalties_apart(tmp_path: Path) -> None:
    changes = merged(by_function("pays_by_hash", steps=1), {"critic": {"heads": "vector"}})
    [row] = steps_of(make_trainer(make_config(settings(tmp_path, changes))))
    assert {"explained_variance/score", "explained_variance/penalties"} <= row.keys()
    assert not [name for name in row if name.startswith("score_correlation")]


def test_a_whole_run_writes_rows_that_the_table_knows(tmp_path: Path) -> None:
    run(settings(tmp_path, vector(ppo={"steps": 2})))
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert len(rows) == 2 and "value_loss_share/penalties" in rows[0]


def test_the_credit_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads what the run has kept, with its tokenizer; and says what it cannot do without."""
    run(settings(tmp_path, vector(ppo={"steps": 2})))
    folder = str(tmp_path / "run")
    assert main(["credit", folder, "--top", "3"]) == 0
    shown = capsys.readouterr().out
    assert "step 2, held out" in shown and all(name in shown for name in NAMES)
    assert main(["credit", folder, "--json", "--training", "--step", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    kept = training_files(tmp_path / "run").read(2)
    assert found["tokens"] == int(kept.response_mask.sum()) and found["dimensions"] == list(NAMES)
    assert all(row["helped"] != row["hurt"] for row in (*found["trade_offs"], *found["places"]))
    for arguments, reason in (
        (["--step", "1"], "--step 1: no rollout of this step is kept; allowed: 0, 2"),
        (["--top", "0"], "--top 0"),
    ):
        assert main(["credit", folder, *arguments]) == 2
        assert reason in capsys.readouterr().err
    run(settings(tmp_path, merged(by_parts(steps=1), {"output": str(tmp_path / "scalar")})))
    assert main(["credit", str(tmp_path / "scalar")]) == 2
    assert "critic.heads = 'vector'" in capsys.readouterr().err
    run(
        settings(tmp_path, merged(vector(), {"output": str(tmp_path / "bare"), "evaluation": {"keep_rollouts": False}}))
    )
    assert main(["credit", str(tmp_path / "bare")]) == 2
    assert "evaluation.keep_rollouts" in capsys.readouterr().err
