"""Progress on a terminal and in a log."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

from rich.console import Console

from fourfold.diagnostics.progress import stage_progress


def lines_of(total: int, seconds_each: float, *, done: int = 0, note: str = "") -> list[str]:
    """What a log holds after a stage whose units take `seconds_each`."""
    stream = io.StringIO()
    now = [0.0]
    console = Console(file=stream, force_terminal=False)
    with stage_progress("ppo", total, unit="steps", done=done, console=console, clock=lambda: now[0]) as progress:
        for _ in range(total - done):
            now[0] += seconds_each
            progress.advance(note=note)
    return stream.getvalue().splitlines()


def test_a_fast_stage_prints_one_line_each_tenth() -> None:
    lines = lines_of(1000, 0.001)
    assert [line.split(",")[0] for line in lines] == [
        "ppo: 0/1000 steps",
        *(f"ppo: {n}00/1000 steps" for n in range(1, 11)),
    ]


def test_a_slow_stage_prints_one_line_each_ten_seconds() -> None:
    """100 units of 4 s: a line after 12 s (three units), and at the end."""
    lines = lines_of(100, 4.0)
    assert [line.split(",")[0] for line in lines[:4]] == [f"ppo: {n}/100 steps" for n in (0, 3, 6, 9)]
    assert lines[-1].startswith("ppo: 100/100 steps, 6:40 spent, 0:00 left")
    assert len(lines) == 1 + 33 + 1


def test_remaining_time_and_note_are_shown() -> None:
    lines = lines_of(10, 60.0, note="score [1.2]")
    assert lines[3] == "ppo: 3/10 steps, 3:00 spent, 7:00 left, score [1.2]"
    assert lines_of(100, 600.0)[1] == "ppo: 1/100 steps, 10:00 spent, 16:30:00 left"


def test_a_resumed_stage_estimates_by_its_own_speed() -> None:
    lines = lines_of(10, 30.0, done=8)
    assert lines == [
        "ppo: 8/10 steps",
        "ppo: 9/10 steps, 0:30 spent, 0:30 left",
        "ppo: 10/10 steps, 1:00 spent, 0:00 left",
    ]


def test_a_terminal_gets_a_bar_that_reads_no_markup() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, width=120)
    with stage_progress("sft [a]", 4, unit="texts", console=console) as progress:
        for _ in range(4):
            progress.advance(note="loss [/b]")
    shown = stream.getvalue()
    assert "sft [a]" in shown and "4/4" in shown and "texts" in shown and "loss [/b]" in shown


SCRIPT = """
from fourfold.diagnostics.progress import stage_progress
with stage_progress("sft", 3, unit="texts") as progress:
    for _ in range(3):
        progress.advance()
print("result")
"""


def run_script(**streams) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "TERM": "xterm", "COLUMNS": "120"}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True, **streams)


def test_stdout_is_left_to_the_command() -> None:
    result = run_script(capture_output=True, text=True)
    assert result.stdout == "result\n"
    assert result.stderr.splitlines()[0] == "sft: 0/3 texts"
    assert "\x1b" not in result.stderr


def test_forced_colour_makes_no_moving_bar_in_a_log(monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in run_script(capture_output=True, text=True).stderr


def test_a_real_terminal_on_stderr_gets_the_bar() -> None:
    reader, writer = pty.openpty()
    result = run_script(stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    shown = os.read(reader, 100_000).decode()
    os.close(reader)
    assert result.stdout == "result\n"
    assert "3/3" in shown and "\x1b[" in shown
