"""Training in float16: close to float32, both roles skip together, and a run resumes with its loss scale."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.backends.local import LocalOptimizer
from fourfold.batch import Experience
from fourfold.config import ConfigError
from fourfold.errors import Interrupted, RunFailed
from fourfold.memory.budget import BatchSizes, OverBudget
from fourfold.models.roles import Activations
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.stage import Stage
from fourfold.training.trainer import Trainer
from fourfold.training.update import Learned, update
from training.runs import (
    INTERRUPT,
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
    weights_of,
)

FLOAT16: Tree = {"precision": {"compute": "float16", "loss_scale": 64.0}}
Scene = tuple[Trainer, Experience, Activations]


def scene_for(folder: Path, changes: Tree, **ppo: Any) -> Scene:
    """One epoch of two mini-batches of 4 rows, each in two micro-batches; values that differ."""
    tree = merged(by_function("pays_by_hash", **{"num_epochs": 1, **ppo}), changes)
    trainer = make_trainer(make_config(settings(folder, tree)))
    give_value_head(trainer.models)
    return trainer, *make_experience(trainer)


def learn(scene: Scene, **changes: Any) -> Learned:
    trainer, experience, activations = scene
    ppo = trainer.config.ppo.model_copy(update=changes)
    return update(trainer.learner, experience, activations, ppo, temperature=1.0, seed=0, sizes=BatchSizes.of(ppo))


def trained(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all trained weights."""
    roles: dict[str, nn.Module] = {"actor": trainer.models.actor, "critic": trainer.models.critic}
    if trainer.models.trunk is not None:
        roles["trunk"] = trainer.models.trunk
    return {f"{name}.{key}": w for name, role in roles.items() for key, w in weights_of(role).items()}


def moves(scene: Scene) -> Tensor:
    """By how much one update changes all trained weights."""
    before = trained(scene[0])
    learn(scene)
    return torch.cat([(w - before[name]).flatten() for name, w in trained(scene[0]).items()])


def test_an_update_in_float16_is_that_of_float32_within_rounding(tmp_path: Path) -> None:
    """On the same experience; another scale changes exponents, and what float16 loses at its lower end."""
    exact = scene_for(tmp_path, {})
    inputs = replace(exact[2], inputs=exact[2].inputs.half())
    expected = moves(exact)
    for scale in (16.0, 1024.0):
        trainer, _, _ = scene_for(tmp_path, {"precision": {"compute": "float16", "loss_scale": scale}})
        found = moves((trainer, exact[1], inputs))
        assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.1


