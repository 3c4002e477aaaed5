"""Every command of the documents can be given as it stands there, what stands in two languages keeps in step, and a
generated page is what the code generates."""

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
from fourfold.training.studies import STUDIES
from fourfold.training.study import Asked, plan

ROOT = Path(__file__).resolve().parents[1]


def blocks(text: str) -> list[str]:
    """What stands between fences."""
    return re.findall(r"^```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The lines of blocks that start this program, without variables of the environment in front of it."""
    lines = (re.sub(r"^([A-Z_]+=\S+ )+", "", line) for block in blocks(text) for line in block.splitlines())
    return [line for line in lines if line.startswith("fourfold ")]


def read(name: str) -> str:
    """A document of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


README = read("README.md")
LINES = commands(README)
ASKED = sorted(set(commands(read("docs/questions.md"))))
TWO_LANGUAGES = {"README.md": "README.zh-CN.md", "docs/questions.md": "docs/questions.zh-CN.md"}
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


@pytest.mark.parametrize("line", ASKED)
def test_a_command_that_answers_a_question_is_understood(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = parsed(line)
    config = getattr(given, "config", "")
    if not config.endswith(".toml"):  # a published model, or a run
        return
    monkeypatch.chdir(tmp_path if config == OWN else ROOT)
    if config == OWN:
        assert main(["init", OWN]) == 0
    found = load_config(Path(config), getattr(given, "overrides", []))
    if hasattr(given, "study"):  # which the page says to want held-out prompts
        assert "`[data.prompts_test]`" in read("docs/questions.md").split("##")[0]
        prompts = found.data.prompts_test or found.data.prompts
        found = found.model_copy(update={"data": found.data.model_copy(update={"prompts_test": prompts})})
        assert plan(STUDIES[given.study], found, Asked(), tmp_path)


def test_every_question_has_a_command_that_shows_the_answer() -> None:
    for page in TWO_LANGUAGES["docs/questions.md"], "docs/questions.md":
        for question in re.split(r"^### ", read(page), flags=re.MULTILINE)[1:]:
            assert commands(question), question.splitlines()[0]


@pytest.mark.parametrize(("english", "chinese"), TWO_LANGUAGES.items())
def test_documents_in_two_languages_keep_in_step(english: str, chinese: str) -> None:
    """The same headings in number and depth, blocks, tables of figures and links, and each leads to the other."""
    first, second = read(english), read(chinese)
    assert blocks(first) == blocks(second)
    levels = [re.findall(r"^(#+) (?:([A-Z]+)\.)?", text, flags=re.MULTILINE) for text in (first, second)]
    assert levels[0] == levels[1]
    figures = [re.findall(r"<!-- figures:.*?<!-- /figures -->", text, flags=re.DOTALL) for text in (first, second)]
    assert figures[0] == figures[1]
    links = [sorted(re.findall(r"\]\(([^)]+)\)", text.replace(".zh-CN.md", ".md"))) for text in (first, second)]
    assert set(links[0]) == set(links[1])
    assert f"]({Path(chinese).name})" in first and f"]({Path(english).name})" in second


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
def test_no_page_has_a_place_that_is_still_to_be_filled(page: str) -> None:
    """A line of capitals alone, such as RESULTS, stands for text that somebody has yet to write."""
    assert re.findall(r"^[^\w\n]*[A-Z][A-Z _]{2,}[^\w\n]*$", read(page), flags=re.MULTILINE) == []


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
