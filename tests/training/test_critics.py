"""How a critic learns: with a model of its own, n times for the actor's once, with dropout and several heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.batch import Experience
from fourfold.config.schema import CriticSection, PpoSection
from fourfold.errors import Interrupted
from fourfold.models.ensemble import EnsembleHead
from fourfold.models.roles import Activations
from fourfold.training.learner import Totals
from fourfold.training.pretraining import pretrain_critic
from fourfold.training.trainer import Trainer
from fourfold.training.update import Learned, Learner, _MiniBatches, update
from fourfold.training.value_lesson import ValueLesson
from tiny import tiny_directory
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
from training.test_update import Recording

CUTS = SHARINGS | {"trained trunk": {"trunk": {"train": True}}}
Learnt = tuple[Trainer, Experience, Activations]


def small_critic(folder: Path) -> Tree:
    """Settings of a critic with a model of its own."""
    path = folder / "critic"
    if not path.is_dir():
        tiny_directory(path, layers=2, hidden=16, seed=9)
    return {"critic": {"init": None, "model": str(path)}}


def trainer_of(folder: Path, *changes: Tree, name: str = "run", **ppo: Any) -> Trainer:
    tree = settings(folder, by_function("pays_by_hash", **ppo))
    for change in ({"output": str(folder / name)}, *changes):
        tree = merged(tree, change)
    trainer = make_trainer(make_config(tree))
    give_value_head(trainer.models)
    return trainer


# --- a model of its own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", CUTS)
def test_a_run_with_a_critic_of_its_own_trains_it_in_full(tmp_path: Path, sharing: str) -> None:
    """Beside a trained trunk the actor alone moves that."""
    trainer = trainer_of(tmp_path, CUTS[sharing], small_critic(tmp_path), steps=1)
    models = trainer.models
    before = {name: weights_of(role) for name, role in (("critic", models.critic), ("actor", models.actor))}
    trunk_before = None if models.trunk is None else weights_of(models.trunk)
    trainer.check()
    [row] = steps_of(trainer)
    for name, tensor in weights_of(models.critic).items():
        moved = not torch.equal(tensor, before["critic"][name])
        assert moved or name in ("head.scale", "head.shift"), name
    assert any(not torch.equal(t, before["actor"][name]) for name, t in weights_of(models.actor).items())
    assert row["critic_grad_norm"] > 0 and "trunk_gradient_cosine" not in row
    if models.trunk is not None and trunk_before is not None:
        assert row["trunk_drift"] > 0
        assert any(not torch.equal(t, trunk_before[name]) for name, t in weights_of(models.trunk).items())


def test_the_trunk_learns_from_the_actor_alone_beside_a_critic_of_its_own(tmp_path: Path) -> None:
    """Its gradient is that of a run whose critic's share of it is 0."""
    given = merged(CUTS["trained trunk"], {"ppo": {"num_epochs": 1, "mini_batch_size": 8}})
    own = trainer_of(tmp_path, given, small_critic(tmp_path))
    shared = trainer_of(tmp_path, given, {"trunk": {"critic_grad_scale": 0.0}}, name="shared")
    experience, activations = make_experience(shared)
    for trainer in (own, shared):
        update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=0)
    assert own.models.trunk is not None and shared.models.trunk is not None
    expected = weights_of(shared.models.trunk)
    for name, tensor in weights_of(own.models.trunk).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("memory", [{"optimizer_residency": "park"}, {"optimizer_residency": "offload"},
                                    {"checkpointing": "layers"}, {"activation_offload": True}])  # fmt: skip
def test_memory_levers_act_on_a_critic_of_its_own(tmp_path: Path, memory: Tree) -> None:
    """Under adapters, where the other roles' own weights are few: its update stays the same bit for bit."""
    tree: Sequence[Tree] = (CUTS["adapters"], small_critic(tmp_path))
    plain = trainer_of(tmp_path, *tree, steps=1)
    lever = trainer_of(tmp_path, *tree, {"memory": memory}, name="lever", steps=1)
    for trainer in (plain, lever):
        steps_of(trainer)
    expected, found = weights_of(plain.models.critic), weights_of(lever.models.critic)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --- how often it learns ----------------------------------------------------------------------------------------------


