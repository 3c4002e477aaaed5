"""Rows of a JSONL, Parquet or CSV file or of a `datasets` id, each with the number under which an error names it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fourfold.config.schema import DatasetSection

REPORTED_ROWS = 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its number (line of a text file, else row, both counted from 1) and its values by column."""

    number: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one source, good and bad, in the order of the source."""

    name: str
    unit: str
    columns: tuple[str, ...]
    rows: tuple[Row | BadRow, ...]

    @property
    def unreadable(self) -> list[BadRow]:
        """Rows that are bad before any column is looked at."""
        return [row for row in self.rows if isinstance(row, BadRow)]


class BadRowsError(ValueError):
    """Every bad row of a source was counted; the message lists the first ten."""

    def __init__(self, table: Table, bad: list[BadRow]) -> None:
        self.total = len(bad)
        self.rows = tuple(bad[:REPORTED_ROWS])
        lines = [f"{table.name}: {self.total:,} of {len(table.rows):,} rows cannot be used; nothing was trained:"]
        lines += [f"  {table.name}, {table.unit} {row.number}: {row.reason}" for row in self.rows]
        if self.total > REPORTED_ROWS:
            lines.append(f"  and {self.total - REPORTED_ROWS:,} more")
        lines.append("mend or remove them, or name other columns in the table `columns` of the data set")
        super().__init__("\n".join(lines))


def read_table(section: DatasetSection) -> Table:
    """Read what `path` names: a file by its extension, else a `datasets` id 'name:split'; at most `max_rows` rows."""
    path = Path(section.path).expanduser()
    reader = _READERS.get(path.suffix.lower())
    if reader is not None:
        if not path.is_file():
            raise ValueError(f"{section.path}: there is no such file; try an absolute path, or check the name")
        table = reader(path, section.max_rows or None)
    elif path.exists() or ":" not in section.path:
        raise ValueError(
            f"{section.path!r} is no data set: allowed are files that end in {', '.join(_READERS)}, and `datasets` ids "
            "with their split, such as 'imdb:train'"
        )
    else:
        table = _read_hub(section.path, section.max_rows or None)
    if not table.rows:
        raise ValueError(f"{table.name}: holds no rows; allowed is one row or more")
    return table


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text; a ValueError says where it breaks."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"bytes that are not UTF-8 ({error.reason} at byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"bad JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("bad JSON (nested too deeply)") from None


def _read_jsonl(path: Path, limit: int | None) -> Table:
    # Lines end at \n only: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    with open(path, "rb") as file:
        lines = ((number, _without_mark(number, line).strip()) for number, line in enumerate(file, start=1))
        rows = tuple(_json_row(number, line) for number, line in islice((pair for pair in lines if pair[1]), limit))
    columns = {column: None for row in rows if isinstance(row, Row) for column in row.values}
    return Table(str(path), "line", tuple(columns), rows)


def _without_mark(number: int, line: bytes) -> bytes:
    return line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def _json_row(number: int, line: bytes) -> Row | BadRow:
    try:
        # Decoded here, because json.loads guesses UTF-16 and UTF-32 from zero bytes.
        values = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(number, f"bytes that are not UTF-8 ({error.reason} at byte {error.start + 1})")
    except ValueError as error:
        return BadRow(number, str(error))
    if not isinstance(values, dict):
        return BadRow(number, f'a JSON object was expected, such as {{"text": "..."}}; given: {kind(values)}')
    return Row(number, values)


def _read_csv(path: Path, limit: int | None) -> Table:
    # Bytes that are not UTF-8 become lone surrogates, so that they are reported with their line like any bad text.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _csv_lines(file)
        _, header = next(lines, (1, []))
        if isinstance(header, str):
            raise ValueError(f"{path}: the line with the column names cannot be read: {header}")
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise ValueError(f"{path}: the first line names {', '.join(map(repr, repeated))} twice; names must differ")
        rows = tuple(_csv_row(number, header, fields) for number, fields in islice(lines, limit))
    return Table(str(path), "line", tuple(header), rows)


def _csv_lines(file: Any) -> Iterator[tuple[int, list[str] | str]]:
    """(line where the row begins, fields or what is wrong with them); blank lines are passed over."""
    reader = csv.reader(file, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first, f"bad CSV ({error})"
        else:
            if fields:
                yield first, fields


def _csv_row(number: int, header: list[str], fields: list[str] | str) -> Row | BadRow:
    if isinstance(fields, str):
        return BadRow(number, fields)
    if len(fields) != len(header):
        return BadRow(
            number, f"{len(fields)} fields where the first line names {len(header)} columns ({', '.join(header)})"
        )
    return Row(number, {column: _cell(text) for column, text in zip(header, fields, strict=True)})


def _cell(text: str) -> Any:
    """A cell can only hold text, so a list of messages is written as JSON; any other cell stays as it is."""
    if not text.startswith("[{"):
        return text
    try:
        value = parse_json(text)
    except ValueError:
        return text
    is_messages = all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value)
    return value if is_messages else text


def _read_parquet(path: Path, limit: int | None) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = tuple(file.schema_arrow.names)
            values = (value for batch in file.iter_batches() for value in batch.to_pylist())
            rows = tuple(Row(number, row) for number, row in enumerate(islice(values, limit), start=1))
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {error}") from error
    return Table(str(path), "row", columns, rows)


def _read_hub(identifier: str, limit: int | None) -> Table:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{identifier!r} is taken for a `datasets` id, but that package is not installed; try: "
            "pip install 'fourfold[datasets]', or give a .jsonl, .parquet or .csv file"
        ) from error
    name, _, split = identifier.partition(":")
    if not name or not split:
        raise ValueError(f"{identifier!r}: a `datasets` id needs a name and a split, such as 'imdb:train'")
    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises types of several HTTP clients; all of them end here, none is hidden
        raise ValueError(
            f"{identifier!r} could not be loaded: {type(error).__name__}: {error}\n"
            "Is the name right, and is there a network? Without one, give a .jsonl, .parquet or .csv file"
        ) from error
    rows = tuple(Row(number, dict(row)) for number, row in enumerate(islice(dataset, limit), start=1))
    return Table(identifier, "row", tuple(dataset.column_names), rows)


def kind(value: object) -> str:
    """Name of a value's type, in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


_READERS: dict[str, Callable[[Path, int | None], Table]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
