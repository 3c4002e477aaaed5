"""The numbers of a whole run are those that were committed: a change that moves them does so knowingly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.golden import GOLDEN, golden_run

# Kernels of other processors add in another order; on one machine the rows are equal bit for bit. The absolute part is
# for numbers that are differences of nearly equal ones, such as KL.
REL, ABS = 1e-4, 2e-5
# Two responses to one prompt have the same first state: rounding says which of its two values ranks higher.
RANKS, RANKS_ABS = "value_return_spearman", 0.05


def assert_close(found: dict[str, float], wanted: dict[str, float]) -> None:
    for name in [name for name in wanted if name.endswith(RANKS)]:
        assert found.pop(name) == pytest.approx(wanted.pop(name), abs=RANKS_ABS)
    assert found == pytest.approx(wanted, rel=REL, abs=ABS)


def test_twenty_steps_give_the_committed_metrics(tmp_path: Path) -> None:
    """`tests/training/golden.py` tells how to write the numbers anew."""
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = golden_run(tmp_path)
    assert len(found["rows"]) == len(expected["rows"]) == 20 + 4
    for row, wanted in zip(found["rows"], expected["rows"], strict=True):
        assert row.pop("kind") == wanted.pop("kind")
        assert_close(row, wanted)
    for name in ("before", "after"):
        assert_close(found[name], expected[name])
    for stage in ("sft", "reward"):
        assert found["stages"][stage] == pytest.approx(expected["stages"][stage], rel=REL, abs=ABS)
