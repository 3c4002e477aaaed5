"""`fourfold sample`: what it refuses before anything is loaded."""

from __future__ import annotations

import pytest

from fourfold.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--chat"], "--chat is for prompts given by --prompt"),
        (["--count", "0"], "--count 0: allowed are 1 or more"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: allowed are 1 or more"),
        (["--temperature", "0"], "--temperature 0.0: allowed are numbers above 0"),
        (["--prompt", "a"], "'no-run' is not the folder of a run"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "no-run", *arguments]) == 2
    assert text in capsys.readouterr().err
