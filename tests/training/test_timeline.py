"""memory.jsonl: stages, phases and roles of every step, what is resident; saving takes no more than training."""

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
    return read_jsonl(folder / "run" / "memory.jsonl"), read_jsonl(folder / "run" / "ppo" / "metrics.jsonl")


def test_count_tensors_fills_in_the_bytes_of_live_tensors(tmp_path: Path) -> None:
    """FAULTS J8, I5: peaks by phase and role; saving takes no more than training."""
    rows, metrics = timeline(tmp_path, count_tensors=True)
    [resident] = [row for row in rows if row["kind"] == "resident"]
    assert {"actor", "critic", "reference"} <= resident.keys() and min(resident["actor"], resident["critic"]) > 0
    assert (resident["stage"], resident["step"]) == ("ppo", 0)
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
    saves = [row for row in spans if row["phase"] == "save"]
    assert [row["step"] for row in saves] == [2, 2], (
        "the checkpoint of step 1 is written in step 2, and the last after it"
    )
    assert max(row["tensor_peak_bytes"] for row in saves) <= learn
    for row in metrics:
        if row["kind"] == "ppo_step":
            for phase, role in WORKING:
                assert 0 < row[f"{role}_{phase}_peak_bytes"] <= row[f"{phase}_peak_bytes"]


def test_tensors_are_not_counted_by_default(tmp_path: Path) -> None:
    rows, _ = timeline(tmp_path)
    assert {row["tensor_peak_bytes"] for row in rows if row["kind"] == "span"} == {None}


def test_loading_the_stages_before_ppo_and_preflight_are_in_it(tmp_path: Path) -> None:
    """What a step of ppo does not show: the base model, both trained stages, the four roles, their first passes."""
    tree = settings(tmp_path, {"ppo": {"steps": 1}, "memory": {"count_tensors": True}})
    run(merged(tree, {"stages": ["sft", "reward"]}))
    run(tree)
    rows = [row for row in read_jsonl(tmp_path / "run" / "memory.jsonl") if row["kind"] == "span"]
    found = [(row["stage"], row["phase"]) for row in rows if row["step"] == 0]
    before = [("", "load"), ("sft", "sft"), ("reward", "reward"), ("", "load")]
    assert found == [*before, ("ppo", "load"), ("ppo", "preflight"), ("ppo", "evaluate"), ("ppo", "ppo")]
    sizes = {(row["stage"], row["phase"]): row["tensor_peak_bytes"] for row in rows if row["step"] == 0}
    assert min(sizes.values()) > 0 and min(row["seconds"] for row in rows) > 0
    in_ppo = [row["tensor_peak_bytes"] for row in rows if row["stage"] == "ppo"]
    assert sizes["ppo", "ppo"] == max(in_ppo)
    assert {(row["phase"], row["step"]) for row in rows if row["step"]} > {("learn", 1), ("save", 1), ("evaluate", 1)}


def test_resuming_keeps_the_steps_before(tmp_path: Path) -> None:
    span, timeline = Span("learn", "actor", 1.0, 2.0, 3, None), Timeline(tmp_path)
    timeline.go_on_from(0)
    timeline.spans("sft", 0, [span])
    timeline.resident("ppo", 0, {"actor": 5})
    for step in (1, 2, 3):
        timeline.spans("ppo", step, [span])
    again = Timeline(tmp_path)
    again.go_on_from(2)
    again.resident("ppo", 2, {"actor": 5})
    again.spans("ppo", 3, [span])
    rows = [(row["kind"], row["stage"], row["step"]) for row in read_jsonl(tmp_path / "memory.jsonl")]
    first = [("span", "sft", 0), ("resident", "ppo", 0), ("span", "ppo", 1), ("span", "ppo", 2)]
    assert rows == [*first, ("resident", "ppo", 2), ("span", "ppo", 3)]


def test_roles_that_score_beside_sampling_have_their_seconds_in_it(tmp_path: Path) -> None:
    """Both work on a thread, whose share of the peak is not told apart; evaluations belong to no step."""
    changes = merged(by_function("pays_by_hash", steps=2), {"sampling": {"overlap_scoring": True, "batch_size": 3}})
    run(settings(tmp_path, changes))
    rows = [row for row in read_jsonl(tmp_path / "run" / "memory.jsonl") if row["kind"] == "span"]
    metrics = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    for metric, step in zip(metrics, (1, 2), strict=True):
        spans = {(row["phase"], row["role"]): row for row in rows if row["step"] == step}
        beside = [spans["score", role] for role in ("reference", "reward")]
        assert all(row["peak_bytes"] is row["tensor_peak_bytes"] is None for row in beside)
        assert spans["score", "critic"]["peak_bytes"] > 0
        assert 0 < sum(row["seconds"] for row in beside) <= metric["score_ahead_seconds"]
        generate = spans["generate", ""]
        assert generate["start"] < spans["score", "reference"]["start"] < generate["start"] + generate["seconds"]
    assert not [row for row in rows if row["step"] == 0 and row["role"]], "pre-flight and evaluations are whole"


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
