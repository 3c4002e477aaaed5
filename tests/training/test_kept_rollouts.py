"""Rollouts that a run keeps: what was learned from, and held-out ones with what the critic says of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

from fourfold.batch import Experience, Rollout
from fourfold.batch_files import write_batch
from fourfold.diagnostics.kept import held_out_files, training_files
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import RunFailed
from training.runs import by_function, make_config, make_trainer, merged, run, settings, steps_of

STEPS = 4
KEPT = {
    "evaluation": {"every": 2},
    "checkpoint": {"every": 2},
    "ppo": {"kl_coef": 0.1, "reward_normalization": "running"},
}


def tree_of(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    return merged(settings(folder, merged(by_function("pays_by_hash", steps=STEPS), KEPT)), changes or {})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    run(tree_of(folder))
    return folder / "run"


def test_every_evaluation_has_its_two_files(finished: Path) -> None:
    """Before the first step nothing has been learned from."""
    assert held_out_files(finished).steps() == [0, 2, 4]
    assert training_files(finished).steps() == [2, 4]


def test_the_files_give_the_rows_of_metrics(finished: Path) -> None:
    """Recomputed in float64 by NumPy and SciPy from what is on disk."""
    rows = {(row["kind"], row["step"]): row for row in read_jsonl(finished / "ppo" / "metrics.jsonl")}
    for step in (2, 4):
        for kind, prefix, files in (
            ("evaluation", "eval_", held_out_files(finished)),
            ("ppo_step", "", training_files(finished)),
        ):
            kept = files.read(step)
            mask = kept.response_mask.numpy()
            values, returns = (tensor.double().numpy()[mask] for tensor in (kept.values, kept.returns))
            expected = {
                "explained_variance": 1 - (returns - values).var() / returns.var(),
                "value_return_spearman": spearmanr(values, returns)[0],
                "value_bias": (values - returns).mean(),
                "score_mean": kept.scores.double().numpy().mean(),
            }
            found = {name: rows[kind, step][f"{prefix}{name}"] for name in expected}
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_training_rollout_is_of_the_policy_before_the_step(finished: Path) -> None:
    for step in (2, 4):
        assert set(training_files(finished).read(step).policy_version.tolist()) == {step - 1}
        assert set(held_out_files(finished).read(step).policy_version.tolist()) == {step}


def test_rewards_of_held_out_responses_are_shaped_as_in_training(finished: Path) -> None:
    """A response's rewards sum up to its normalised score less kl_coef times its KL; the moments are the run's."""
    kept, learned = (files(finished).read(STEPS) for files in (held_out_files, training_files))

    def shaped(batch: Experience) -> torch.Tensor:
        return (batch.rewards + 0.1 * batch.kl).sum(dim=1)

    # One straight line through both: scores of training and of held-out responses are normalised by the same moments.
    slope, offset = _line(learned.scores, shaped(learned))
    assert torch.allclose(shaped(kept), slope * kept.scores + offset, atol=1e-4)


def _line(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx = x - x.mean()
    slope = (dx @ (y - y.mean())) / (dx @ dx)
    return slope, y.mean() - slope * x.mean()


def test_switched_off_nothing_is_written_and_nothing_else_changes(tmp_path: Path, finished: Path) -> None:
    trainer = make_trainer(make_config(tree_of(tmp_path, {"evaluation": {"keep_rollouts": False}})))
    rows = steps_of(trainer)
    assert not (tmp_path / "run" / "ppo" / "evaluations").exists()
    assert not (tmp_path / "run" / "ppo" / "rollouts").exists()
    kept = read_jsonl(finished / "ppo" / "metrics.jsonl", "ppo_step")
    assert [row["value_loss_per_token"] for row in rows] == [row["value_loss_per_token"] for row in kept]


def test_a_resumed_run_forgets_what_an_interrupted_one_kept_of_later_steps(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(tree_of(tmp_path)))
    steps_of(trainer)
    for files in (held_out_files(tmp_path / "run"), training_files(tmp_path / "run")):
        files.write(STEPS + 2, files.read(STEPS))
    make_trainer(make_config(tree_of(tmp_path)))
    assert held_out_files(tmp_path / "run").steps() == [2, 4]
    assert training_files(tmp_path / "run").steps() == [2, 4]


def test_held_out_responses_without_any_score_stop_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(tree_of(tmp_path)))
    assert trainer.evaluation_prompts is not None
    rollout, activations = trainer.sampler.generate(trainer.evaluation_prompts, policy_version=0)
    scored, valid = trainer._score(rollout, activations)
    with pytest.raises(RunFailed, match="no held-out response got a valid score"):
        trainer.kept.held_out(scored, torch.zeros_like(valid), trainer.progress)


def test_a_file_of_another_stage_is_refused(tmp_path: Path, finished: Path) -> None:
    kept = held_out_files(finished).read(STEPS)
    files = held_out_files(tmp_path)
    files.folder.mkdir(parents=True)
    write_batch(files.path(3), Rollout(**{f.name: getattr(kept, f.name) for f in fields(Rollout)}))
    with pytest.raises(ValueError, match="Rollout; a run keeps Experience"):
        files.read(3)
