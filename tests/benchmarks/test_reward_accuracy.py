"""The reward model's figures are those of the runs, and its settings are settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.reward_accuracy import EXAMPLE, SETTINGS, figures
from fourfold.config.loading import load_config


def summary(accuracy: float, seconds: float) -> dict[str, Any]:
    return {
        "reward_model": {"pair_accuracy": accuracy},
        "stages": {"reward": {"test_pairs": 1074}},
        "seconds": {"sft": 60.0, "reward": seconds},
    }


def test_the_mean_of_the_seeds_is_compared_with_the_target() -> None:
    accuracy, seconds = figures([summary(0.86, 240.0), summary(0.89, 260.0), summary(0.875, 900.0)])
    assert accuracy.name == "reward model: accuracy on 1,074 held-out pairs, mean of 3 seeds"
    assert accuracy.value == pytest.approx((0.86 + 0.89 + 0.875) / 3) and accuracy.spread == (0.86, 0.89)
    assert accuracy.met and not figures([summary(0.86, 240.0)])[0].met
    assert seconds.value == 320.0  # the median


def test_the_settings_are_taken_by_the_example() -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    config = load_config(str(EXAMPLE), overrides)
    assert config.stages == ("sft", "reward") and config.reward.max_pairs == SETTINGS["reward.max_pairs"]
