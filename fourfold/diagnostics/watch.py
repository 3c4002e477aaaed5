"""A run in the terminal: last values and their way, seconds by phase, what the doctor says; live or once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fourfold.diagnostics.doctor import Examination, by_severity
from fourfold.diagnostics.doctor.table import STYLES
from fourfold.diagnostics.doctor_says import examination_of
from fourfold.diagnostics.numbers import short
from fourfold.diagnostics.run_files import STATE
from fourfold.diagnostics.run_record import Points, RunRecord, read_run
from fourfold.diagnostics.run_state import read_state
from fourfold.diagnostics.tables import visible
from fourfold.planner.units import seconds

# What is shown, of steps and of evaluations, in this order.
SHOWN = (
    ("ppo_step", "score_mean"), ("evaluation", "eval_score_mean"), ("evaluation", "eval_judge_mean"),
    ("ppo_step", "kl_per_sequence_mean"), ("ppo_step", "entropy_per_token_mean"),
    ("ppo_step", "approx_kl_per_token_mean"), ("ppo_step", "policy_clip_fraction"), ("ppo_step", "ratio_max"),
    ("ppo_step", "explained_variance"), ("evaluation", "eval_explained_variance"), ("ppo_step", "value_loss_per_token"),
    ("ppo_step", "response_length_mean"), ("ppo_step", "eos_share"), ("ppo_step", "sampler_gap_mean"),
)  # fmt: skip
NEEDS_ATTENTION = 6  # verdicts shown at most, the worst first
DOCTOR_SECONDS = 20.0  # between two rounds of the doctor, who reads rollouts
SECONDS_SHOWN = ("generate", "score", "learn", "save")


@dataclass(frozen=True)
class Glyphs:
    """Characters that the terminal has."""

    levels: str = "▁▂▃▄▅▆▇█"
    bar: str = "█"
    healthy: str = "✓"
    outside: str = "▲"

    @classmethod
    def of(cls, console: Console) -> Glyphs:
        """Those of ASCII where there are no others."""
        return cls(levels=".:-=+*#@", bar="#", healthy="ok", outside="!") if console.options.ascii_only else cls()


def sparkline(points: Points, width: int, levels: str) -> str:
    """The way of a metric in so many characters: of each stretch of steps the value furthest from the middle."""
    values = [value for _, value in points]
    low, high = min(values), max(values)
    middle, spread = (low + high) / 2, high - low
    count, said = min(width, len(values)), []
    for n in range(count):
        piece = values[n * len(values) // count : (n + 1) * len(values) // count]
        value = max(piece, key=lambda each: abs(each - middle))
        share = (value - low) / spread if spread else 0.5
        said.append(levels[min(int(share * len(levels)), len(levels) - 1)])
    return "".join(said)


def frame(record: RunRecord, doctor: Examination | str, glyphs: Glyphs, width: int) -> RenderableType:
    """All that is shown of a run as it stands."""
    parts: list[RenderableType] = [_title(record)]
    if record.state.said and not record.finished:
        parts.append(visible(record.state.said.splitlines()[0]))
    if record.steps:
        parts += ["", _metrics(record, glyphs, max(10, min(48, width - 52))), "", _phases(record, glyphs)]
    elif "ppo" in record.config.stages:
        parts.append(Text(f"no step of ppo has been logged; stage {record.stage}", "bright_black"))
    else:
        parts.append(Text(f"stages {', '.join(record.config.stages)}, without ppo: there are no steps to show"))
        return Group(*parts)
    parts += ["", *_verdicts(doctor)]
    return Group(*parts)


def _title(record: RunRecord) -> Text:
    state = "finished" if record.finished and record.state.ended else record.state.state
    style = {"running": "bold cyan", "finished": "bold green", "failed": "bold red"}.get(state, "bold yellow")
    line = visible(record.name)
    line.stylize("bold")
    line.append("  ").append("not finished" if state == "unknown" else state, style)
    if "ppo" in record.config.stages:
        line.append(f"  step {record.step:,} of {record.config.ppo.steps:,}")
    if record.steps and state == "running":
        left = (record.config.ppo.steps - record.step) * median(row["step_seconds"] for row in record.steps[-20:])
        line.append(f", about {seconds(left)} left", "bright_black")
    return line


def _metrics(record: RunRecord, glyphs: Glyphs, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for kind, name in SHOWN:
        if not (points := record.points(kind, name)):
            continue
        band, last = record.band(kind, name), points[-1][1]
        mark = Text("")
        if band is not None:
            inside = band.holds(last)
            mark = Text(glyphs.healthy if inside else glyphs.outside, "green" if inside else "bold red")
        table.add_row(name, short(last), mark, Text(sparkline(points, width, glyphs.levels), "blue"))
    return table


def _phases(record: RunRecord, glyphs: Glyphs) -> Table:
    """Seconds of the last step by phase."""
    last = record.steps[-1]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for phase in SECONDS_SHOWN:
        spent = last[f"{phase}_seconds"]
        share = spent / last["step_seconds"] if last["step_seconds"] else 0.0
        table.add_row(phase, seconds(spent), Text(glyphs.bar * round(30 * share), "magenta"))
    table.add_row("step", seconds(last["step_seconds"]), Text(f"{last['tokens_per_second']:,.0f} tokens/s"))
    return table


def _verdicts(found: Examination | str) -> Iterator[Text]:
    if isinstance(found, str):
        yield Text(f"doctor: {found}", "bright_black")
        return
    wrong = [each for each in by_severity(found.verdicts) if each.severity != "good"]
    for each in wrong[:NEEDS_ATTENTION]:
        line, tried = Text(f"{each.severity}: ", STYLES[each.severity]), f"  try {each.remedy}" if each.remedy else ""
        yield line.append_text(visible(f"{each.name}: {each.evidence}")).append(tried, "bright_black")
    if len(wrong) > NEEDS_ATTENTION:
        yield Text(f"and {len(wrong) - NEEDS_ATTENTION} more: fourfold doctor", "bright_black")
    left = f"{len(found.unjudged)} not judged"
    if found.too_early:
        yield Text(f"doctor: too early: {left}", "yellow")
    elif not wrong:
        line = Text("doctor: nothing found", "yellow" if found.silent else "green")
        line.append(f"; {left}" if found.unjudged else "", "bright_black")
        yield line.append(f", all of {' and '.join(found.silent)}" if found.silent else "", "yellow")


def line_of(row: dict[str, float]) -> str:
    """A step in a line, for logs."""
    said = {"score": "score_mean", "KL": "kl_per_sequence_mean", "explained variance": "explained_variance"}
    shown = ", ".join(f"{name} {short(row[metric])}" for name, metric in said.items())
    return f"step {row['step']:,}: {shown}, {seconds(row['step_seconds'])}"


@dataclass
class Watch:
    """Follows a run until no process works on it any more."""

    root: Path
    console: Console
    every: float = 2.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._glyphs = Glyphs.of(self.console)
        self._asked = -float("inf")
        self._seen: tuple[float, ...] = ()
        self._doctor: Examination | str = ""

    def once(self) -> None:
        """Print the run as it stands."""
        self.console.print(self._frame(read_run(self.root)))

    def live(self) -> None:
        """A picture that is drawn anew when the run has written something."""
        with Live(self._frame(read_run(self.root)), console=self.console, auto_refresh=False) as live:
            for record in self._follow():
                live.update(self._frame(record), refresh=True)

    def lines(self) -> None:
        """A line a step, where there is no terminal."""
        told = 0
        for record in self._follow():
            for row in record.steps:
                if row["step"] > told:
                    self.console.print(line_of(row), soft_wrap=True, highlight=False, markup=False)
                    told = row["step"]
        self.console.print(_title(record).plain, soft_wrap=True, highlight=False, markup=False)

    def _follow(self) -> Iterator[RunRecord]:
        """The record whenever it has changed; the last one when the run has ended."""
        while True:
            seen, ended = self._stamps(), read_state(self.root).ended  # first: what is written later is seen next
            if seen != self._seen or ended:
                self._seen = seen
                yield read_run(self.root)
            if ended:
                return
            self.sleep(self.every)

    def _stamps(self) -> tuple[float, ...]:
        files = (self.root / "ppo" / "metrics.jsonl", self.root / STATE)
        return tuple(file.stat().st_mtime if file.is_file() else 0.0 for file in files)

    def _frame(self, record: RunRecord) -> RenderableType:
        if self.clock() - self._asked >= DOCTOR_SECONDS or record.state.ended:
            self._doctor, self._asked = examination_of(self.root), self.clock()
        return frame(record, self._doctor, self._glyphs, self.console.width)
