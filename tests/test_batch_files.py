"""Batches on disk: bit for bit, whole or not at all, damage named."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.batch import Experience, Rollout, ScoredRollout
from fourfold.batch_files import read_batch, write_batch

PROMPT, RESPONSE = 3, 5


def make_batch(stage: type[Rollout], lengths: list[int], seed: int = 0, values: tuple[int, ...] = ()) -> Any:
    """A batch of any stage with random numbers in every float column, in the padding too."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    tensors = {
        "prompt_mask": torch.arange(PROMPT) >= torch.arange(rows)[:, None] % PROMPT,
        "response_mask": torch.arange(RESPONSE) < torch.tensor(lengths)[:, None],
        "sequences": torch.randint(2**40, (rows, PROMPT + RESPONSE), generator=generator),
        "truncated": torch.arange(rows) % 2 == 0,
        "policy_version": torch.arange(rows) + 7,
        "prompt_id": torch.arange(rows) * 10,
    }
    tensors["scores"] = torch.randn(rows, generator=generator)
    for name in ("score_parts", "score_weights"):
        tensors[name] = torch.randn(rows, 2, generator=generator)
    tensors["last_values"] = torch.randn(rows, *values, generator=generator)
    for name in ("values", "rewards", "returns"):
        tensors[name] = torch.randn(rows, RESPONSE, *values, generator=generator)
    for field in fields(Experience):
        if field.name not in tensors:
            tensors[field.name] = torch.randn(rows, RESPONSE, generator=generator)
    return stage(**{field.name: tensors[field.name] for field in fields(stage)})


def assert_same(a: Rollout, b: Rollout) -> None:
    """Same stage, and every column the same bytes (so -0.0 is not 0.0)."""
    assert type(a) is type(b)
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.numpy().tobytes() == y.numpy().tobytes(), field.name


def header_of(path: Path) -> dict[str, Any]:
    return json.loads(pq.read_metadata(path).metadata[b"fourfold"])


def rewrite_header(path: Path, **changes: Any) -> None:
    """The same columns under a changed header."""
    table = pq.read_table(path)
    header = {**header_of(path), **changes}
    pq.write_table(table.replace_schema_metadata({b"fourfold": json.dumps(header).encode()}), path)


