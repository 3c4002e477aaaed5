"""Which build of torch `make setup` takes, and what it says; pip is played by a script that writes down its calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKE = shutil.which("make")
CPU = ["filelock", 'optree>=0.13.0; extra == "optree"']
CUDA = ["filelock", 'nvidia-cudnn-cu13==9.1; platform_system == "Linux"']
CUDA_TOOLKIT = ["filelock", 'cuda-toolkit[cudart]==13.0; platform_system == "Linux"']
WARNING = "pip is about to take a CUDA build of torch"

pytestmark = pytest.mark.skipif(MAKE is None or sys.platform != "linux", reason="needs make on Linux")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(
    folder: Path, *arguments: str, offered: Sequence[str] | None = CPU, gpu: bool = False
) -> tuple[list[str], str]:
    """The installations that pip was asked for, and stderr; `offered` is what pip's torch needs, None: it fails."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    packages = [] if offered is None else [{"metadata": {"name": "torch", "requires_dist": offered}}]
    (folder / "report.json").write_text(json.dumps({"install": packages}) if offered is not None else "")
    cases = [f'-c*) exec {sys.executable} "$@"', "*--dry-run*) cat report.json", '*) echo "$*" >>calls']
    script(folder / ".venv" / "bin" / "python", 'case "$*" in\n' + " ;;\n".join(cases) + "\nesac")
    tools = folder / "tools"
    tools.mkdir()
    for name in ("uname", "touch", "cat"):
        (tools / name).symlink_to(str(shutil.which(name)))
    if gpu:
        script(tools / "nvidia-smi", "echo GPU 0")
    assert MAKE is not None
    variables = {key: value for key, value in os.environ.items() if key not in ("TORCH_INDEX", "MAKEFLAGS")}
    done = subprocess.run(
        [MAKE, *arguments], cwd=folder, env=variables | {"PATH": str(tools)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text().splitlines()
    assert calls.pop() == "-m tools.precompile", "when everything is installed, what runs import is compiled"
    return calls, done.stderr


@pytest.mark.parametrize("offered", [CUDA, CUDA_TOOLKIT])
def test_a_cuda_build_without_a_gpu_is_announced_with_the_way_out(tmp_path: Path, offered: list[str]) -> None:
    calls, said = make(tmp_path, "setup", offered=offered)
    assert WARNING in said and "make setup TORCH_INDEX=URL" in said
    assert [call.split()[-1] for call in calls] == [".[dev]"], "it goes on all the same: nobody is asked"


@pytest.mark.parametrize(("offered", "gpu"), [(CPU, False), (CUDA, True), (None, False)])
def test_there_is_no_warning_where_none_is_due(tmp_path: Path, offered: list[str] | None, gpu: bool) -> None:
    calls, said = make(tmp_path, "setup", offered=offered, gpu=gpu)
    assert said == "" and [call.split()[-1] for call in calls] == [".[dev]"]
    assert "--index-url" not in calls[0], "where wheels come from is for pip's configuration to say"


def test_torch_alone_comes_from_the_index_that_is_given(tmp_path: Path) -> None:
    [torch, rest], said = make(tmp_path, "setup", "TORCH_INDEX=file:///wheels", offered=CUDA)
    assert torch.endswith("-c constraints.txt --no-deps --index-url file:///wheels torch")
    assert rest.endswith("-e .[dev]") and "--index-url" not in rest
    assert said == ""
