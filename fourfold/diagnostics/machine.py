"""Measure this machine in seconds: products, memory, the way to a GPU, the disk. `--hardware detect` plans with it.

Rates are the best of several repetitions: what the hardware reaches when it is not disturbed. What real work reaches of
them is the planner's business.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from fourfold.diagnostics.decoding_rates import DECODED, product_rates, step_seconds
from fourfold.files import write_atomically
from fourfold.memory.precision import DTYPES, cpu_multiplies_bfloat16
from fourfold.planner.hardware import host
from fourfold.planner.hardware.machine import Cluster, Device, Node
from fourfold.planner.hardware.measured import (
    Identity,
    Measurement,
    NotMeasured,
    measurement_file,
    read_measurement,
)

MIB = 2**20
UNITS = {"GFLOP/s": 1e9, "GB/s": 1e9, "GiB": 2**30, "ms": 1e-3}
# Rows, inputs and outputs of a product: an MLP's in SmolLM2-135M, with few rows and with many (the few end before the
# system turns to another program); a square; an MLP's in Llama-3.2-1B, Llama-2-7B and 70B.
SHAPES: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "cpu": ((128, 576, 1536), (512, 576, 1536), (1024, 1024, 1024), (512, 2048, 8192)),
    "cuda": ((4096, 2048, 8192), (4096, 4096, 11008), (8192, 8192, 28672)),
}
SECONDS = 0.3  # for each thing that is measured, at least
COPIED = {"cpu": 256 * MIB, "cuda": 1024 * MIB}
PINNED = 256 * MIB
FILE_CHUNK, FILE_CHUNKS, FILE_SECONDS = 32 * MIB, 4, 2.0


@dataclass
class Findings:
    """Single figures by name, the unit in the name, and what there is to say about them."""

    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def ensure_measured(say: Callable[[str], None]) -> Cluster:
    """This machine as measured: by the file where that is good, else now."""
    try:
        return read_measurement().cluster
    except NotMeasured:
        return measure(say).cluster


def measure(say: Callable[[str], None], folder: Path | None = None) -> Measurement:
    """Measure everything and keep it in the user's cache; `say` is told each thing. The disk is that of `folder`.

    The folder is the system's temporary one unless given; a file of up to 128 MiB is written there and removed.
    """
    folder = folder or Path(tempfile.gettempdir())
    findings = Findings(notes=_circumstances())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flops = {dtype: _products(device, dtype, findings, say) for dtype in multiplied(device)}
    few_rows, layer_step = _decoding(findings, say) if device.type == "cpu" else ({}, ())
    bandwidth = _record(findings, say, "memory copy, read and written", "GB/s", copy_rate(device))
    pcie = 0.0
    if device.type == "cuda":
        there = _record(findings, say, "host to device", "GB/s", _pinned(to_device=True))
        back = _record(findings, say, "device to host", "GB/s", _pinned(to_device=False))
        pcie = min(there, back)
    write, read = _disk(folder, findings)
    _record(findings, say, "disk write", "GB/s", write)
    _record(findings, say, "disk read", "GB/s", read)
    _record(findings, say, "host memory", "GiB", host.host_memory())
    devices = _equal_devices(device, findings)
    node = Node(
        device=replace(_device(device, flops, bandwidth, pcie), few_rows=few_rows, layer_step=layer_step),
        devices=devices,
        link=_record(findings, say, "device to device", "GB/s", _peers()) if devices > 1 else 0.0,
        link_name="peer copies" if devices > 1 else "",
        host_memory=host.host_memory(),
        disk=shutil.disk_usage(folder).free,
        disk_bandwidth=min(write, read),
    )
    measurement = Measurement(
        measured_at=time.time(),
        identity=Identity.of_this(),
        cluster=Cluster(node, notes=tuple(findings.notes)),
        findings=findings.figures,
    )
    file = measurement_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, measurement.model_dump_json(indent=2) + "\n")
    return measurement


def _circumstances() -> list[str]:
    """How it is measured, and what else may lower the rates."""
    notes = [f"measured with {torch.get_num_threads()} threads of torch {torch.__version__}"]
    load = os.getloadavg()[0]
    if load > host.cores():
        notes.append(
            f"other programs kept the machine busy (load {load:.1f} on {host.cores()} cores): rates may be low"
        )
    return notes


def _equal_devices(device: torch.device, findings: Findings) -> int:
    """GPUs of the first one's kind, which are beside each other; 1 on a CPU."""
    if device.type == "cpu":
        return 1
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    equal = next((number for number, name in enumerate(names) if name != names[0]), len(names))
    if equal < len(names):
        findings.notes.append(f"left out are GPUs that differ from the first {equal}: {', '.join(names[equal:])}")
    return equal


