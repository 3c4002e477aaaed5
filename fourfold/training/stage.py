"""The loop that the supervised stages share: batches, optimizer steps, checkpoints, resuming, stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

from fourfold.backends.base import RoleOptimizer
from fourfold.backends.local import LocalOptimizer
from fourfold.backends.scaling import LossScale, step_unless_overflowed
from fourfold.config.schema import OptimizerSection, RunConfig
from fourfold.diagnostics.progress import stage_progress
from fourfold.errors import Interrupted, RunFailed
from fourfold.memory.budget import BatchSize, stops_when_short
from fourfold.memory.meter import PhaseUsage
from fourfold.memory.quantization import stands_for
from fourfold.models.loading import Base
from fourfold.models.roles import Policy, Scorer
from fourfold.models.storage import RoleRecord, load_own_tensors, own_tensors
from fourfold.training.census import made_beside
from fourfold.training.checkpoint import CheckpointStore, flatten_optimizer, restore_optimizer
from fourfold.training.folder import RunFolder
from fourfold.training.signals import StopRequest

Item = TypeVar("Item")
Say = Callable[[str], None]


def say_what_is_trained(name: str, role: Policy | Scorer, base: Base, say: Say) -> None:
    """How many of the role's parameters a stage trains; a warning where no matrix of a decoder layer is among them."""
    parts = [role, *([] if base.trunk is None else [base.trunk])]
    held = {id(p): p for part in parts for p in part.parameters()}
    numbers = {key: p.numel() for key, p in held.items()}
    for part in parts:
        numbers |= {key: count for key, (_, count) in stands_for(part).items()}
    trained, whole = sum(numbers[key] for key, p in held.items() if p.requires_grad), sum(numbers.values())
    say(f"{name}: trains {trained:,} of {whole:,} parameters ({100 * trained / whole:.2g} %)")
    if not any(p.requires_grad and p.ndim >= 2 for p in role.branch.parameters()):
        say(
            f"warning: {name}: no matrix of a decoder layer is among them: above a trunk of all layers (trunk."
            "branch_layers = 0) this stage has little to learn with, because the trunk is trained in ppo only; set "
            f"trunk.branch_layers to 1 or more, or leave {name!r} out of stages"
        )


def stage_optimizer(
    name: str,
    role: Policy | Scorer,
    settings: OptimizerSection,
    steps: int,
    config: RunConfig,
    base: Base,
    folder: Path,
) -> LocalOptimizer:
    """The optimizer of a role that is trained alone."""
    with made_beside(base, f"{name}'s optimizer", config):
        return LocalOptimizer(
            name,
            role,
            settings,
            total_steps=steps,
            memory=config.memory,
            folder=folder,
            loss_scale=LossScale.of(config.precision, base.budget.device),
            budget=base.budget,
        )


def stage_size(
    stage: Literal["sft", "reward"], role: str, micro_batch_size: int, config: RunConfig, base: Base
) -> BatchSize:
    """The rows of a pass of the role that a stage trains."""
    whole = f"{stage}.batch_size = {stage}.micro_batch_size" if config.memory.optimizer_in_backward else ""
    return BatchSize(stage, role, micro_batch_size, base.budget, whole)


def learn_from(
    batch: Sequence[Item],
    loss_sum: Callable[[Sequence[Item]], Tensor],
    count: int,
    optimizer: RoleOptimizer,
    size: BatchSize,
) -> float:
    """One optimizer step on a batch, in pieces that fit; returns its loss, the sum divided by `count`."""

    def passes(at_once: int) -> float:
        total = 0.0
        for start in range(0, len(batch), at_once):
            loss = loss_sum(batch[start : start + at_once])
            optimizer.backward(loss / count)
            total += float(loss.detach())
        return total

    total = size.fitting(passes, len(batch), optimizer.discard)
    step_unless_overflowed(optimizer)
    return total / count


@dataclass
class Stage:
    """A supervised stage: `learn(step)` takes one optimizer step and returns its loss."""

    name: str
    folder: Path
    role: Policy | Scorer
    record: RoleRecord
    optimizer: RoleOptimizer
    steps: int
    learn: Callable[[int], float]
    checkpoint_every: int
    size: BatchSize

    def run(self) -> list[float]:
        """Go from the newest checkpoint to the last step; returns the losses of the steps taken here."""
        store = CheckpointStore(self.folder / "checkpoints", keep_last=2)
        run, started = RunFolder(self.folder.parent), time.perf_counter()
        done = self._resume(store)
        losses: list[float] = []
        with StopRequest() as stop, stage_progress(self.name, self.steps, unit="steps", done=done) as progress:
            for step in range(done, self.steps):
                losses.append(self._learn(step))
                progress.advance(1, note=f"loss {losses[-1]:.3f}")
                if stop.requested or (step + 1) % self.checkpoint_every == 0 or step + 1 == self.steps:
                    self._save(store, step + 1)
                    # For a process that is killed; one that ends otherwise counts the whole stage (pipeline.py).
                    run.note_spent({self.name: PhaseUsage(time.perf_counter() - started, 0)})
                if stop.requested:  # also after the last step: what follows can take long
                    raise Interrupted(
                        f"{self.name}: stopped after step {step + 1} of {self.steps}; the same command goes on"
                    )
        return losses

    def noted(self, micro_batch_size: int) -> dict[str, float]:
        """What the stage's metrics say of its way: rows at once if memory has halved them, and float16's loss scale."""
        rows = {"micro_batch_size": float(self.size.size)} if self.size.size < micro_batch_size else {}
        scale = self.optimizer.loss_scale
        return rows if scale is None else rows | scale.metrics()

    def _learn(self, step: int) -> float:
        try:
            with stops_when_short(self.name, "", self.size.budget, self.size.describe):
                return self.learn(step)
        except RunFailed as error:
            raise RunFailed(f"{self.name}, step {step + 1}: {error}") from error

    def _resume(self, store: CheckpointStore) -> int:
        checkpoint = store.latest()
        if checkpoint is None:
            return 0
        load_own_tensors(self.role, checkpoint.tensors("role").unread(), shares_head=self.record.shares_head)
        record = checkpoint.state
        restored = restore_optimizer(checkpoint.tensors("optimizer").unread(), record["optimizer"])
        self.optimizer.load_state_dict({"optimizer": restored, "steps_done": record["steps_done"]})
        self.size.size = record["batch_sizes"].get("learn", self.size.size)
        if (scale := self.optimizer.loss_scale) is not None:
            scale.load_state_dict(record["loss_scale"])
        return checkpoint.step

    def _save(self, store: CheckpointStore, step: int) -> None:
        everything = self.optimizer.state_dict()
        tensors, record = flatten_optimizer(everything["optimizer"])
        groups = {"role": own_tensors(self.role, shares_head=self.record.shares_head), "optimizer": tensors}
        # With its record, every checkpoint can be loaded as the stage's result (reward.checkpoint).
        state = {"optimizer": record, "steps_done": everything["steps_done"], "record": asdict(self.record)}
        state["batch_sizes"] = {"learn": self.size.size}
        scale = self.optimizer.loss_scale
        state["loss_scale"] = None if scale is None else scale.state_dict()
        store.save(step, groups, state)
