"""This machine as Linux describes it, without torch: memory that a process can have, processor, GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def host_memory(root: Path = ROOT) -> int:
    """Bytes that this process can have: the machine's, or less where its control group (a container's) is limited."""
    total = meminfo(root)["MemTotal"]
    return min([total, *_limits(root)])


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes (proc_meminfo(5))."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    pairs = (line.split(":") for line in lines)
    return {name: int(value.split()[0]) * (1024 if value.endswith("kB") else 1) for name, value in pairs}


def _limits(root: Path) -> Iterator[int]:
    """Limits of the process's control group and of those above it, in either version of the interface (cgroups(7)).

    Where a container sees its own group as the top, the path in /proc may not be there; the top is.
    """
    cgroups = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, name = (cgroups, cgroups / "unified"), "memory.max"
        elif "memory" in controllers.split(","):
            tops, name = (cgroups / "memory",), "memory.limit_in_bytes"
        else:
            continue
        for top in tops:
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                file = folder / name
                if folder.is_relative_to(top) and file.is_file() and (text := file.read_text().strip()) != "max":
                    yield int(text)


def processor(root: Path = ROOT) -> str:
    """The processor's name, such as "AMD EPYC"."""
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine  # ARM's has no such line


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus(root: Path = ROOT) -> tuple[str, ...]:
    """NVIDIA's GPUs as the driver lists them, and what of them is visible where that is limited."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = [line.partition(":")[2].strip() for file in files for line in file.read_text().splitlines()[:1]]
    visible = [f"{name}={os.environ[name]}" for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ]
    return (*models, *visible)