@pytest.mark.parametrize("stage", [Rollout, ScoredRollout, Experience])
@settings(deadline=None, max_examples=10)
@given(
    lengths=st.lists(st.integers(1, RESPONSE - 1), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    values=st.sampled_from([(), (1,), (3,)]),
)
def test_every_stage_comes_back_bit_for_bit(
    stage: type[Rollout],
    lengths: list[int],
    seed: int,
    values: tuple[int, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Also where no row fills the padded length, or the critic has several values: the shape is kept, not derived."""
    path = tmp_path_factory.mktemp("batch") / "batch.parquet"
    batch = make_batch(stage, lengths, seed, values)
    write_batch(path, batch)
    assert_same(read_batch(path), batch)


def test_odd_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    batch = make_batch(Rollout, [5, 5])
    odd = torch.tensor([[-0.0, 1e-45, 3.4e38, -1e-38, 0.1]] * 2)
    batch = replace(batch, log_probs=odd, sequences=batch.sequences - 2**62)
    write_batch(tmp_path / "a.parquet", batch)
    assert_same(read_batch(tmp_path / "a.parquet"), batch)


def test_a_view_of_another_batch_is_written_as_itself(tmp_path: Path) -> None:
    batch = make_batch(Experience, [1, 2, 3, 4])
    turned = replace(batch, values=batch.values.t().contiguous().t())
    write_batch(tmp_path / "a.parquet", turned)
    assert_same(read_batch(tmp_path / "a.parquet"), batch)


def test_any_parquet_reader_sees_list_columns_and_what_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    batch = make_batch(ScoredRollout, [2, 5])
    write_batch(path, batch)
    table = pq.read_table(path)
    assert table.column_names == [f.name for f in fields(ScoredRollout)]
    assert table.column("response_mask").to_pylist() == batch.response_mask.tolist()
    assert table.column("sequences").to_pylist() == batch.sequences.tolist()
    assert table.column("scores").to_pylist() == batch.scores.tolist()
    header = header_of(path)
    assert header["stage"] == "ScoredRollout"
    assert header["policy_version_range"] == [7, 8]
    assert table.column("score_parts").to_pylist() == batch.score_parts.tolist()
    assert header["schema_version"] == 3
    assert len(header["sha256"]) == 64


def test_columns_are_compressed_and_floats_split_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_batch(path, make_batch(Experience, [5] * 4))
    group = pq.read_metadata(path).row_group(0)
    for i in range(group.num_columns):
        column = group.column(i)
        assert column.compression == "ZSTD"
        is_float = column.physical_type == "FLOAT"
        assert ("BYTE_STREAM_SPLIT" in column.encodings) == is_float, column.path_in_schema


def test_policy_log_probs_compress(tmp_path: Path) -> None:
    """Padding and exponents shrink: half a batch of padding takes less than 0.6 of the raw bytes."""
    path = tmp_path / "a.parquet"
    rows, width = 64, 64
    mask = torch.arange(width) < torch.full((rows, 1), width // 2)
    floats = torch.where(mask, -torch.rand(rows, width, generator=torch.Generator().manual_seed(0)), 0.0)
    rollout = Rollout(
        prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
        response_mask=mask,
        sequences=torch.zeros(rows, width + 1, dtype=torch.int64),
        log_probs=floats,
        sampler_log_probs=floats.clone(),
        truncated=torch.zeros(rows, dtype=torch.bool),
        policy_version=torch.zeros(rows, dtype=torch.int64),
        prompt_id=torch.arange(rows),
    )
    write_batch(path, rollout)
    assert path.stat().st_size < 0.6 * 2 * floats.numel() * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path: Path, bad: float) -> None:
    batch = make_batch(Experience, [2, 5])
    batch.advantages[1, 2] = bad
    with pytest.raises(ValueError, match=r"a\.parquet: advantages has 1 NaN or infinite numbers among 10"):
        write_batch(tmp_path / "a.parquet", batch)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_without_rows_is_refused(tmp_path: Path) -> None:
    empty = make_batch(Rollout, [2, 5]).select(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="no rows"):
        write_batch(tmp_path / "a.parquet", empty)


def test_writing_replaces_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for seed in (0, 1):
        batch = make_batch(Rollout, [3, 4], seed)
        write_batch(path, batch)
    assert_same(read_batch(path), batch)
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_batch(path, make_batch(Experience, [2, 5]))
    data = path.read_bytes()
    for length in (0, 3, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"a\.parquet: not a readable Parquet file"):
            read_batch(path)


def test_a_flipped_byte_never_gives_another_batch(tmp_path: Path) -> None:
    """Each of many single-byte damages is refused with the file's name, or did not touch the data."""
    path = tmp_path / "a.parquet"
    batch = make_batch(Experience, [2, 5])
    write_batch(path, batch)
    data = path.read_bytes()
    refused = 0
    for position in range(4, len(data), 31):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        try:
            back = read_batch(path)
        except ValueError as error:
            assert "a.parquet" in str(error)
            refused += 1
        else:
            assert_same(back, batch)
    assert refused > 50


def test_changed_numbers_are_found_by_the_checksum(tmp_path: Path) -> None:
    """A valid Parquet file with one other score under the old header."""
    path = tmp_path / "a.parquet"
    write_batch(path, make_batch(ScoredRollout, [2, 5]))
    table = pq.read_table(path)
    scores = pa.array([0.5, 0.25], pa.float32())
    place = table.column_names.index("scores")
    pq.write_table(table.set_column(place, "scores", scores), path)
    with pytest.raises(ValueError, match=r"a\.parquet: the columns do not give the sha256"):
        read_batch(path)


def test_a_changed_header_is_found_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_batch(path, make_batch(Rollout, [2, 5]))
    rewrite_header(path, policy_version_range=[0, 1])
    with pytest.raises(ValueError, match="sha256"):
        read_batch(path)


@pytest.mark.parametrize("version", [1, 2, 4, None])
def test_another_schema_version_is_refused_with_both_versions(tmp_path: Path, version: int | None) -> None:
    path = tmp_path / "a.parquet"
    write_batch(path, make_batch(Rollout, [2, 5]))
    rewrite_header(path, schema_version=version)
    with pytest.raises(ValueError, match=rf"a\.parquet: schema version {version}, this program reads version 3"):
        read_batch(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "Nonsense"}, "stage 'Nonsense', allowed are Rollout, ScoredRollout, Experience"),
        ({"stage": "Experience"}, "a Experience has"),
        ({"shapes": {}}, "has columns"),
        ({"shapes": None}, "damaged"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.parquet"
    write_batch(path, make_batch(Rollout, [2, 5]))
    rewrite_header(path, **changes)
    with pytest.raises(ValueError, match=message):
        read_batch(path)


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_batch(path, make_batch(Rollout, [2, 5]))
    rewrite_header(path, shapes={**header_of(path)["shapes"], "log_probs": [3, 7]})
    with pytest.raises(ValueError, match="shapes of its header"):
        read_batch(path)


def test_some_other_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    with pytest.raises(ValueError, match=r"other\.parquet: a Parquet file, but not a batch"):
        read_batch(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        read_batch(tmp_path / "none.parquet")
