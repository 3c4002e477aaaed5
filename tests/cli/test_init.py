"""`fourfold init`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.config import load_config
from fourfold.config.template import commented_template


def test_writes_a_configuration_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert Path("fourfold.toml").read_text() == commented_template()
    load_config("fourfold.toml")
    assert "fourfold run fourfold.toml" in capsys.readouterr().out


def test_keeps_what_is_there_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("precious")
    assert main(["init", str(path)]) == 2
    assert path.read_text() == "precious"
    assert "--force" in capsys.readouterr().err
    assert main(["init", str(path), "--force"]) == 0
    assert path.read_text() == commented_template()


def test_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
