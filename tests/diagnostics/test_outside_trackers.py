"""Weights & Biases and trackio: what they are given, that no step is sent twice, and that nothing needs the network.

The real packages are tested where they are installed; what is asked of them is tested with a stand-in everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from diagnostics.stand_in_tracker import StandIn
from fourfold.diagnostics.outside_trackers import Described, Ledger
from fourfold.diagnostics.trackers import make_trackers, read_jsonl

NAMES = ("wandb", "trackio")
# Logs steps FIRST to LAST, an evaluation every two, as a run does; RESUME is "" for a new one.
PROGRAM = """
import sys
from pathlib import Path
from fourfold.diagnostics.outside_trackers import Described
from fourfold.diagnostics.trackers import make_trackers
name, folder, first, last, resume = sys.argv[1:]
described = Described("tests", "a run", {"ppo": {"steps": 9}})
made = make_trackers([name], Path(folder), resume_after_step=int(resume) if resume else None, described=described)
for step in range(int(first), int(last) + 1):
    for tracker in made:
        tracker.log({"step": step, "score_mean": step / 4}, "ppo_step")
        if step % 2 == 0:
            tracker.log({"step": step, "eval_score_mean": step / 8}, "evaluation")
for tracker in made:
    tracker.close()
"""


@pytest.fixture(params=NAMES)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(request.param)
    monkeypatch.setitem(sys.modules, request.param, made)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return made


def logged(name: str, folder: Path, first: int, last: int, resume: int | None = None) -> None:
    made = make_trackers([name], folder, resume_after_step=resume, described=Described("p", "n", {"seed": 7}))
    for step in range(first, last + 1):
        for tracker in made:
            tracker.log({"step": step, "score_mean": step / 4}, "ppo_step")
    for tracker in made:
        tracker.close()


def test_every_row_is_sent_under_its_kind(stand_in: StandIn, tmp_path: Path) -> None:
    logged(stand_in.__name__, tmp_path / "ppo", 1, 3)
    assert stand_in.rows == [(step, {"ppo_step/score_mean": step / 4}) for step in (1, 2, 3)]
    [asked] = stand_in.asked
    assert asked["project"] == "p" and asked["name"].startswith("n") and asked["config"] == {"seed": 7}


def test_a_resumed_run_sends_no_step_twice(stand_in: StandIn, tmp_path: Path) -> None:
    """Killed after step 6, resumed from the checkpoint of step 3: 4 to 6 are done again, and sent once."""
    logged(stand_in.__name__, tmp_path, 1, 6)
    logged(stand_in.__name__, tmp_path, 4, 8, resume=3)
    assert [step for step, _ in stand_in.rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    first, second = stand_in.asked
    same = "id" if stand_in.__name__ == "wandb" else "name"
    assert first[same] == second[same] and second["resume"] == "allow"


def test_a_new_run_in_the_same_folder_is_another_run(stand_in: StandIn, tmp_path: Path) -> None:
    logged(stand_in.__name__, tmp_path, 1, 2)
    logged(stand_in.__name__, tmp_path, 1, 2)
    same = "id" if stand_in.__name__ == "wandb" else "name"
    assert stand_in.asked[0][same] != stand_in.asked[1][same]
    assert [step for step, _ in stand_in.rows] == [1, 2, 1, 2]


@pytest.mark.parametrize(("given", "mode"), [(None, "offline"), ("online", "online"), ("disabled", "disabled")])
def test_nothing_is_sent_unless_the_user_says_so(
    given: str | None, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = StandIn("wandb")
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if given:
        monkeypatch.setenv("WANDB_MODE", given)
    logged("wandb", tmp_path, 1, 1)
    assert made.asked[0]["mode"] == mode and made.asked[0]["dir"] == str(tmp_path)


def test_what_trackio_says_is_no_output_of_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "trackio", StandIn("trackio"))
    logged("trackio", tmp_path, 1, 1)
    said = capsys.readouterr()
    assert said.out == "" and "a line of its own" in said.err


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_an_error_that_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"fourfold\[{name}\]"):
        make_trackers([name], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_noted_before_it_is_sent(tmp_path: Path) -> None:
    """A process that is killed in between leaves the row out rather than in twice."""
    ledger = Ledger(tmp_path, "wandb", resumed=False)
    assert ledger.takes("ppo_step", 1) and not ledger.takes("ppo_step", 1)
    again = Ledger(tmp_path, "wandb", resumed=True)
    assert again.key == ledger.key and not again.takes("ppo_step", 1) and again.takes("evaluation", 1)
    other = Ledger(tmp_path, "trackio", resumed=True)  # asked for when the run goes on
    assert other.takes("ppo_step", 1) and other.key != ledger.key
    assert json.loads((tmp_path / "tracking.json").read_text()).keys() == {"wandb", "trackio"}


def real(name: str, folder: Path, *arguments: object, **variables: str) -> None:
    """The program in a process of its own, which reaches no network."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_"))}
    closed = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment |= {**closed, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", PROGRAM, name, str(folder), *map(str, arguments)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def wandb_rows(folder: Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of all files below a folder: LevelDB's log format, records are protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""  # a header of 7 bytes, then blocks of 32 KiB
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                record = Record()
                record.ParseFromString(whole)
                whole = b""
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        found.append((record.history.step.num, name, json.loads(item.value_json)))
    return found


def expected(first: int, last: int) -> list[tuple[int, str, float]]:
    rows = []
    for step in range(first, last + 1):
        rows.append((step, "ppo_step/score_mean", step / 4))
        if step % 2 == 0:
            rows.append((step, "evaluation/eval_score_mean", step / 8))
    return rows


def test_wandb_itself_works_without_a_network_and_has_each_step_once(tmp_path: Path) -> None:
    real("wandb", tmp_path, 1, 6, "")
    real("wandb", tmp_path, 4, 8, 3)
    assert sorted(wandb_rows(tmp_path)) == sorted(expected(1, 8))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl", "ppo_step")] == list(range(1, 9))


def test_trackio_itself_works_without_a_network_and_has_each_step_once(tmp_path: Path) -> None:
    place = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    real("trackio", tmp_path, 1, 6, "", **place)
    real("trackio", tmp_path, 4, 8, 3, **place)
    [file] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({run for run, _, _ in rows}) == 1
    found = [(step, name, value) for _, step, text in rows for name, value in json.loads(text).items()]
    assert sorted(found) == sorted(expected(1, 8))
