"""Trainers over a trained trunk, and updates whose gradients are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.backends.scaling import LossScale
from fourfold.batch import Experience
from fourfold.models.roles import Activations
from fourfold.training.learner import Learned, Learner
from fourfold.training.trainer import Trainer
from fourfold.training.update import update
from training.runs import Tree, by_function, give_value_head, make_config, make_trainer, merged, settings, weights_of

TRAINED: Tree = {"train": True, "lr_scale": 0.5}


def trainer_for(
    folder: Path, trunk: Tree | None = None, *, family: str = "llama", more: Tree | None = None, **ppo: Any
):
    """A trainer before its first step, over a trained trunk of 2 layers; its values differ."""
    changes = merged(by_function("pays_by_hash", **ppo), {"trunk": TRAINED | (trunk or {})})
    trainer = make_trainer(make_config(settings(folder, merged(changes, more or {}), family=family)))
    give_value_head(trainer.models)
    return trainer


class Recording:
    """An optimizer that keeps each step's gradients, in float64 and flat, and moves nothing."""

    learning_rate = 0.0
    loss_scale: LossScale | None = None

    def __init__(self, name: str, module: nn.Module, log: list[str]) -> None:
        self.name, self.module, self.log = name, module, log
        self.gradients: list[Tensor] = []

    @property
    def scaled(self) -> torch.optim.Optimizer:
        raise AssertionError("without a loss scale nobody asks")

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> float:
        self.log.append(self.name)
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([g.flatten().double() for g in found]))
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


@dataclass
class Recorded:
    """The gradients of an update, whose turns they were in, and what was learned."""

    trunk: list[Tensor]
    actor: list[Tensor]
    critic: list[Tensor]
    log: list[str]
    learned: Learned


def record(trainer: Trainer, experience: Experience, activations: Activations, **ppo: Any) -> Recorded:
    """An update that moves nothing."""
    models, log, given = trainer.models, list[str](), trainer.learner.trunk
    assert given is not None and models.trunk is not None
    optimizers = [
        Recording(name, module, log)
        for name, module in (("actor", models.actor), ("critic", models.critic), ("trunk", models.trunk))
    ]
    actor, critic, trunk = optimizers
    learner = Learner(models.actor, models.critic, actor, critic, replace(given, optimizer=trunk))
    changed = trainer.config.ppo.model_copy(update=ppo)
    learned = update(learner, experience, activations, changed, temperature=1.0, seed=1)
    return Recorded(trunk.gradients, actor.gradients, critic.gradients, log, learned)


def disturbed(experience: Experience) -> Experience:
    """As if the policy and the critic had moved since sampling: ratios and values are not those of the start."""
    generator = torch.Generator().manual_seed(3)
    noise = [0.3 * torch.randn(experience.log_probs.shape, generator=generator) for _ in range(2)]
    return replace(experience, log_probs=experience.log_probs + noise[0], values=experience.values + noise[1])


def moved(trainer: Trainer, experience: Experience, activations: Activations) -> dict[str, Tensor]:
    """The trunk and the actor after an update."""
    update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=1)
    assert trainer.models.trunk is not None
    return weights_of(trainer.models.trunk) | weights_of(trainer.models.actor)
