"""How a run stands, as its last process has said it, or not been able to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.diagnostics import run_state
from fourfold.diagnostics.run_state import noted_state, read_state
from fourfold.errors import Interrupted, RunFailed


def test_a_run_at_work_is_running_and_then_finished(tmp_path: Path) -> None:
    with noted_state(tmp_path, ["sft", "ppo"]):
        inside = read_state(tmp_path)
    assert (inside.state, inside.stages, inside.process) == ("running", ("sft", "ppo"), os.getpid())
    assert not inside.ended
    after = read_state(tmp_path)
    assert (after.state, after.said) == ("finished", "") and after.ended and after.at >= after.since == inside.since


def test_the_scorer_that_ended_a_run_is_noted_through_the_layers_above(tmp_path: Path) -> None:
    with pytest.raises(RunFailed), noted_state(tmp_path, ["ppo"]):
        try:
            raise RunFailed("score: out of order", blamed="reward.parts.tone")
        except RunFailed as error:
            raise RunFailed(f"step 3: {error}") from error
    assert read_state(tmp_path).blamed == "reward.parts.tone"
    with pytest.raises(RunFailed), noted_state(tmp_path, ["ppo"]):
        raise RunFailed("learn: the critic's loss is inf")
    assert read_state(tmp_path).blamed == ""


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Interrupted("stopped after step 2 of 3"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (RunFailed("step 2: reward: not finite"), "failed"),
        (ZeroDivisionError("division by zero"), "failed"),
    ],
)
def test_a_run_that_ends_early_says_how(tmp_path: Path, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), noted_state(tmp_path, ["ppo"]):
        raise error
    found = read_state(tmp_path)
    assert (found.state, found.said) == (state, str(error) or "KeyboardInterrupt")


def test_a_killed_process_is_known_by_its_absence(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from fourfold.diagnostics.run_state import noted_state\n"
        "with noted_state(Path(sys.argv[1]), ['ppo']): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    assert read_state(tmp_path).state == "killed"


def test_a_process_with_the_same_number_is_not_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with noted_state(tmp_path, ["ppo"]):
        text = (tmp_path / "state.json").read_text()
        born = read_state(tmp_path).born
        (tmp_path / "state.json").write_text(text.replace(str(born), str(born - 60)))
        assert read_state(tmp_path).state == "killed"
        (tmp_path / "state.json").write_text(text)
        # Of a process on another machine nothing can be seen from here.
        monkeypatch.setattr(run_state.socket, "gethostname", lambda: "another")
        (tmp_path / "state.json").write_text(text.replace(str(born), str(born - 60)))
        assert read_state(tmp_path).state == "running"


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"state": "running", "stages": [], "new": 1}'])
def test_without_a_readable_state_it_is_unknown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "state.json").write_text(text)
    assert read_state(tmp_path).state == "unknown"
