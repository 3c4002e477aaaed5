"""Rows in, records out: formats, columns, messages, and every bad row named."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.schema import DatasetSection
from fourfold.data.records import (
    BadRowsError,
    Message,
    PairRecord,
    PromptRecord,
    TextRecord,
    read_pairs,
    read_prompts,
    read_texts,
)
from tiny import sentences

ASK = {"role": "user", "content": "how was it"}
SAY = {"role": "assistant", "content": "it was a gift"}
MOAN = {"role": "assistant", "content": "it was a mess"}


def section(path: Path | str, **settings: Any) -> DatasetSection:
    return DatasetSection(path=str(path), **settings)


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def bad_rows(path: Path, read: Any = read_texts, **settings: Any) -> list[tuple[int, str]]:
    with pytest.raises(BadRowsError) as caught:
        read(section(path, **settings))
    assert all(str(path) in str(caught.value) for _ in caught.value.rows)
    return [(row.number, row.reason) for row in caught.value.rows]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            cells = ({key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()} for row in rows)
            writer.writerows(cells)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv", "ROWS.CSV"])
def test_all_formats_hold_the_same_records(tmp_path: Path, name: str) -> None:
    texts = [*sentences()[:5], 'quoted "word", comma', "two\nlines", "größer 映画 🎬", "ls\u2028ps"]
    path = write(
        tmp_path / name.replace("ROWS.CSV", "rows.csv"), [{"id": str(i), "text": t} for i, t in enumerate(texts)]
    )
    path = path.rename(tmp_path / name)
    assert read_texts(section(path)) == [TextRecord(text) for text in texts]
    assert read_texts(section(path, max_rows=2)) == [TextRecord(text) for text in texts[:2]]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_messages_in_every_format(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"messages": [ASK, SAY]}, {"messages": [ASK, MOAN]}])
    turns = (Message("user", "how was it"), Message("assistant", "it was a gift"))
    assert read_texts(section(path))[0] == TextRecord(turns)
    pairs = write(tmp_path / f"pairs{path.suffix}", [{"prompt": [ASK], "chosen": [SAY], "rejected": [MOAN]}])
    assert read_pairs(section(pairs)) == [PairRecord(turns[:1], turns[1:], (Message("assistant", "it was a mess"),))]


def test_a_csv_cell_that_only_looks_like_messages_stays_text(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [{"text": '[{"a": 1}]'}, {"text": "[{ not json"}])
    assert read_texts(section(path)) == [TextRecord('[{"a": 1}]'), TextRecord("[{ not json")]


def test_mark_blank_lines_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n   \n{"text": "two"}')
    assert read_texts(section(path)) == [TextRecord("one"), TextRecord("two")]
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbftext,id\r\none,1\r\n\r\n"two\r\nlines",2\r\n')
    assert read_texts(section(path)) == [TextRecord("one"), TextRecord("two\r\nlines")]


def test_every_bad_line_is_reported_with_number_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": "cut off\n{"review": "x", "id": 3}\n\n{"text": 7}\n{"text": "  "}\n["text"]\n'
        b'{"text": null}\n{"text": "\\ud800"}\n{"text": "\xff"}\n{"text": []}\n'
    )
    found = bad_rows(path)
    assert [number for number, _ in found] == [2, 3, 5, 6, 7, 8, 9, 10, 11]
    parts = ["bad JSON", "'review', 'id'", "a number", "empty", "a list", "null", "UTF-8", "UTF-8", "empty list"]
    assert all(part in reason for part, (_, reason) in zip(parts, found, strict=True))


def test_all_bad_rows_are_counted_and_ten_are_listed(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"text": "good"}, *[{"text": ""}] * 25)
    with pytest.raises(BadRowsError, match=r"25 of 26 rows.*\n(.*line.*\n){10}.*and 15 more") as caught:
        read_texts(section(path))
    assert (caught.value.total, len(caught.value.rows)) == (25, 10)


@given(st.lists(st.sampled_from(["good", "empty", "broken", "blank"]), min_size=1, max_size=30))
def test_numbers_of_bad_lines_survive_any_mixture(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> None:
    lines = {"good": '{"text": "a"}', "empty": '{"text": ""}', "broken": "{", "blank": ""}
    path = tmp_path_factory.mktemp("mixture") / "rows.jsonl"
    path.write_text("".join(lines[kind] + "\n" for kind in kinds))
    bad = [number for number, kind in enumerate(kinds, start=1) if kind in ("empty", "broken")]
    if bad:
        with pytest.raises(BadRowsError) as caught:
            read_texts(section(path))
        assert (caught.value.total, [row.number for row in caught.value.rows]) == (len(bad), bad[:10])
    elif "good" in kinds:
        assert len(read_texts(section(path))) == kinds.count("good")
    else:
        with pytest.raises(ValueError, match="no rows"):
            read_texts(section(path))


def test_bad_csv_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'text,id\n"a\nb",1\n,2\nx\ny,3,4\n"\xff",5\nfine,6\n"never closed,7\n')
    found = bad_rows(path)
    assert [number for number, _ in found] == [4, 5, 6, 7, 9]
    parts = ["empty", "1 fields", "3 fields", "UTF-8", "bad CSV"]
    assert all(part in reason for part, (_, reason) in zip(parts, found, strict=True))


def test_bad_parquet_rows_and_files(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", [{"text": "a"}, {"text": None}, {"text": ""}])
    assert [number for number, _ in bad_rows(path)] == [2, 3]
    path.write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a readable Parquet file"):
        read_texts(section(path))


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"text": "a"}, {"text": "b"}, {"text": ""})
    assert len(read_texts(section(path, max_rows=2))) == 2
    assert bad_rows(path, max_rows=3)[0][0] == 3


def test_columns_are_mapped(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"opening": "a", "good": "b", "bad": "c", "prompt": "not this"})
    columns = {"prompt": "opening", "chosen": "good", "rejected": "bad"}
    assert read_pairs(section(path, columns=columns)) == [PairRecord("a", "b", "c")]
    assert read_prompts(section(path, columns={"prompt": "opening"})) == [PromptRecord("a")]
    assert read_prompts(section(path, columns={"messages": "opening"})) == [PromptRecord("a")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "a"}, "did you mean 'prompt'"),
        ({"chosen": "a"}, "'chosen', which is not read here"),
        ({"prompt": "opning"}, "no column 'opning'.*columns: opening, id; did you mean 'opening'"),
        ({"prompt": "opening", "messages": "id"}, "both"),
        ({}, "no column 'prompt' or 'messages'; columns: opening, id"),
    ],
)
def test_wrong_columns_are_explained(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    path = jsonl(tmp_path, {"opening": "a", "id": "1"})
    with pytest.raises(ValueError, match=message):
        read_prompts(section(path, columns=columns))


def test_two_columns_for_one_thing_are_not_chosen_between_in_silence(tmp_path: Path) -> None:
    """FAULTS L7: no branch overrides what the user's column says."""
    path = jsonl(tmp_path, {"prompt": "plain", "messages": [ASK]})
    with pytest.raises(ValueError, match="'prompt' and 'messages'"):
        read_prompts(section(path))
    assert read_prompts(section(path, columns={"prompt": "prompt"})) == [PromptRecord("plain")]
    chosen = read_prompts(section(path, columns={"messages": "messages"}))
    assert chosen == [PromptRecord((Message("user", "how was it"),))]


