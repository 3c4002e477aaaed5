"""The example's figures out of the summaries of its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.reviews import figures, read_summary

EVALUATED = ("judge_mean", "score_mean", "kl_per_sequence", "eos_share", "mean_length", "ref_log_prob_per_token")


def summary(load: float, judge: float) -> dict[str, Any]:
    return {
        "before": dict.fromkeys(EVALUATED, 0.0) | {"distinct_2": 0.8},
        "after": dict.fromkeys(EVALUATED, 1.0) | {"distinct_2": 0.6, "judge_mean": judge},
        "reward_model": {"pair_accuracy": 0.9},
        "seconds": {"load": load, "sft": 10.0, "reward": 20.0, "ppo": 30.0, "save": 1.0},
        "peak_bytes": {"load": 2**20, "ppo": 3 * 2**20},
    }


def test_figures_are_medians_over_the_runs_with_their_range() -> None:
    found = {figure.name: figure for figure in figures([summary(1.0, 0.3), summary(5.0, 0.4), summary(2.0, 0.5)])}
    assert found["judge_mean: gain on held-out prompts"].value == 0.4
    assert found["distinct_2: after / before"].value == 0.6 / 0.8
    assert found["peak resident memory"].value == 3.0
    load = found["seconds of load"]
    assert (load.value, load.spread) == (2.0, (1.0, 5.0))


def test_the_three_stages_are_counted_without_loading() -> None:
    found = {figure.name: figure for figure in figures([summary(1.0, 0.3)])}
    assert found["seconds of the three stages"].value == 60.0


def test_the_seconds_of_a_stage_that_was_run_by_itself_are_found(tmp_path: Path) -> None:
    whole = summary(1.0, 0.3)
    for name in ("sft", "reward"):
        del whole["seconds"][name]
    (tmp_path / "summary.json").write_text(json.dumps(whole))
    for seconds, stage in enumerate(("sft", "reward", "ppo"), start=7):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "done.json").write_text(json.dumps({"seconds": float(seconds), "peak_bytes": 9 * 2**20}))
    found = {figure.name: figure.value for figure in figures([read_summary(tmp_path)])}
    assert found["seconds of the three stages"] == 7 + 8 + 9
    assert found["peak resident memory"] == 9.0
