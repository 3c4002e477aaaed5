"""The learn phase: what a gradient depends on, how many steps are taken, what stops them."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.batch import Experience
from fourfold.errors import RunFailed
from fourfold.models.roles import Activations
from fourfold.training.trainer import Trainer
from fourfold.training.update import Learned, Learner, update
from training.runs import (
    SHARINGS,
    by_function,
    give_value_head,
    make_config,
    make_experience,
    make_trainer,
    merged,
    settings,
    steps_of,
    weights_of,
)


class Recording:
    """An optimizer that keeps each step's gradients and moves nothing."""

    learning_rate = 0.0
    loss_scale: Any = None
    scaled: Any = None

    def __init__(self, name: str, module: nn.Module, log: list[tuple[str, str]] | None = None) -> None:
        self.name = name
        self.module = module
        self.log = [] if log is None else log
        self.gradients: list[dict[str, Tensor]] = []

    def backward(self, loss: Tensor) -> None:
        self.log.append((self.name, "backward"))
        loss.backward()

    def step(self) -> float:
        self.log.append((self.name, "step"))
        self.gradients.append({n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None})
        self.discard()
        return 0.0

    def discard(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def state_bytes(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("an update never restores an optimizer")


def trainer_for(folder: Path, changes: dict[str, Any] | None = None, **ppo: Any) -> Trainer:
    """A trainer before its first step, with values that differ."""
    trainer = make_trainer(make_config(settings(folder, merged(by_function("pays_by_hash", **ppo), changes or {}))))
    give_value_head(trainer.models)
    return trainer


def gradients(trainer: Trainer, experience: Experience, activations: Activations, **changes: Any) -> list[Tensor]:
    """The gradients of one mini-batch that is the whole rollout, actor's and critic's, flat."""
    models = trainer.models
    actor, critic = Recording("actor", models.actor), Recording("critic", models.critic)
    everything = {"num_epochs": 1, "mini_batch_size": len(experience.sequences)}
    ppo = trainer.config.ppo.model_copy(update=everything | changes)
    update(Learner(models.actor, models.critic, actor, critic), experience, activations, ppo, temperature=0.8, seed=1)
    [a], [c] = actor.gradients, critic.gradients
    return [torch.cat([g.flatten() for g in found.values()]) for found in (a, c)]


def padded(experience: Experience, activations: Activations, left: int, right: int) -> tuple[Experience, Activations]:
    """The same rows with more padding: NaN wherever a tensor of the rollout has no token."""
    pad = nn.functional.pad
    changes: dict[str, Tensor] = {}
    for field in fields(experience):
        value = getattr(experience, field.name)
        if field.name == "prompt_mask":
            changes[field.name] = pad(value, (left, 0))
        elif field.name == "sequences":
            changes[field.name] = pad(value, (left, right), value=1)
        elif field.name == "response_mask":
            changes[field.name] = pad(value, (0, right))
        elif value.ndim == 2 and field.name not in ("score_parts", "score_weights"):
            masked = torch.where(experience.response_mask, value, math.nan)
            changes[field.name] = pad(masked, (0, right), value=math.nan)
    inputs = pad(activations.inputs, (0, 0, left, right), value=0.3)
    return replace(experience, **changes), Activations(inputs, pad(activations.mask, (left, right)))


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Trainer, Experience, Activations]:
    """A learner that has moved away from the policy that sampled: ratios, values and KL are not those of the start."""
    trainer = trainer_for(tmp_path, kl_coef=0.0, kl_loss_coef=0.1, entropy_coef=0.01, dual_clip=1.5, clip_eps=0.1)
    experience, activations = make_experience(trainer)
    assert len({int(n) for n in experience.lengths}) > 1, "responses of several lengths"
    update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=0)
    return trainer, experience, activations


def test_gradient_does_not_depend_on_micro_batches(trained: tuple[Trainer, Experience, Activations]) -> None:
    """FAULTS F2, F16: for the critic as for the actor; micro-batches of 3 leave one of 2."""
    whole = gradients(*trained, micro_batch_size=8)
    assert all(float(g.abs().max()) > 1e-3 for g in whole)
    for size, tokens in ((1, 0), (2, 0), (3, 0), (8, 1), (8, 20), (8, 45)):
        cut = gradients(*trained, micro_batch_size=size, micro_batch_tokens=tokens)
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)


def test_ratios_are_those_of_the_training_engine(trained: tuple[Trainer, Experience, Activations]) -> None:
    """What the sampler reports is measured and not learned from: its engine may round otherwise (FAULTS A11)."""
    trainer, experience, activations = trained
    other = replace(experience, sampler_log_probs=experience.sampler_log_probs - 0.3)
    for found, expected in zip(gradients(trainer, other, activations), gradients(*trained), strict=True):
        assert torch.equal(found, expected)