def overflow_in(module: nn.Module, pass_number: int) -> None:
    """The gradient of this training pass of a role becomes infinite."""
    calls = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal calls
        calls += output.requires_grad
        if output.requires_grad and calls == pass_number:
            output.register_hook(lambda gradient: torch.full_like(gradient, math.inf))

    module.register_forward_hook(hook)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_both_roles_skip_the_mini_batch_in_which_one_overflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The second of two: weights, moments and schedules stay as the first has left them."""
    scene = scene_for(tmp_path, FLOAT16)
    trainer, left = scene[0], list[dict[str, Tensor]]()
    overflow_in(getattr(trainer.models, role).branch, 3)
    step = LocalOptimizer.step

    def stepping(self: LocalOptimizer) -> float:
        norm = step(self)
        left.append(trained(trainer))
        return norm

    monkeypatch.setattr(LocalOptimizer, "step", stepping)
    learned = learn(scene)
    assert len(left) == 2, "the steps of both roles in the first mini-batch"
    assert all(torch.equal(w, left[-1][name]) for name, w in trained(trainer).items())
    metrics = learned.metrics
    assert metrics["actor_optimizer_steps"] == metrics["critic_optimizer_steps"] == 1
    assert metrics["steps_skipped_overflow"] == 1 and metrics["loss_scale"] == 32.0
    assert 0 <= metrics["gradient_underflow_fraction"] < 0.1
    assert metrics["epochs_run"] == 1 and learned.actor.rows == learned.critic.rows == 8
    assert all(math.isfinite(value) for value in metrics.values())
    models = trainer.models
    assert all(p.grad is None for part in (models.actor, models.critic) for p in part.parameters())


TRUNKS: dict[str, Tree] = {"both": {}, "balanced": {"balance": "grad_norm"}, "turns": {"alternate": 1}}


@pytest.mark.parametrize("trunk", TRUNKS.values(), ids=TRUNKS)
def test_a_trained_trunks_gradient_is_that_of_float32_within_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trunk: Tree
) -> None:
    """Under the same scale as the roles above it; the norms that are measured are those without it."""
    changes, gradients = {"trunk": {"train": True, **trunk}}, list[Tensor]()
    exact = scene_for(tmp_path, changes)
    half = scene_for(tmp_path, merged(changes, FLOAT16))
    step = LocalOptimizer.step

    def stepping(self: LocalOptimizer) -> float:
        if self.name == "trunk" and self.steps_done == 0:
            gradients.append(torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None]))
        return step(self)

    monkeypatch.setattr(LocalOptimizer, "step", stepping)
    metrics = [learn((trainer, *exact[1:])).metrics for trainer in (exact[0], half[0])]
    expected, found = gradients
    assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.02
    norms = [name for name in metrics[0] if name.startswith("trunk_") and name.endswith(("norm", "cosine"))]
    assert len(norms) == (1 if "alternate" in trunk else 4)
    for name in norms:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=0.02, abs=0.01)
    assert metrics[1]["steps_skipped_overflow"] == 0 and metrics[1]["loss_scale"] == 64.0


@pytest.mark.parametrize("scale", [1.0, 0.0])
@pytest.mark.parametrize("role", ["actor", "critic", "trunk"])
def test_all_skip_the_mini_batch_in_which_a_trunk_or_a_role_above_it_overflows(
    tmp_path: Path, role: str, scale: float
) -> None:
    """The first of two, in which the trunk's gradients are measured; what is logged is the second's."""
    trunk = {"train": True, "critic_grad_scale": scale}
    scene = scene_for(tmp_path, merged({"trunk": trunk}, FLOAT16))
    before, given = trained(scene[0]), scene[0].learner.trunk
    models = scene[0].models
    overflowing = {"actor": models.actor.branch, "critic": models.critic.branch, "trunk": models.trunk}[role]
    assert given is not None and overflowing is not None
    overflow_in(overflowing, 1)
    metrics = learn(scene).metrics
    assert metrics["actor_optimizer_steps"] == metrics["critic_optimizer_steps"] == 1
    assert metrics["steps_skipped_overflow"] == 1 and metrics["loss_scale"] == 32.0
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["trunk_actor_grad_norm"] > 0
    assert all(not torch.equal(w, before[name]) for name, w in trained(scene[0]).items() if "q_proj" in name)
    assert given.optimizer.state_dict()["steps_done"] == 1 and given.gradients.bytes == 0


def test_a_loss_over_a_trained_trunk_that_overflows_is_skipped(tmp_path: Path) -> None:
    trainer, experience, activations = scene_for(tmp_path, merged({"trunk": {"train": True}}, FLOAT16))
    spoiled = replace(experience, returns=torch.where(experience.response_mask, math.inf, 0.0))
    before = trained(trainer)
    metrics = learn((trainer, spoiled, activations)).metrics
    assert metrics["steps_skipped_overflow"] == 2 and "trunk_grad_norm" not in metrics
    assert all(torch.equal(w, before[name]) for name, w in trained(trainer).items())
    assert all(
        p.grad is None for part in (trainer.models.trunk, trainer.models.actor) if part for p in part.parameters()
    )


def test_an_offloaded_optimizer_beside_float16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"memory\.optimizer_residency: 'offload' beside precision\.compute = 'float16'"
    ):
        make_config(settings(tmp_path, merged(FLOAT16, {"memory": {"optimizer_residency": "offload"}})))


def test_a_loss_that_overflows_is_skipped_until_the_scale_is_smallest(tmp_path: Path) -> None:
    """Four epochs at 8, 4, 2 end at the scale 1, where the usual message says whose loss it is."""
    trainer, experience, activations = scene_for(tmp_path, {"precision": {"compute": "float16", "loss_scale": 8.0}})
    spoiled = replace(experience, returns=torch.where(experience.response_mask, math.inf, 0.0))
    before = trained(trainer)
    with pytest.raises(RunFailed, match="learn: the critic's loss is inf; the last good checkpoint is kept"):
        learn((trainer, spoiled, activations), num_epochs=2, mini_batch_size=8)
        learn((trainer, spoiled, activations), num_epochs=2, mini_batch_size=8)
    assert all(torch.equal(w, before[name]) for name, w in trained(trainer).items())


def test_a_step_whose_mini_batches_all_overflow_still_has_a_row(tmp_path: Path) -> None:
    """With the default scale of 2^16 the first ones of a tiny model do."""
    tree = merged(by_function("pays_by_hash", steps=1, num_epochs=1), {"precision": {"compute": "float16"}})
    trainer = make_trainer(make_config(settings(tmp_path, tree)))
    give_value_head(trainer.models)
    for role in (trainer.models.actor, trainer.models.critic):
        role.branch.register_forward_hook(
            lambda module, args, output: (
                output.register_hook(lambda g: g * math.inf) and None if output.requires_grad else None
            )
        )
    trainer.run()
    [recorder] = trainer.trackers
    [row] = recorder.rows  # pyright: ignore[reportAttributeAccessIssue]
    assert row["steps_skipped_overflow"] == 2 and row["loss_scale"] == 2.0**14 and row["optimizer_steps"] == 0
    assert "critic_grad_norm" not in row and "policy_loss_per_token" not in row


def test_target_kl_drops_the_actors_step_and_leaves_the_critics(tmp_path: Path) -> None:
    scene = scene_for(tmp_path, FLOAT16)
    before = trained(scene[0])
    metrics = learn(scene, target_kl=0.0).metrics
    assert metrics["actor_optimizer_steps"] == 0 and metrics["critic_optimizer_steps"] == 1
    assert metrics["mini_batches_skipped"] == 1 and metrics["steps_skipped_overflow"] == 0
    same = {name.partition(".")[0]: True for name in before}
    for name, w in trained(scene[0]).items():
        same[name.partition(".")[0]] &= torch.equal(w, before[name])
    assert same == {"actor": True, "critic": False}


def test_a_pass_that_runs_out_of_memory_is_done_again_beside_waiting_gradients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The actor's, while the critic's gradients wait: as if its micro-batches had been half as large from the start."""
    scene, small = scene_for(tmp_path, FLOAT16), scene_for(tmp_path, FLOAT16)
    calls = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal calls
        calls += 1
        if output.requires_grad and len(output) > 1:
            raise OverBudget("1.0 GiB are resident, memory.budget_gib = 0.9")

    scene[0].models.actor.branch.register_forward_hook(hook)
    with caplog.at_level(logging.WARNING):
        learned = learn(scene)
    assert "memory ran out in the actor's pass over 2 rows" in caplog.text and learned.metrics["loss_scale"] == 64.0
    trainer, experience, activations = small
    sizes = BatchSizes.of(trainer.config.ppo)
    sizes.actor.size = 1
    update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=0, sizes=sizes)
    expected = trained(trainer)
    assert all(torch.equal(w, expected[name]) for name, w in trained(scene[0]).items())


