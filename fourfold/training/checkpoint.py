"""Checkpoints that are whole or not there: written aside, made durable, renamed; verified before they are used.

A checkpoint is a folder `step-00000012` with one safetensors file for each group of tensors, `state.json`, and
`manifest.json`, which is written last and holds size and sha256 of every file and of itself. Nothing is unpickled.
The order of write, fsync, rename, fsync of the folder follows Pillai et al. 2014, "All File Systems Are Not Created
Equal: On the Complexity of Crafting Crash-Consistent Applications".
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.errors import RunFailed
from fourfold.files import sync, write_atomically, write_durably
from fourfold.tensor_files import Source, TensorFile, size_of, write_tensors
from fourfold.training.records import flatten_optimizer, restore_optimizer, restore_rng, rng_state

__all__ = [
    "SCHEMA",
    "Checkpoint",
    "CheckpointStore",
    "Schema",
    "flatten_optimizer",
    "restore_optimizer",
    "restore_rng",
    "rng_state",
]

log = logging.getLogger(__name__)

FOLDER = re.compile(r"step-(\d{8,})")
GROUP = re.compile(r"[a-z0-9_]+")
# The JSON files and the folder itself, beside the tensors: an upper bound for the question whether there is room.
OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Schema:
    """The version of what `state` holds; `added[v]` gives, by dotted key, what version v added and its old meaning."""

    version: int
    added: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def migrate(self, state: dict[str, Any], version: int) -> list[str]:
        """Fill in what a state of an older version lacks; returns the keys that were filled in (FAULTS K4)."""
        filled = []
        for newer in range(version + 1, self.version + 1):
            for key, value in self.added.get(newer, {}).items():
                table = state
                *path, name = key.split(".")
                for part in path:
                    table = table.setdefault(part, {})
                if name not in table:
                    table[name] = copy.deepcopy(value)
                    filled.append(key)
        return filled


SCHEMA = Schema(
    version=2,
    added={2: {"batch_sizes": {}}},  # rows at once after halvings: none that differ from the settings'
)


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    state: dict[str, Any]
    path: Path
    groups: tuple[str, ...]

    def tensors(self, name: str) -> TensorFile:
        """The tensors of one group, on the CPU, each read when it is asked for."""
        if name not in self.groups:
            raise ValueError(f"{self.path}: no tensors {name!r}; allowed: {', '.join(self.groups)}")
        return TensorFile(self.path / f"{name}.safetensors")


class CheckpointStore:
    """The checkpoints of one stage: keeps the last `keep_last` and the best; one process writes at a time."""

    def __init__(self, root: Path, keep_last: int, *, schema: Schema = SCHEMA) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last: given {keep_last}; allowed: 1 or more")
        self.root = root
        self.keep_last = keep_last
        self.warnings: list[str] = []
        self._schema = schema
        self._damaged: set[Path] = set()
        if root.is_dir():
            # A reader without the right to write, or beside a run that is saving, leaves the leftovers alone.
            with contextlib.suppress(OSError, _Busy), self._lock():
                self._clean_up()

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, Source]], state: dict[str, Any], *, is_best: bool = False
    ) -> Path:
        """Write a checkpoint and only then delete older ones; a failure leaves those as they were.

        Tensors are written one after the other: of what lies below the device one is in memory at a time.
        """
        text = _state_text(state)
        for name in tensors:
            if not GROUP.fullmatch(name):
                raise ValueError(f"tensors: given the group {name!r}; allowed: lower case letters, digits and _")
        needed = sum(size_of(each) for group in tensors.values() for each in group.values()) + OVERHEAD_BYTES
        path = self.root / f"step-{step:08d}"
        partial = self.root / f".partial-{path.name}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self._clean_up()
                self._check_room(needed, partial)
                # Saved once more, a step is still the best that it was.
                is_best = is_best or (path not in self._damaged and _says_best(path))
                try:
                    self._write(partial, step, tensors, text, is_best)
                    self._put_in_place(partial, path)
                except BaseException:
                    self._clean_up()
                    raise
                self._damaged.discard(path)
                if is_best:
                    self._point_to_best(path)
                self._prune(step)
        except _Busy:
            raise RunFailed(
                f"{self.root}: another process is writing checkpoints here; let it end, or use another output"
            ) from None
        except OSError as error:
            raise RunFailed(self._disk_message(error, step, needed)) from error
        return path

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint; damaged ones are named in `warnings` and passed over."""
        return self._first_intact(self._folders())

    def load_best(self) -> Checkpoint | None:
        """The intact checkpoint that was saved as the best last."""
        return self._first_intact([path for path in self._folders() if _says_best(path)])

    # Reading

    def _folders(self) -> list[Path]:
        """Checkpoint folders, newest first."""
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if FOLDER.fullmatch(path.name)]
        return sorted(found, key=_step_of, reverse=True)

    def _first_intact(self, folders: list[Path]) -> Checkpoint | None:
        for path in folders:
            try:
                return self._open(path)
            except Damaged as damage:
                self._damaged.add(path)
                self._warn(f"{path} is passed over: {damage}")
        return None

    def _open(self, path: Path) -> Checkpoint:
        manifest = _read_manifest(path)
        if manifest["step"] != _step_of(path):
            raise Damaged(f"its manifest is that of step {manifest['step']}")
        for name, expected in manifest["files"].items():
            _verify(path / name, expected)
        version = manifest["schema_version"]
        if version > self._schema.version:
            raise ValueError(
                f"{path}: written by a newer version of fourfold (schema {version}; this one reads up to "
                f"{self._schema.version}); install that version, or start again in another output folder"
            )
        state = json.loads((path / "state.json").read_bytes())
        if version < self._schema.version:
            filled = self._schema.migrate(state, version)
            self._warn(
                f"{path}: written by an older version (schema {version}, now {self._schema.version}); "
                f"set to defaults: {', '.join(filled) or 'nothing'}"
            )
        groups = tuple(name.removesuffix(".safetensors") for name in manifest["files"] if name.endswith(".safetensors"))
        return Checkpoint(step=manifest["step"], state=state, path=path, groups=groups)

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        log.warning("%s", message)

    # Writing

    def _write(
        self, partial: Path, step: int, tensors: Mapping[str, Mapping[str, Source]], state: str, is_best: bool
    ) -> None:
        partial.mkdir()
        for name, group in tensors.items():
            write_tensors(partial / f"{name}.safetensors", group)
        write_durably(partial / "state.json", state)
        files = {path.name: _fingerprint(path) for path in sorted(partial.iterdir())}
        manifest = {"schema_version": self._schema.version, "step": step, "best": is_best, "files": files}
        write_durably(partial / "manifest.json", json.dumps({**manifest, "seal": _seal(manifest)}, indent=1))
        sync(partial)

    def _put_in_place(self, partial: Path, path: Path) -> None:
        """Rename; a checkpoint of the same step is set aside until the new one is durable."""
        aside = self.root / f".replaced-{path.name}"
        if path.exists():
            os.rename(path, aside)
        os.rename(partial, path)
        sync(self.root)
        if aside.exists():
            shutil.rmtree(aside)

    def _point_to_best(self, path: Path) -> None:
        """For people and other programs; the manifests say the same, so a crash before this line loses nothing."""
        write_atomically(self.root / "best.json", json.dumps({"step": _step_of(path), "folder": path.name}))

    def _prune(self, step: int) -> None:
        """Delete all but the last and the best; later steps (a damaged end that was passed over) are not counted."""
        folders = [path for path in self._folders() if _step_of(path) <= step]
        intact = [path for path in folders if path not in self._damaged]
        best = next((path for path in intact if _says_best(path)), None)
        for path in folders:
            if path not in intact[: self.keep_last] and path != best:
                # Renamed first, so that a crash in the middle does not leave half a checkpoint under its name.
                gone = self.root / f".partial-{path.name}"
                os.rename(path, gone)
                shutil.rmtree(gone)

    def _clean_up(self) -> None:
        """Undo what an interrupted save left: half-written folders go, a checkpoint set aside comes back."""
        sync(self.root)  # a new checkpoint is durable before the one that it replaces goes
        for path in self.root.glob(".partial-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for aside in self.root.glob(".replaced-*"):
            path = self.root / aside.name.removeprefix(".replaced-")
            if path.exists():
                shutil.rmtree(aside)
            else:
                os.rename(aside, path)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Held while the folder is changed; the system lets go of it when the process dies."""
        with open(self.root / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _Busy from None
            except OSError as error:
                # Some network file systems have no locks; one run per output folder is then up to the user.
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            yield

    def _check_room(self, needed: int, partial: Path) -> None:
        if shutil.disk_usage(self.root).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))

    def _disk_message(self, error: OSError, step: int, needed: int) -> str:
        free = shutil.disk_usage(self.root if self.root.is_dir() else Path.cwd()).free
        return (
            f"save: the checkpoint of step {step} could not be written: {error.strerror or error} "
            f"({error.filename or self.root}); "
            f"it needs {needed:,} bytes, {free:,} are free on that disk; free some room, lower "
            "checkpoint.keep_last, or move "
            f"output; the checkpoints before it are intact and the same command goes on from them"
        )


class _Busy(Exception):
    """Another process holds the lock."""


def _step_of(path: Path) -> int:
    found = FOLDER.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _state_text(state: dict[str, Any]) -> str:
    """JSON that reads back equal; anything that would come back changed is refused now rather than at the resume."""
    text = json.dumps(state, allow_nan=False, indent=1)
    if json.loads(text) != state:
        raise ValueError(
            "state: comes back changed from JSON; allowed: dicts with text keys, lists, numbers, texts, None"
        )
    return text


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        seal = manifest.pop("seal")
    except FileNotFoundError:
        raise Damaged("manifest.json is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"manifest.json cannot be read ({error})") from error
    if seal != _seal(manifest):
        raise Damaged("manifest.json does not match its own sha256")
    return manifest


def _verify(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise Damaged(f"{path.name} has {size:,} bytes instead of {expected['bytes']:,}")
        if _fingerprint(path) != expected:
            raise Damaged(f"{path.name} does not match its sha256")
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error


def _says_best(path: Path) -> bool:
    """Whether the manifest says that this was the best when it was saved."""
    try:
        return _read_manifest(path)["best"]
    except (Damaged, OSError):
        return False
