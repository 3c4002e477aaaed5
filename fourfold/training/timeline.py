"""memory.jsonl in the folder of the stage ppo: what is resident, and the peaks of phases and roles, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fourfold.diagnostics.trackers import read_jsonl
from fourfold.files import write_atomically
from fourfold.memory.meter import Span

TIMELINE = "memory.jsonl"


class Timeline:
    """One JSON object a line: `kind` "resident" (bytes by role) once a process, "span" (a phase or role) every step.

    Resuming takes out the lines of later steps than the one that the run goes on from.
    """

    def __init__(self, folder: Path, *, step: int, resident: Mapping[str, int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / TIMELINE
        kept: list[dict[str, Any]] = []
        if step and self._path.is_file():
            kept = [row for row in read_jsonl(self._path) if row["step"] <= step]
        kept.append({"kind": "resident", "step": step, **resident})
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))

    def note(self, step: int, spans: Iterable[Span]) -> None:
        """Append what a step took, checkpoints written since the step before included."""
        rows = [{"kind": "span", "step": step, **span._asdict()} for span in spans]
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
