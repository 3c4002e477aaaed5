"""What a run of PPO carries from step to step, and how it goes into a checkpoint and comes back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from fourfold.algorithms.kl import adapt_kl_coef
from fourfold.algorithms.masking import masked_sum
from fourfold.algorithms.rewards import RunningMoments
from fourfold.batch import ScoredRollout
from fourfold.config.schema import PpoSection
from fourfold.memory.budget import BatchSizes
from fourfold.models.assembly import FourModels
from fourfold.models.roles import Policy, Scorer
from fourfold.models.storage import load_own_tensors, own_tensors
from fourfold.tensor_files import Source
from fourfold.training.checkpoint import Checkpoint, flatten_optimizer, restore_optimizer, restore_rng, rng_state
from fourfold.training.experience import Shaping, shape_scores
from fourfold.training.learner import Learner


@dataclass
class Progress:
    """Counters and controllers of a run; everything here is part of a checkpoint."""

    kl_coef: float
    step: int = 0
    episodes: int = 0
    tokens: int = 0
    optimizer_steps: int = 0
    best_metric: float | None = None
    moments: RunningMoments = field(default_factory=RunningMoments)
    part_moments: tuple[RunningMoments, ...] = ()

    def observe(self, scored: ScoredRollout, valid: Tensor) -> None:
        """Scores have come in: those that are valid go into the running moments, of the total and of each part."""
        shaping = self.shaping_with(scored.select(valid.nonzero()[:, 0]))
        self.moments, self.part_moments = shaping.moments, shaping.part_moments

    @property
    def shaping(self) -> Shaping:
        """How rewards are shaped as things stand."""
        return Shaping(self.kl_coef, self.moments, self.part_moments)

    def shaping_with(self, scored: ScoredRollout) -> Shaping:
        """That, were these scores to come in."""
        parts = scored.score_parts.unbind(dim=1)
        known = self.part_moments or (RunningMoments(),) * len(parts)
        updated = tuple(each.update(scores) for each, scores in zip(known, parts, strict=True))
        return Shaping(self.kl_coef, self.moments.update(scored.scores), updated)

    def count(self, scored: ScoredRollout, optimizer_steps: int, settings: PpoSection) -> None:
        """A step is done; the adaptive controller moves kl_coef by the very KL that was penalised."""
        self.step += 1
        self.episodes += len(scored.sequences)
        self.tokens += int(scored.lengths.sum())
        self.optimizer_steps += optimizer_steps
        if settings.kl_controller == "adaptive":
            self.kl_coef = adapt_kl_coef(
                self.kl_coef,
                float(masked_sum(scored.kl, scored.response_mask)) / len(scored.sequences),
                target=settings.kl_target,
                horizon=settings.kl_horizon,
                num_sequences=len(scored.sequences),
            )

    def shaping_of(self, scored: ScoredRollout) -> Shaping:
        """As things stand, for responses that no statistics take in; before the first step there are but their own."""
        return self.shaping if self.moments.count else self.shaping_with(scored)

    def mean_shaped_score(self, scored: ScoredRollout, valid: Tensor, settings: PpoSection) -> Tensor:
        """Of those responses, scored before the first step, that have a valid score: where a new value head starts.

        One a dimension.
        """
        scored = scored.select(valid.nonzero()[:, 0])
        return shape_scores(scored, settings, self.shaping_of(scored)).mean(dim=0)

    def is_best(self, value: float, mode: str) -> bool:
        """Whether a value of the metric that chooses the best checkpoint is the best so far; it is kept if so."""
        best = self.best_metric
        better = best is None or (value > best if mode == "max" else value < best)
        if better:
            self.best_metric = value
        return better

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = [each.to_dict() for each in self.part_moments]
        return {**asdict(self), "moments": self.moments.to_dict(), "part_moments": parts}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Progress:
        """The inverse of `as_dict`."""
        parts = tuple(RunningMoments.from_dict(each) for each in state["part_moments"])
        return cls(**{**state, "moments": RunningMoments.from_dict(state["moments"]), "part_moments": parts})


def _roles(models: FourModels) -> dict[str, Policy | Scorer]:
    return {"actor": models.actor, "critic": models.critic}


def collect(
    models: FourModels, learner: Learner, progress: Progress, sizes: BatchSizes
) -> tuple[dict[str, dict[str, Source]], dict[str, Any]]:
    """Tensors and JSON of a checkpoint: trained roles, their optimizers, a reference that moves, loss scale, counters,
    random states, frozen checksums."""
    tensors = {name: own_tensors(role, shares_head=models.base.shares_head) for name, role in _roles(models).items()}
    state: dict[str, Any] = {
        "progress": progress.as_dict(),
        "batch_sizes": sizes.state(),
        "loss_scale": None if learner.loss_scale is None else learner.loss_scale.state_dict(),
        "frozen_checksums": models.frozen_checksums(),
        "optimizers": {},
    }
    for name, optimizer in learner.optimizers().items():
        everything = optimizer.state_dict()
        tensors[f"{name}_optimizer"], record = flatten_optimizer(everything["optimizer"])
        state["optimizers"][name] = {"optimizer": record, "steps_done": everything["steps_done"]}
    if models.moving is not None:
        tensors["reference"] = models.moving.tensors()
    random, state["random"] = rng_state()
    tensors["random"] = {**random}
    return tensors, state


def restore(checkpoint: Checkpoint, models: FourModels, learner: Learner, sizes: BatchSizes) -> Progress:
    """Put a checkpoint back into the models, optimizers and batch sizes; returns the counters.

    The frozen models are rebuilt from the stages' files, so they are compared with what the run had.
    """
    before, now = checkpoint.state["frozen_checksums"], models.frozen_checksums()
    # A role at a service, then or now, is in one of the two only: the service's weights were compared with the run's.
    if changed := [name for name in before.keys() & now.keys() if before[name] != now[name]]:
        raise ValueError(
            f"{checkpoint.path}: {' and '.join(sorted(changed))} are not those of the interrupted run (checksums "
            "differ); restore the stage folders, or start again in a new output folder"
        )
    for name, role in _roles(models).items():
        load_own_tensors(role, checkpoint.tensors(name).unread(), shares_head=models.base.shares_head)
    if models.moving is not None:
        models.moving.load(checkpoint.tensors("reference"))
    for name, optimizer in learner.optimizers().items():
        record = checkpoint.state["optimizers"][name]
        restored = restore_optimizer(checkpoint.tensors(f"{name}_optimizer").unread(), record["optimizer"])
        optimizer.load_state_dict({"optimizer": restored, "steps_done": record["steps_done"]})
    if learner.loss_scale is not None:
        learner.loss_scale.load_state_dict(checkpoint.state["loss_scale"])
    sizes.restore(checkpoint.state["batch_sizes"])
    restore_rng(checkpoint.tensors("random"), checkpoint.state["random"])
    return Progress.from_dict(checkpoint.state["progress"])
