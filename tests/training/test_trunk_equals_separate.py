"""One update through the cached trunk equals one update through whole models with the same layers frozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fourfold.backends.local import LocalOptimizer
from fourfold.models.roles import Policy, Scorer
from fourfold.models.split import layout_of
from fourfold.training.trainer import Trainer
from fourfold.training.update import Learned, Learner, update
from tiny import tiny_model
from training.runs import (
    SHARINGS,
    by_function,
    give_value_head,
    make_config,
    make_experience,
    make_trainer,
    merged,
    settings,
)

LAYERS, OWN = 4, 2
PPO = {
    "rollout_batch_size": 12, "mini_batch_size": 6, "micro_batch_size": 2, "num_epochs": 2, "entropy_coef": 0.01,
    "kl_coef": 0.0, "kl_loss_coef": 0.1, "value_clip_eps": 0.2,
}  # fmt: skip
# Adam divides by the root of the second moment: with the usual 1e-8, gradients that are 0 but for rounding would count.
ADAM = {"learning_rate": 1e-2, "eps": 1e-4}


def upper_layers(role: Policy | Scorer, family: str) -> Iterator[tuple[str, nn.Module]]:
    """What a role owns above the trunk, whether or not it also holds the layers below."""
    layout = layout_of(tiny_model(family, layers=1))
    layers = getattr(role.branch.body, layout.layers)
    for i, layer in enumerate(layers[len(layers) - OWN :]):
        yield f"layer {i}", layer
    yield "norm", getattr(role.branch.body, layout.norm)
    if isinstance(role, Scorer):
        yield "head", role.head


def trainer_for(folder: Path, family: str, sharing: str) -> Trainer:
    """Whole models have all but the upper layers and the value head frozen, as the trunk is."""
    changes = merged(by_function("pays_by_hash", **PPO, **ADAM), {"critic": ADAM, "output": str(folder / sharing)})
    trainer = make_trainer(make_config(settings(folder, merged(changes, SHARINGS[sharing]), family=family)))
    models = trainer.models
    give_value_head(models)
    for role in (models.actor, models.critic):
        role.requires_grad_(False)
        for _, module in upper_layers(role, family):
            module.requires_grad_(True)
    ppo, critic = trainer.config.ppo, trainer.config.critic
    trainer.learner = Learner(
        models.actor,
        models.critic,
        LocalOptimizer("actor", models.actor, ppo, total_steps=4),
        LocalOptimizer("critic", models.critic, critic, total_steps=4),
    )
    return trainer


def learn(trainer: Trainer) -> tuple[dict[str, Tensor], Learned]:
    """One rollout and its update; returns the experience, by name, and what was learned."""
    experience, activations = make_experience(trainer)
    learned = update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=5)
    names = ("sequences", "log_probs", "ref_log_probs", "values", "scores", "advantages", "returns")
    return {name: getattr(experience, name) for name in names}, learned


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_update_of_both_roles_is_the_same(tmp_path: Path, family: str) -> None:
    """Two epochs, two mini-batches, three micro-batches: every tensor within 1e-5 in float32."""
    cached, whole = (trainer_for(tmp_path, family, sharing) for sharing in ("trunk", "none"))
    assert cached.models.actor.branch.num_layers == OWN and whole.models.actor.branch.num_layers == LAYERS
    roles = [(getattr(cached.models, name), getattr(whole.models, name)) for name in ("actor", "critic")]
    start = [{name: _weights(module) for name, module in upper_layers(role, family)} for role, _ in roles]
    (seen, learned), (whole_seen, whole_learned) = learn(cached), learn(whole)

    assert torch.equal(seen.pop("sequences"), whole_seen.pop("sequences")), "both sample the same responses"
    for name, tensor in seen.items():
        torch.testing.assert_close(tensor, whole_seen[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert learned.metrics["actor_optimizer_steps"] == learned.metrics["critic_optimizer_steps"] == 4
    assert learned.metrics == pytest.approx(whole_learned.metrics, rel=1e-4, abs=1e-5)
    for (role, other), before in zip(roles, start, strict=True):
        moved = 0.0
        for (name, module), (_, other_module) in zip(
            upper_layers(role, family), upper_layers(other, family), strict=True
        ):
            for key, tensor in _weights(module).items():
                torch.testing.assert_close(tensor, _weights(other_module)[key], rtol=0, atol=1e-5)
                moved = max(moved, float((tensor - before[name][key]).abs().max()))
        assert moved > 1e-3, "the update is far larger than the difference allowed"


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
