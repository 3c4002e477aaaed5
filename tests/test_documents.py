"""Every command of README.md can be given as it stands there, and a generated page is what the code generates."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from fourfold.cli.main import COMMANDS, build_parser, main
from fourfold.config import load_config
from fourfold.diagnostics.doctor.markdown import doctor_markdown
from fourfold.diagnostics.metrics import metrics_markdown

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("fourfold ")]
# The one file that no clone has: an earlier line of the README writes it.
OWN = "my.toml"


def parsed(line: str) -> argparse.Namespace:
    _, command, *arguments = shlex.split(line, comments=True)
    assert command in COMMANDS, line
    module = importlib.import_module(f"fourfold.cli.{command}")
    return build_parser(command, module).parse_args([command, *arguments])


def test_the_readme_shows_the_commands_of_the_main_job() -> None:
    assert {shlex.split(line)[1] for line in LINES} >= {"data", "run", "sample", "export", "init"}


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_readme_is_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parsed(line)
    if hasattr(given, "config"):
        path = ROOT / given.config
        if given.config == OWN:
            assert any(shlex.split(other, comments=True)[1:] == ["init", OWN] for other in LINES)
            monkeypatch.chdir(tmp_path)
            assert main(["init", OWN]) == 0
            path = tmp_path / OWN
        load_config(path, given.overrides)
    if hasattr(given, "run_folder"):
        outputs = {load_config(example).output for example in (ROOT / "examples").glob("*.toml")}
        assert given.run_folder in outputs


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(SystemExit):
        parsed("fourfold run examples/reviews.toml --steps 3")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z]+)", README))))
def test_a_make_target_of_the_readme_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)", README))))
def test_a_page_that_the_readme_links_exists(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_page_of_the_doctor_is_in_step() -> None:
    """Bring it up to date with the text of `fourfold.diagnostics.doctor.markdown.doctor_markdown()`."""
    assert (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8") == doctor_markdown()


def test_the_page_of_metrics_is_in_step() -> None:
    """Bring it up to date with the text of `fourfold.diagnostics.metrics.metrics_markdown()`."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_markdown()
