"""Whole runs through the public API: what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import RunFailed
from training.runs import SHARINGS, by_function, make_config, make_trainer, merged, run, settings

EVALUATED = {
    "score_mean",
    "kl_per_sequence",
    "ref_log_prob_per_token",
    "distinct_2",
    "mean_length",
    "eos_share",
}


def actor(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "ppo" / "model" / "model.safetensors")


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_whole_run_writes_the_summary(tmp_path: Path, sharing: str) -> None:
    summary = run(merged(settings(tmp_path), SHARINGS[sharing]))
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["before"].keys() >= EVALUATED and summary["after"].keys() >= EVALUATED
    assert summary["before"]["kl_per_sequence"] == 0.0
    assert 0.0 <= summary["reward_model"]["pair_accuracy"] <= 1.0
    for name in ("load", "sft", "reward", "ppo", "generate", "score", "learn", "save"):
        assert summary["seconds"][name] > 0 and summary["peak_bytes"][name] > 0, name
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("episodes", "tokens", "optimizer_steps"):
        counts = [row[name] for row in rows]
        assert counts == sorted(counts) and counts[0] > 0


def test_the_number_of_steps_is_the_number_of_rows(tmp_path: Path) -> None:
    """FAULTS F12, F13: every public number moves something."""
    for steps in (1, 4):
        tree = merged(settings(tmp_path), {"output": str(tmp_path / f"run{steps}"), "ppo": {"steps": steps}})
        run(tree)
        rows = read_jsonl(tmp_path / f"run{steps}" / "ppo" / "metrics.jsonl", "ppo_step")
        assert len(rows) == steps
        assert rows[-1]["optimizer_steps"] == steps * 2 * 2  # epochs x mini-batches


def test_without_held_out_data_a_run_ends_well(tmp_path: Path) -> None:
    """FAULTS N2."""
    without = dict.fromkeys(("texts_test", "pairs_test", "prompts_test"))
    tree = merged(settings(tmp_path), {"data": without, "evaluation": None})
    summary = run(tree)
    assert "before" not in summary and "reward_model" not in summary
    assert actor(tmp_path)


def test_stages_one_by_one_equal_the_whole(tmp_path: Path) -> None:
    whole = settings(tmp_path)
    run(whole)
    parts = merged(whole, {"output": str(tmp_path / "parts")})
    for stage in ("sft", "reward", "ppo"):
        run(merged(parts, {"stages": [stage]}))
    expected, found = actor(tmp_path), load_file(tmp_path / "parts" / "ppo" / "model" / "model.safetensors")
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_finished_stages_are_skipped(tmp_path: Path) -> None:
    tree = settings(tmp_path)
    run(tree)
    before = (tmp_path / "run" / "ppo" / "model" / "model.safetensors").stat().st_mtime_ns
    run(tree)
    assert (tmp_path / "run" / "ppo" / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    tree = settings(tmp_path)
    run(tree)
    with pytest.raises(ValueError, match=r"ppo\.kl_coef was 0\.05, is 0\.5"):
        run(merged(tree, {"ppo": {"kl_coef": 0.5}}))


def test_ppo_without_a_reward_model_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run the stage reward first"):
        run(merged(settings(tmp_path), {"stages": ["ppo"]}))


def test_a_reward_function_needs_no_other_stage(tmp_path: Path) -> None:
    summary = run(merged(settings(tmp_path), by_function("pays_for_a")))
    assert summary["after"]["score_mean"] >= 0


def test_failed_scores_stop_the_run_or_are_dropped(tmp_path: Path) -> None:
    """FAULTS M5: None is never learned from as a number."""
    tree = merged(settings(tmp_path), by_function("pays_none_for_some"))
    with pytest.raises(RunFailed, match="no valid score"):
        run(tree)
    tree = merged(tree, {"output": str(tmp_path / "dropped"), "reward": {"on_failure": "drop"}})
    run(tree)
    rows = read_jsonl(tmp_path / "dropped" / "ppo" / "metrics.jsonl", "ppo_step")
    assert sum(row["invalid_scores"] for row in rows) > 0
    assert all(row["dropped_rows"] == row["invalid_scores"] for row in rows)


def test_a_changed_reference_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(merged(settings(tmp_path), by_function("pays_for_a", steps=2))))
    trainer.step()
    trainer.save(is_best=False)
    with torch.no_grad():
        next(trainer.models.reference.branch.parameters()).add_(1e-3)
    with pytest.raises(RunFailed, match="trunk, reference or reward have changed"):
        trainer.save(is_best=False)
    checkpoint = trainer.store.latest()
    assert checkpoint is not None and checkpoint.step == 1


def test_an_exception_in_a_callback_is_not_swallowed(tmp_path: Path) -> None:
    """FAULTS N3."""
    seen: list[int] = []

    def callback(step: int, row: dict[str, float]) -> None:
        seen.append(step)
        if step == 2:
            raise KeyError("mine")

    config = make_config(merged(settings(tmp_path), by_function("pays_for_a", steps=3)))
    with pytest.raises(KeyError, match="mine"):
        make_trainer(config, callbacks=(callback,)).run()
    assert seen == [1, 2]
