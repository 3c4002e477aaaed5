"""`fourfold data reviews`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.data import reviews
from tiny_sdist import digest, miniature, no_index


def test_makes_the_files_from_a_source_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sdist = tmp_path / "miniature.tar.gz"
    sdist.write_bytes(miniature())
    monkeypatch.setattr(reviews, "SDIST_SHA256", digest(miniature()))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "reviews", "--sdist", str(sdist)]) == 0
    names = {path.name for path in Path("data/reviews").iterdir()}
    kinds = {f"{kind}.{split}.jsonl" for kind in ("texts", "prompts", "pairs") for split in ("train", "test")}
    assert names == kinds | {"NOTICE", "manifest.json"}
    assert str(Path("data/reviews/pairs.test.jsonl")) in capsys.readouterr().out
    assert main(["data", "reviews"]) == 0
    assert "complete already" in capsys.readouterr().out


def test_another_file_than_the_source_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(miniature())
    out = tmp_path / "out"
    assert main(["data", "reviews", "--out", str(out), "--sdist", str(wrong)]) == 2
    assert "sha256" in capsys.readouterr().err
    assert main(["data", "reviews", "--out", str(out), "--sdist", str(tmp_path / "none")]) == 2
    assert main(["data", "reviews", "--out", str(wrong)]) == 2
    assert not out.exists()


def test_without_a_network_it_fails_and_tells_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_index(monkeypatch)
    assert main(["data", "reviews", "--out", str(tmp_path / "out")]) == 3
    assert "fourfold data reviews --sdist" in capsys.readouterr().err


def test_a_data_set_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2
    assert main(["data", "reviws"]) == 2
    assert "reviews" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from fourfold.cli.main import main; assert main(['data', 'reviews', '--help']) == 0; "
        "heavy = {'torch', 'transformers', 'pyarrow', 'datasets', 'pydantic', 'tarfile'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--sdist" in done.stdout
