"""What a run has cost, phase by phase: the last save included, and every process that worked on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import Interrupted
from fourfold.memory.meter import PhaseUsage
from fourfold.training.folder import SPENT, RunFolder
from training.runs import INTERRUPT, Tree, by_function, interrupt_at, merged, run, settings, write_config

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def ppo_only(folder: Path, **more: Any) -> Tree:
    """Four steps; the reward function is called once in pre-flight, four times before, four times a step."""
    changes = {"sampling": {"temperature": 0.9}, **more}
    return settings(folder, merged(by_function("pays_and_interrupts", steps=4), changes))


def test_the_last_save_counts(tmp_path: Path) -> None:
    """The only checkpoint comes after the last row: no row can tell of it."""
    summary = run(settings(tmp_path, by_function("pays_for_a", steps=2) | {"checkpoint": {"every": 10}}))
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert [row["save_seconds"] for row in rows] == [0.0, 0.0]
    assert summary["seconds"]["save"] > 0 and summary["peak_bytes"]["save"] > 0
    for phase in ("generate", "score", "learn"):
        assert summary["seconds"][phase] == pytest.approx(sum(row[f"{phase}_seconds"] for row in rows))
        assert summary["peak_bytes"][phase] == max(row[f"{phase}_peak_bytes"] for row in rows)
    done = json.loads((tmp_path / "run" / "ppo" / "done.json").read_text())
    assert (done["seconds"], done["peak_bytes"]) == (summary["seconds"]["ppo"], summary["peak_bytes"]["ppo"])


def test_a_resumed_run_counts_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interrupted process has left is marked by hand, so that it can be told apart afterwards."""
    monkeypatch.setenv(INTERRUPT, "0:")
    interrupt_at(15, "SIGTERM")
    tree = ppo_only(tmp_path)
    with pytest.raises(Interrupted, match="stopped after step 3"):
        run(tree)
    path = tmp_path / "run" / SPENT
    stopped = json.loads(path.read_text())
    assert stopped.keys() == {"load", "preflight", "evaluate", "ppo", "generate", "score", "learn", "save"}
    assert all(usage["seconds"] > 0 and usage["peak_bytes"] > 0 for usage in stopped.values())
    marked = {name: usage | {"seconds": 1000.0 * i} for i, (name, usage) in enumerate(stopped.items(), start=1)}
    marked["learn"]["peak_bytes"] = 2**60
    path.write_text(json.dumps(marked))

    summary = run(tree)
    spent = json.loads(path.read_text())
    for name, usage in marked.items():
        assert 0 < spent[name]["seconds"] - usage["seconds"] < 500, name
    told = marked.keys() - {"preflight", "evaluate"}
    assert summary["seconds"] == {name: spent[name]["seconds"] for name in told}
    assert summary["peak_bytes"]["learn"] == 2**60 > summary["peak_bytes"]["ppo"]
    again = run(tree)  # nothing is left to do, so nothing is spent
    assert (again["seconds"], again["peak_bytes"]) == (summary["seconds"], summary["peak_bytes"])


def test_stages_of_one_process_are_counted_once(tmp_path: Path) -> None:
    tree = settings(tmp_path, {"stages": ["sft", "reward"]})
    first = run(tree)["seconds"]
    assert first.keys() == {"load", "sft", "reward"}
    second = run(merged(tree, {"stages": ["sft", "reward", "ppo"]}))["seconds"]
    assert (second["sft"], second["reward"]) == (first["sft"], first["reward"])
    assert second["load"] > first["load"]


def test_notes_of_one_process_replace_each_other_and_add_to_those_before(tmp_path: Path) -> None:
    RunFolder(tmp_path).note_spent({"sft": PhaseUsage(2.0, 50)})
    folder = RunFolder(tmp_path)
    for seconds, peak in ((1.0, 10), (3.0, 70)):
        folder.note_spent({"sft": PhaseUsage(seconds, peak), "load": PhaseUsage(0.5, 5)})
    assert folder.spent() == {"sft": PhaseUsage(5.0, 70), "load": PhaseUsage(0.5, 5)}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below `ppo` a run of that stage that was killed in its third step, below `sft` one killed after step 3 of 4."""
    folder = tmp_path_factory.mktemp("killed")
    ppo = write_config(ppo_only(folder / "ppo"), folder / "ppo.toml")
    sft = write_config(settings(folder / "sft", {"stages": ["sft"]}), folder / "sft.toml")
    program = [sys.executable, str(Path(__file__).with_name("kill_once.py"))]
    program += [str(ppo), "actor", "9", str(sft), "sft policy", "3"]  # an actor takes 4 steps a step of PPO
    done = subprocess.run(program, env=ENVIRONMENT | {INTERRUPT: "0:"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_killed_ppo_leaves_what_it_spent_up_to_its_last_step(killed: Path) -> None:
    spent = RunFolder(killed / "ppo" / "run").spent()
    rows = read_jsonl(killed / "ppo" / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert [row["step"] for row in rows] == [1, 2]
    assert spent["generate"].seconds == pytest.approx(sum(row["generate_seconds"] for row in rows))
    assert spent["ppo"].seconds > sum(row["step_seconds"] for row in rows)
    assert spent["ppo"].peak_bytes >= max(row["learn_peak_bytes"] for row in rows)


def test_a_killed_sft_leaves_what_it_spent_up_to_its_last_checkpoint(killed: Path) -> None:
    spent = RunFolder(killed / "sft" / "run").spent()
    assert spent.keys() == {"load", "sft"} and spent["sft"].seconds > 0
