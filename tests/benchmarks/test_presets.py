"""The table of presets out of the summaries of their runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.presets import (
    UNITS,
    between,
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


def test_gains_are_compared_with_those_dealt_to_the_presets_at_random() -> None:
    """Of 20 ways to deal six gains to two presets of three, two part them as 1, 2, 3 and 4, 5, 6 do."""
    far = presets_result({name: [summary(x, 1.0) for x in some] for name, some in SIX.items()}, "a machine", "a")
    (line,) = judges_apart(far)
    share = float(re.search(r"as much in ([\d.]+)%", line)[1]) / 100  # type: ignore[index]
    assert share == pytest.approx(0.1, abs=0.01)
    assert line.startswith("Judge: which preset it is explains 77% of the variance over seeds of full, lora; ")
    one = presets_result({**{"offload": [summary(0.9, 1.0)]}, "lora": far_runs("lora")}, "a machine", "a")
    assert judges_apart(one) == []


SIX = {"full": (0.1, 0.2, 0.3), "lora": (0.4, 0.5, 0.6)}


def far_runs(name: str) -> list[dict[str, Any]]:
    return [summary(x, 1.0) for x in SIX[name]]


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=9), st.integers(1, 3))
def test_the_share_between_presets_is_that_of_the_sums_of_squares(gains: list[float], size: int) -> None:
    """Total = between + within, by numpy."""
    sizes = [size, len(gains) - size]
    array = numpy.array(gains)
    assume(array.var() > 1e-6)
    groups = numpy.split(array, [size])
    within = sum(len(each) * each.var() for each in groups)
    assert between(gains, sizes) == pytest.approx(1 - within / (len(gains) * array.var()), abs=1e-6)


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
    about = {
        name: {
            "settings": {},
            "seeds": list(range(len(runs))),
            "judges": [measured(each)["judge"] for each in runs],
            "measured": stamp,
        }
        for name, runs in given.items()
    }
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
