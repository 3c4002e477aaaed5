"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's contents, or the names in a folder, durable: a rename is on disk once its folder is (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: str | bytes) -> None:
    """Write a new file and wait until its contents are on disk; its name is durable after `sync` of its folder."""
    try:
        with open(path, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # Errors of write and fsync do not say which file they are about.
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace the contents of `path`: readers see the old contents or the new, never a part."""
    with replacing(path) as partial:
        write_durably(partial, data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, durably, that takes the place of `path` at the end; it is removed where that fails."""
    partial = path.with_name(f".partial-{path.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # what a killed process with our id left
        partial.unlink()
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def require_empty(target: Path) -> None:
    """ValueError where a folder that is to be written is there already and holds something, or cannot be made."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give another one")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{target}: {above} is a file, and no folder can be made below it; give another one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{target}: nothing can be written to {above} (no permission); give another one")


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into that becomes `target` when all is written, and is removed where that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{target.name}-", dir=target.parent))
    try:
        yield partial
        if target.exists():
            target.rmdir()
        os.chmod(partial, 0o755)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
