"""The settings of a run: frozen, strict, complete.

Every field is described once, in `sections`; `fourfold init` and `docs/configuration.md` are made from that.
No torch is imported, so `--help` and checks of a configuration answer at once.
"""

from __future__ import annotations

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
from fourfold.config.sections.parts import PartSection
from fourfold.config.sections.running import CheckpointSection, EvaluationSection, SamplingSection, TrackingSection
from fourfold.config.sections.training import OptimizerSection, PpoSection, RewardSection, SftSection

__all__ = [
    "AdaptersSection",
    "CheckpointSection",
    "CriticSection",
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
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """Of actor and critic in the whole stage ppo, when no epoch ends early."""
        ppo, warmup = self.ppo, self.critic.warmup_rollouts
        updates, learning = ppo.updates_a_rollout, ppo.steps - warmup
        turns = self.trunk.turns(updates)
        return {
            "actor": learning * (updates - turns["critic"]),
            "critic": self.critic.pretrain_rollouts * ppo.mini_batches
            + self.critic.updates_per_actor * (warmup * updates + learning * (updates - turns["actor"])),
        }

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
        elsewhere = self.reference.starts_as_the_actor and self.reference.computes_elsewhere
        return self.precision.reference_differs or elsewhere

    @property
    def importance(self) -> Literal["none", "token", "sequence"]:
        """What `ppo.importance` comes to."""
        given = self.ppo.importance
        if given == "auto":
            return "token" if self.sampling.differs else "none"
        return given

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> RunConfig:
        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self
