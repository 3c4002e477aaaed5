"""How a run stands: whether a process works on it, and how the last one ended; kept in `state.json`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from fourfold.diagnostics.run_files import STATE
from fourfold.errors import Interrupted, RunFailed
from fourfold.files import write_atomically

State = Literal["running", "finished", "interrupted", "failed", "killed", "unknown"]
# The start of a process is known to a hundredth of a second, which is rounded when it is asked for.
SAME_SECONDS = 1.0
MESSAGE_CHARACTERS = 4000


@dataclass(frozen=True)
class RunState:
    """What the last process on a run has said of itself; "killed" and "unknown" are what a reader makes of it.

    `said` is the message of an error, `blamed` who was at fault (RunFailed); `since` and `at` are seconds since 1970:
    when the process began, when it wrote.
    """

    state: State
    stages: tuple[str, ...] = ()
    said: str = ""
    blamed: str = ""
    process: int = 0
    born: float = 0.0
    host: str = ""
    since: float = 0.0
    at: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether no process can be at work any more, as far as can be seen from here."""
        return self.state != "running"


def read_state(root: Path) -> RunState:
    """The state of the run in a folder. A process of this host that is not there any more was killed."""
    try:
        record = json.loads((root / STATE).read_text(encoding="utf-8"))
        state = RunState(**(record | {"stages": tuple(record["stages"])}))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return RunState("unknown")
    if state.state == "running" and state.host == socket.gethostname() and not _alive(state):
        return replace(state, state="killed")
    return state


def _alive(state: RunState) -> bool:
    try:
        return abs(psutil.Process(state.process).create_time() - state.born) < SAME_SECONDS
    except psutil.Error:
        return False


@contextlib.contextmanager
def noted_state(root: Path, stages: Sequence[str]) -> Iterator[None]:
    """Note that this process works on these stages of a run, and at the end how it ended."""
    own = psutil.Process()
    now = time.time()
    begun = RunState(
        "running",
        tuple(stages),
        process=os.getpid(),
        born=own.create_time(),
        host=socket.gethostname(),
        since=now,
        at=now,
    )
    _write(root, begun)
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | Interrupted)
        said = str(error)[:MESSAGE_CHARACTERS] or type(error).__name__
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            ended = replace(begun, state="interrupted" if stopped else "failed", said=said, at=time.time())
            _write(root, replace(ended, blamed=_blamed(error)))
        raise
    _write(root, replace(begun, state="finished", at=time.time()))


def _blamed(error: BaseException | None) -> str:
    """Whom the error, or one that has led to it, blames: the layers that an error passes add to its message alone."""
    while error is not None:
        if isinstance(error, RunFailed) and error.blamed:
            return error.blamed
        error = error.__cause__
    return ""


def _write(root: Path, state: RunState) -> None:
    write_atomically(root / STATE, json.dumps(asdict(state), indent=2) + "\n")
