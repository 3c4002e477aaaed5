"""Seconds and peak memory by phase and role, their timeline, and the passes and FLOPs of each model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fourfold.memory.peaks import PeakSource, peak_source
from fourfold.memory.tensors import LiveTensors

# The trunk is counted on its own, because the roles share its passes; without a trunk its numbers are 0.
COUNTED_MODELS = ("trunk", "actor", "critic", "reference", "reward")
COUNTED_PHASES = ("generate", "score", "learn")
DIRECTIONS = ("forward", "backward")
# The roles that work in a phase; besides them the actor in score, for the full KL only. A trained trunk works in learn
# with actor and critic together.
WORKING = (
    *(("generate", "actor"), ("score", "reference"), ("score", "critic"), ("score", "reward")),
    *(("learn", "critic"), ("learn", "actor"), ("learn", "trunk")),
)
Direction = Literal["forward", "backward"]


class PhaseUsage(NamedTuple):
    """Wall-clock seconds and the most memory held at any moment of a phase."""

    seconds: float
    peak_bytes: int


class Span(NamedTuple):
    """A stretch of the timeline: a phase (role ""), or all the work of a role in it."""

    phase: str
    role: str
    start: float  # Unix time
    seconds: float
    peak_bytes: int | None  # None for work of a thread beside the one that measures
    tensor_peak_bytes: int | None  # of live tensors, where they are counted


@dataclass
class _OpenPhase:
    name: str
    role: str
    started: float
    clock: float
    peak_bytes: int = 0
    tensor_peak_bytes: int = 0


class PhaseMeter:
    """Adds up seconds and peak bytes of named phases: `load`, `preflight`, `generate`, `score`, `learn`, `save`,
    `evaluate`, and a stage's name.

    Phases nest: the time and the peak of an inner phase belong to the outer one too. Bytes are the process's resident
    memory on CPU, torch's allocations on CUDA. Within a phase the roles at work are measured one by one.
    """

    def __init__(self, device: torch.device, *, source: PeakSource | None = None, count_tensors: bool = False) -> None:
        self._source = source or peak_source(device)
        self._tensors = LiveTensors() if count_tensors else None
        self._spans: dict[tuple[str, str], Span] = {}
        self._adding = threading.Lock()
        self._open: list[_OpenPhase] = []
        self._thread = 0  # that measures
        self._recent: dict[str, PhaseUsage] = {}
        self._total: dict[str, PhaseUsage] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs inside, also when it raises."""
        assert all(phase.name != name or phase.role for phase in self._open), f"phase {name!r} is open already"
        with self._measured(name, ""):
            yield

    @contextlib.contextmanager
    def role(self, phase: str, role: str) -> Iterator[None]:
        """Measure a role's work inside a phase; where that phase is not open (evaluations) nothing is measured.

        Of a thread beside the one that measures the seconds alone are noted, for the timeline: peaks are not told
        apart.
        """
        if threading.get_ident() != self._thread:
            measured = self._beside(phase, role)
        else:
            measured = self._measured(phase, role) if self._is_open(phase) else contextlib.nullcontext()
        with measured:
            yield

    def _is_open(self, *phases: str) -> bool:
        return any(each.name in phases and not each.role for each in self._open)

    @contextlib.contextmanager
    def _beside(self, phase: str, role: str) -> Iterator[None]:
        clock, started = time.time(), time.perf_counter()
        in_a_step = self._is_open(*COUNTED_PHASES)
        try:
            yield
        finally:
            self._source.synchronize_thread()
            # Between the phases of a step there is a moment when none is open, but no work begins and ends in it.
            if in_a_step or self._is_open(*COUNTED_PHASES):
                self._add(Span(phase, role, clock, time.perf_counter() - started, None, None))

    @contextlib.contextmanager
    def _measured(self, name: str, role: str) -> Iterator[None]:
        outermost = not self._open
        self._thread = threading.get_ident()
        self._source.synchronize()
        if outermost:
            self._source.start()
        else:
            self._fold_into_innermost()  # the reset below must not lose what the outer phase has seen
        self._source.reset()
        with self._tensors if self._tensors is not None and outermost else contextlib.nullcontext():
            if self._tensors is not None:
                self._tensors.reset()
            self._open.append(_OpenPhase(name, role, time.perf_counter(), time.time()))
            try:
                yield
            finally:
                self._close()

    def _fold_into_innermost(self) -> None:
        innermost = self._open[-1]
        innermost.peak_bytes = max(innermost.peak_bytes, self._source.peak_bytes())
        if self._tensors is not None:
            innermost.tensor_peak_bytes = max(innermost.tensor_peak_bytes, self._tensors.peak_bytes)

    def _close(self) -> None:
        try:
            self._source.synchronize()
        finally:
            self._fold_into_innermost()
            closed = self._open.pop()
            usage = PhaseUsage(time.perf_counter() - closed.started, closed.peak_bytes)
            self._note(closed, usage)
            if self._open:
                outer = self._open[-1]
                outer.peak_bytes = max(outer.peak_bytes, closed.peak_bytes)
                outer.tensor_peak_bytes = max(outer.tensor_peak_bytes, closed.tensor_peak_bytes)
            else:
                self._source.stop()

    def _note(self, closed: _OpenPhase, usage: PhaseUsage) -> None:
        name = f"{closed.name}/{closed.role}" if closed.role else closed.name
        for book in (self._recent,) if closed.role else (self._recent, self._total):
            before = book.get(name, PhaseUsage(0.0, 0))
            seconds, peak = before.seconds + usage.seconds, max(before.peak_bytes, usage.peak_bytes)
            book[name] = PhaseUsage(seconds, peak)
        tensors = None if self._tensors is None else closed.tensor_peak_bytes
        self._add(Span(closed.name, closed.role, closed.clock, usage.seconds, usage.peak_bytes, tensors))

    def _add(self, span: Span) -> None:
        """Note a stretch, with those before it of the same phase and role as one."""
        key = span.phase, span.role
        with self._adding:
            earlier = self._spans.get(key)
            if earlier is not None:
                span = span._replace(
                    start=earlier.start,
                    seconds=earlier.seconds + span.seconds,
                    peak_bytes=_larger(earlier.peak_bytes, span.peak_bytes),
                    tensor_peak_bytes=_larger(earlier.tensor_peak_bytes, span.tensor_peak_bytes),
                )
            self._spans[key] = span

    def take_spans(self) -> list[Span]:
        """The timeline since the last `take_spans`: phases and roles that were closed, by their start."""
        with self._adding:
            spans, self._spans = self._spans, {}
        return sorted(spans.values(), key=lambda span: span.start)

    def take(self) -> dict[str, PhaseUsage]:
        """Phases closed since the last `take`, roles in them as "phase/role"; what is open appears once it closes."""
        recent, self._recent = self._recent, {}
        return recent

    def totals(self) -> dict[str, PhaseUsage]:
        """Every phase closed so far, whatever was taken."""
        return dict(self._total)

    def current_bytes(self) -> int:
        """Bytes held now."""
        return self._source.current_bytes()


