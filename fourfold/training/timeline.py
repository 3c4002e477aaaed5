"""memory.jsonl in a run's folder: what is resident, and the peaks of phases and roles, stage by stage, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fourfold.diagnostics.run_files import TIMELINE
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.files import write_atomically
from fourfold.memory.meter import Span


class Timeline:
    """One JSON object a line: `kind` "span" (a phase or a role in it), or "resident" (bytes by role).

    `stage` is "" for what comes before the first stage: loading the base model. `step` is that of ppo; 0 stands for
    what belongs to none that was finished: loading, pre-flight, a whole stage, a step that was broken off. The lines of
    several processes that worked on a run follow each other.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / TIMELINE

    def go_on_from(self, step: int) -> None:
        """Take out the lines of later steps, which are done again."""
        if self._path.is_file():
            kept = [row for row in read_jsonl(self._path) if row["step"] <= step]
            write_atomically(self._path, _lines(kept))

    def resident(self, stage: str, step: int, sizes: Mapping[str, int]) -> None:
        """Append what each role holds as a process takes a stage up after this step."""
        self._append([{"kind": "resident", "stage": stage, "step": step, **sizes}])

    def spans(self, stage: str, step: int, spans: Iterable[Span]) -> None:
        """Append what a step took, checkpoints written since the step before included."""
        self._append([{"kind": "span", "stage": stage, "step": step, **span._asdict()} for span in spans])

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(_lines(rows))


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
