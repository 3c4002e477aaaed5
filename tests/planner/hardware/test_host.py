"""What Linux says of a machine, from files as kernels and container engines lay them down."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from fourfold.planner.hardware import host

MEMINFO = "MemTotal:       24683652 kB\nMemAvailable:   19832084 kB\nHugePages_Total:       3\n"
TOTAL = 24683652 * 1024
UNLIMITED = "9223372036854771712"


def laid(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


CASES = {
    "no limit": ("0::/user.slice\n", {"sys/fs/cgroup/user.slice/memory.max": "max\n"}, TOTAL),
    "version 2": ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "8589934592\n"}, 8 << 30),
    "a group above is tighter": (
        "0::/a/b\n",
        {"sys/fs/cgroup/a/b/memory.max": "8589934592\n", "sys/fs/cgroup/a/memory.max": "4294967296\n"},
        4 << 30,
    ),
    "version 2, a container's own view": ("0::/../c\n", {"sys/fs/cgroup/memory.max": "2147483648\n"}, 2 << 30),
    "both versions": (
        "4:memory:/job\n1:cpu:/\n0::/\n",
        {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3221225472\n"},
        3 << 30,
    ),
    "version 1 without a limit": (
        "4:cpu,memory:/\n",
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED}\n"},
        TOTAL,
    ),
    "version 1, a container's own view": (
        "4:memory:/docker/abc\n",
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n"},
        1 << 30,
    ),
    "a limit above what there is": ("0::/\n", {"sys/fs/cgroup/memory.max": "99999999999999\n"}, TOTAL),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_the_machines_or_the_containers_limit(case: str, tmp_path: Path) -> None:
    cgroup, files, expected = CASES[case]
    assert host.host_memory(laid(tmp_path, cgroup, files)) == expected


def test_this_machine() -> None:
    assert 0 < host.host_memory() <= psutil.virtual_memory().total
    assert host.meminfo()["MemTotal"] == psutil.virtual_memory().total
    assert host.cores() == len(psutil.Process().cpu_affinity() or ())
    assert host.processor()


def test_units_of_meminfo(tmp_path: Path) -> None:
    assert host.meminfo(laid(tmp_path, "0::/\n", {})) == {
        "MemTotal": TOTAL,
        "MemAvailable": 19832084 * 1024,
        "HugePages_Total": 3,
    }


def test_gpus_are_those_of_the_driver_and_what_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert host.gpus(tmp_path) == ()
    for number in (1, 0):
        laid(
            tmp_path, "", {f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information": "Model:   NVIDIA H200\nIRQ: 1\n"}
        )
    assert host.gpus(tmp_path) == ("NVIDIA H200", "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert host.gpus(tmp_path)[2:] == ("CUDA_VISIBLE_DEVICES=1",)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