def _larger(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)


class PassCounter:
    """Adds up the rows and FLOPs that each model worked through; the caller says what it ran."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], int] = defaultdict(int)
        self._tokens: dict[tuple[str, str], int] = defaultdict(int)
        self._flops: dict[tuple[str, str], float] = defaultdict(float)

    def count(self, role: str, phase: str, direction: Direction, rows: int, tokens: int, flops: float) -> None:
        """Record one pass of `role` over `rows` rows that hold `tokens` tokens."""
        assert role in COUNTED_MODELS and phase in COUNTED_PHASES and direction in DIRECTIONS, (role, phase, direction)
        self._rows[role, direction] += rows
        self._tokens[role, direction] += tokens
        self._flops[role, phase] += flops

    def take(self, rows_per_pass: int) -> dict[str, float]:
        """The metrics since the last `take`: passes (rows / rows_per_pass), tokens, and FLOPs of every model."""
        assert rows_per_pass > 0, "a pass needs rows"
        row: dict[str, float] = {}
        for role in COUNTED_MODELS:
            for direction in DIRECTIONS:
                row[f"{role}_{direction}_passes"] = self._rows[role, direction] / rows_per_pass
                row[f"{role}_{direction}_tokens"] = self._tokens[role, direction]
            for phase in COUNTED_PHASES:
                row[f"{role}_{phase}_flops"] = self._flops[role, phase]
        for book in (self._rows, self._tokens, self._flops):
            book.clear()
        return row