def test_a_run_resumes_bit_for_bit_with_its_loss_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a scale that has to fall first: the interrupted run must not begin with it again."""
    monkeypatch.setenv(INTERRUPT, "0:")

    def tree(name: str) -> Tree:
        changes = {
            "output": str(tmp_path / name),
            "precision": {"compute": "float16", "loss_scale": 2.0**24},
            "sampling": {"temperature": 0.9},
        }
        return settings(tmp_path, merged(by_function("pays_and_interrupts", steps=3), changes))

    run(tree("whole"))
    expected = outcome(tmp_path / "whole")
    assert expected["state"]["loss_scale"]["scaler"]["scale"] < 2.0**24
    assert sum(row.get("steps_skipped_overflow", 0) for row in expected["rows"]) > 0
    assert expected["rows"][-2]["optimizer_steps"] > 0
    interrupt_at(11, "SIGTERM")
    with pytest.raises(Interrupted, match="stopped after step 2 of 3"):
        run(tree("stopped"))
    run(tree("stopped"))
    found = outcome(tmp_path / "stopped")
    assert [name for name in expected if found[name] != expected[name]] == []


def test_sft_and_reward_scale_their_losses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They report the scale and how many batches overflowed; a stage that was broken off goes on with both."""
    changes: Tree = {
        "stages": ["sft", "reward"],
        "precision": {"compute": "float16", "loss_scale": 2.0**26},
        "sft": {"num_epochs": 3},
        "reward": {"num_epochs": 2},
        "checkpoint": {"stage_every": 1},
    }
    whole, broken, save = run(settings(tmp_path, changes))["stages"], list[str](), Stage._save

    def saving(self: Stage, store: CheckpointStore, step: int) -> None:
        save(self, store, step)
        if step == 5 and self.name not in broken:
            broken.append(self.name)
            raise Interrupted("broken off")

    monkeypatch.setattr(Stage, "_save", saving)
    tree = settings(tmp_path, merged(changes, {"output": str(tmp_path / "stopped")}))
    for _ in range(2):
        with pytest.raises(Interrupted):
            run(tree)
    assert run(tree)["stages"] == whole and broken == ["sft", "reward"]
    for metrics in whole.values():
        assert metrics["steps_skipped_overflow"] > 2
        assert metrics["loss_scale"] == 2.0 ** (26 - metrics["steps_skipped_overflow"])
        assert 0 <= metrics["gradient_underflow_fraction"] < 0.5
