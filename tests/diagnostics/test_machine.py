"""Measuring a machine, on this one; the parts that need a GPU are marked so."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fourfold.cli.main import main
from fourfold.diagnostics import machine
from fourfold.diagnostics.machine import best_seconds, ensure_measured, measure, multiplied
from fourfold.planner.hardware import find_hardware, host
from fourfold.planner.hardware.measured import measurement_file, read_measurement

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes and few repetitions: what is checked is that it measures, not how well."""
    monkeypatch.setattr(machine, "SECONDS", 0.02)
    monkeypatch.setattr(machine, "SHAPES", {name: shapes[:1] for name, shapes in machine.SHAPES.items()})
    monkeypatch.setattr(machine, "COPIED", {"cpu": 16 * machine.MIB, "cuda": 16 * machine.MIB})
    monkeypatch.setattr(machine, "PINNED", 16 * machine.MIB)
    monkeypatch.setattr(machine, "FILE_CHUNK", machine.MIB)


@pytest.mark.usefixtures("quick")
def test_this_machine_is_measured_and_found_as_it_was_measured(tmp_path: Path) -> None:
    said: list[str] = []
    measured = measure(said.append, tmp_path)
    assert find_hardware("detect") == measured.cluster
    assert measured == read_measurement()
    assert len(said) == len(measured.findings) and all(": " in line for line in said)
    assert measured.findings["host memory, GiB"] == host.host_memory() / 2**30
    assert max(v for k, v in measured.findings.items() if k.startswith("float32")) == pytest.approx(
        measured.cluster.device.flops["float32"] / 1e9
    )
    assert os.listdir(tmp_path) == ["cache"], "the file that was written is removed"
    node = measured.cluster.node
    assert node.host_memory == host.host_memory()
    assert 0 < node.disk_bandwidth < 1e12 and node.disk > 0
    assert set(node.device.flops) == set(multiplied(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    assert all(1e8 < rate < 1e16 for rate in node.device.flops.values())
    assert 1e8 < node.device.bandwidth < 1e13
    on_cpu = node.device.kind == "cpu"
    assert set(node.device.few_rows) == ({"float32", "bfloat16"} if on_cpu else set())
    assert all(
        rate == pytest.approx(1e9 * measured.findings[f"decoding, {dtype} product {rows} x 576 x 1536, GFLOP/s"])
        for dtype, rates in node.device.few_rows.items()
        for rows, rate in rates
    )
    steps = {rows: 1e3 * seconds for rows, seconds in node.device.layer_step}
    names = {rows: f"decoding, a layer beside its products, {rows} rows, ms" for rows in ((1, 64) if on_cpu else ())}
    assert steps == pytest.approx({rows: measured.findings[name] for rows, name in names.items()})
    assert all(0 <= seconds < 1e3 for seconds in steps.values())


@pytest.mark.usefixtures("quick")
def test_what_was_measured_before_is_not_measured_again(tmp_path: Path) -> None:
    said: list[str] = []
    first = ensure_measured(said.append)
    assert said
    said.clear()
    assert ensure_measured(said.append) == first and not said
    measurement_file().write_text("{}")
    assert ensure_measured(said.append).device.name == first.device.name and said


@pytest.mark.usefixtures("quick")
def test_the_command_prints_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "machine", "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "float32 product 128 x 576 x 1536: " in printed or torch.cuda.is_available()
    assert f"kept in {measurement_file()}" in printed and "note: measured with" in printed
    assert main(["bench", "machine", "--folder", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_type_is_multiplied_where_the_processor_says_so() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    found = multiplied(CPU)
    assert found[0] == "float32"
    assert ("bfloat16" in found) == bool({"avx512_bf16", "amx_tile"} & set(flags))
    assert ("int8" in found) == bool({"avx512_vnni", "avx_vnni", "amx_tile"} & set(flags))


def test_the_shortest_repetition_counts() -> None:
    waits = iter([0.05, 0.05] + [0.03, 0.01, 0.03] * 50)
    assert best_seconds(lambda: time.sleep(next(waits)), CPU, seconds=0.1) == pytest.approx(0.01, abs=0.008)


def test_a_disk_is_written_and_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "probe"
    size, seconds = machine._write(file)
    assert file.stat().st_size == size and seconds > 0
    read, how = machine._read(file)
    assert read > 0 and how in ("directly", "through the page cache, which was asked to forget it")


def test_too_little_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "meminfo", lambda root=None: {"MemAvailable": machine.MIB, "MemTotal": 10**9})
    with pytest.raises(ValueError, match=r"1 MiB of memory are free.*allowed: 20 MiB"):
        machine._products(CPU, "float32", machine.Findings(), lambda line: None)


@pytest.mark.gpu
def test_a_gpu_is_measured_near_its_published_figures(tmp_path: Path) -> None:
    """Within a third to all of the data sheet's, where the card is a known one."""
    measured = measure(lambda line: None, tmp_path).cluster
    device = measured.device
    assert device.kind in ("cuda", "rocm") and device.pcie > 1e9
    published = find_hardware(device.name).device
    assert device.memory == pytest.approx(published.memory, rel=0.05)
    assert 0.5 < device.bandwidth / published.bandwidth < 1.05
    for dtype, rate in published.flops.items():
        assert 0.33 < device.flops[dtype] / rate < 1.1, dtype
