"""Whole tiny runs that are paid by several parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.diagnostics.trackers import read_jsonl
from training.runs import Tree, by_function, make_config, make_trainer, merged, run, settings, steps_of

PARTS: Tree = {
    "letters": {"source": "function", "function": "training.runs:pays_for_a", "weight": 0.5},
    "hash": {"source": "function", "function": "training.runs:pays_by_hash", "weight": 2.0},
}


def by_parts(parts: Tree = PARTS, **ppo: int) -> Tree:
    """Only the stage ppo, paid by these parts."""
    combined = {"source": "combined", "function": None, "parts": parts}
    return merged(by_function("pays_by_hash", **ppo), {"reward": combined})


def test_rows_and_evaluations_have_mean_and_spread_of_every_part(tmp_path: Path) -> None:
    """The mean of a sum is the sum of the means; a run of one source has no such metrics."""
    tree = settings(tmp_path, by_parts(steps=2))
    summary = run(tree)
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "ppo_step"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    assert len(steps) == 2 and evaluations
    for prefix, found in (("", steps), ("eval_", evaluations)):
        for row in found:
            means = [row[f"{prefix}score_mean/{name}"] for name in ("letters", "hash")]
            assert row[f"{prefix}score_mean"] == pytest.approx(0.5 * means[0] + 2.0 * means[1], abs=1e-5)
            assert row[f"{prefix}score_std/hash"] > 0
    assert {"score_mean/letters", "score_std/hash"} <= summary["after"].keys()


def test_one_part_of_weight_one_is_the_source_alone(tmp_path: Path) -> None:
    one = {"hash": {"source": "function", "function": "training.runs:pays_by_hash"}}
    combined, alone = (
        steps_of(make_trainer(make_config(settings(tmp_path / name, changes))))
        for name, changes in (("one", by_parts(one)), ("alone", by_function("pays_by_hash")))
    )
    for ours, theirs in zip(combined, alone, strict=True):
        assert not [name for name in theirs if "/" in name]
        assert ours["score_mean/hash"] == ours["score_mean"]
        for name in ("score_mean", "score_shaped_mean", "actor_grad_norm", "critic_grad_norm", "return_std"):
            assert ours[name] == theirs[name], name
