"""Before the first PPO step: the critic alone learns what responses are worth, at every position of them.

A reward model has only learned to judge whole texts, and a new head has learned nothing; PPO's first steps would follow
their errors. So the policy as it starts writes rollouts of its own, and values learn the returns of these: sums of what
is still to come, without the bootstrap from the critic itself (lambda = 1), as in value pretraining by Yuan et al. 2025
("What's Behind PPO's Collapse in Long-CoT? Value Optimization Holds the Secret", section 4.1). Where KL is 0 and
gamma 1, the return of every state of a response is its score.

Every mini-batch is seen once. How well values explain returns is measured on one rollout more, which is never learned
from. An interruption before the first checkpoint of ppo begins it anew, to the same numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.batch import Experience
from fourfold.diagnostics.kept import value_fit
from fourfold.diagnostics.progress import stage_progress
from fourfold.errors import Interrupted
from fourfold.models.roles import Activations
from fourfold.rollout.prompts import PromptStream
from fourfold.rollout.sampler import row_seed
from fourfold.scoring.opinions import Opinions, ask, of_critic
from fourfold.scoring.pipeline import learnable
from fourfold.training.experience import estimate_advantages
from fourfold.training.signals import StopRequest
from fourfold.training.update import update

if TYPE_CHECKING:
    from fourfold.training.trainer import Trainer


@dataclass(frozen=True)
class Pretrained:
    """What pretraining did, and how values fit the returns of a rollout that was not learned from (`value_fit`)."""

    rollouts: int
    responses: int
    optimizer_steps: int
    before: dict[str, float]
    after: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """One line for the terminal."""
        explained, ranks = "explained_variance", "value_return_spearman"
        return (
            f"critic: pretrained on {self.responses:,} responses in {self.optimizer_steps:,} optimizer steps; of a "
            f"rollout that it has not learned from, values explain {self.after[explained]:.3f} of the variance of "
            f"returns ({self.before[explained]:.3f} before), rank correlation {self.after[ranks]:.3f} "
            f"({self.before[ranks]:.3f})"
        )


def pretrain_critic(trainer: Trainer) -> Pretrained:
    """Carry out `critic.pretrain_rollouts` with the actor as it is now, which stands still."""
    config, count = trainer.config, trainer.config.critic.pretrain_rollouts
    assert count and not trainer.progress.step, "pretraining comes before the first step"
    stream = trainer.prompts.elsewhere(row_seed("pretrain", config.seed))
    held, held_activations = _experience(trainer, stream, 0)
    before = value_fit(held)
    responses = steps = 0
    # One pass, and values as far as they go: what clips them is for steps that follow each other closely.
    settings = config.ppo.model_copy(update={"num_epochs": 1, "value_clip_eps": 0.0})
    critic = config.critic.model_copy(update={"updates_per_actor": 1})
    with StopRequest() as stop, stage_progress("critic: pretraining", count, unit="rollouts") as progress:
        for number in range(1, count + 1):
            experience, activations = _experience(trainer, stream, number)
            with trainer.census.phase(trainer.meter, "learn"):
                learned = update(
                    trainer.learner,
                    experience,
                    activations,
                    settings,
                    temperature=config.sampling.temperature,
                    seed=row_seed("pretrain update", config.seed, number),
                    critic=critic,
                    train_actor=False,
                    sizes=trainer.sizes,
                )
            responses += len(experience.sequences)
            steps += int(learned.metrics["critic_optimizer_steps"])
            progress.advance(1, note=f"value loss {learned.metrics.get('value_loss_per_token', 0.0):.3f}")
            if stop.requested:
                done = f"critic: pretraining stopped after rollout {number} of {count}"
                raise Interrupted(f"{done}; the same command begins it anew, to the same numbers")
    after = value_fit(replace(held, values=_values(trainer, held, held_activations)))
    return Pretrained(count, responses, steps, before, after)


def _experience(trainer: Trainer, stream: PromptStream, number: int) -> tuple[Experience, Activations]:
    """A rollout of the policy as it starts, with the plain sums of its rewards as returns."""
    config, progress = trainer.config, trainer.progress
    with trainer.census.phase(trainer.meter, "generate"):
        rollout, activations = trainer.sampler.generate(stream.batch(number), policy_version=0)
    with trainer.census.phase(trainer.meter, "score"):
        scored, valid = trainer._score(rollout, activations)
        progress.observe(scored, valid)
        # What is cut by length has the score that it got: its last state's value is one of those that are to be mended.
        truncation = "terminal" if config.ppo.truncation == "bootstrap" else config.ppo.truncation
        rows = learnable(scored, valid, truncation=truncation, on_failure=config.reward.on_invalid)
        plain = {"gae_lambda": 1.0, "whiten_advantages": False, "truncation": truncation}
        plain = config.ppo.model_copy(update=plain)
        return estimate_advantages(scored.select(rows), plain, progress.shaping), activations.select(rows)


@torch.no_grad()
def _values(trainer: Trainer, experience: Experience, activations: Activations) -> Tensor:
    """Of the critic as it is now."""
    critic, size = trainer.models.critic, trainer.sizes.score
    found = Opinions.empty(experience, parts=0, values=critic.head.shape)  # no reward is asked
    ask(found, experience, activations, critic, of_critic(critic, size), size)
    return found.values
