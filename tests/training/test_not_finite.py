"""A number that is not finite stops the step, and the message names the phase, the model and the step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.algorithms.rewards import RunningMoments
from fourfold.diagnostics.trackers import JsonlTracker, read_jsonl
from fourfold.errors import RunFailed
from fourfold.models.roles import freeze
from fourfold.scoring.sources import FunctionReward, ModelReward
from fourfold.training.state import Progress
from fourfold.training.trainer import Trainer
from training.runs import SHARINGS, by_function, make_config, make_trainer, merged, settings

DAMAGED = {
    "trunk": r"generate: the actor's logits for response token \d+ are not finite, nor are the trunk's activations",
    "reference": "score: the reference's ref_log_probs are not finite",
    "reward": "score: the reward model's scores of ",
}


def trainer_for(folder: Path, changes: dict[str, Any] | None = None, **ppo: Any) -> Trainer:
    tree = merged(by_function("pays_by_hash", **({"steps": 3} | ppo)), changes or {})
    return make_trainer(make_config(settings(folder, tree)))


def with_reward_model(trainer: Trainer) -> Trainer:
    scorer = trainer.models.base.new_scorer()
    freeze(scorer)
    trainer.models.reward, trainer.reward = scorer, ModelReward(scorer)
    return trainer


def damage(module: nn.Module, value: float) -> None:
    """One weight of its last matrix."""
    with torch.no_grad():
        [*_, last] = [p for p in module.parameters() if p.ndim >= 2]
        last.flatten()[0] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("model", "sharing"),
    [(model, sharing) for model in DAMAGED for sharing in SHARINGS if model != "trunk" or "trunk" in sharing],
)
def test_a_damaged_weight_is_named_with_its_phase_and_step(
    tmp_path: Path, model: str, sharing: str, value: float
) -> None:
    """FAULTS B10: of the three models that stand still; actor and critic are in test_update.py."""
    trainer = with_reward_model(trainer_for(tmp_path, SHARINGS[sharing]))
    models = trainer.models

    def spoil(step: int, row: dict[str, float]) -> None:
        module = models.base.trunk if model == "trunk" else getattr(models, model).branch
        assert module is not None
        damage(module, value)

    trainer.callbacks = (spoil,)
    trainer.config = trainer.config.model_copy(
        update={"checkpoint": trainer.config.checkpoint.model_copy(update={"every": 10})}
    )
    with pytest.raises(RunFailed, match=rf"^step 2: {DAMAGED[model]}"):
        trainer.run()


@pytest.mark.parametrize("model", ["reference", "reward"])
def test_pre_flight_names_a_damaged_model_too(tmp_path: Path, model: str) -> None:
    trainer = with_reward_model(trainer_for(tmp_path))
    damage(getattr(trainer.models, model).branch, math.nan)
    with pytest.raises(RunFailed, match=rf"^{DAMAGED[model]}"):
        trainer.check()


@pytest.mark.parametrize(
    ("on_failure", "message"), [("stop", "8 of 8 responses got no valid score"), ("drop", "no response can be learned")]
)
def test_a_score_beyond_float32_stops_the_step(tmp_path: Path, on_failure: str, message: str) -> None:
    """FAULTS M5: 1e39 is a fine Python number, and infinite as soon as it is a score."""
    trainer = trainer_for(tmp_path, {"reward": {"on_failure": on_failure}})
    trainer.reward = FunctionReward(
        lambda _, responses: [1e39] * len(responses), trainer.models.base.tokenizer, retries=0
    )
    with pytest.raises(RunFailed, match=f"^step 1: score: {message}"):
        trainer.run()


def test_the_scores_statistics_take_no_infinity(tmp_path: Path) -> None:
    """A source that calls an infinite score valid is stopped in the score phase."""

    def lying(activations: Any, rollout: Any) -> tuple[Tensor, Tensor]:
        rows = len(rollout.sequences)
        return torch.full((rows,), math.inf), torch.ones(rows, dtype=torch.bool)

    trainer = trainer_for(tmp_path)
    trainer.reward = lying
    with pytest.raises(RunFailed, match=r"^step 1: score: the reward's scores: 8 of 8 are NaN or infinite"):
        trainer.run()


def test_the_statistics_come_back_from_a_checkpoint_as_they_went() -> None:
    progress = Progress(kl_coef=0.1)
    progress.moments = progress.moments.update(torch.tensor([1.0, 2.0, 6.0]))
    again = Progress.from_dict(progress.as_dict())
    assert again == progress and isinstance(again.moments, RunningMoments)
    assert (again.moments.count, again.moments.mean, again.moments.std) == (3, 3.0, pytest.approx(7**0.5))


def test_a_metric_that_is_not_finite_stops_the_run_and_is_not_written(tmp_path: Path) -> None:
    """A row of JSON that no reader takes would be worse than none."""
    trainer = trainer_for(tmp_path)
    trainer.judge = lambda texts: [math.nan] * len(texts)
    trainer.config = trainer.config.model_copy(
        update={"evaluation": trainer.config.evaluation.model_copy(update={"every": 1})}
    )
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    trainer.trackers = [tracker]
    with pytest.raises(RunFailed, match=r"^step 1: log: metric 'eval_judge_mean' of step 1 is nan"):
        trainer.run()
    tracker.close()
    assert [row["kind"] for row in read_jsonl(path)] == ["ppo_step"]
