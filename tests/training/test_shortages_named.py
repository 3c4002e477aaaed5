"""Where memory runs out beside passes: while a stage makes its role, and in an optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.errors import RunFailed
from fourfold.memory.budget import OverBudget
from fourfold.training import reward_model, supervised
from training.observed import Scene
from training.runs import run, settings
from training.test_out_of_memory import scene, trainer_for

__all__ = ["scene"]  # a fixture


@pytest.mark.parametrize(("stage", "role"), [("sft", "sft policy"), ("reward", "reward model")])
def test_a_role_that_a_stage_cannot_make_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, role: str
) -> None:
    """FAULTS J5: memory is there for the base model, and for nothing of the stage."""
    tree = settings(tmp_path, {"memory": {"budget_gib": 64.0}})

    def full(role: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(supervised if stage == "sft" else reward_model, "make_trainable", full)
    with pytest.raises(RunFailed, match=f"load: memory ran out while the {role} was loaded") as caught:
        run(tree)
    assert "Loaded so far: trunk " in str(caught.value) and "batch_size" not in str(caught.value)


def test_an_optimizer_step_that_does_not_fit_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_for(scene)

    def full() -> float:
        raise OverBudget("1.0 GiB are resident, memory.budget_gib = 0.9")

    monkeypatch.setattr(trainer.learner.actor_optimizer, "step", full)
    with pytest.raises(RunFailed, match="learn: memory ran out in a step of the actor's optimizer") as caught:
        trainer.step()
    assert "Would help most" in str(caught.value)