def test_answers_may_be_texts_or_repeat_the_prompt(tmp_path: Path) -> None:
    expected = PairRecord(
        (Message("user", "how was it"),),
        (Message("assistant", "it was a gift"),),
        (Message("assistant", "it was a mess"),),
    )
    path = jsonl(
        tmp_path,
        {"prompt": [ASK], "chosen": [SAY], "rejected": [MOAN]},
        {"prompt": [ASK], "chosen": "it was a gift", "rejected": "it was a mess"},
        {"prompt": [ASK], "chosen": [ASK, SAY], "rejected": [ASK, MOAN]},
        {"prompt": "how was it", "chosen": [ASK, SAY], "rejected": [MOAN]},
    )
    assert read_pairs(section(path)) == [expected] * 4


def test_bad_pairs_and_messages(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": [ASK], "chosen": [ASK], "rejected": [MOAN]},
        {"prompt": [ASK], "chosen": [{"role": "user", "content": "other"}, SAY], "rejected": [MOAN]},
        {"prompt": [ASK, SAY], "chosen": [SAY], "rejected": [MOAN]},
        {"prompt": [{"role": "user"}], "chosen": [SAY], "rejected": [MOAN]},
        {"prompt": ["hello"], "chosen": [SAY], "rejected": [MOAN]},
        {"prompt": [{**ASK, "tool_calls": [1]}], "chosen": [SAY], "rejected": [MOAN]},
        {"prompt": [{**ASK, "content": ""}], "chosen": [SAY], "rejected": [MOAN]},
        {"prompt": [{"role": "system", "content": ""}, {**ASK, "name": None}], "chosen": [SAY], "rejected": [MOAN]},
    )
    reasons = [reason for _, reason in bad_rows(path, read_pairs)]
    parts = ["the same", "no answer", "role 'user'", "'assistant'", "missing", "a text", "tool_calls", "empty"]
    assert all(part in reason for part, reason in zip(parts, reasons, strict=True))


@pytest.mark.parametrize("path", ["rows.txt", "imdb", "folder", "none.jsonl"])
def test_what_is_no_data_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"allowed are files that end in \.jsonl|there is no such file"):
        read_texts(section(path))


def in_a_new_process(program: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": "", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )


HUB = (
    "from fourfold.config.schema import DatasetSection as S\nfrom fourfold.data.records import read_texts\n"
    "try: print(len(read_texts(S(path={path!r}, max_rows=3))))\nexcept ValueError as error: print('ValueError', error)"
)


def test_datasets_ids_are_loaded_and_failures_explained(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.csv", [{"text": sentence} for sentence in sentences()])
    done = in_a_new_process(HUB.format(path=f"{tmp_path / 'set'}:train"), tmp_path / "home")
    assert done.stdout.strip() == "3", done.stderr
    done = in_a_new_process(HUB.format(path="nobody/nothing:train"), tmp_path / "home")
    assert "ValueError 'nobody/nothing:train' could not be loaded" in done.stdout, done.stderr
    assert "network" in done.stdout


def test_a_missing_datasets_package_names_the_extra(tmp_path: Path) -> None:
    program = "import sys; sys.modules['datasets'] = None\n" + HUB.format(path="imdb:train")
    done = in_a_new_process(program, tmp_path)
    assert "pip install 'fourfold[datasets]'" in done.stdout, done.stderr


def test_reading_files_needs_neither_torch_nor_datasets(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"text": "a"})
    program = (
        HUB.format(path=str(path)) + "\nimport sys; print({'torch', 'datasets', 'transformers'} & set(sys.modules))"
    )
    done = in_a_new_process(program, tmp_path)
    assert done.stdout.split() == ["1", "set()"], done.stderr
