"""Where metrics go: a JSON line a row, TensorBoard, and trackers of other projects."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from fourfold.diagnostics.finite import Row, finite
from fourfold.diagnostics.outside_trackers import OUTSIDE, Described, missing_package
from fourfold.files import write_atomically

TRACKERS = ("tensorboard", *OUTSIDE)


class Tracker(Protocol):
    """Takes rows of metrics; every row has a `step`."""

    def log(self, row: Row, kind: str) -> None:
        """Record one row of this kind (see diagnostics/metrics)."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class JsonlTracker:
    """One JSON object a line, on disk before `log` returns.

    `resume_after_step` keeps the rows up to that step and takes out later ones and a half-written last line, so a
    resumed log has every row once; without it the log starts empty. Rows must be logged before the checkpoint of
    their step is written.
    """

    def __init__(self, path: Path, *, resume_after_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resume_after_step is not None and path.exists():
            kept = [row for row in read_jsonl(path) if row["step"] <= resume_after_step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._last_step: dict[str, float] = {row["kind"]: row["step"] for row in kept}
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open until close()

    def log(self, row: Row, kind: str) -> None:
        """Append the row and wait until it is on disk."""
        numbers = finite(row)
        step, last = numbers["step"], self._last_step.get(kind)
        assert last is None or step > last, f"{kind} row of step {step} after that of step {last}: steps must rise"
        self._file.write(json.dumps({"kind": kind, **numbers}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_step[kind] = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Scalars named KIND/METRIC over `step`; resuming hides what an interrupted run logged for later steps."""

    def __init__(self, folder: Path, *, resume_after_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ValueError(missing_package("tensorboard")) from error
        purge = 0 if resume_after_step is None else resume_after_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, row: Row, kind: str) -> None:
        """Add every metric of the row and flush."""
        numbers = finite(row)
        for name, value in numbers.items():
            if name != "step":
                self._writer.add_scalar(f"{kind}/{name}", value, global_step=int(numbers["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def make_trackers(
    names: Iterable[str], folder: Path, *, resume_after_step: int | None = None, described: Described | None = None
) -> list[Tracker]:
    """`metrics.jsonl` in `folder`, always, and the trackers named; nothing is touched when one cannot be made.

    `described` is how the run is called at trackers of other projects.
    """
    described = described or Described("fourfold", folder.parent.name)
    extra: list[Tracker] = []
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"tracking.trackers names {name!r}; allowed: {', '.join(TRACKERS)}, or none")
        if name in OUTSIDE:
            extra.append(OUTSIDE[name](folder, described, resumed=resume_after_step is not None))
        else:
            extra.append(TensorBoardTracker(folder / name, resume_after_step=resume_after_step))
    return [JsonlTracker(folder / "metrics.jsonl", resume_after_step=resume_after_step), *extra]


def read_jsonl(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a log, of one kind or all; a half-written last line is left out, any other bad line an error."""
    lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        row = None
        with contextlib.suppress(ValueError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            row = json.loads(line)
        if isinstance(row, dict) and {"kind", "step"} <= row.keys():
            rows.append(row)
        elif line and any(rest for rest in lines[number:]):  # a killed writer can only spoil the end of the file
            raise ValueError(
                f"{path}, line {number}: not a row of metrics ({line[:60]!r}); "
                "allowed: JSON objects with kind and step; remove that line, or move the file away"
            )
    return [row for row in rows if kind is None or row["kind"] == kind]
