"""The review data set, made from a miniature source distribution of sentences written for the tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fourfold.data import reviews
from fourfold.errors import RunFailed
from fourfold.files import write_atomically
from tiny_sdist import digest, miniature, no_index, snippets


def build(archive: bytes) -> dict[str, bytes]:
    return reviews.build_files(archive, sdist_sha256=digest(archive))


def rows(files: dict[str, bytes], name: str) -> list[dict]:
    return [json.loads(line) for line in files[name].decode().splitlines()]


@pytest.fixture
def sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A miniature on disk whose sha256 is the accepted one."""
    path = tmp_path / "miniature.tar.gz"
    path.write_bytes(miniature())
    monkeypatch.setattr(reviews, "SDIST_SHA256", digest(path.read_bytes()))
    return path


def test_every_sentence_is_in_one_split_with_its_ratings() -> None:
    files = build(miniature())
    train, test = rows(files, "texts.train.jsonl"), rows(files, "texts.test.jsonl")
    assert train and test
    assert sorted(row["text"] for row in train + test) == sorted(snippets())
    first = next(row for row in train + test if row["id"] == "4")
    # ratings(4) = [2, 2, 0, 1]: mean 5/4, squared deviations (9 + 9 + 25 + 1) / 16, over 4
    assert (first["rating"], first["n_raters"], first["rating_sd"]) == (1.25, 4, round((44 / 64) ** 0.5, 4))


def test_short_long_blank_and_repeated_lines_are_left_out() -> None:
    long = " ".join(["word"] * 41)
    fits = " ".join(["word"] * 40)
    extra = f"\n90\t1.0\ttwo words\n91\t1.0\t{long}\n92\t1.0\t{fits}\n93\t1.0\t{snippets()[0].upper()}\n"
    files = build(miniature(extra))
    ids = {row["id"] for split in ("train", "test") for row in rows(files, f"texts.{split}.jsonl")}
    assert ids - {str(i) for i in range(len(snippets()))} == {"92"}


def test_pairs_are_whole_sentences_of_one_split_that_lie_a_point_apart() -> None:
    files = build(miniature())
    for split in ("train", "test"):
        texts = {row["id"]: row for row in rows(files, f"texts.{split}.jsonl")}
        uses: dict[str, int] = {}
        seen = set()
        for row in rows(files, f"pairs.{split}.jsonl"):
            chosen, rejected = texts[row["chosen_id"]], texts[row["rejected_id"]]
            assert row["prompt"] + row["chosen"] == chosen["text"]
            assert row["prompt"] + row["rejected"] == rejected["text"]
            assert row["rating"] == pytest.approx(chosen["rating"] - rejected["rating"], abs=1e-4)
            assert row["rating"] >= 1
            seen.add((row["chosen_id"], row["rejected_id"]))
            for key in ("chosen_id", "rejected_id"):
                uses[row[key]] = uses.get(row[key], 0) + 1
        assert len(seen) == len(rows(files, f"pairs.{split}.jsonl"))
        assert max(uses.values(), default=0) <= 4
    assert len(rows(files, "pairs.train.jsonl")) > 10


def test_prompts_are_shared_openings_most_common_first() -> None:
    prompts = rows(build(miniature()), "prompts.train.jsonl")
    train = [row["text"] for row in rows(build(miniature()), "texts.train.jsonl")]
    assert all(len(row["prompt"].split()) in (2, 3) for row in prompts)
    counts = [row["n_texts"] for row in prompts]
    assert counts == sorted(counts, reverse=True)
    for row in prompts:
        assert row["n_texts"] == sum(text.startswith(row["prompt"] + " ") for text in train) >= 2


def test_the_same_source_gives_the_same_bytes_and_another_seed_another_order() -> None:
    assert build(miniature()) == build(miniature())
    snippets, _ = reviews.read_sdist(miniature())
    groups = reviews.group_by_opening(snippets)
    first, second = (reviews.pair_rows(groups, random.Random(seed)) for seed in (0, 1))
    assert first != second


def test_agreement_counts_pairs_of_raters() -> None:
    # 2 against (1, 2): one win, one tie; 0 against (1, 2): two losses
    assert reviews.agreement([2, 0], [1, 2]) == 1.5 / 4


def test_another_archive_is_refused_with_both_digests() -> None:
    with pytest.raises(ValueError, match=rf"(?s){digest(b'other')}.*{reviews.SDIST_SHA256}"):
        reviews.build_files(b"other", sdist_sha256=reviews.SDIST_SHA256)


def test_files_notice_and_manifest_are_written(tmp_path: Path, sdist: Path) -> None:
    out = tmp_path / "a" / "b"
    reviews.prepare_reviews(out, sdist=sdist, say=lambda _: None)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == build(miniature())
    notice = (out / "NOTICE").read_text()
    assert all(word in notice for word in ("Hutto", "Gilbert", "ICWSM", "2014", "The licence of the miniature"))
    listed = json.loads((out / "manifest.json").read_text())["files"]
    assert {name: entry["sha256"] for name, entry in listed.items()} == {
        path.name: digest(path.read_bytes()) for path in out.iterdir() if path.name != "manifest.json"
    }


def test_complete_files_are_kept_without_a_source_and_force_makes_them_again(tmp_path: Path, sdist: Path) -> None:
    out = tmp_path / "out"
    reviews.prepare_reviews(out, sdist=sdist, say=lambda _: None)
    before = {path: path.stat().st_ino for path in out.iterdir()}
    said: list[str] = []
    reviews.prepare_reviews(out, sdist=tmp_path / "gone", say=said.append)
    assert {path: path.stat().st_ino for path in out.iterdir()} == before
    assert "complete" in said[0]
    reviews.prepare_reviews(out, sdist=sdist, force=True, say=lambda _: None)
    assert all(path.stat().st_ino != before[path] for path in out.iterdir())


@pytest.mark.parametrize("damage", ["cut", "delete", "forget"])
def test_a_damaged_or_missing_file_is_named_and_made_again(tmp_path: Path, sdist: Path, damage: str) -> None:
    out = tmp_path / "out"
    reviews.prepare_reviews(out, sdist=sdist, say=lambda _: None)
    victim = out / "pairs.train.jsonl"
    whole = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(whole[:-20])
    elif damage == "delete":
        victim.unlink()
    else:
        manifest = json.loads((out / "manifest.json").read_text())
        del manifest["files"]["pairs.train.jsonl"]
        victim.unlink()
        write_atomically(out / "manifest.json", json.dumps(manifest))
    said: list[str] = []
    reviews.prepare_reviews(out, sdist=sdist, say=said.append)
    assert "pairs.train.jsonl" in said[0]
    assert victim.read_bytes() == whole


def test_pip_without_an_index_fails_with_what_was_tried_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_index(monkeypatch)
    out = tmp_path / "out"
    with pytest.raises(RunFailed, match=r"(?s)-m pip download .*vaderSentiment==3\.3\.2.*--sdist"):
        reviews.prepare_reviews(out, say=lambda _: None)
    assert not out.exists()
