"""Tables show what models write, and nothing of it acts on the terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from fourfold.diagnostics.tables import (
    RoleRow,
    as_text,
    before_after_table,
    role_rows,
    roles_table,
    samples_table,
    visible,
)
from fourfold.models.assembly import assemble, record_for
from fourfold.models.loading import load_base
from fourfold.models.storage import save_role
from tiny import VOCABULARY, tiny_directory
from tiny_roles import MODES, tiny_config


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
        RoleRow("trunk", 120_353_472, 0, "bfloat16", "cpu", 240_706_944, 240_706_944),
        RoleRow("actor", 14_161_536, 14_161_536, "float32", "cuda:0", 56_646_144, 56_646_144),
    ]
    text = shown(roles_table(rows))
    assert cells(text, "trunk") == ["trunk", "120,353,472", "0", "bfloat16", "cpu", "229.6"]
    assert cells(text, "actor") == ["actor", "14,161,536", "14,161,536", "float32", "cuda:0", "54.0"]


HIDDEN = 32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_count_every_weight_once(tmp_path: Path, family: str, mode: str) -> None:
    """FAULTS J9: against the number of the library's own model; gpt2's head is its embedding, llama's is not."""
    model = tiny_directory(tmp_path / family, family)
    config = tiny_config(model, mode)
    base = load_base(config)
    save_role(tmp_path / "reward", base.new_scorer(), record_for(config, "scorer"))
    models = assemble(config, base, None, tmp_path / "reward")
    rows = {row.model: row for row in role_rows(models)}

    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())
    head = VOCABULARY * HIDDEN if family == "llama" else 0
    actor, value_head = rows["actor"].parameters, HIDDEN + 1
    if mode == "trunk":
        assert list(rows) == ["trunk", "actor", "critic", "reference", "reward"]
        assert rows["trunk"].parameters + actor == whole and rows["trunk"].trainable == 0
        assert rows["critic"].parameters == rows["reward"].parameters == actor + value_head
    else:
        assert list(rows) == ["actor", "critic", "reference", "reward"]
        assert actor == whole
        assert rows["critic"].parameters == rows["reward"].parameters == whole - head + value_head
    assert rows["reference"].parameters == actor
    assert {name: row.trainable for name, row in rows.items() if row.trainable} == {
        "actor": actor,
        "critic": rows["critic"].parameters,
    }
    for row in rows.values():
        assert (row.dtype, row.device, row.bytes) == ("float32", "cpu", 4 * row.parameters)


def test_rows_name_the_type_that_weights_are_really_held_in(tmp_path: Path) -> None:
    """FAULTS G5: float32 masters of what is trained, matrices in the compute type of what is not."""
    config = tiny_config(tiny_directory(tmp_path / "model"), precision__compute="bfloat16", critic__init="actor")
    rows = {row.model: row for row in role_rows(assemble(config, load_base(config), None, None))}
    assert {name: row.dtype for name, row in rows.items()} == {
        "trunk": "bfloat16",
        "actor": "float32",
        "critic": "float32",
        "reference": "bfloat16 + float32",
    }
    reference, vectors = rows["reference"], 5 * HIDDEN  # two norms in each of two layers, and the last one
    assert reference.bytes == 2 * (reference.parameters - vectors) + 4 * vectors


def test_a_table_for_a_log_is_plain_lines() -> None:
    lines = as_text(roles_table([RoleRow("actor", 10, 10, "float32", "cpu", 40, 40)])).splitlines()
    assert lines[0].split() == ["model", "parameters", "trainable", "dtype", "device", "MiB"]
    assert lines[-1].split() == ["actor", "10", "10", "float32", "cpu", "0.0"]
    assert len(lines) == 3 and "\x1b" not in "".join(lines)
