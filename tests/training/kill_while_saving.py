"""Finds every line of a save after which the disk looks different, then kills a forked child that saves there.

Run by test_checkpoint.py: arguments are an empty folder, and 'new' (a further step) or 'again' (a step that is there).
Leaves a folder `killed-<n>` for each moment and prints how many there are.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from test_checkpoint import CheckpointStore, save

TRACED = ("fourfold/training/checkpoint.py", "fourfold/tensor_files.py", "fourfold/files.py", "shutil.py")


def on_disk(root: Path) -> list[tuple[str, int]]:
    """Names and sizes of everything below a folder."""
    return sorted((str(path), path.stat().st_size if path.is_file() else -1) for path in root.rglob("*"))


def save_with(root: Path, again: bool, at_line: Callable[[int], None]) -> None:
    """Save once, calling `at_line` with a running number before each line of the code that writes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        count += 1
        at_line(count)
        return trace

    store = CheckpointStore(root, 1)
    sys.settrace(trace)
    save(store, 2 if again else 3, is_best=not again)
    sys.settrace(None)


def moments(start: Path, whole: Path, again: bool) -> list[int]:
    """The numbers of the lines before which the disk has changed."""
    shutil.copytree(start, whole)
    found, last = [1], on_disk(whole)

    def compare(count: int) -> None:
        nonlocal last
        now = on_disk(whole)
        if now != last:
            found.append(count)
        last = now

    save_with(whole, again, compare)
    return found


def kill_at(wanted: int) -> Callable[[int], None]:
    """End this process, as the system would, at one line."""
    return lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == wanted else None


def main(base: Path, again: bool) -> None:
    """Save 1 (the best) and 2, then be killed while saving on."""
    start = base / "start"
    store = CheckpointStore(start, 1)
    save(store, 1, is_best=True)
    save(store, 2)
    found = moments(start, base / "whole", again)
    for number, moment in enumerate(found):
        root = base / f"killed-{number}"
        shutil.copytree(start, root)
        child = os.fork()
        if child == 0:
            save_with(root, again, kill_at(moment))
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    print(len(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "again")
