"""A run in the terminal: what a frame shows, when it is drawn anew, when it ends, and lines for logs."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diagnostics.shown_run import GOOD, HOSTILE, ILL, STEPS, Unsaid, change_json, copy_of, make_run, set_state
from diagnostics.shown_run import said as examination
from fourfold.diagnostics import watch as module
from fourfold.diagnostics.numbers import short
from fourfold.diagnostics.run_record import read_run
from fourfold.diagnostics.watch import SHOWN, Glyphs, Watch, frame, sparkline

LEVELS = Glyphs().levels
WELL = examination(GOOD)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("watched"))


@pytest.fixture
def running(whole: Path, tmp_path: Path) -> Path:
    return copy_of(whole, tmp_path / "run", lambda folder: set_state(folder, "running"))


def console(width: int = 80, **options: Any) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None, **options)


def said(made: Console) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()


def shown(folder: Path, doctor: Any = WELL, width: int = 80) -> str:
    made = console(width)
    made.print(frame(read_run(folder), doctor, Glyphs(), width))
    return said(made)


def test_last_values_are_shown_with_their_way(whole: Path) -> None:
    record, text = read_run(whole), shown(whole)
    for kind, name in SHOWN:
        if points := record.points(kind, name):
            line = next(each for each in text.splitlines() if each.startswith(name))
            assert short(points[-1][1]) in line and any(level in line for level in LEVELS)
    assert f"step {STEPS} of {STEPS}" in text and "finished" in text and "tokens/s" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_verdicts_are_shown_with_the_worst_first(whole: Path) -> None:
    text = shown(whole, examination(GOOD, replace(ILL, severity="note", name="a note"), ILL), 200)
    assert text.index("ill: entropy collapse") < text.index("note: a note") and "1.00 in every step" not in text
    assert "try ppo.entropy_coef = 0.02" in text
    assert "doctor: nothing found" in shown(whole) and "doctor: not asked" in shown(whole, "not asked")


def test_where_nothing_was_judged_nothing_is_called_healthy(whole: Path) -> None:
    few = examination(unjudged=(Unsaid("KL runaway", "6 steps are needed"),))
    assert "doctor: too early: 1 not judged" in shown(whole, few) and "nothing found" not in shown(whole, few)
    assert "doctor: nothing found; 1 not judged" in shown(whole, replace(few, verdicts=(GOOD,)))
    good = replace(few, verdicts=(replace(GOOD, name="system healthy"),))
    assert "1 not judged, all of critic and policy and reward" in shown(whole, good, 200)
    made = console()
    watch(whole, made).once()
    assert "doctor: too early: " in said(made), "after four steps"


def test_a_running_run_says_how_long_it_will_take(running: Path) -> None:
    change_json(running / "state.json", lambda value: value.update(state="running"))
    config = (running / "config.toml").read_text().replace(f"steps = {STEPS}", "steps = 400")
    (running / "config.toml").write_text(config)
    assert "running  step 4 of 400, about" in shown(running)


def test_a_run_without_a_step_is_shown(running: Path) -> None:
    (running / "ppo" / "metrics.jsonl").write_text("")
    assert "no step of ppo has been logged; stage ppo" in shown(running)


def test_messages_cannot_move_the_cursor(whole: Path, tmp_path: Path) -> None:
    folder = copy_of(whole, tmp_path / "run", lambda folder: set_state(folder, "failed", HOSTILE))
    text = shown(folder, width=200)
    assert "failed" in text and "\\x1b[2J" in text and "\x1b" not in text and "\u202e" not in text


def test_a_sparkline_goes_from_the_least_to_the_most() -> None:
    assert sparkline([(n, float(n)) for n in range(8)], 8, LEVELS) == LEVELS
    assert sparkline([(1, 2.0)], 8, LEVELS) == LEVELS[4]
    long = [(n, 9.0 if n == 50 else 0.0) for n in range(100)]
    drawn = sparkline(long, 10, LEVELS)
    assert len(drawn) == 10 and drawn.count(LEVELS[-1]) == 1 and drawn[5] == LEVELS[-1]


def test_without_other_characters_ascii_is_used() -> None:
    glyphs = Glyphs.of(console(legacy_windows=False))
    assert glyphs.levels == LEVELS
    ascii_only = console()
    ascii_only.file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert Glyphs.of(ascii_only).levels.isascii() and Glyphs.of(ascii_only).outside.isascii()


class Script:
    """What happens to the run while the watch sleeps."""

    def __init__(self, folder: Path, *happens: Any) -> None:
        self.folder, self.happens, self.slept = folder, list(happens), 0

    def __call__(self, seconds: float) -> None:
        self.slept += 1
        assert self.happens, "it should have ended"
        self.happens.pop(0)(self.folder)


def add_step(folder: Path) -> None:
    path = folder / "ppo" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = next(row for row in reversed(rows) if row["kind"] == "ppo_step")
    path.write_text(path.read_text() + json.dumps({**last, "step": last["step"] + 1}) + "\n")
    _later(path)


def _later(path: Path) -> None:
    """Clocks of file systems can be coarse."""
    stamp = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(stamp, stamp))


def nothing(folder: Path) -> None:
    """No change."""


def ends(folder: Path) -> None:
    change_json(folder / "state.json", lambda value: value.update(state="finished"))
    _later(folder / "state.json")


def watch(folder: Path, made: Console, *happens: Any) -> Watch:
    return Watch(folder, made, sleep=Script(folder, *happens), clock=lambda: 0.0)


def test_lines_follow_the_steps_and_end_with_the_run(running: Path) -> None:
    made = console()
    watch(running, made, add_step, nothing, add_step, ends).lines()
    lines = said(made).splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"step {n}" for n in range(1, STEPS + 3)]
    assert "score" in lines[0] and "KL" in lines[0] and lines[-1].endswith(f"step {STEPS + 2} of {STEPS}")


def test_a_live_picture_is_drawn_anew_when_something_is_written(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = module.frame
    monkeypatch.setattr(module, "frame", lambda record, *rest: drawn.append(record.step) or real(record, *rest))
    watch(running, console(force_terminal=True), nothing, add_step, nothing, ends).live()
    assert drawn == [STEPS, STEPS, STEPS + 1, STEPS + 1], "at first twice, at the new step, and at the end"


def test_the_doctor_is_not_asked_at_every_step(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(module, "examination_of", lambda root: asked.append(root) or examination())
    watch(running, console(force_terminal=True), add_step, add_step, ends).live()
    assert len(asked) == 2, "at first and at the end; the clock of this test stands still"


def test_once_prints_one_frame(running: Path) -> None:
    made = console()
    watch(running, made).once()
    assert said(made).count("score_mean") == 2  # training and held out
