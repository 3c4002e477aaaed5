"""What got slower, larger or worse since the last committed result: `python -m benchmarks.regression [NAME ...]`.

A figure is compared, as a ratio of medians, with that of the newest committed result of the same name, hardware and
configuration. It is worse when the ranges of both do not touch: the best of the new repeats is worse than the worst of
the old ones, by more than MARGIN. A figure that was measured once has SINGLE for its range.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.results import FOLDER, ROOT, Figure, Result, number, origin, read_results

# Ranges of a few repeats are narrow by chance; and what a single measurement is taken to spread by to either side.
MARGIN, SINGLE = 0.02, 0.1
LESS_IS_BETTER = ("s", "ms a token", "MiB", "GiB", "exponent")
MORE_IS_BETTER = ("1/s", "times", "tokens/s", "share of the limit", "MFU")
# Of a configuration: what came out of it rather than went into it.
OUTCOMES = ("sides", "levers", "presets", "products")
Verdict = Literal["worse", "better", "as before"]


@dataclass(frozen=True)
class Change:
    """A figure then and now."""

    name: str
    unit: str
    before: Figure
    now: Figure
    less_is_better: bool

    @property
    def ratio(self) -> float:
        """now / before."""
        return self.now.value / self.before.value

    @property
    def verdict(self) -> Verdict:
        """Whether the ranges lie apart, and which way."""
        (low, high), (new_low, new_high) = _range(self.before), _range(self.now)
        if new_low > high * (1 + MARGIN):
            return "worse" if self.less_is_better else "better"
        if new_high < low * (1 - MARGIN):
            return "better" if self.less_is_better else "worse"
        return "as before"

    def __str__(self) -> str:
        then, now = number(self.before.value), number(self.now.value)
        return f"{self.verdict}: {self.name}: {then} -> {now} {self.unit} (x {self.ratio:.2f})"


def _range(figure: Figure) -> tuple[float, float]:
    if figure.spread is not None and figure.spread[0] < figure.spread[1]:
        return figure.spread
    return figure.value * (1 - SINGLE), figure.value * (1 + SINGLE)


def less_is_better(figure: Figure) -> bool | None:
    """By the target where there is one, else by the unit; None: neither way is better."""
    if figure.target is not None:
        return figure.target.startswith("<")
    if figure.unit in LESS_IS_BETTER or (figure.unit == "ratio" and figure.against is not None):
        return True
    return False if figure.unit in MORE_IS_BETTER else None


def changes(before: Result, now: Result) -> list[Change]:
    """Every figure of both that can be better or worse."""
    old = {figure.name: figure for figure in before.figures}
    found = []
    for figure in now.figures:
        then, less = old.get(figure.name), less_is_better(figure)
        if then is not None and less is not None and then.unit == figure.unit and then.value > 0:
            found.append(Change(figure.name, figure.unit, then, figure, less))
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys in which two configurations ask for other work."""
    keys = sorted({*before, *now} - {*OUTCOMES})
    return [key for key in keys if key in before and key in now and before[key] != now[key]]


def committed(folder: Path = FOLDER, root: Path = ROOT) -> list[Result]:
    """The results of the last commit, oldest first."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"{root}: results are compared with committed ones, but git said: {done.stderr.strip()}")
        return done.stdout

    place = folder.relative_to(root).as_posix()
    names = sorted(
        name for name in git("ls-tree", "--name-only", "HEAD", f"{place}/").split() if name.endswith(".json")
    )
    return [Result.model_validate_json(git("show", f"HEAD:{name}")) for name in names]


def pairs(old: Sequence[Result], new: Sequence[Result], names: Sequence[str]) -> Iterator[tuple[Result | None, Result]]:
    """The newest result of each name and hardware that is not committed as it is, after what it is compared with."""
    newest = {(each.name, each.hardware): each for each in new}
    before = {(each.name, each.hardware): each for each in old}
    for key, result in newest.items():
        if (not names or result.name in names) and result not in old:
            yield before.get(key), result


def report(old: Sequence[Result], new: Sequence[Result], names: Sequence[str] = ()) -> tuple[list[str], bool]:
    """Lines for people, and whether anything is worse."""
    lines, worse = [], False
    for before, now in pairs(old, new, names):
        lines.append(f"{now.name}: {origin(now)}")
        if before is None:
            lines.append("  nothing is committed to compare it with")
        elif other := differences(before.config, now.config):
            lines.append(f"  cannot be compared with {before.file_name}: other {', '.join(other)}")
        else:
            found = changes(before, now)
            told = [change for change in found if change.verdict != "as before"]
            worse |= any(change.verdict == "worse" for change in told)
            lines.append(f"  against {origin(before)}:")
            lines += [f"  {change}" for change in sorted(told, key=lambda change: change.verdict != "worse")]
            lines.append(f"  {len(found) - len(told)} figures as before")
    return lines or ["no result differs from the committed ones"], worse


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing got worse, 1 when something did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regression", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results, such as peer (default: all that are new)")
    lines, worse = report(committed(), read_results(FOLDER), parser.parse_args(arguments).names)
    print("\n".join(lines))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
