"""What a finished study came to, kept as a result: `python -m benchmarks.studies OUTPUT [OUTPUT ...]`.

OUTPUT is the folder of `fourfold study`; what its study.json says of every variant becomes a result, and the table of
docs/studies.md. A study asks what comes of a setting, so nothing in it is a target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import (
    ROOT,
    Figure,
    Result,
    cell,
    commit,
    hardware,
    newest,
    today,
    versions,
    write_result,
)
from fourfold.config.loading import CONFIG

PACKAGES = ("torch", "transformers")
REPORT = "study.json"


def result_of(output: Path) -> Result:
    """The result of the study in this folder; ValueError for a folder without one, or one that is not finished."""
    if not (output / REPORT).is_file():
        raise ValueError(f"{output} has no {REPORT}; give the folder that `fourfold study` has written")
    study: Mapping[str, Any] = json.loads((output / REPORT).read_text(encoding="utf-8"))
    runs = [run for variant in study["variants"].values() for run in variant["runs"]]
    if not runs or any(run["status"] != "done" for run in runs):
        raise ValueError(f"{output}: not every run of the study has finished; the same command goes on")
    units = {each["name"]: each["unit"] for each in study["measures"]}
    config = {
        "study": study["study"],
        "steps": study["steps"],
        "seeds": study["seeds"],
        "titles": {each["name"]: each["title"] for each in study["measures"]},
        "variants": {name: variant["about"] for name, variant in study["variants"].items()},
        "settings": {
            name: (output / name / f"seed-{study['seeds'][0]}" / CONFIG).read_text(encoding="utf-8")
            for name in study["variants"]
        },
    }
    return Result(
        name=f"study-{study['study']}",
        date=today(),
        hardware=hardware(),
        versions=versions(PACKAGES),
        commit=commit(),
        config=config,
        figures=tuple(_figures(study["variants"], units)),
    )


def _figures(variants: Mapping[str, Any], units: Mapping[str, str]) -> list[Figure]:
    found = []
    for name, variant in variants.items():
        finals = [run["final"] for run in variant["runs"]]
        for measure, unit in units.items():
            if values := [final[measure] for final in finals if measure in final]:
                found.append(Figure.of(f"{name}: {measure}", values, unit))
    return found


def study_table(result: Result) -> list[str]:
    """A row for each measure, a column for each variant: medians over the seeds, ranges in brackets."""
    values, variants = {figure.name: figure for figure in result.figures}, result.config["variants"]
    rows = [f"| measure | {' | '.join(variants)} |", "|---" * (len(variants) + 1) + "|"]
    for name, title in result.config["titles"].items():
        cells = [values.get(f"{variant}: {name}") for variant in variants]
        if any(cells):
            unit = next(each.unit for each in cells if each is not None)
            rows.append(f"| {title} ({unit}) | {' | '.join(map(cell, cells))} |")
    seeds = ", ".join(map(str, result.config["seeds"]))
    rows += ["", f"* {result.config['steps']} steps, seed{'s' * (len(result.config['seeds']) != 1)} {seeds}."]
    return rows + [f"* {name}: {about}." for name, about in variants.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the studies and write a result for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies", description=__doc__)
    parser.add_argument("outputs", nargs="+", type=Path, metavar="OUTPUT", help="folder of a finished study")
    for output in parser.parse_args(arguments).outputs:
        found = result_of(output)
        print(write_result(found, instead_of=newest(found.name)).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
