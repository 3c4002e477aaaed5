"""What the critic is made of, and how it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fourfold.config.sections.base import Count, PositiveInt
from fourfold.config.sections.training import OptimizerSection


class CriticSection(OptimizerSection):
    init: Literal["reward", "actor", "base"] = Field(
        default="reward",
        description="Weights of the critic: from the reward model (with its head), from the actor, "
        "or from the base model (new head).",
    )
    layers: Count = Field(
        default=0,
        description="The values are read above so many of the run's model's lowest layers, by a new head: a critic of "
        "the first N layers. At least as many as the trunk has. 0: all layers.",
    )
    model: str = Field(
        default="",
        description="A whole model of its own for the critic, smaller ones too, named as in model.path, with the run's "
        "tokenizer; a sequence classifier with one label brings its head. `fourfold distill` makes one out of the "
        "reward model. '': the critic is made of the run's model.",
    )
    heads: Literal["scalar", "vector", "multi"] = Field(
        default="scalar",
        description="'scalar': one value, of the weighted total. Else a value for each part of the reward and one for "
        "the penalties (KL, length, missing EOS), with rewards, advantages, value clip and loss of their own: 'vector' "
        "by one linear map, 'multi' by a small layer of its own for each on the shared body.",
    )
    head_width: PositiveInt = Field(default=32, description="Units of each head's own layer (heads = 'multi').")
    loss_balance: Literal["fixed", "uncertainty", "grad_norm"] = Field(
        default="fixed",
        description="What the loss of each value counts (heads 'vector', 'multi'): loss_weights; or one over its mean "
        "squared error on the rollout; or one over the norm of its gradient at what the heads read. The latter two "
        "have mean 1 and stay within a tenth and ten times their geometric mean.",
    )
    loss_weights: dict[str, float] = Field(
        default_factory=dict,
        description="Factors of the value losses by part of the reward and 'penalties', where they are not 1.",
    )
    value_clip_eps: dict[str, float] = Field(
        default_factory=dict,
        description="Clip ranges of the values by part of the reward and 'penalties', where they are not "
        "ppo.value_clip_eps.",
    )
    warmup_steps: Count = Field(default=0, description="Optimizer steps of linear warm-up of the learning rate.")
    pretrain_rollouts: Count = Field(
        default=0,
        description="Rollouts before the first PPO step whose returns the critic alone learns, at every position of "
        "the responses, without the bootstrap of gae_lambda and without value clip; they are not among ppo.steps.",
    )
    warmup_rollouts: Count = Field(
        default=0, description="PPO steps at the start in which the critic alone is trained and the actor stands still."
    )
    updates_per_actor: PositiveInt = Field(
        default=1,
        description="Mini-batches that the critic learns for each of the actor's: it goes through a rollout so many "
        "times in each of ppo.num_epochs.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Share of the features before the value head that are left out of each response when the critic "
        "learns; the values of a rollout are computed without it.",
    )
    ensemble: PositiveInt = Field(
        default=1,
        description="Value heads, each of which learns by its own loss from responses of its own drawing; the value is "
        "their mean, and how far they differ is logged.",
    )

    @property
    def of_the_run(self) -> bool:
        """Whether it is made of the run's own model."""
        return not self.model

    @property
    def from_reward(self) -> bool:
        """Whether it starts from the weights of the reward model."""
        return self.of_the_run and self.init == "reward"
