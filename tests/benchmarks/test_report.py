"""Tables of the documents come from the results and from nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.limit import figures as limit_figures
from benchmarks.report import main, number, table, update, with_tables
from benchmarks.results import Figure, Result, read_results


def result(name: str = "speed", value: float = 24.04, date: str = "2026-01-31", **changes: Any) -> Result:
    plain: dict[str, Any] = {"name": "seconds", "unit": "s", "spread": None, "against": None, "target": None}
    return Result(
        name=name,
        date=date,
        hardware="2 x Some CPU, 24 GiB, no GPU",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        commit="0123456789abcdef0123456789abcdef01234567-dirty",
        config={"batch": 16},
        figures=(Figure(value=value, **(plain | changes)),),
    )


def test_a_table_shows_value_spread_comparison_and_whether_the_target_is_met() -> None:
    text = table(result(value=0.85, unit="ratio", spread=(0.8, 0.9), against="TRL", target="<= 0.8"))
    assert text.splitlines()[2:] == [
        "| seconds | 0.85 | 0.80 - 0.90 | TRL | <= 0.8: missed |",
        "",
        "2026-01-31, 2 x Some CPU, 24 GiB, no GPU; commit 0123456789 with changes; python 3.11.7, torch 2.13.0.",
    ]
    assert "| seconds | 0.79 |  |  | <= 0.8: met |" in table(result(value=0.79, unit="ratio", target="<= 0.8"))


def test_a_comparison_says_what_each_side_trains() -> None:
    trained = {"actor": 14160960, "critic": 14161537}
    sides = {"Ours": {"what": "a trunk", "trainable_parameters": trained, "seconds_per_update": [[1.0]]}}
    lines = table(result().model_copy(update={"config": {"batch": 16, "sides": sides}})).splitlines()
    assert lines[4:6] == ["* Ours: a trunk. Trained parameters: actor 14,160,960, critic 14,161,537.", ""]
    assert lines[6].startswith("2026-01-31")


def test_only_what_stands_between_the_markers_is_written() -> None:
    text = "before\n<!-- figures:speed -->\nold\n<!-- /figures -->\nafter\n"
    made = with_tables(text, [result()])
    assert made.startswith("before\n<!-- figures:speed -->\n| figure")
    assert made.endswith("torch 2.13.0.\n<!-- /figures -->\nafter\n")
    assert "old" not in made and "24.0 s" in made
    assert with_tables(made, [result()]) == made


def test_the_newest_result_of_a_name_is_shown() -> None:
    text = "<!-- figures:speed -->\n<!-- /figures -->\n"
    made = with_tables(text, [result(value=30.0), result(value=20.0, date="2026-02-01"), result("other", 10.0)])
    assert "20.0 s" in made and "30.0" not in made and "10.0" not in made


def test_a_table_without_a_result_says_so() -> None:
    made = with_tables("<!-- figures:speed -->\n<!-- /figures -->\n", [])
    assert made == "<!-- figures:speed -->\nNot measured yet.\n<!-- /figures -->\n"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- figures:speed -->\n",
        "<!-- /figures -->\n",
        "<!-- figures:a -->\n<!-- figures:b -->\n<!-- /figures -->\n<!-- /figures -->\n",
        "<!-- figures:Not A Name -->\n<!-- /figures -->\n",
    ],
)
def test_markers_that_do_not_pair_up_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="do not pair up"):
        with_tables(text, [result()])


def test_check_names_outdated_documents_and_writes_nothing(tmp_path: Path) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "docs" / "memory.md"
    page.parent.mkdir()
    text = "<!-- figures:speed -->\n<!-- /figures -->\n"
    readme.write_text("no table\n")
    page.write_text(text)
    assert update(tmp_path, [result()], check=True) == [page]
    assert page.read_text() == text
    assert update(tmp_path, [result()], check=False) == [page]
    assert update(tmp_path, [result()], check=True) == []
    assert readme.read_text() == "no table\n"


def test_the_documents_of_the_project_are_up_to_date() -> None:
    assert main(["--check"]) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(6849.4, "6,849"), (24.04, "24.0"), (0.834, "0.83"), (0.01234, "0.0123"), (0.0, "0.00"), (-150.6, "-151")],
)
def test_numbers_show_the_digits_that_mean_something(value: float, text: str) -> None:
    assert number(value) == text


def test_the_peers_table_has_a_line_a_side_and_a_line_a_comparison() -> None:
    """Of the committed result: nothing of it is lost but what the sides' lines say together."""
    [newest] = [each for each in read_results() if each.name == "peer"][-1:]
    text = table(newest)
    values = {figure.name: figure for figure in newest.figures}
    for side in newest.config["sides"]:
        [line] = [line for line in text.splitlines() if line.startswith(f"| {side} |")]
        seconds, tokens = values[f"{side}: seconds per update"], values[f"{side}: response tokens per update"]
        assert f"| {number(seconds.value)} (" in line
        assert line.endswith(f"| {number(tokens.value / seconds.value)} |")
    for name, figure in values.items():
        if figure.against is not None and figure.target is not None:
            assert f"{figure.target}: {'met' if figure.met else 'missed'}" in text, name


def test_the_limits_table_has_a_line_a_phase() -> None:
    product = ["bfloat16", 16, 8, 8]
    line = {
        "seconds": 2.0,
        "limit_seconds": 0.5,
        "share_of_limit": 0.25,
        "mfu": 0.2,
        "flops": 3e12,
        "peak_bytes": 2**30,
    }
    lines = [line | {"phase": phase} for phase in ("generate", "score", "learn", "step")]
    told = {"lines": lines, "tokens_per_second": 192.0, "compute": "bfloat16", "bandwidth": 2e10}
    found = limit_figures([told | {"products": [[product, 5e11]]}])
    made = result("limit").model_copy(update={"config": {"compute": "bfloat16"}, "figures": tuple(found)})
    rows = table(made).splitlines()
    assert rows[2] == "| generate | 2.00 (2.00 - 2.00) | 0.50 | 25% | 20% | 3.00 | 1,024 |"
    assert rows[7] == "192 response tokens a second; bfloat16 at 500 GFLOP/s at best, memory at 20.0 GB/s."
    share = next(figure for figure in found if figure.name == "step: share of the limit")
    assert share.target == ">= 0.5" and share.met is False
