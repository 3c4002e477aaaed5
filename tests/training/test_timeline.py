"""memory.jsonl: phases and roles of every step, what is resident; saving takes no more memory than training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.diagnostics.trackers import read_jsonl
from fourfold.memory.meter import Span
from fourfold.memory.tensors import LiveTensors
from fourfold.training.timeline import Timeline
from training.runs import SEPARATE, by_function, merged, run, settings

WORKING = {
    ("generate", "actor"), ("score", "reference"), ("score", "critic"), ("score", "reward"), ("learn", "critic"),
    ("learn", "actor"),
}  # fmt: skip


def timeline(folder: Path, **memory: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of memory.jsonl and of metrics.jsonl after a run of separate models."""
    changes = merged(by_function("pays_by_hash", steps=2), SEPARATE)
    run(settings(folder, merged(changes, {"memory": memory} if memory else {})))
    return read_jsonl(folder / "run" / "ppo" / "memory.jsonl"), read_jsonl(folder / "run" / "ppo" / "metrics.jsonl")


def test_count_tensors_fills_in_the_bytes_of_live_tensors(tmp_path: Path) -> None:
    """FAULTS J8, I5: peaks by phase and role; saving takes no more than training."""
    rows, metrics = timeline(tmp_path, count_tensors=True)
    [resident] = [row for row in rows if row["kind"] == "resident"]
    assert {"actor", "critic", "reference"} <= resident.keys() and min(resident["actor"], resident["critic"]) > 0
    spans = [row for row in rows if row["kind"] == "span"]
    for step in (1, 2):
        found = {(row["phase"], row["role"]): row for row in spans if row["step"] == step}
        phases = {(phase, "") for phase in ("generate", "score", "learn")}
        assert WORKING | phases <= found.keys()
        for (phase, role), row in found.items():
            assert row["seconds"] >= 0 and row["peak_bytes"] > row["tensor_peak_bytes"] > 0
            if role:
                whole = found[phase, ""]
                assert row["tensor_peak_bytes"] <= whole["tensor_peak_bytes"]
                assert row["peak_bytes"] <= whole["peak_bytes"] and row["seconds"] <= whole["seconds"]
                assert row["start"] >= whole["start"]
    weights = resident["actor"] + resident["critic"]
    learn = max(row["tensor_peak_bytes"] for row in spans if row["phase"] == "learn")
    assert learn > 3 * weights, "weights, moments, gradients, activations"
    [save, *_] = [row for row in spans if row["phase"] == "save"]
    assert save["tensor_peak_bytes"] <= learn
    for row in metrics:
        if row["kind"] == "ppo_step":
            for phase, role in WORKING:
                assert 0 < row[f"{role}_{phase}_peak_bytes"] <= row[f"{phase}_peak_bytes"]


def test_tensors_are_not_counted_by_default(tmp_path: Path) -> None:
    rows, _ = timeline(tmp_path)
    assert {row["tensor_peak_bytes"] for row in rows if row["kind"] == "span"} == {None}


def test_resuming_keeps_the_steps_before(tmp_path: Path) -> None:
    span = Span("learn", "actor", 1.0, 2.0, 3, None)
    first = Timeline(tmp_path, step=0, resident={"actor": 5})
    for step in (1, 2, 3):
        first.note(step, [span])
    Timeline(tmp_path, step=2, resident={"actor": 5}).note(3, [span])
    rows = [(row["kind"], row["step"]) for row in read_jsonl(tmp_path / "memory.jsonl")]
    assert rows == [("resident", 0), ("span", 1), ("span", 2), ("resident", 2), ("span", 3)]


def test_live_tensors_are_counted_to_the_byte() -> None:
    kept = torch.zeros(1000)
    with LiveTensors() as live:
        start = live.bytes
        made = torch.ones(500)
        view = made[10:]
        assert live.bytes == start + 2000
        more = kept + 1.0
        assert live.bytes == start + 6000
        del more
        assert (live.bytes, live.peak_bytes) == (start + 2000, start + 6000)
        del made
        assert live.bytes == start + 2000, "the view holds the storage"
        del view
        assert live.bytes == start
        live.reset()
        weight = torch.zeros(100, requires_grad=True)
        (weight * 2).sum().backward()
        assert weight.grad is not None
        assert live.bytes == start + 800, "a weight and its gradient"
    assert live.peak_bytes == pytest.approx(start + 808, abs=50), "the product goes before its gradient comes"
