"""What a measurement leaves behind: one JSON file with hardware, versions, commit, configuration and figures."""

from __future__ import annotations

import datetime
import operator
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
# What a result depends on: a change of a document or of another result does not make a commit inexact.
# Of a processor's instructions for matrix products those that make it another machine, the fastest first.
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd")
MEASURED = ("fourfold", "benchmarks/*.py", "benchmarks/*.txt", "pyproject.toml", "constraints.txt")
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

Text = Annotated[str, StringConstraints(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]


class Record(BaseModel):
    """Immutable, complete, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Figure(Record):
    """One number, what it is measured against and what it should be."""

    name: Text
    value: Finite
    unit: Text
    spread: tuple[Finite, Finite] | None = Field(description="Least and greatest of the repeats; none: measured once.")
    against: Text | None = Field(description="What the value is a comparison with; none: it stands alone.")
    target: Text | None = Field(description="A comparison and a number, such as '<= 0.8'; none: only recorded.")

    @field_validator("target")
    @classmethod
    def _target_can_be_read(cls, target: str | None) -> str | None:
        if target is not None:
            _comparison(target)
        return target

    @model_validator(mode="after")
    def _value_lies_in_its_spread(self) -> Figure:
        if self.spread is not None and not self.spread[0] <= self.value <= self.spread[1]:
            raise ValueError(f"{self.name}: value {self.value} lies outside its spread {list(self.spread)}")
        return self

    @classmethod
    def of(cls, name: str, values: Sequence[float], unit: str, target: str | None = None) -> Figure:
        """Median and range of repeats; `model_copy` changes what differs."""
        spread = (min(values), max(values))
        return cls(name=name, value=statistics.median(values), unit=unit, spread=spread, against=None, target=target)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        if self.target is None:
            return None
        compare, bound = _comparison(self.target)
        return bool(COMPARISONS[compare](self.value, bound))


class Result(Record):
    """A finished measurement."""

    name: Slug
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    hardware: Text
    versions: dict[str, str] = Field(min_length=1)
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}(-dirty)?$")]
    config: dict[str, Any] = Field(min_length=1)
    figures: tuple[Figure, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Result:
        names = [figure.name for figure in self.figures]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"figures named more than once: {', '.join(twice)}")
        return self

    @property
    def file_name(self) -> str:
        """<date>-<hardware>-<name>.json"""
        return f"{self.date}-{slug(self.hardware)}-{self.name}.json"


def _comparison(target: str) -> tuple[str, float]:
    found = re.fullmatch(r"(<=|>=|<|>) (-?\d+(?:\.\d+)?)", target)
    if found is None:
        raise ValueError(f"target {target!r} cannot be read; allowed: {', '.join(COMPARISONS)}, a blank and a number")
    return found[1], float(found[2])


def slug(text: str) -> str:
    """Lower-case letters, digits and single hyphens, for file names."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def number(value: float) -> str:
    """Three or four figures that mean something: 6,849, 24.0, 0.83, 0.0123."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or value == 0 else f"{value:.3g}"


def cell(figure: Figure | None) -> str:
    """A median with the range in brackets, where repeats differ; "-" for what was not measured."""
    if figure is None:
        return "-"
    low, high = figure.spread or (figure.value, figure.value)
    return number(figure.value) if low == high else f"{number(figure.value)} ({number(low)} - {number(high)})"


def write_result(result: Result, folder: Path = FOLDER, *, instead_of: Result | None = None) -> Path:
    """Write the result; measuring again on the same day and hardware replaces it, and `instead_of` goes in any case."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.file_name
    partial = path.with_suffix(".partial")
    partial.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
    if instead_of is not None and instead_of.file_name != path.name:
        (folder / instead_of.file_name).unlink()
    return path


def read_result(path: Path) -> Result:
    """Read and check a results file; a file that is incomplete or misnamed is a ValueError that names it."""
    try:
        result = Result.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a result: {error}") from error
    if path.name != result.file_name:
        raise ValueError(f"{path}: the content belongs into {result.file_name}; rename the file")
    return result


def read_results(folder: Path = FOLDER) -> list[Result]:
    """All results of a folder, oldest first."""
    return [read_result(path) for path in sorted(folder.glob("*.json"))]


def newest(name: str, folder: Path = FOLDER) -> Result | None:
    """The newest result of this name."""
    return next((each for each in reversed(read_results(folder)) if each.name == name), None)


def stamp_of(result: Result) -> dict[str, Any]:
    """When, where and of what a result was measured, for the parts of it that outlive a result."""
    return {name: getattr(result, name) for name in ("date", "hardware", "commit", "versions")}


def origin(result: Result, about: Mapping[str, Any] | None = None) -> str:
    """When, where and of what a result, or the part of it that `about` tells this of, was measured."""
    told = stamp_of(result) | dict(about or {})
    short = told["commit"][:10] + (" with changes" if told["commit"].endswith("-dirty") else "")
    libraries = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    return f"{told['date']}, {told['hardware']}; commit {short}; {libraries}"


def side_line(name: str, side: Mapping[str, Any]) -> str:
    """What a side of a comparison is and how much of it is trained."""
    trained = ", ".join(f"{role} {count:,}" for role, count in side["trainable_parameters"].items())
    return f"* {name}: {side['what']}. Trained parameters: {trained}."


def today() -> str:
    """Today's date in UTC, as file names carry it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def hardware(*, gpu: str = "no GPU") -> str:
    """Logical cores, processor, memory and accelerator of this machine, in words."""
    cores = os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    try:
        about_cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        about_cpu = ""
    return f"{cores} x {processor(about_cpu)}, {memory_gib:.0f} GiB, {gpu}"


def processor(about: str) -> str:
    """Name and widest instructions for matrix products, out of /proc/cpuinfo: machines rented under one name differ."""
    name = re.search(r"^model name\s*:\s*(.+)$", about, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", about, flags=re.MULTILINE)
    known = flags[1].split() if flags else []
    widest = next((f" ({each})" for each in INSTRUCTIONS if each in known), "")
    return (name[1].strip() if name else platform.machine()) + widest


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of installed packages."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def commit(root: Path = ROOT, measured: Sequence[str] = MEASURED) -> str:
    """The commit that is measured, with '-dirty' when measured files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"{root}: results name the commit they belong to, but git said: {done.stderr.strip()}")
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return head + "-dirty" if git("status", "--porcelain", "--", *measured) else head
