"""The table of presets out of the summaries of their runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.presets import (
    UNITS,
    counted_bytes,
    figures,
    judges_apart,
    measured,
    merged,
    preset_of,
    presets_origins,
    presets_table,
)
from benchmarks.results import Result


def summary(judge: float, seconds: float, counted: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "before": {"judge_mean": 0.1, "score_mean": -0.5, "distinct_2": 0.8},
        "after": {"judge_mean": judge, "score_mean": 1.0, "distinct_2": 0.6, "kl_per_sequence": 7.0},
        "reward_model": {"pair_accuracy": 0.9},
        "seconds": {"load": 99.0, "sft": 10.0, "reward": 20.0, "ppo": seconds, "generate": 5.0},
        "peak_bytes": {"load": 2**20, "ppo": 3 * 2**20},
        "counted_bytes": counted or {},
    }


def test_a_run_is_named_after_its_file_and_its_seed() -> None:
    assert [preset_of(Path("runs/levers") / name) for name in ("lora", "lora-1", "max-savings-12")] == [
        "lora",
        "lora",
        "max-savings",
    ]


def test_gains_are_after_less_before_and_seconds_are_those_of_the_stages() -> None:
    found = measured(summary(0.6, 30.0, {"load": 2**23, "sft": 2**22, "reward": 2**22, "ppo": 2**21}))
    assert found == {
        "judge": pytest.approx(0.5), "score": 1.5, "KL": 7.0, "distinct-2": pytest.approx(0.75), "pairs": 0.9,
        "seconds": 60.0, "peak": 3.0, "tensors": 2.0, "tensors in load": 8.0, "tensors in sft": 4.0,
        "tensors in reward": 4.0,
    }  # fmt: skip
    assert found.keys() == UNITS.keys()


def test_a_row_has_the_median_over_the_seeds_and_the_range_where_they_differ() -> None:
    given = {"lora": [summary(0.6, 30.0), summary(0.5, 50.0), summary(0.4, 40.0)], "full": [summary(0.3, 7.0)]}
    about = {name: {"settings": {}, "seeds": list(range(len(runs)))} for name, runs in given.items()}
    result = Result(
        name="presets", date="2026-01-02", hardware="a machine", versions={"torch": "2"}, commit="0" * 40,
        config={"presets": about}, figures=tuple(figures(given)),
    )  # fmt: skip
    _, _, lora, full = presets_table(result)
    cells = [cell.strip() for cell in lora.split("|")]
    assert cells[1:4] == ["[lora](../examples/levers/lora.toml)", "3", "0.40 (0.30 - 0.50)"]
    assert "70.0 (60.0 - 80.0)" in cells and "37.0" in full
    assert cells[-2] == "-", "no tensors were counted"


def test_gains_are_the_same_where_the_ranges_over_seeds_have_one_in_common() -> None:
    """One seed has no range; the ends are of the ranges (gains are 0.1 less than the judge's means)."""
    given = {
        "full": [summary(0.4, 1.0), summary(0.6, 1.0)],
        "lora": [summary(0.55, 1.0), summary(0.7, 1.0)],
        "trunk": [summary(0.5, 1.0), summary(0.57, 1.0)],
        "offload": [summary(0.9, 1.0)],
    }
    (line,) = judges_apart(presets_result(given, "a machine", "a"))
    assert line.startswith("Judge, ranges over the seeds of full, lora, trunk (of offload there is one seed): all have")
    assert line.endswith("all have 0.45 - 0.47 in common.")
    given["qlora"] = [summary(0.65, 1.0), summary(0.8, 1.0)]
    (line,) = judges_apart(presets_result(given, "a machine", "a"))
    assert line.endswith(
        "of full, lora, trunk, qlora (of offload there is one seed): apart lie full and qlora; trunk and qlora."
    )
    assert judges_apart(presets_result({"full": given["full"]}, "a machine", "a")) == []


def test_the_most_live_bytes_are_found_by_what_ran(tmp_path: Path) -> None:
    """Loading is no part of ppo's figure, though the stage's own line holds both."""
    spans = (
        ("", 0, "load", 9), ("sft", 0, "sft", 4), ("ppo", 0, "load", 11), ("ppo", 0, "preflight", 6),
        ("ppo", 1, "score", None), ("ppo", 1, "learn", 7), ("ppo", 2, "learn", 5), ("ppo", 0, "ppo", 11),
    )  # fmt: skip
    rows: list[dict[str, Any]] = [{"kind": "resident", "stage": "ppo", "step": 0, "actor": 99}]
    names = ("stage", "step", "phase", "tensor_peak_bytes")
    rows += [{"kind": "span", "role": "", **dict(zip(names, span, strict=True))} for span in spans]
    (tmp_path / "memory.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert counted_bytes(tmp_path) == {"load": 11, "sft": 4, "ppo": 7}


def presets_result(given: dict[str, list[dict[str, Any]]], machine: str, commit: str) -> Result:
    """A result of presets as the command forms it."""
    stamp: dict[str, Any] = {
        "date": "2026-01-02", "hardware": machine, "versions": {"torch": "2"}, "commit": commit * 40
    }  # fmt: skip
    about = {name: {"settings": {}, "seeds": list(range(len(runs))), "measured": stamp} for name, runs in given.items()}
    return Result(name="presets", config={"presets": about}, figures=tuple(figures(given)), **stamp)


def test_presets_that_are_not_measured_again_keep_figures_and_origin() -> None:
    earlier = presets_result({"lora": [summary(0.6, 30.0)], "full": [summary(0.3, 7.0)]}, "one machine", "a")
    found = merged(earlier, presets_result({"full": [summary(0.4, 9.0)]}, "another", "b"))
    values = {figure.name: figure.value for figure in found.figures}
    assert values["lora: judge"] == pytest.approx(0.5) and values["full: judge"] == pytest.approx(0.3)
    assert list(found.config["presets"]) == ["full", "lora"]
    full, lora = presets_origins(found)
    assert full.startswith("* full: ") and "another; commit bbbb" in full
    assert lora.startswith("* lora: ") and "one machine; commit aaaa" in lora
    assert merged(None, earlier) == earlier


def test_presets_of_a_result_without_origins_of_its_own_have_that_of_the_result() -> None:
    earlier = presets_result({"lora": [summary(0.6, 30.0)]}, "one machine", "a")
    del earlier.config["presets"]["lora"]["measured"]
    (line,) = presets_origins(earlier)
    assert "one machine" in line
    found = merged(earlier, presets_result({"full": [summary(0.3, 7.0)]}, "another", "b"))
    assert found.config["presets"]["lora"]["measured"]["hardware"] == "one machine"
