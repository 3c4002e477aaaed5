"""The most memory held at any moment: as the kernel counts it, by looking every 10 ms, or torch's own count on CUDA."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.01


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

    def synchronize_thread(self) -> None:
        """The same for what this thread has queued."""
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

    def synchronize_thread(self) -> None:
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

    def synchronize_thread(self) -> None:
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

    def synchronize_thread(self) -> None:
        """Wait for the kernels of the thread's stream."""
        torch.cuda.current_stream(self._device).synchronize()


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
