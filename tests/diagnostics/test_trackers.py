"""Logs that survive kills and resumes, and trackers that say at the start what they lack."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.diagnostics.trackers import JsonlTracker, TensorBoardTracker, make_trackers, read_jsonl
from fourfold.errors import RunFailed

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def steps(path: Path, kind: str = "ppo_step") -> list[int]:
    return [row["step"] for row in read_jsonl(path, kind)]


def logged(path: Path, last: int) -> Path:
    """A log of `last` steps, with an evaluation every two."""
    tracker = JsonlTracker(path)
    for step in range(1, last + 1):
        tracker.log({"step": step, "score_mean": step / 3}, "ppo_step")
        if step % 2 == 0:
            tracker.log({"step": step, "eval_score_mean": step / 7}, "evaluation")
    tracker.close()
    return path


@given(value=FINITE)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_numbers_come_back_bit_for_bit(tmp_path: Path, value: float) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"step": 1, "score_mean": value}, "ppo_step")
    tracker.close()
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert row == {"kind": "ppo_step", "step": 1, "score_mean": value}
    assert math.copysign(1, row["score_mean"]) == math.copysign(1, value)


def test_a_row_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    """A process that is killed right after logging has lost nothing."""
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from fourfold.diagnostics.trackers import JsonlTracker\n"
        "tracker = JsonlTracker(Path(sys.argv[1])); tracker.log({'step': 1}, 'ppo_step')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert result.returncode == -signal.SIGKILL
    assert steps(path) == [1]


def test_a_resumed_log_has_no_row_twice(tmp_path: Path) -> None:
    """FAULTS K3, N8: killed after step 6, resumed from the checkpoint of step 3, the log goes on at step 4."""
    path = logged(tmp_path / "metrics.jsonl", 6)
    before = read_jsonl(path)
    tracker = JsonlTracker(path, resume_after_step=3)
    assert steps(path) == [1, 2, 3]
    assert steps(path, "evaluation") == [2]
    for step in (4, 5, 6, 7):
        tracker.log({"step": step, "score_mean": step / 3}, "ppo_step")
    tracker.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    assert [row for row in before if row["step"] <= 3] == read_jsonl(path)[:4]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_half_written_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = logged(tmp_path / "metrics.jsonl", 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    # Without its last character, the line feed, the row itself is whole.
    assert steps(path) == ([1, 2, 3] if cut == 1 else [1, 2])
    tracker = JsonlTracker(path, resume_after_step=2)
    tracker.log({"step": 3, "score_mean": 1.0}, "ppo_step")
    tracker.close()
    assert path.read_bytes() == whole


def test_zeros_at_the_end_after_a_power_cut_are_dropped(tmp_path: Path) -> None:
    path = logged(tmp_path / "metrics.jsonl", 2)
    path.write_bytes(path.read_bytes() + b"\0" * 50)
    JsonlTracker(path, resume_after_step=2).close()
    assert steps(path) == [1, 2]
    assert b"\0" not in path.read_bytes()


def test_a_bad_line_inside_a_log_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = logged(tmp_path / "metrics.jsonl", 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + b"".join(lines[1:]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a row"):
        JsonlTracker(path, resume_after_step=3)
    assert path.read_bytes() == before


def test_a_new_run_starts_an_empty_log(tmp_path: Path) -> None:
    path = logged(tmp_path / "metrics.jsonl", 3)
    JsonlTracker(path).close()
    assert path.read_bytes() == b""


def test_resuming_without_a_log_starts_one(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "new" / "metrics.jsonl", resume_after_step=5)
    tracker.log({"step": 6}, "ppo_step")
    tracker.close()
    assert steps(tmp_path / "new" / "metrics.jsonl") == [6]


@pytest.mark.parametrize("step", [2, 3])
def test_steps_rise_within_a_kind(tmp_path: Path, step: int) -> None:
    """FAULTS N8: the step column is monotone, also across a resume."""
    tracker = JsonlTracker(logged(tmp_path / "metrics.jsonl", 3), resume_after_step=3)
    with pytest.raises(AssertionError, match="steps must rise"):
        tracker.log({"step": step}, "ppo_step")
    tracker.log({"step": 3}, "evaluation")  # another kind has steps of its own; its last was 2
    tracker.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None, "1.0", torch.tensor(1.0)])
def test_what_is_no_finite_number_is_refused_by_name(tmp_path: Path, value) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFailed, match=r"^log: metric 'kl_coef' of step 4 is "):
        tracker.log({"step": 4, "score_mean": 1.0, "kl_coef": value}, "ppo_step")
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_truth_values_and_numpy_floats_become_plain_numbers(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"step": 1, "early_stopped": True, "score_mean": np.float64(0.5)}, "ppo_step")
    tracker.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"kind": "ppo_step", "step": 1, "early_stopped": 1, "score_mean": 0.5}
    assert "true" not in line


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_all_trackers_get_every_row(tmp_path: Path) -> None:
    """FAULTS N4: JSON lines and TensorBoard both have one row a step with all its metrics."""
    pytest.importorskip("tensorboard")
    trackers = make_trackers(["tensorboard"], tmp_path)
    for step in (1, 2, 3):
        for tracker in trackers:
            tracker.log({"step": step, "score_mean": step / 4, "eos_share": 0.5}, "ppo_step")
    for tracker in trackers:
        tracker.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert scalars(tmp_path / "tensorboard", "ppo_step/score_mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert scalars(tmp_path / "tensorboard", "ppo_step/eos_share") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_a_resumed_tensorboard_shows_no_step_twice(tmp_path: Path) -> None:
    """FAULTS K3."""
    pytest.importorskip("tensorboard")
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        first.log({"step": step, "score_mean": 1.0}, "ppo_step")
    first.close()
    second = TensorBoardTracker(tmp_path, resume_after_step=2)
    second.log({"step": 3, "score_mean": 2.0}, "ppo_step")
    second.close()
    assert scalars(tmp_path, "ppo_step/score_mean") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_tensorboard_refuses_what_is_not_finite(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(tmp_path)
    with pytest.raises(RunFailed, match="'kl_coef'"):
        tracker.log({"step": 1, "kl_coef": float("nan")}, "ppo_step")
    tracker.close()


def test_a_missing_package_is_an_error_at_start_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS N4: missing package -> error at start, naming the extra; an existing log stays as it is."""
    path = logged(tmp_path / "metrics.jsonl", 3)
    before = path.read_bytes()
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # how Python itself marks a module that cannot be imported
    with pytest.raises(ValueError, match=r"fourfold\[tensorboard\]"):
        make_trackers(["tensorboard"], tmp_path)
    assert path.read_bytes() == before


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'tensorbord'.*allowed: tensorboard, wandb, trackio, or none"):
        make_trackers(["tensorbord"], tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()
