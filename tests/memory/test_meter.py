"""The meter against allocations of known size, known times and known counts."""

from __future__ import annotations

import mmap
import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.memory import peaks
from fourfold.memory.meter import PassCounter, PhaseMeter
from fourfold.memory.peaks import CudaPeak, KernelPeak, SampledPeak, peak_source, resident_bytes_reader

CPU = torch.device("cpu")
SIZE = 200 * 2**20


def allocate(size: int = SIZE) -> torch.Tensor:
    """A tensor of `size` bytes whose pages are really there, and really gone afterwards.

    Pages of its own: malloc would take a hole in its heap that is large enough, where an earlier test has left one, and
    keep it.
    """
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)


SOURCES = [
    pytest.param(
        KernelPeak, marks=pytest.mark.skipif(not KernelPeak.available(), reason="this system cannot reset VmHWM")
    ),
    pytest.param(SampledPeak),
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_peak_belongs_to_its_phase_only(source: type) -> None:
    """FAULTS I5, J8: memory is shown phase by phase; what is freed does not count in the next phase."""
    meter = PhaseMeter(CPU, source=source())
    with meter.phase("generate"):
        pass
    with meter.phase("learn"):
        tensor = allocate()
        time.sleep(0.05)
        del tensor
    with meter.phase("save"):
        pass
    usage = meter.take()
    growth = usage["learn"].peak_bytes - usage["generate"].peak_bytes
    assert growth == pytest.approx(SIZE, rel=0.1)
    assert abs(usage["save"].peak_bytes - usage["generate"].peak_bytes) < 0.1 * SIZE


@pytest.mark.parametrize("source", SOURCES)
def test_an_inner_phase_does_not_lose_the_outer_peak(source: type) -> None:
    meter = PhaseMeter(CPU, source=source())
    with meter.phase("load"):
        pass
    with meter.phase("ppo"):
        tensor = allocate()
        time.sleep(0.05)
        del tensor
        with meter.phase("generate"):
            pass
        with meter.phase("learn"):
            smaller = allocate(SIZE // 2)
            time.sleep(0.05)
            del smaller
    usage = meter.take()
    base = usage["load"].peak_bytes
    assert usage["ppo"].peak_bytes - base == pytest.approx(SIZE, rel=0.1)
    assert usage["learn"].peak_bytes - base == pytest.approx(SIZE / 2, rel=0.1)
    assert usage["generate"].peak_bytes - base < 0.1 * SIZE


def test_a_peak_of_an_inner_phase_counts_in_the_outer_one() -> None:
    meter = PhaseMeter(CPU)
    with meter.phase("load"):
        pass
    with meter.phase("ppo"), meter.phase("learn"):
        tensor = allocate()
        time.sleep(0.05)
        del tensor
    usage = meter.take()
    assert usage["ppo"].peak_bytes >= usage["learn"].peak_bytes > usage["load"].peak_bytes + 0.9 * SIZE


class ScriptedMemory:
    """Memory whose level is set by hand: its peak since a reset is known exactly."""

    def __init__(self) -> None:
        self.level = self.high = 0

    def set(self, level: int) -> None:
        self.level = level
        self.high = max(self.high, level)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def synchronize(self) -> None: ...

    def synchronize_thread(self) -> None: ...

    def reset(self) -> None:
        self.high = self.level

    def peak_bytes(self) -> int:
        return self.high

    def current_bytes(self) -> int:
        return self.level


Script = st.recursive(
    st.integers(min_value=0, max_value=1000), lambda inner: st.lists(inner, max_size=5), max_leaves=25
)


@given(st.lists(Script, max_size=6))
@settings(deadline=None)
def test_nested_peaks_are_the_largest_level_seen(script: list) -> None:
    """A list is a phase, a number sets the memory level; every phase must report the highest level during it."""
    memory = ScriptedMemory()
    meter = PhaseMeter(CPU, source=memory)
    expected: dict[str, int] = {}

    def play(steps: list, name: str) -> int:
        highest = memory.level
        with meter.phase(name):
            for number, step in enumerate(steps):
                if isinstance(step, list):
                    highest = max(highest, play(step, f"{name}.{number}"))
                else:
                    memory.set(step)
                    highest = max(highest, step)
        expected[name] = highest
        return highest

    play(script, "phase")
    assert {name: usage.peak_bytes for name, usage in meter.take().items()} == expected


def test_seconds_add_up_over_the_visits_of_a_phase() -> None:
    meter = PhaseMeter(CPU)
    for _ in range(3):
        with meter.phase("generate"):
            time.sleep(0.02)
    assert 0.06 <= meter.take()["generate"].seconds < 0.2


def test_take_clears_and_totals_do_not() -> None:
    meter = PhaseMeter(CPU)
    with meter.phase("generate"):
        time.sleep(0.01)
    first = meter.take()
    assert meter.take() == {}
    with meter.phase("generate"):
        time.sleep(0.01)
    second = meter.take()
    total = meter.totals()["generate"]
    assert total.seconds == pytest.approx(first["generate"].seconds + second["generate"].seconds)
    assert total.peak_bytes == max(first["generate"].peak_bytes, second["generate"].peak_bytes)


def test_take_inside_a_stage_reports_what_has_closed() -> None:
    meter = PhaseMeter(CPU)
    with meter.phase("ppo"):
        with meter.phase("learn"):
            pass
        assert set(meter.take()) == {"learn"}
    assert set(meter.take()) == {"ppo"}


def test_a_phase_that_raises_is_closed() -> None:
    meter = PhaseMeter(CPU)
    with pytest.raises(RuntimeError, match="inside"), meter.phase("learn"):
        raise RuntimeError("inside")
    with meter.phase("learn"):
        pass
    assert set(meter.take()) == {"learn"}


def test_a_phase_inside_itself_is_our_own_bug() -> None:
    meter = PhaseMeter(CPU)
    with meter.phase("learn"), pytest.raises(AssertionError, match="open already"), meter.phase("learn"):
        pass


def test_current_bytes_follow_an_allocation() -> None:
    meter = PhaseMeter(CPU)
    before = meter.current_bytes()
    tensor = allocate()
    assert meter.current_bytes() - before == pytest.approx(SIZE, rel=0.1)
    del tensor


def test_sampling_is_the_fallback_where_the_peak_cannot_be_reset(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(peaks, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    assert isinstance(peak_source(CPU), SampledPeak)


def test_resident_bytes_agree_with_psutil() -> None:
    psutil = pytest.importorskip("psutil")
    assert resident_bytes_reader()() == pytest.approx(psutil.Process(os.getpid()).memory_info().rss, rel=0.05)


def test_the_sampling_thread_ends_with_the_outermost_phase() -> None:
    source = SampledPeak()
    meter = PhaseMeter(CPU, source=source)
    with meter.phase("ppo"), meter.phase("learn"):
        pass
    assert source._thread is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peaks_are_those_of_the_allocator() -> None:
    device = torch.device("cuda")
    assert isinstance(peak_source(device), CudaPeak)
    meter = PhaseMeter(device)
    with meter.phase("generate"):
        pass
    with meter.phase("learn"):
        tensor = torch.ones(SIZE, dtype=torch.uint8, device=device)
        del tensor
    usage = meter.take()
    assert usage["learn"].peak_bytes - usage["generate"].peak_bytes == SIZE


def test_passes_of_ppo_are_rows_over_the_rollout() -> None:
    """Four epochs of two mini-batches over a rollout of 8 are 4 passes, however they are cut."""
    counter = PassCounter()
    counter.count("reference", "score", "forward", rows=8, tokens=80, flops=1e6)
    for _ in range(4):
        for rows in (3, 5):
            counter.count("actor", "learn", "forward", rows=rows, tokens=10 * rows, flops=100.0)
            counter.count("actor", "learn", "backward", rows=rows, tokens=10 * rows, flops=200.0)
    row = counter.take(rows_per_pass=8)
    assert row["actor_forward_passes"] == row["actor_backward_passes"] == 4
    assert row["actor_forward_tokens"] == 320
    assert row["actor_learn_flops"] == 2400
    assert row["actor_generate_flops"] == 0
    assert row["reference_forward_passes"] == 1
    assert row["reference_backward_passes"] == row["reference_learn_flops"] == 0
    assert row["reference_score_flops"] == 1e6
    assert not any(counter.take(rows_per_pass=8).values())


@pytest.mark.parametrize(("role", "phase", "direction"), [("judge", "score", "forward"), ("actor", "save", "forward")])
def test_counting_under_an_unknown_name_is_our_own_bug(role: str, phase: str, direction) -> None:
    with pytest.raises(AssertionError):
        PassCounter().count(role, phase, direction, rows=1, tokens=1, flops=1.0)
