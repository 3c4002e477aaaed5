"""Write the tables of the documents from the results: `python -m benchmarks.report`, with --check only compare.

A table stands between `<!-- figures:NAME -->` and `<!-- /figures -->`; it shows the newest result of that name, or says
that there is none.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.levers_table import declared_table, levers_table
from benchmarks.limit import limit_table
from benchmarks.peer_table import peer_table
from benchmarks.planner_table import planner_table
from benchmarks.presets import judges_apart, presets_origins, presets_table
from benchmarks.quantization import quantization_table
from benchmarks.results import FOLDER, ROOT, Figure, Result, number, origin, read_results, side_line
from benchmarks.studies import study_table

BLOCK = re.compile(r"(<!-- figures:(?P<name>[a-z0-9-]+) -->\n)(?P<body>.*?)(<!-- /figures -->)", flags=re.DOTALL)
# The one block that is made from declarations, not from a result.
DECLARED = "declared-levers"
NOT_MEASURED = "Not measured yet."


def with_tables(text: str, results: Sequence[Result]) -> str:
    """The text with every table written anew; markers that do not pair up are a ValueError."""
    newest = {result.name: result for result in results}  # oldest first, so that the newest one stays
    opened, closed = text.count("<!-- figures:"), text.count("<!-- /figures -->")
    if not opened == closed == len(BLOCK.findall(text)):
        raise ValueError(
            f"{opened} '<!-- figures:NAME -->' lines and {closed} '<!-- /figures -->' lines do not pair up"
        )

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name == DECLARED:
            body = "\n".join(declared_table())
        else:
            body = table(newest[name]) if name in newest else NOT_MEASURED
        return f"{match[1]}{body}\n{match[4]}"

    return BLOCK.sub(block, text)


def table(result: Result) -> str:
    """A result as a Markdown table; below it what each side trains, and where and when it was measured."""
    if "levers" in result.config:
        return "\n".join(levers_table(result))
    if "presets" in result.config:
        apart = [line for told in judges_apart(result) for line in (told, "")]
        return "\n".join([*presets_table(result), "", *apart, *presets_origins(result)])
    if result.name.partition("-")[0] == "peer":
        rows = peer_table(result)
    elif result.name.partition("-")[0] == "limit":
        rows = limit_table(result)
    elif "study" in result.config:
        rows = study_table(result)
    elif result.name == "quantization":
        rows = quantization_table(result)
    elif "planner" in result.config:
        rows = planner_table(result)
    else:
        rows = ["| figure | value | least - greatest | against | target |", "|---|---:|---:|---|---|"]
        rows += [_row(figure) for figure in result.figures]
    if sides := result.config.get("sides"):
        rows += ["", *(side_line(name, side) for name, side in sides.items())]
    rows += ["", f"{origin(result)}."]
    return "\n".join(rows)


def _row(figure: Figure) -> str:
    unit = "" if figure.unit == "ratio" else f" {figure.unit}"
    spread = "" if figure.spread is None else f"{number(figure.spread[0])} - {number(figure.spread[1])}"
    target = "" if figure.target is None else f"{figure.target}: {'met' if figure.met else 'missed'}"
    return f"| {figure.name} | {number(figure.value)}{unit} | {spread} | {figure.against or ''} | {target} |"


def documents(root: Path) -> list[Path]:
    """The documents that may hold tables."""
    return [
        path for path in (*sorted(root.glob("README*.md")), *sorted((root / "docs").rglob("*.md"))) if path.is_file()
    ]


def update(root: Path, results: Sequence[Result], *, check: bool) -> list[Path]:
    """Documents whose tables were not up to date; written unless `check`."""
    outdated: list[Path] = []
    for path in documents(root):
        text = path.read_text(encoding="utf-8")
        try:
            wanted = with_tables(text, results)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if wanted != text:
            outdated.append(path)
            if not check:
                path.write_text(wanted, encoding="utf-8")
    return outdated


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all is up to date (afterwards, without --check), 1 when it is not, 2 when a table cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Write tables from the results.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a table is out of date")
    check = parser.parse_args(arguments).check
    try:
        outdated = update(ROOT, read_results(FOLDER), check=check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for path in outdated:
        print(f"{path.relative_to(ROOT)}: {'out of date; run make report' if check else 'tables written'}")
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
