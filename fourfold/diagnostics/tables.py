"""Tables for people: roles, metrics before and after, samples side by side."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fourfold.planner.advice import STEP_0
from fourfold.planner.bill import PHASES

if TYPE_CHECKING:
    from torch import nn

    from fourfold.models.assembly import FourModels

# Columns of a table that is written into a log.
LOG_WIDTH = 120

# Written by a model and shown on a terminal: control codes and direction marks could move the cursor or hide text.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # parts of ordinary words and emoji


@dataclass(frozen=True, slots=True)
class RoleRow:
    """One line of the table of roles."""

    model: str
    parameters: int
    trainable: int
    dtype: str
    device: str
    bytes: int
    resident_bytes: int  # without what is parked now


def visible(text: str) -> Text:
    """Text as it is: no markup is read from it, and characters that cannot be seen are shown as escapes."""
    return Text("".join(map(_shown, text)))


def _shown(character: str) -> str:
    hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
    return character.encode("unicode_escape").decode() if hidden else character


def before_after_table(before: Mapping[str, float], after: Mapping[str, float], *, title: str = "") -> Table:
    """Metrics before and after training with their change; one that is missing on a side is shown as a dash."""
    table = Table(title=title or None, box=SIMPLE_HEAD)
    table.add_column("metric", no_wrap=True)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        change = "-" if old is None or new is None else f"{new - old:+.4g}"
        table.add_row(visible(name), _number(old), _number(new), change)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def memory_table(memory: Mapping[str, Mapping[str, int]]) -> Table:
    """Peak bytes by phase, and by phase and role below it: predicted by the planner beside measured."""
    table = Table(title="peak memory of ppo, MiB", box=SIMPLE_HEAD)
    table.add_column("phase", no_wrap=True)
    for column in ("predicted", "measured", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in sorted(memory, key=lambda name: (PHASES.index(name.partition("/")[0]), name)):
        predicted, measured = memory[name]["predicted_bytes"], memory[name]["measured_bytes"]
        _, has_role, role = name.partition("/")
        shown = (f"{predicted / 2**20:,.1f}", f"{measured / 2**20:,.1f}", f"{predicted / measured - 1:+.1%}")
        table.add_row(f"  {role}" if has_role else name, *shown)
    return table


def study_table(report: Mapping[str, Any]) -> Table:
    """Measures of a study's variants, means over seeds with their standard deviation; variants are columns."""
    variants = report["variants"]
    table = Table(title=f"study {report['study']}: {report['question']}", box=SIMPLE_HEAD)
    table.add_column("measure", overflow="fold")
    for name in variants:
        table.add_column(visible(name), justify="right", overflow="fold")
    for measure in report["measures"]:
        cells = []
        for variant in variants.values():
            mean, spread = variant["mean"].get(measure["name"]), variant["std"].get(measure["name"])
            cells.append(_number(mean) + ("" if spread is None else f" ± {spread:.2g}"))
        if set(cells) != {"-"}:
            table.add_row(f"{measure['title']}, {measure['unit']}", *cells)
    seconds = [sum(run.get("seconds", 0.0) for run in variant["runs"]) for variant in variants.values()]
    table.add_row("seconds of ppo, all seeds", *(f"{spent:.0f}" for spent in seconds))
    failed = [sum(run["status"] == "failed" for run in variant["runs"]) for variant in variants.values()]
    if any(failed):
        table.add_row("runs that failed", *map(str, failed))
    return table


def samples_table(rows: Sequence[tuple[str, str, str]], *, names: tuple[str, str] = ("before", "after")) -> Table:
    """Prompts with the response before and after, side by side."""
    table = Table(box=SIMPLE_HEAD, show_lines=True)
    for column in ("prompt", *names):
        table.add_column(column, overflow="fold", ratio=1)
    for prompt, before, after in rows:
        table.add_row(visible(prompt), visible(before), visible(after))
    return table


def role_rows(models: FourModels) -> list[RoleRow]:
    """A row for what the roles share, where they do, and for each role: a tensor that several hold is counted once.

    The language head above a shared trunk stands in the trunk's row.
    """
    from fourfold.memory.offload import is_elsewhere, residency_of
    from fourfold.memory.quantization import stands_for

    counted = set[int]()
    parts = dict(models.shared_parameters())
    quantized = {} if models.base.trunk is None else stands_for(models.base.trunk)
    roles = {name: getattr(models, name) for name in ("actor", "critic", "reference", "reward")} | models.classifiers
    roles[STEP_0] = models.step_0
    for name, role in roles.items():
        parts[name] = [] if role is None else list(role.parameters())
        quantized |= {} if role is None else stands_for(role)
    rows = []
    for name, parameters in parts.items():
        # By identity: tied weights are one parameter under two names.
        unique = {id(p): p for p in parameters if id(p) not in counted}
        counted |= unique.keys()
        role = roles.get(name)
        outside = getattr(role, "outside_torch", None)
        if outside is not None:
            rows.append(
                RoleRow(name, outside.parameters, 0, outside.dtype, outside.where, outside.bytes, outside.bytes)
            )
        elif unique:
            held = residency_of(role) or getattr(role, "masters", None)
            row = _role_row(name, list(unique.values()), quantized, "" if held is None else held.where)
            rows.append(replace(row, dtype="-", bytes=0, resident_bytes=0) if is_elsewhere(role) else row)
    return rows


def _role_row(
    name: str, parameters: Sequence[nn.Parameter], quantized: Mapping[int, tuple[str, int]], where: str
) -> RoleRow:
    """`quantized`: of codes and scales by their ids, the kind and how many weights they stand for."""
    from fourfold.memory.budget import tensor_bytes

    sizes: dict[str, int] = {}
    count = 0
    for p in parameters:
        dtype, numbers = quantized.get(id(p), (str(p.dtype).removeprefix("torch."), p.numel()))
        sizes[dtype] = sizes.get(dtype, 0) + p.numel() * p.element_size()
        count += numbers
    return RoleRow(
        model=name,
        parameters=count,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtype=" + ".join(sorted(sizes, key=lambda dtype: -sizes[dtype])),
        device=where or ", ".join(sorted({str(p.device) for p in parameters})),
        bytes=sum(sizes.values()),
        resident_bytes=tensor_bytes(parameters),
    )


def as_text(table: Table) -> str:
    """A table as plain lines, for a log."""
    stream = io.StringIO()
    Console(file=stream, width=LOG_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


def roles_table(rows: Sequence[RoleRow]) -> Table:
    """What is held by each model: parameters, how many are trained, type, device, memory."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in ("parameters", "trainable"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("dtype", "device"):
        table.add_column(column, no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    for row in rows:
        numbers = (f"{row.parameters:,}", f"{row.trainable:,}")
        table.add_row(visible(row.model), *numbers, row.dtype, row.device, f"{row.bytes / 2**20:,.1f}")
    return table
