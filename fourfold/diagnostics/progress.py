"""Progress of a stage with remaining time, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_SECONDS = 10.0
_LINE_SHARE = 0.1


class StageProgress(Protocol):
    """How a stage tells how far it is."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """`n` more units are done; `note` is a few words on how it goes."""
        ...


class _Bar:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, n: int = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=n, note=note)


class _Lines:
    """A line at the start and the end, and between them after 10 s or a tenth of the way, whichever comes first."""

    def __init__(
        self, write: Callable[[str], None], title: str, total: int, unit: str, done: int, clock: Callable[[], float]
    ) -> None:
        self._write, self._title, self._total, self._unit, self._clock = write, title, total, unit, clock
        self._done = self._first_done = self._line_done = done
        self._started = self._line_time = clock()
        write(f"{title}: {done}/{total} {unit}")

    def advance(self, n: int = 1, note: str = "") -> None:
        self._done += n
        now = self._clock()
        far = self._done - self._line_done >= self._total * _LINE_SHARE
        if not (self._done >= self._total or far or now - self._line_time >= _LINE_SECONDS):
            return
        self._line_done, self._line_time = self._done, now
        made, spent = self._done - self._first_done, now - self._started
        left = spent / made * max(self._total - self._done, 0) if made else 0.0
        line = f"{self._title}: {self._done}/{self._total} {self._unit}, {_clock(spent)} spent, {_clock(left)} left"
        self._write(f"{line}, {note}" if note else line)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def stage_progress(
    title: str,
    total: int,
    *,
    unit: str,
    done: int = 0,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[StageProgress]:
    """Show how far a stage of `total` units is, `done` of which an earlier run has finished.

    stdout is left alone, so a command's output can be piped.
    """
    if console is None:
        # Colour may be forced where there is no terminal; a moving bar would fill a log with control codes.
        console = Console(stderr=True, force_interactive=sys.stderr.isatty())
    if not console.is_interactive:
        # One write a line: console.print would wrap at a width that a log does not have.
        stream = console.file

        def write(line: str) -> None:
            stream.write(line + "\n")
            stream.flush()

        yield _Lines(write, title, total, unit, done, clock)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("spent,"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("left"),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(title, total=total, completed=done, unit=unit, note="")
        yield _Bar(bars, task)
