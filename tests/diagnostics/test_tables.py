"""Tables show what models write, and nothing of it acts on the terminal."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from fourfold.diagnostics.tables import RoleRow, before_after_table, roles_table, samples_table, visible


def shown(table: Table, width: int = 160) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True, color_system=None).print(table)
    return stream.getvalue()


def cells(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if name in line).split()


def test_markup_in_model_text_is_shown_as_it_is() -> None:
    text = shown(samples_table([("[bold]the film", "[/nonsense] was", "[link=http://example.org]good[/link]")]))
    assert "[bold]the film" in text
    assert "[/nonsense] was" in text
    assert "[link=http://example.org]good[/link]" in text


def test_control_codes_in_model_text_reach_no_terminal() -> None:
    text = shown(samples_table([("prompt", "clear \x1b[2J screen", "bell \x07 and\nline \u202e tfel")]))
    assert "clear \\x1b[2J screen" in text
    assert "bell \\x07 and\\nline \\u202e tfel" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


@given(st.text())
def test_visible_text_is_printable_and_keeps_printable_text(text: str) -> None:
    plain = visible(text).plain
    assert all(character.isprintable() or character in "\u200c\u200d" or character.isspace() for character in plain)
    assert not any(ord(character) < 32 for character in plain)
    if text.isprintable():
        assert plain == text


def test_samples_stand_side_by_side() -> None:
    text = shown(samples_table([("the film", "was bad", "was wonderful")], names=("reference", "actor")))
    assert cells(text, "prompt") == ["prompt", "reference", "actor"]
    assert cells(text, "the film") == ["the", "film", "was", "bad", "was", "wonderful"]


def test_long_samples_are_folded_not_cut() -> None:
    words = [f"word{n}" for n in range(60)]
    text = shown(samples_table([("p", " ".join(words), "x")]), width=60)
    assert all(word in text for word in words)


def test_before_and_after_with_change() -> None:
    text = shown(before_after_table({"score_mean": -0.031, "episodes": 0}, {"score_mean": 2.14, "episodes": 12960}))
    assert cells(text, "score_mean") == ["score_mean", "-0.031", "2.14", "+2.171"]
    assert cells(text, "episodes")[2] == "12,960"


def test_a_metric_that_is_missing_on_one_side_is_a_dash() -> None:
    text = shown(before_after_table({"kept": 1.0, "gone": 1.5}, {"kept": 1.0, "judge_mean": 0.5}))
    assert cells(text, "gone") == ["gone", "1.5", "-", "-"]
    assert cells(text, "judge_mean") == ["judge_mean", "-", "0.5", "-"]


def test_the_table_of_roles_says_where_everything_lives() -> None:
    """FAULTS J9: model, parameters, trainable, dtype, device, bytes."""
    rows = [
        RoleRow("trunk", 120_353_472, 0, "bfloat16", "cpu", 240_706_944),
        RoleRow("actor", 14_161_536, 14_161_536, "float32", "cuda:0", 56_646_144),
    ]
    text = shown(roles_table(rows))
    assert cells(text, "trunk") == ["trunk", "120,353,472", "0", "bfloat16", "cpu", "229.6"]
    assert cells(text, "actor") == ["actor", "14,161,536", "14,161,536", "float32", "cuda:0", "54.0"]
