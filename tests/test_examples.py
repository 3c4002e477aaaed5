"""Every configuration in examples/ is read, checked and says in its header what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.config.loading import load_config

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))


def test_the_examples_that_the_documents_name_are_there() -> None:
    names = {path.name for path in EXAMPLES}
    assert {"reviews.toml", "cpu-tiny.toml", "separate-models.toml"} <= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_runs_into_a_folder_of_its_own_name(path: Path) -> None:
    config = load_config(path)
    assert config.output == f"runs/{path.relative_to(ROOT / 'examples').with_suffix('')}"
    assert config.stages == (("sft", "reward", "ppo") if config.reward.trains else ("sft", "ppo"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_it_shows_needs_and_leads_to(path: Path) -> None:
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("Shows:", "Needs:", "Hardware:", "Time", "emory", "Expect:"):
        assert word in header, word