def _record(findings: Findings, say: Callable[[str], None], name: str, unit: str, value: float) -> float:
    """Write down and tell `value`, which is in bytes, bytes/s, FLOP/s or seconds, in a unit for people; returns it."""
    shown = value / UNITS[unit]
    findings.figures[f"{name}, {unit}"] = shown
    say(f"{name}: {shown:,.1f} {unit}")
    return value


def multiplied(device: torch.device) -> tuple[str, ...]:
    """Types that the hardware has instructions for, of those that the planner knows."""
    if device.type == "cuda":
        found = {"float32": True, "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False), "float16": True}
        # torch._int_mm: tensor cores of Turing and later.
        found["int8"] = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 5)
    else:
        found = {"float32": True, "bfloat16": cpu_multiplies_bfloat16(), "float16": _cpu_has("_is_amx_fp16_supported")}
        found["int8"] = _cpu_has("_is_vnni_supported", "_is_amx_tile_supported")
    return tuple(dtype for dtype, there in found.items() if there)


def _cpu_has(*checks: str) -> bool:
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def _products(device: torch.device, dtype: str, findings: Findings, say: Callable[[str], None]) -> float:
    """FLOP/s of products of a type: the best of the shapes that a quarter of the free memory holds."""
    rates = []
    available = min(host.meminfo()["MemAvailable"], host.host_memory())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available
    for rows, inputs, outputs in SHAPES[device.type]:
        numbers = rows * inputs + inputs * outputs + rows * outputs
        if 4 * numbers > free / 4:
            continue
        work = product(device, dtype, rows, inputs, outputs)
        rate = 2 * rows * inputs * outputs / best_seconds(work, device)
        rates.append(_record(findings, say, f"{dtype} product {rows} x {inputs} x {outputs}", "GFLOP/s", rate))
    if not rates:
        raise ValueError(
            f"this machine cannot be measured: {free / MIB:,.0f} MiB of memory are free, and no product fits into a "
            "quarter of that; allowed: 20 MiB or more; try when less runs here"
        )
    return max(rates)


def _decoding(
    findings: Findings, say: Callable[[str], None]
) -> tuple[dict[str, tuple[tuple[int, float], ...]], tuple[tuple[int, float], ...]]:
    """Of a CPU: FLOP/s of a decoding step's products by type and rows, and a layer's seconds beside them by rows."""
    inputs, outputs = DECODED
    few_rows = {}
    for dtype in ("float32", "bfloat16"):
        few_rows[dtype] = product_rates(DTYPES[dtype], COPIED["cpu"], _best)
        for rows, rate in few_rows[dtype]:
            _record(findings, say, f"decoding, {dtype} product {rows} x {inputs} x {outputs}", "GFLOP/s", rate)
    layer_step = step_seconds(dict(few_rows["float32"]), _best)
    for rows, seconds in layer_step:
        _record(findings, say, f"decoding, a layer beside its products, {rows} rows", "ms", seconds)
    return few_rows, layer_step


def _best(work: Callable[[], object]) -> float:
    return best_seconds(work, torch.device("cpu"))


