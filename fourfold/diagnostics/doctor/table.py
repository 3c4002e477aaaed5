"""What the doctor says, for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fourfold.diagnostics.doctor.examine import Examination
from fourfold.diagnostics.doctor.verdict import Severity, Verdict
from fourfold.diagnostics.tables import visible

STYLES: dict[Severity, str] = {"ill": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}


def examination_table(examination: Examination) -> RenderableType:
    """Verdicts with evidence and remedy, and below what could not be judged."""
    table = Table(box=SIMPLE_HEAD, title=None, show_lines=False)
    table.add_column("finding", no_wrap=True)
    table.add_column("sure", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("evidence and remedy", overflow="fold", ratio=1)
    for verdict in examination.verdicts:
        name = Text(f"{verdict.severity}: {verdict.name}", style=STYLES[verdict.severity])
        table.add_row(name, f"{verdict.confidence:.0%}", _steps(verdict), _said(verdict))
    parts: list[RenderableType] = [visible(f"the run: {examination.state}")]
    parts.append(table if examination.verdicts else Text("nothing could be judged"))
    if examination.unjudged:
        parts.append(Text("not judged:"))
        parts += [visible(f"  {', '.join(names)}: {reason}") for reason, names in examination.reasons.items()]
    return Group(*parts)


def _steps(verdict: Verdict) -> str:
    first, last = verdict.steps
    return str(first) if first == last else f"{first}-{last}"


def _said(verdict: Verdict) -> Text:
    said = visible(verdict.evidence)
    return said if not verdict.remedy else said.append("\n").append(visible(f"try {verdict.remedy}"))
