"""The settings of a run: frozen, strict, complete.

Every field is described once, in `sections`; `fourfold init` and `docs/configuration.md` are made from that.
No torch is imported, so `--help` and checks of a configuration answer at once.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from pydantic import Field, model_validator

from fourfold.config.checks import problems
from fourfold.config.sections.base import Count, Section
from fourfold.config.sections.critic import CriticSection
from fourfold.config.sections.data import DataSection, DatasetSection
from fourfold.config.sections.models import (
    AdaptersSection,
    MemorySection,
    ModelSection,
    PrecisionSection,
    ReferenceSection,
    ServiceSection,
    SharingSection,
    SystemSection,
    TrunkSection,
)
from fourfold.config.sections.parts import ClassifierSection, PartSection, RuleSection
from fourfold.config.sections.running import (
    CheckpointSection,
    CurriculumSection,
    EvaluationSection,
    SamplingSection,
    TrackingSection,
)
from fourfold.config.sections.training import OptimizerSection, PpoSection, RewardSection, SftSection

__all__ = [
    "AdaptersSection",
    "CheckpointSection",
    "ClassifierSection",
    "CriticSection",
    "CurriculumSection",
    "DataSection",
    "DatasetSection",
    "EvaluationSection",
    "MemorySection",
    "ModelSection",
    "OptimizerSection",
    "PartSection",
    "PpoSection",
    "PrecisionSection",
    "ReferenceSection",
    "RewardSection",
    "RuleSection",
    "RunConfig",
    "SamplingSection",
    "Section",
    "ServiceSection",
    "SftSection",
    "SharingSection",
    "SystemSection",
    "TrackingSection",
    "TrunkSection",
]


# The last dimension of a critic that has several: the KL, the length, the missing EOS.
PENALTIES = "penalties"


class RunConfig(Section):
    """All settings of a run; what is not given has the default shown by `fourfold init`."""

    output: str = Field(description="Folder of the run: stages, checkpoints, metrics, summary.")
    seed: Count = Field(default=0, description="Seed of everything random.")
    stages: tuple[Literal["sft", "reward", "ppo"], ...] = Field(
        default=("sft", "reward", "ppo"),
        description="Stages that `fourfold run` carries out, in this order.",
        strict=False,
    )
    model: ModelSection
    sharing: SharingSection = Field(default_factory=SharingSection)
    trunk: TrunkSection = Field(default_factory=TrunkSection)
    adapters: AdaptersSection = Field(default_factory=AdaptersSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    system: SystemSection = Field(default_factory=SystemSection)
    data: DataSection = Field(default_factory=DataSection)
    sft: SftSection = Field(default_factory=SftSection)
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    service: ServiceSection = Field(default_factory=ServiceSection)
    critic: CriticSection = Field(default_factory=CriticSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    ppo: PpoSection = Field(default_factory=PpoSection)
    curriculum: CurriculumSection = Field(default_factory=CurriculumSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """Of actor and critic in the whole stage ppo, when no epoch ends early."""
        warmup, found = self.critic.warmup_rollouts, {"actor": 0, "critic": 0}
        # Steps by their rows and whether the actor learns; those after a rollout has grown are alike.
        growing = min(self.curriculum.steps if self.curriculum.start_rollout_batch_size else 0, self.ppo.steps)
        alike = Counter((self.rows_at(step), step >= warmup) for step in range(growing))
        waiting = min(max(warmup - growing, 0), self.ppo.steps - growing)
        alike[self.ppo.rollout_batch_size, False] += waiting
        alike[self.ppo.rollout_batch_size, True] += self.ppo.steps - growing - waiting
        for (rows, learning), count in alike.items():
            updates = self.ppo.updates_of(rows)
            turns = self.trunk.turns(updates)
            found["actor"] += count * learning * (updates - turns["critic"])
            found["critic"] += count * (updates - learning * turns["actor"])
        found["critic"] *= self.critic.updates_per_actor
        found["critic"] += self.critic.pretrain_rollouts * self.ppo.mini_batches_of(self.rows_at(0))
        return found

    def rows_at(self, step: int) -> int:
        """Responses in the rollout of a PPO step, counted from 0: a multiple of mini-batch and responses a prompt."""
        unit = math.lcm(self.ppo.mini_batch_size, self.sampling.responses_per_prompt)
        given = self.curriculum
        return given.grown(given.start_rollout_batch_size, self.ppo.rollout_batch_size, step, unit)

    def new_tokens_at(self, step: int) -> int:
        """Longest response of a PPO step, counted from 0."""
        return self.curriculum.grown(self.curriculum.start_new_tokens, self.sampling.max_new_tokens, step)

    def evaluated_after(self, step: int) -> bool:
        """Whether an evaluation comes after a PPO step: every so many, and at the end."""
        every = self.evaluation.every
        given = self.data.prompts_test is not None
        return given and (step == self.ppo.steps or (every > 0 and step % every == 0))

    @property
    def value_dimensions(self) -> tuple[str, ...]:
        """What a critic of several dimensions has a value of: the parts of the reward, and the penalties; else none."""
        return () if self.critic.heads == "scalar" else (*self.reward.dimensions, PENALTIES)

    @property
    def reference_differs(self) -> bool:
        """Whether a reference may say otherwise what the actor's numerics would say of its weights: a bias is measured.

        Of settings whose `compute` is resolved.
        """
        given = self.reference
        elsewhere = given.engine != "torch" or (given.starts_as_the_actor and given.computes_elsewhere)
        return self.precision.reference_differs or elsewhere

    @property
    def importance(self) -> Literal["none", "token", "sequence"]:
        """What `ppo.importance` comes to."""
        given = self.ppo.importance
        if given == "auto":
            return "token" if self.sampling.differs else "none"
        return given

    def with_reward(self, key: str) -> RunConfig:
        """The same settings with the text classifier that table `key` describes as the only reward model."""
        given = self.reward.classifiers[key]
        own = {name: getattr(given, name) for name in ClassifierSection.model_fields}
        reward = self.reward.model_copy(update={**own, "source": "model"})
        return self.model_copy(update={"reward": reward})

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> RunConfig:
        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self