def product(device: torch.device, dtype: str, rows: int, inputs: int, outputs: int) -> Callable[[], object]:
    """A matrix product [rows, inputs] x [inputs, outputs] of numbers of a type, to be called."""
    if dtype == "int8":
        left = torch.ones(rows, inputs, dtype=torch.int8, device=device)
        right = torch.ones(outputs, inputs, dtype=torch.int8, device=device)
        return partial(torch.ops.aten._int_mm, left, right.t())
    left = torch.full((rows, inputs), 0.5, dtype=DTYPES[dtype], device=device)
    right = torch.full((outputs, inputs), 0.5, dtype=DTYPES[dtype], device=device)
    return partial(torch.nn.functional.linear, left, right)


def best_seconds(work: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> float:
    """The shortest time that `work` has taken, in repetitions for so many seconds and of three at least.

    On a GPU short work is repeated within a repetition, so that starting it is not what is measured.
    """

    def once(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / times

    once(1)  # caches are warm and kernels loaded from here on
    times = max(1, round(0.01 / max(once(1), 1e-6))) if device.type == "cuda" else 1
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < until:
        taken.append(once(times))
    return min(taken)


def copy_rate(device: torch.device) -> float:
    """Bytes/s of a copy within the device's memory, read and written ones together, as STREAM counts them."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * source.nbytes / best_seconds(partial(target.copy_, source), device)


def read_rate(device: torch.device) -> float:
    """Bytes/s of reading the device's memory once, in a sum of float32."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    return source.nbytes / best_seconds(source.sum, device)


def _pinned(*, to_device: bool) -> float:
    """Bytes/s between page-locked host memory and the GPU, one way."""
    here = torch.zeros(PINNED, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(PINNED, dtype=torch.uint8, device="cuda")
    source, target = (here, there) if to_device else (there, here)
    return PINNED / best_seconds(partial(target.copy_, source, non_blocking=True), there.device)


def _peers() -> float:
    """Bytes/s from the first GPU to the second."""
    source = torch.zeros(PINNED, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(PINNED, dtype=torch.uint8, device="cuda:1")
    return PINNED / best_seconds(partial(target.copy_, source, non_blocking=True), source.device)


def _device(device: torch.device, flops: Mapping[str, float], bandwidth: float, pcie: float) -> Device:
    if device.type == "cpu":
        return Device(host.processor(), "cpu", host.host_memory(), bandwidth, dict(flops), source="measured")
    properties = torch.cuda.get_device_properties(device)
    kind = "cuda" if torch.version.hip is None else "rocm"
    return Device(properties.name, kind, properties.total_memory, bandwidth, dict(flops), pcie, source="measured")


def _disk(folder: Path, findings: Findings) -> tuple[float, float]:
    """Bytes/s of writing a file until it is on the disk, and of reading it past the page cache."""
    with tempfile.TemporaryDirectory(prefix="fourfold-machine-", dir=folder) as place:
        file = Path(place) / "probe"
        size, seconds = _write(file)
        read, how = _read(file)
    findings.notes.append(f"disk: {size // MIB} MiB in {folder}, read back {how}")
    return size / seconds, size / read


def _write(file: Path) -> tuple[int, float]:
    """Bytes written and the seconds that took; a slow disk is given fewer."""
    chunk = os.urandom(FILE_CHUNK)  # not zeros: some disks and file systems leave those out
    written, started = 0, time.perf_counter()
    with file.open("wb", buffering=0) as opened:
        for _ in range(FILE_CHUNKS):
            written += opened.write(chunk)
            os.fsync(opened.fileno())
            if time.perf_counter() - started > FILE_SECONDS:
                break
    return written, time.perf_counter() - started


def _read(file: Path) -> tuple[float, str]:
    """Seconds of reading a file, and how the page cache was kept out."""
    with mmap.mmap(-1, FILE_CHUNK) as aligned:  # O_DIRECT wants memory that begins at a page
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            how = "directly"
        except OSError:  # a file system without O_DIRECT, such as tmpfs before Linux 6.6
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            how = "through the page cache, which was asked to forget it"
        try:
            started = time.perf_counter()
            while os.readv(descriptor, [aligned]):
                pass
            return time.perf_counter() - started, how
        finally:
            os.close(descriptor)