def learned(trainer: Trainer, experience: Experience, activations: Activations, **given: Any) -> Learned:
    """One update; `critic` stands for settings of the critic, others are those of ppo."""
    critic = CriticSection(**given.pop("critic", {}))
    ppo = trainer.config.ppo.model_copy(update=given)
    return update(trainer.learner, experience, activations, ppo, temperature=1.0, seed=3, critic=critic)


def test_the_critic_learns_n_mini_batches_before_each_of_the_actors(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    experience, activations = make_experience(trainer)
    log: list[tuple[str, str]] = []
    actor, critic = (Recording(name, getattr(trainer.models, name), log) for name in ("actor", "critic"))
    learner = Learner(trainer.models.actor, trainer.models.critic, actor, critic)
    ppo = trainer.config.ppo.model_copy(update={"num_epochs": 2, "mini_batch_size": 4, "micro_batch_size": 4})
    found = update(
        learner, experience, activations, ppo, temperature=1.0, seed=3, critic=CriticSection(updates_per_actor=3)
    )
    steps = [name for name, what in log if what == "step"]
    assert steps == (["critic"] * 3 + ["actor"]) * 4
    assert found.metrics["critic_optimizer_steps"] == 12 and found.metrics["actor_optimizer_steps"] == 4
    assert found.critic.rows == 3 * found.actor.rows == 3 * 16


def test_every_pass_of_the_critic_sees_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    experience, activations = make_experience(trainer)
    seen: list[Tensor] = []
    values = trainer.models.critic.values_of
    by_text = {tuple(ids.tolist()): row for row, ids in enumerate(experience.sequences)}
    assert len(by_text) == len(experience.sequences)

    def watched(hidden: Tensor, rollout: Any) -> Tensor:
        seen.append(rollout.returns[:, 0])
        return values(hidden, rollout)

    trainer.models.critic.values_of = watched  # type: ignore[method-assign]
    given = {"num_epochs": 1, "mini_batch_size": 2, "micro_batch_size": 2}
    learned(trainer, experience, activations, critic={"updates_per_actor": 3}, **given)
    passes = torch.cat(seen).reshape(3, -1)
    first = experience.returns[:, 0]
    for one in passes:
        torch.testing.assert_close(one.sort().values, first.sort().values)
    assert len({tuple(one.tolist()) for one in passes}) == 3


def test_the_actor_learns_the_same_however_often_the_critic_does(tmp_path: Path) -> None:
    """Above a frozen trunk nothing of the critic's steps reaches the actor within an update."""
    found = []
    for ratio in (1, 4):
        trainer = trainer_of(tmp_path, name=f"run{ratio}")
        experience, activations = make_experience(trainer)
        before = weights_of(trainer.models.critic)
        learned(trainer, experience, activations, critic={"updates_per_actor": ratio})
        found.append((weights_of(trainer.models.actor), weights_of(trainer.models.critic), before))
    assert all(torch.equal(found[1][0][name], tensor) for name, tensor in found[0][0].items())
    assert any(not torch.equal(found[1][1][name], tensor) for name, tensor in found[0][1].items())


def test_the_schedule_of_the_critic_counts_all_of_its_steps(tmp_path: Path) -> None:
    """A linear schedule ends at the last step, and pretraining has its part in it."""
    more: Tree = {
        "critic": {"updates_per_actor": 2, "pretrain_rollouts": 1, "warmup_rollouts": 1, "schedule": "linear"}
    }
    trainer = trainer_of(tmp_path, more, steps=3)
    config = trainer.config
    assert config.optimizer_steps == {"actor": 2 * 4, "critic": 2 + 3 * 2 * 4}
    pretrain_critic(trainer)
    rows = steps_of(trainer)
    assert sum(row["critic_optimizer_steps"] for row in rows) == 24
    assert rows[-1]["critic_learning_rate"] == pytest.approx(0.0, abs=1e-9)
    assert rows[0]["critic_learning_rate"] > rows[1]["critic_learning_rate"] > 1e-4


def test_errors_of_fresh_responses_and_of_the_last_pass_are_told_apart(tmp_path: Path) -> None:
    """A critic that learns one rollout by heart: the last pass's error falls far below that of values before it."""
    trainer = trainer_of(
        tmp_path, {"critic": {"updates_per_actor": 12, "learning_rate": 1e-2}}, steps=1, value_clip_eps=0.0
    )
    experience, _ = make_experience(trainer)
    [row] = steps_of(trainer)
    mask = experience.response_mask
    by_hand = 0.5 * float((experience.values - experience.returns)[mask].square().mean())
    assert row["value_loss_fresh_per_token"] == pytest.approx(by_hand, rel=1e-4)
    assert row["value_loss_last_pass_per_token"] < 0.5 * row["value_loss_fresh_per_token"]


def test_one_pass_over_standing_values_errs_by_what_it_scored(tmp_path: Path) -> None:
    """Where no step is taken within the pass, both errors are one number."""
    trainer = trainer_of(tmp_path, steps=1, num_epochs=1, mini_batch_size=8)
    [row] = steps_of(trainer)
    assert row["value_loss_last_pass_per_token"] == pytest.approx(row["value_loss_fresh_per_token"], rel=1e-4)


def test_the_last_pass_is_told_where_its_first_mini_batch_is_the_actors_turn() -> None:
    totals = Totals()
    for of_pass, error in ((0, 4.0), (0, 4.0), (1, 1.0), (2, 0.5), (2, 0.5)):
        totals.value_pass(of_pass)
        totals.sums["value_error"] += error
    assert totals.sums["value_error"] == 1.0
    minis = _MiniBatches(6, 2, 0, torch.device("cpu"))
    passes = [[batch.of_pass for turn in minis.turns(epoch, 2) for batch in turn.critic] for epoch in (0, 1)]
    assert passes == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


# --- dropout and several heads ----------------------------------------------------------------------------------------


def critic_gradient(
    trainer: Trainer, experience: Experience, activations: Activations, seed: int = 1, **given: Any
) -> Tensor:
    """Of one mini-batch that is the whole rollout, flat."""
    models, section = trainer.models, CriticSection(**given.pop("critic"))
    actor, critic = Recording("actor", models.actor), Recording("critic", models.critic)
    rows = {"num_epochs": 1, "mini_batch_size": len(experience.sequences)}
    ppo = trainer.config.ppo.model_copy(update=rows | given)
    learner = Learner(models.actor, models.critic, actor, critic)
    update(learner, experience, activations, ppo, temperature=1.0, seed=seed, critic=section)
    return torch.cat([g.flatten() for g in critic.gradients[0].values()])


@pytest.mark.parametrize("critic", [{"dropout": 0.5}, {"ensemble": 3}, {"dropout": 0.3, "ensemble": 2}])
def test_regularised_gradients_do_not_depend_on_micro_batches(tmp_path: Path, critic: Tree) -> None:
    """Masks and weights belong to rows: neither the cut nor the rows beside one change them."""
    trainer = trainer_of(tmp_path, {"critic": critic}, value_clip_eps=0.0)
    learnt = (trainer, *make_experience(trainer))
    whole = critic_gradient(*learnt, critic=critic, micro_batch_size=8)
    for size in (1, 3):
        torch.testing.assert_close(
            critic_gradient(*learnt, critic=critic, micro_batch_size=size), whole, rtol=1e-4, atol=1e-5
        )
    assert not torch.allclose(critic_gradient(*learnt, critic=critic, seed=2), whole)
    plain = critic_gradient(*learnt, critic={"ensemble": critic.get("ensemble", 1)}, micro_batch_size=8)
    assert "dropout" not in critic or not torch.allclose(plain, whole)


def test_dropout_is_for_learning_only(tmp_path: Path) -> None:
    """The first rollout's values, and every score, are those of a run without it."""
    plain, dropped = (
        trainer_of(tmp_path, {"critic": {"dropout": share}}, name=f"run{share}", steps=2) for share in (0.0, 0.5)
    )
    first, second = (steps_of(trainer) for trainer in (plain, dropped))
    for name in ("value_mean", "value_std", "explained_variance", "advantage_std", "value_loss_fresh_per_token"):
        assert first[0][name] == second[0][name]
    assert first[0]["value_loss_per_token"] != second[0]["value_loss_per_token"]
    assert first[1]["value_mean"] != second[1]["value_mean"]


def test_dropout_keeps_features_with_the_given_share_and_their_mean() -> None:
    lesson = ValueLesson(PpoSection(), CriticSection(dropout=0.25), seed=5)
    kept = lesson.kept(torch.arange(64), 500, step=0)
    assert kept.shape == (64, 1, 500) and kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(kept.mean()) == pytest.approx(1.0, abs=4 * (0.25 / 0.75 / kept.numel()) ** 0.5)
    again = lesson.kept(torch.tensor([7, 3]), 500, step=0)
    assert torch.equal(again, kept[[7, 3]])
    for other in (
        lesson.kept(torch.tensor([7]), 500, step=1),
        replace(lesson, seed=6).kept(torch.tensor([7]), 500, step=0),
    ):
        assert not torch.equal(other[0], kept[7])


def test_heads_count_responses_as_poisson_has_it() -> None:
    counts = ValueLesson(PpoSection(), CriticSection(ensemble=4), seed=5).counts(torch.arange(2000), 4)
    assert counts.shape == (2000, 4) and torch.equal(counts, counts.round())
    error = 1 / counts.numel() ** 0.5
    assert float(counts.mean()) == pytest.approx(1.0, abs=4 * error)
    assert float((counts == 0).float().mean()) == pytest.approx(0.3679, abs=4 * error)
    assert float(torch.corrcoef(counts.T)[0, 1]) == pytest.approx(0.0, abs=4 / 2000**0.5)


def test_each_head_has_a_loss_of_its_own(tmp_path: Path) -> None:
    """The gradient at the heads, against one written out row by row and head by head."""
    trainer = trainer_of(tmp_path, {"critic": {"ensemble": 3}}, value_clip_eps=0.0, value_coef=0.7)
    experience, activations = make_experience(trainer)
    head = trainer.models.critic.head
    assert isinstance(head, EnsembleHead)
    critic = Recording("critic", trainer.models.critic)
    learner = Learner(trainer.models.actor, trainer.models.critic, Recording("actor", trainer.models.actor), critic)
    ppo = trainer.config.ppo.model_copy(update={"num_epochs": 1, "mini_batch_size": 8})
    section = CriticSection(ensemble=3)
    update(learner, experience, activations, ppo, temperature=1.0, seed=4, critic=section)
    with torch.no_grad():
        hidden = trainer.models.critic.hidden_at(activations.states(), experience)
    counts = ValueLesson(ppo, section, seed=4).counts(torch.arange(8), 3)
    weight, bias = head.linear.weight.detach(), head.linear.bias.detach()
    expected, tokens = torch.zeros(3, hidden.shape[-1]), int(experience.response_mask.sum())
    for row in range(8):
        for t in range(int(experience.lengths[row])):
            for k in range(3):
                value = float(hidden[row, t] @ weight[k] + bias[k])
                error = value - float(experience.returns[row, t])
                expected[k] += 0.7 * float(counts[row, k]) * error * hidden[row, t] / 3 / tokens
    found = critic.gradients[0]["head.linear.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_heads_that_begin_alike_part_and_the_spread_is_logged(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, {"critic": {"ensemble": 3}}, value_clip_eps=0.0, steps=2)
    weight = trainer.models.critic.head.linear.weight
    with torch.no_grad():
        weight.copy_(weight[:1].expand(3, -1))
    rows = steps_of(trainer)
    assert 0 < rows[0]["value_spread_per_token_mean"] < rows[1]["value_spread_per_token_mean"]
    assert not torch.equal(weight[0], weight[1])


# --- beforehand -------------------------------------------------------------------------------------------------------


PRETRAINED: Tree = {
    "critic": {"pretrain_rollouts": 8},
    "ppo": {"rollout_batch_size": 32, "mini_batch_size": 16, "micro_batch_size": 16},
}


def test_pretraining_learns_the_score_at_every_position_and_moves_nobody_else(tmp_path: Path) -> None:
    """Where KL is 0 and gamma 1, what it learns is the score; held-out returns are explained better after it."""
    tree = merged(settings(tmp_path, by_function("pays_by_prompt", steps=1)), PRETRAINED)
    trainer = make_trainer(make_config(tree))
    trainer.check()
    actor, frozen = weights_of(trainer.models.actor), trainer.models.frozen_checksums()
    learnt: list[Experience] = []
    objective = ValueLesson.objective

    def watched(self: ValueLesson, critic: Any, hidden: Tensor, part: Experience, *rest: Any) -> Tensor:
        learnt.append(part)
        assert self.settings.value_clip_eps == 0.0
        return objective(self, critic, hidden, part, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ValueLesson, "objective", watched)
        found = pretrain_critic(trainer)
    for part in learnt:
        scores = part.scores[:, None].expand_as(part.returns)
        torch.testing.assert_close(part.returns[part.response_mask], scores[part.response_mask], rtol=1e-4, atol=1e-4)
    assert found.responses == sum(len(part.sequences) for part in learnt) == 8 * 32
    assert found.optimizer_steps == 8 * 2 and trainer.progress.step == 0
    assert found.before["explained_variance"] == pytest.approx(0.0, abs=1e-4), "a new head says the same everywhere"
    assert found.after["explained_variance"] > 0.8 and found.after["value_return_spearman"] > 0.7
    assert "values explain" in found.describe()
    assert all(torch.equal(tensor, actor[name]) for name, tensor in weights_of(trainer.models.actor).items())
    assert trainer.models.frozen_checksums() == frozen


@pytest.mark.parametrize("name", ["SIGINT"])
@pytest.mark.parametrize("call", [6, 24])
def test_an_interrupted_run_with_everything_on_ends_as_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, name: str
) -> None:
    """In pretraining it begins anew, later it goes on from its checkpoint."""
    everything = merged(
        small_critic(tmp_path),
        {
            "critic": {
                "updates_per_actor": 2,
                "dropout": 0.2,
                "ensemble": 2,
                "pretrain_rollouts": 2,
                "schedule": "linear",
            },
            "ppo": {"value_clip_eps": 0.0, "reward_normalization": "running"},
        },
    )
    tree = merged(settings(tmp_path, by_function("pays_and_interrupts", steps=3)), everything)
    # Calls are micro-batches: 1 in pre-flight, 3 x 4 in pretraining with the held-out rollout, 4 before, 4 a step.
    interrupt_at(0, "")
    run(tree)
    expected = outcome(tmp_path / "run")
    stopped = merged(tree, {"output": str(tmp_path / "stopped")})
    interrupt_at(call, name)
    with pytest.raises(Interrupted, match="pretraining stopped" if call == 6 else "stopped after step"):
        run(stopped)
    interrupt_at(0, "")
    run(stopped)
    found = outcome(tmp_path / "stopped")
    assert [part for part in expected if found[part] != expected[part]] == []
    record = json.loads((tmp_path / "stopped" / "ppo" / "pretraining.json").read_text())
    assert record["rollouts"] == 2 and record["optimizer_steps"] == 4
    assert set(record["before"]) == {"explained_variance", "value_return_spearman", "value_bias"}
