"""Seconds and peak memory by phase and role, their timeline, and the passes and FLOPs of each model."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from fourfold.memory.tensors import LiveTensors

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.01

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
    peak_bytes: int
    tensor_peak_bytes: int | None  # of live tensors, where they are counted


class PeakSource(Protocol):
    """Measures the most memory held since the last `reset`."""

    def start(self) -> None:
        """The outermost phase opens."""
        ...

    def stop(self) -> None:
        """The outermost phase has closed."""
        ...

    def reset(self) -> None:
        """Forget the peak: from here on it is what is held now."""
        ...

    def peak_bytes(self) -> int:
        """The most bytes held since `reset`."""
        ...

    def current_bytes(self) -> int:
        """Bytes held now."""
        ...

    def synchronize(self) -> None:
        """Wait for work that was only queued, so that seconds are those of the work."""
        ...


class KernelPeak:
    """Peak resident memory of the process as Linux counts it (VmHWM), reset through clear_refs (proc(5))."""

    @staticmethod
    def available() -> bool:
        """Whether this system lets the process reset its own peak."""
        try:
            _CLEAR_REFS.write_text("5")
            return _status_bytes("VmHWM") > 0
        except (OSError, ValueError):
            return False

    def start(self) -> None:
        """Nothing to start: the kernel counts always."""

    def stop(self) -> None:
        """Nothing to stop."""

    def reset(self) -> None:
        """Set VmHWM to the memory that is resident now."""
        _CLEAR_REFS.write_text("5")

    def peak_bytes(self) -> int:
        """VmHWM."""
        return _status_bytes("VmHWM")

    def current_bytes(self) -> int:
        """VmRSS."""
        return _status_bytes("VmRSS")

    def synchronize(self) -> None:
        """CPU work is done when the call returns."""


class SampledPeak:
    """Peak resident memory from a thread that looks every 10 ms; what comes and goes between two looks is missed."""

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        self._read = read or resident_bytes_reader()
        self._lock = threading.Lock()
        self._peak = 0
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to look."""
        self._halt.clear()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        if self._thread is not None:
            self._halt.set()
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._halt.wait(_SAMPLE_SECONDS):
            self._look()

    def _look(self) -> int:
        with self._lock:
            self._peak = max(self._peak, self._read())
            return self._peak

    def reset(self) -> None:
        """Start again from what is resident now."""
        with self._lock:
            self._peak = self._read()

    def peak_bytes(self) -> int:
        """The most bytes seen since `reset`."""
        return self._look()

    def current_bytes(self) -> int:
        """Resident bytes now."""
        return self._read()

    def synchronize(self) -> None:
        """CPU work is done when the call returns."""


class CudaPeak:
    """Peak of what torch has allocated on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Nothing to start: torch counts always."""

    def stop(self) -> None:
        """Nothing to stop."""

    def reset(self) -> None:
        """Reset torch's peak to what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """torch.cuda.max_memory_allocated."""
        return torch.cuda.max_memory_allocated(self._device)

    def current_bytes(self) -> int:
        """torch.cuda.memory_allocated."""
        return torch.cuda.memory_allocated(self._device)

    def synchronize(self) -> None:
        """Wait for the kernels that are queued."""
        torch.cuda.synchronize(self._device)


def _status_bytes(field: str) -> int:
    """A size from /proc/self/status, where Linux gives it in KiB."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def resident_bytes_reader() -> Callable[[], int]:
    """The best way to read the resident bytes of this process here: /proc, psutil, or the peak since its start."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        page = os.sysconf("SC_PAGE_SIZE")
        return lambda: int(statm.read_text().split()[1]) * page
    with contextlib.suppress(ImportError):
        import psutil

        process = psutil.Process()
        return lambda: process.memory_info().rss
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB (getrusage(2))
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_source(device: torch.device) -> PeakSource:
    """How peak memory is measured on this device and system."""
    if device.type == "cuda":
        return CudaPeak(device)
    return KernelPeak() if KernelPeak.available() else SampledPeak()


@dataclass
class _OpenPhase:
    name: str
    role: str
    started: float
    clock: float
    peak_bytes: int = 0
    tensor_peak_bytes: int = 0


class PhaseMeter:
    """Adds up seconds and peak bytes of named phases (`load`, `generate`, `score`, `learn`, `save`, a stage's name).

    Phases nest: the time and the peak of an inner phase belong to the outer one too. Bytes are the process's resident
    memory on CPU, torch's allocations on CUDA. Within a phase the roles at work are measured one by one.
    """

    def __init__(self, device: torch.device, *, source: PeakSource | None = None, count_tensors: bool = False) -> None:
        self._source = source or peak_source(device)
        self._tensors = LiveTensors() if count_tensors else None
        self._spans: dict[tuple[str, str], Span] = {}
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

        Nor is what a thread does beside the one that opened it: their peaks are not told apart.
        """
        mine = threading.get_ident() == self._thread
        is_open = mine and any(each.name == phase and not each.role for each in self._open)
        with self._measured(phase, role) if is_open else contextlib.nullcontext():
            yield

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
        span = Span(closed.name, closed.role, closed.clock, usage.seconds, usage.peak_bytes, tensors)
        earlier = self._spans.get((closed.name, closed.role))
        if earlier is not None:
            both = None if tensors is None else max(tensors, earlier.tensor_peak_bytes or 0)
            seconds, peak = earlier.seconds + span.seconds, max(earlier.peak_bytes, span.peak_bytes)
            span = Span(span.phase, span.role, earlier.start, seconds, peak, both)
        self._spans[closed.name, closed.role] = span

    def take_spans(self) -> list[Span]:
        """The timeline since the last `take_spans`: phases and roles that were closed, by their start."""
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
