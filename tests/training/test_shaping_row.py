"""What shaping did is counted as it was done: against the scores that come out, and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fourfold.algorithms.rewards import RunningMoments
from fourfold.config.schema import PpoSection
from fourfold.training.experience import Shaping, shape_scores
from fourfold.training.shaping_row import shaping_row
from training.runs import by_function, make_config, make_trainer, settings, steps_of
from training.test_experience import scored

ROWS = st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(1, 6), st.booleans()), min_size=2, max_size=8)
ON: dict[str, Any] = {
    "reward_normalization": "running",
    "score_clip": 1.5,
    "missing_eos_penalty": 0.5,
    "length_penalty": 0.25,
    "length_range": (2, 4),
}
NAMES = {
    "reward_normalization": {"score_normalization_mean", "score_normalization_std"},
    "score_clip": {"score_clipped_share"},
    "missing_eos_penalty": {"missing_eos_penalty_mean"},
    "length_penalty": {"length_penalty_mean", "length_penalised_share"},
}


@given(ROWS, st.sampled_from(["batch", "running"]), st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=5))
@examples(deadline=None, max_examples=60)
def test_the_mean_that_goes_in_less_what_is_said_is_the_mean_that_comes_out(
    rows: list[tuple[float, int, bool]], kind: str, seen: list[float]
) -> None:
    """Without a clip every step is linear: mean shaped = (mean raw - mean) / std - penalties."""
    batch = scored(*map(list, zip(*rows, strict=True)))
    ppo = PpoSection(**{**ON, "reward_normalization": kind, "score_clip": 0.0})
    shaping = Shaping(0.1, RunningMoments().update(torch.tensor(seen)).update(batch.scores))
    row = shaping_row(batch, ppo, shaping)
    normalised = (float(batch.scores.double().mean()) - row["score_normalization_mean"]) / (
        row["score_normalization_std"] + 1e-8
    )
    expected = normalised - row["missing_eos_penalty_mean"] - row["length_penalty_mean"]
    if row["score_normalization_std"] > 1e-3:
        assert float(shape_scores(batch, ppo, shaping).double().mean()) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_numbers_worked_out_by_hand() -> None:
    """Moments 2 and 2: scores -1, 1, 0, 3 of which one is clipped; lengths 1, 3, 5, 6 are 1, 0, 1, 2 tokens outside."""
    batch = scored([0.0, 4.0, 2.0, 8.0], [1, 3, 5, 6], [False, True, True, False])
    shaping = Shaping(0.1, RunningMoments(count=5, mean=2.0, m2=16.0))
    assert shaping_row(batch, PpoSection(**ON), shaping) == {
        "score_normalization_mean": 2.0,
        "score_normalization_std": 2.0,
        "score_clipped_share": 0.25,
        "missing_eos_penalty_mean": 0.25,
        "length_penalty_mean": 0.25,
        "length_penalised_share": 0.75,
    }
    raw = {**ON, "reward_normalization": "none", "score_clip": 3.0}
    assert shaping_row(batch, PpoSection(**raw), shaping)["score_clipped_share"] == 0.5


@pytest.mark.parametrize("on", NAMES)
def test_only_what_is_switched_on_is_told(on: str) -> None:
    batch = scored([0.0, 4.0], [1, 3], [False, True])
    given = {
        name: value for name, value in ON.items() if name == on or (on, name) == ("length_penalty", "length_range")
    }
    assert shaping_row(batch, PpoSection(**given), Shaping(0.1, RunningMoments())).keys() == NAMES[on]
    assert shaping_row(batch, PpoSection(), Shaping(0.1, RunningMoments())) == {}


def test_rows_of_a_run_hold_them(tmp_path: Path) -> None:
    ppo = {**ON, "length_range": [2, 4], "steps": 1}
    [row] = steps_of(make_trainer(make_config(settings(tmp_path, by_function("pays_by_hash", **ppo)))))
    assert set().union(*NAMES.values()) <= row.keys()
    assert row["missing_eos_penalty_mean"] == pytest.approx(0.5 * (1 - row["eos_share"]))
    assert row["score_normalization_mean"] == pytest.approx(row["score_mean"], abs=1e-6)
