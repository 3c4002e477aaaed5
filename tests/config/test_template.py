"""The commented configuration and the document, both written from the schema."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fourfold.config import RunConfig, load_config
from fourfold.config.describe import all_settings, describe_type, tables
from fourfold.config.template import commented_template, configuration_markdown, toml_value


def test_the_template_loads_and_holds_defaults(tmp_path: Path) -> None:
    path = tmp_path / "fourfold.toml"
    path.write_text(commented_template())
    config = load_config(path)
    plain = {key: config.model_dump()[key] for key in ("sft", "reward", "critic", "ppo", "sampling", "evaluation")}
    assert plain == {
        key: RunConfig.model_fields[key].get_default(call_default_factory=True).model_dump() for key in plain
    }


def test_every_commented_key_uncommented_is_its_default() -> None:
    """With all '#' before keys taken away it is still TOML, and every value equals the schema's default."""
    lines = [
        line.removeprefix("#") if line.startswith("#") and line[1:2] != " " else line
        for line in commented_template().splitlines()
    ]
    tree = tomllib.loads("\n".join(lines))
    settings = all_settings()
    seen = set()
    for key, setting in settings.items():
        value = tree
        for part in key.split("."):
            value = value[part]
        seen.add(key)
        if setting.default is not None:
            expected = list(setting.default) if isinstance(setting.default, tuple) else setting.default
            assert value == expected, key
    assert seen == settings.keys()


def test_every_setting_is_explained() -> None:
    template = " ".join(line.removeprefix("# ") for line in commented_template().splitlines())
    markdown = configuration_markdown()
    for table in tables():
        for setting in table.settings:
            assert len(setting.description) > 8, f"{setting.key} has no description"
            assert setting.description in template
            assert setting.description in markdown
            assert f"Allowed: {setting.allowed}" in template


def test_lines_fit(tmp_path: Path) -> None:
    assert max(map(len, commented_template().splitlines())) <= 120


def test_the_document_is_up_to_date() -> None:
    """Bring it up to date with: python -m fourfold.config.template > docs/configuration.md"""
    document = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert document.read_text() == configuration_markdown()


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "integer"),
        (tuple[str, ...], "list of text"),
        (tuple[int, float], "list of 2: integer, number"),
        (dict[str, str], "table of text"),
        (float | None, "number"),
        (bool, "true or false"),
    ],
)
def test_types_in_words(annotation: object, words: str) -> None:
    assert describe_type(annotation) == words


@pytest.mark.parametrize("value", [1, 1e-8, 0.1, True, 'a "b" \\', (1, 2.5), ["x"], {"a": "b"}, (), {}])
def test_values_are_toml(value: object) -> None:
    expected = list(value) if isinstance(value, tuple) else value
    assert tomllib.loads(f"v = {toml_value(value)}") == {"v": expected}