def test_gradient_does_not_depend_on_row_order(trained: tuple[Trainer, Experience, Activations]) -> None:
    trainer, experience, activations = trained
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    shuffled = gradients(trainer, experience.select(order), activations.select(order), micro_batch_size=3)
    for found, expected in zip(shuffled, gradients(*trained, micro_batch_size=3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 2), (2, 3)])
def test_gradient_does_not_depend_on_padding(
    trained: tuple[Trainer, Experience, Activations], left: int, right: int
) -> None:
    trainer, experience, activations = trained
    more = gradients(trainer, *padded(experience, activations, left, right), micro_batch_size=4)
    for found, expected in zip(more, gradients(*trained, micro_batch_size=4), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("mini", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_every_combination_takes_the_right_number_of_steps(
    trained: tuple[Trainer, Experience, Activations], rows: int, mini: int, accumulation: int
) -> None:
    """FAULTS F5: rows that were dropped leave a last mini-batch, or a last micro-batch, that is smaller."""
    trainer, experience, activations = trained
    some = torch.arange(rows)
    micro = max(1, mini // accumulation)
    ppo = trainer.config.ppo.model_copy(update={"mini_batch_size": mini, "micro_batch_size": micro, "num_epochs": 2})
    learned = update(trainer.learner, experience.select(some), activations.select(some), ppo, temperature=1.0, seed=3)
    steps = 2 * math.ceil(rows / mini)
    assert learned.metrics["actor_optimizer_steps"] == learned.metrics["critic_optimizer_steps"] == steps
    assert learned.actor.rows == learned.critic.rows == 2 * rows, "every row once an epoch"
    assert all(math.isfinite(value) for value in learned.metrics.values())


def test_the_critic_goes_first_and_frees_its_gradients(trained: tuple[Trainer, Experience, Activations]) -> None:
    """At no time do both roles hold gradients: the peak has room for one set."""
    trainer, experience, activations = trained
    models = trainer.models
    log: list[tuple[str, str]] = []

    class Alone(Recording):
        def backward(self, loss: Tensor) -> None:
            other = models.critic if self.name == "actor" else models.actor
            assert all(p.grad is None for p in other.parameters()), f"{self.name} beside the other's gradients"
            super().backward(loss)

    learner = Learner(
        models.actor, models.critic, Alone("actor", models.actor, log), Alone("critic", models.critic, log)
    )
    ppo = trainer.config.ppo.model_copy(update={"mini_batch_size": 4, "micro_batch_size": 2, "num_epochs": 1})
    update(learner, experience, activations, ppo, temperature=1.0, seed=0)
    one = [(role, event) for role in ("critic", "actor") for event in ("backward", "backward", "step")]
    assert log == one * 2
    assert all(p.grad is None for role in (models.actor, models.critic) for p in role.parameters())


def learn(trainer: Trainer, experience: Experience, activations: Activations, **changes: Any) -> Learned:
    """The update of the trainer's own learner with some settings changed."""
    ppo = trainer.config.ppo.model_copy(update=changes)
    return update(trainer.learner, experience, activations, ppo, temperature=1.0, seed=0)


def test_target_kl_of_zero_evaluates_one_mini_batch_and_takes_no_step(tmp_path: Path) -> None:
    """FAULTS F15: counters, rows and gradients agree that the actor stood still."""
    trainer = trainer_for(tmp_path)
    experience, activations = make_experience(trainer)
    before = weights_of(trainer.models.actor)
    learned = learn(trainer, experience, activations, target_kl=0.0)
    expected = {
        "actor_optimizer_steps": 0, "critic_optimizer_steps": 1, "mini_batches_skipped": 1, "epochs_run": 0,
        "early_stopped": 1, "policy_clip_fraction": 0,
    }  # fmt: skip
    assert {name: learned.metrics[name] for name in expected} == expected
    assert learned.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert learned.actor.rows == learned.critic.rows == trainer.config.ppo.mini_batch_size
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(trainer.models.actor).items())
    assert all(p.grad is None for p in trainer.models.actor.parameters())


def test_target_kl_ends_the_epochs_when_it_is_reached(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, learning_rate=3e-2)
    experience, activations = make_experience(trainer)
    learned = learn(trainer, experience, activations, target_kl=1e-3, num_epochs=50)
    assert learned.metrics["early_stopped"] == learned.metrics["mini_batches_skipped"] == 1
    assert 1 <= learned.metrics["actor_optimizer_steps"] == learned.metrics["critic_optimizer_steps"] - 1 < 100
    assert learned.metrics["epochs_run"] == learned.metrics["actor_optimizer_steps"] // 2


def test_advantages_and_returns_stay_those_of_the_rollout(tmp_path: Path) -> None:
    """FAULTS E10: the last epoch learns from the very arrays of the first, although actor and critic have moved."""
    trainer = trainer_for(tmp_path, num_epochs=3)
    experience, activations = make_experience(trainer)
    kept = {f.name: getattr(experience, f.name).clone() for f in fields(experience)}
    learn(trainer, experience, activations)
    assert all(torch.equal(getattr(experience, name), tensor) for name, tensor in kept.items())
    again, _ = make_experience(trainer)
    assert not torch.equal(again.values, kept["values"]), "the critic of now would give others"


def test_value_clip_limits_the_move_of_an_epoch(tmp_path: Path) -> None:
    """FAULTS E9: values that have moved by more than the range towards their return get no more gradient."""
    # Without momentum, which would carry the values on after their gradient is gone.
    trainer = trainer_for(tmp_path, {"critic": {"learning_rate": 3e-4, "betas": [0.0, 0.95]}})
    experience, activations = make_experience(trainer)
    far = replace(experience, returns=experience.values + torch.where(experience.response_mask, 50.0, 0.0))
    moves, clipped = {}, {}
    start = weights_of(trainer.models.critic)
    for clip in (0.0, 1.0):
        trainer.models.critic.load_state_dict(start)
        learned = learn(trainer, far, activations, value_clip_eps=clip, num_epochs=8)
        with torch.no_grad():
            values = trainer.models.critic.values(activations, experience)
        moves[clip] = float((values - experience.values)[experience.response_mask].mean())
        clipped[clip] = learned.metrics["value_clip_fraction"]
    assert clipped[0.0] == 0.0 < 0.3 < clipped[1.0]
    assert 1.0 < moves[1.0] < 0.5 * moves[0.0]


def policy_gap(trainer: Trainer, experience: Experience, activations: Activations) -> tuple[float, float]:
    """Mean exact KL(actor, reference) and mean entropy over the response tokens, from whole logits."""
    models = trainer.models
    with torch.no_grad():
        actor, reference = (
            (role.hidden_before(activations, experience) @ role.head.weight.T).double().log_softmax(-1)
            for role in (models.actor, models.reference)
        )
    kl = (actor.exp() * (actor - reference)).sum(-1).mean()
    return float(kl), float(-(actor.exp() * actor).sum(-1).mean())


def test_entropy_bonus_raises_the_entropy(tmp_path: Path) -> None:
    """Every advantage is 0, so the bonus is all that is learned from."""
    trainer = trainer_for(tmp_path, kl_coef=0.0)
    experience, activations = make_experience(trainer)
    still = replace(experience, advantages=torch.zeros_like(experience.advantages))
    before = policy_gap(trainer, still, activations)[1]
    assert learn(trainer, still, activations, entropy_coef=0.0).metrics["actor_grad_norm"] == 0.0
    learn(trainer, still, activations, entropy_coef=0.1, num_epochs=5)
    assert policy_gap(trainer, still, activations)[1] > before + 0.05


def test_kl_in_the_loss_lowers_the_kl(tmp_path: Path) -> None:
    """FAULTS C6: advantages 0, the actor pushed away from the reference: 20 optimizer steps bring it back."""
    trainer = trainer_for(tmp_path, kl_coef=0.0, rollout_batch_size=64, mini_batch_size=32, micro_batch_size=32)
    with torch.no_grad():
        for parameter in trainer.models.actor.branch.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    experience, activations = make_experience(trainer)
    still = replace(experience, advantages=torch.zeros_like(experience.advantages))
    before = policy_gap(trainer, still, activations)[0]
    learned = learn(trainer, still, activations, kl_loss_coef=1.0, num_epochs=10)
    assert learned.metrics["actor_optimizer_steps"] == 20
    after = policy_gap(trainer, still, activations)[0]
    assert after < 0.7 * before


def test_without_kl_rewards_are_the_scores(tmp_path: Path) -> None:
    """FAULTS C8: both coefficients 0; with both above 0 the settings are refused."""
    trainer = trainer_for(tmp_path, kl_coef=0.0)
    with torch.no_grad():
        next(trainer.models.actor.branch.parameters()).add_(0.05)
    experience, _ = make_experience(trainer)
    assert float(experience.kl.abs().max()) > 1e-3
    last = experience.lengths - 1
    expected = torch.zeros_like(experience.rewards).scatter(1, last[:, None], experience.scores[:, None])
    assert torch.equal(experience.rewards, expected)
    with pytest.raises(ValueError, match=r"ppo\.kl_loss_coef: given 0\.2 beside ppo\.kl_coef = 0\.1"):
        make_config(settings(tmp_path, by_function("pays_by_hash", kl_coef=0.1, kl_loss_coef=0.2)))


def test_critic_warm_up_leaves_the_actor_alone(tmp_path: Path) -> None:
    """FAULTS E6: for two rollouts only the critic learns; then both do."""
    trainer = trainer_for(tmp_path, {"critic": {"warmup_rollouts": 2}}, steps=3)
    start = weights_of(trainer.models.actor)
    seen: list[bool] = []
    trainer.callbacks = (
        lambda step, row: seen.append(
            all(torch.equal(t, start[n]) for n, t in trainer.models.actor.state_dict().items())
        ),
    )
    rows = steps_of(trainer)
    assert seen == [True, True, False]
    assert [row["actor_optimizer_steps"] for row in rows] == [0, 0, 4]
    assert [row["critic_optimizer_steps"] for row in rows] == [4, 4, 4]
    assert all("explained_variance" in row and row["critic_grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("steps", [3, 5])
def test_learning_rates_follow_the_schedule_to_the_end(tmp_path: Path, steps: int) -> None:
    """FAULTS F12, F13, N8: steps, optimizer steps and the decay to 0 agree, with several responses a prompt."""
    changes = {
        "critic": {"learning_rate": 2e-3, "schedule": "cosine", "warmup_rollouts": 1},
        "sampling": {"responses_per_prompt": 4},
    }
    trainer = trainer_for(tmp_path, changes, steps=steps, learning_rate=1e-3, schedule="linear", warmup_steps=2)
    rows = steps_of(trainer)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["optimizer_steps"] for row in rows] == [4 * step for step in range(steps)]
    assert [row["episodes"] for row in rows] == [8 * (step + 1) for step in range(steps)]
    assert all(a["tokens"] < b["tokens"] for a, b in itertools.pairwise(rows))
    total = 4 * (steps - 1)
    for step, row in enumerate(rows):
        done = 4 * step
        actor = 1e-3 * ((done + 1) / 2 if done < 2 else 1 - (done - 2) / (total - 2))
        critic = 2e-3 * 0.5 * (1 + math.cos(math.pi * (step + 1) / steps))
        assert row["actor_learning_rate"] == pytest.approx(actor, abs=1e-12)
        assert row["critic_learning_rate"] == pytest.approx(critic, abs=1e-12)
    assert rows[-1]["actor_learning_rate"] == rows[-1]["critic_learning_rate"] == 0.0


@pytest.mark.parametrize("sharing", ["trunk", "none"])
@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("actor", r"step 2: generate: 1 of the actor's \d+ weights are not finite, the first 'branch\."),
        ("critic", "step 2: score: the critic's values are not finite"),
    ],
)
def test_a_nan_weight_stops_the_run_and_is_named(tmp_path: Path, role: str, message: str, sharing: str) -> None:
    """FAULTS B10: phase, role and step are named; the checkpoint of the step before is the newest and is whole."""
    trainer = trainer_for(tmp_path, SHARINGS[sharing], steps=3)

    def spoil(step: int, row: dict[str, float]) -> None:
        trainer.save(is_best=False)
        with torch.no_grad():
            next(p for p in getattr(trainer.models, role).parameters() if p.requires_grad).flatten()[0] = math.nan

    trainer.callbacks = (spoil,)
    trainer.config = trainer.config.model_copy(
        update={"checkpoint": trainer.config.checkpoint.model_copy(update={"every": 10})}
    )
    with pytest.raises(RunFailed, match=message):
        trainer.run()
    checkpoint = trainer.store.latest()
    assert checkpoint is not None and checkpoint.step == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in checkpoint.tensors(role).values())


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_loss_that_is_not_finite_takes_no_step(tmp_path: Path, role: str) -> None:
    """In the learn phase the role is named, its weights stay as they were, and no gradient is left."""
    trainer = trainer_for(tmp_path)
    experience, activations = make_experience(trainer)
    name = "advantages" if role == "actor" else "returns"
    spoiled = replace(experience, **{name: torch.where(experience.response_mask, math.inf, 0.0)})
    before = weights_of(getattr(trainer.models, role))
    with pytest.raises(RunFailed, match=f"learn: the {role}'s loss is"):
        learn(trainer, spoiled, activations)
    module = getattr(trainer.models, role)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(module).items())
    assert all(p.grad is None for p in module.parameters())


def test_returns_near_twenty_are_learned(tmp_path: Path) -> None:
    """FAULTS G11: 50 critic steps explain more than half of the variance of returns around 20."""
    trainer = trainer_for(tmp_path, {"critic": {"learning_rate": 2e-2}})
    experience, activations = make_experience(trainer)
    mask = experience.response_mask
    returns = torch.where(mask, 20.0 + 3.0 * torch.arange(8)[:, None] + torch.zeros_like(experience.returns), 0.0)
    shifted = replace(experience, returns=returns)
    learn(trainer, shifted, activations, value_clip_eps=0.0, num_epochs=25)
    with torch.no_grad():
        values = trainer.models.critic.values(activations, experience)
    errors = (returns - values)[mask]
    assert 1 - float(errors.var() / returns[mask].var()) > 0.5
