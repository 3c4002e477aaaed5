"""Runs that waste time or memory on purpose, and float16 beyond its range."""

from __future__ import annotations

from pathlib import Path

from diagnostics.patients import examined, found, memory_for_half, patient
from training.runs import Tree


def test_a_slow_scorer_leaves_a_bubble(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, "slow", {"evaluation": {"every": 0}}, steps=6)), "bubble")
    assert verdicts["bubble"].severity == "note" and "sampling.overlap_scoring" in verdicts["bubble"].remedy


def test_what_is_refused_beside_a_bubble_is_not_proposed(tmp_path: Path) -> None:
    """FAULTS J10: exact KL takes actor and reference at once."""
    tree = patient(tmp_path, "slow", {"evaluation": {"every": 0}}, steps=6, kl_estimator="full")
    assert found(examined(tree), "bubble")["bubble"].remedy == ""


def test_a_budget_of_64_gib_is_not_used(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, changes={"memory": {"budget_gib": 64.0}}, steps=3)), "unused budget")
    assert verdicts["unused budget"].severity == "note"


def test_rows_that_went_through_in_halves_are_told(tmp_path: Path) -> None:
    with memory_for_half():
        examination = examined(patient(tmp_path, steps=3))
    verdicts = found(examination, "micro-batch halved")
    assert verdicts["micro-batch halved"].evidence.startswith("16 rows")


def test_a_loss_scale_beyond_float16_overflows(tmp_path: Path) -> None:
    changes: Tree = {"precision": {"compute": "float16", "loss_scale": 2.0**80}}
    also = {"critic underfit: variance", "critic plateau", "actor stands still"}
    found(examined(patient(tmp_path, changes=changes, learning_rate=1e-3)), "float16 overflow", also=also)


def test_a_loss_scale_of_1_underflows(tmp_path: Path) -> None:
    changes: Tree = {"precision": {"compute": "float16", "loss_scale": 1.0}}
    found(examined(patient(tmp_path, changes=changes, learning_rate=1e-3)), "float16 underflow")
