"""The benchmark of predicted seconds: its arithmetic, and one tiny run of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.planner import PHASES, Case, settings
from benchmarks.planner_time import CASES, Timed, figures, time_case
from fourfold.config.loading import parse_config
from planner.scenes import CPU, cluster, in_this_process

CASE = Case("tiny", ('sharing.mode="trunk"',), (4, 4, 8, 4))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_run(case: Case, tmp_path: Path) -> None:
    config = parse_config(settings(case, tmp_path), "a test")
    assert config.ppo.rollout_batch_size % config.ppo.micro_batch_size == 0


def test_errors_are_of_shares_and_of_the_whole_step() -> None:
    """4, 2 and 4 of 10 s against 2, 1 and 2 of 5: the same shares, half the time; then a phase that is off."""
    measured = {"generate": 4.0, "score": 2.0, "learn": 4.0}
    half = Timed(CASE, measured, {phase: seconds / 2 for phase, seconds in measured.items()})
    assert half.share_errors == dict.fromkeys(PHASES, 0.0) and half.step_error == -0.5
    off = Timed(CASE, measured, {"generate": 4.0, "score": 4.0, "learn": 2.0})
    assert off.share_errors == pytest.approx({"generate": 0.0, "score": 1.0, "learn": -0.5}) and off.step_error == 0.0
    worst, median, step, *phases = figures([half, off])
    assert (worst.value, median.value, step.value) == pytest.approx((1.0, 0.0, 0.5))
    assert worst.target == "<= 0.25" and worst.met is False
    names = {figure.name: figure.value for figure in phases[:6]}
    assert names[f"{CASE.name}: learn measured"] == 4.0 and names[f"{CASE.name}: learn predicted"] == 2.0


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_timed_phase_by_phase(tmp_path: Path) -> None:
    """How far off is no question here: other tests may run meanwhile."""
    timed = time_case(CASE, tmp_path, cluster(device=CPU), threads=1, steps=1, work=in_this_process)
    for seconds in (timed.measured, timed.predicted):
        assert tuple(seconds) == PHASES and all(0 < each < math.inf for each in seconds.values())
