"""`fourfold report` and `fourfold watch`: what they write, say and refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnostics.shown_run import copy_of, make_run, set_state
from fourfold.cli.main import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("reported"))


def test_the_page_is_written_into_the_runs_folder(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(whole), "--samples", "2"]) == 0
    assert f"{whole / 'report.html'} written" in capsys.readouterr().out
    assert (whole / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_page_can_go_elsewhere_and_says_what_is_missing(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def harm(folder: Path) -> None:
        set_state(folder, "interrupted", "stopped")
        (folder / "report.html").unlink(missing_ok=True)

    folder = copy_of(whole, tmp_path / "run", harm)
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out), "--samples", "0"]) == 0
    said = capsys.readouterr().out
    assert out.is_file() and not (folder / "report.html").exists()
    assert "not there: stage ppo: was stopped" in said and "not there: token x-ray: left out by --samples 0" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["report", "no-run"], "'no-run' is not the folder of a run"),
        (["report", "no-run", "--samples", "-1"], "--samples -1: allowed are 0 or more"),
        (["report", "no-run", "--out", "no/such/page.html"], "there is no folder 'no/such'"),
        (["report", "no-run", "--out", "."], "--out .: is a folder"),
        (["watch", "no-run", "--once"], "'no-run' is not the folder of a run"),
        (["watch", "no-run", "--every", "0"], "--every 0.0: allowed: a finite number of seconds above 0"),
        (["watch", "no-run", "--every", "inf"], "--every inf: allowed: a finite number of seconds above 0"),
        (["watch", "no-run", "--every", "nan"], "--every nan: allowed: a finite number of seconds above 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_watch_without_a_terminal_writes_lines(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3", "step 4", lines[-1]]
    assert "finished" in lines[-1]


def test_watch_once(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(whole), "--once"]) == 0
    assert "kl_per_sequence_mean" in capsys.readouterr().out
