"""`fourfold serve` in a process of its own, for sides whose reference or reward model is at a service."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.results import ROOT
from fourfold.config import RunConfig, dump_toml
from fourfold.config.checks import roles_at_a_service


def free_address() -> str:
    """An address of this machine at which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


@contextlib.contextmanager
def serving(config: RunConfig, folder: Path) -> Iterator[int | None]:
    """Within, a process holds the roles that the run leaves to a service: its id, None where there are none."""
    roles = roles_at_a_service(config)
    if not roles:
        yield None
        return
    file, port = folder / "service.toml", urlsplit(config.service.url).port
    file.write_text(dump_toml(config), encoding="utf-8")
    command = [sys.executable, "-m", "fourfold", "serve", str(file), "--roles", ",".join(roles), "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _wait(process)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _wait(process: subprocess.Popen[str]) -> None:
    """Until the service says that it serves."""
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("serving "):
            return
    raise ValueError(f"the service ended before it could be asked; it said: {''.join(said).strip()}")
