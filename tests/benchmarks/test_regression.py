"""What counts as worse than the committed result, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.regression import Change, changes, committed, differences, less_is_better, report
from benchmarks.results import Figure, Result, read_results


def figure(name: str, values: list[float], unit: str = "s", target: str | None = None) -> Figure:
    return Figure.of(name, values, unit, target)


def result(*figures: Figure, date: str = "2026-01-01", name: str = "peer", **config: object) -> Result:
    return Result(
        name=name,
        date=date,
        hardware="a machine",
        versions={"torch": "1"},
        commit="a" * 40,
        config={"batch": 16} | config,
        figures=figures,
    )


def verdict(old: list[float], new: list[float], unit: str = "s") -> str:
    [change] = changes(result(figure("x", old, unit)), result(figure("x", new, unit)))
    return change.verdict


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([1.0, 1.1, 1.2], [1.25, 1.3, 1.4], "worse"),
        ([1.0, 1.1, 1.2], [1.19, 1.3, 1.4], "as before"),  # the ranges touch
        ([1.0, 1.1, 1.2], [1.21, 1.3, 1.4], "as before"),  # within the margin
        ([1.0, 1.1, 1.2], [0.8, 0.9, 0.95], "better"),
        ([1.0], [1.15], "as before"),  # measured once: ten percent to either side of both
        ([1.0], [1.3], "worse"),
    ],
)
def test_what_is_worse_is_worse_than_the_worst(old: list[float], new: list[float], expected: str) -> None:
    assert verdict(old, new) == expected
    turned = {"worse": "better", "better": "worse"}.get(expected, expected)
    if len(old) > 1 and expected != "as before":
        assert verdict(old, new, "tokens/s") == turned


def test_the_ratio_is_that_of_the_medians() -> None:
    [change] = changes(result(figure("x", [1.0, 2.0, 9.0])), result(figure("x", [3.0, 4.0, 5.0])))
    assert change.ratio == 2.0


def test_a_target_says_which_way_is_better_and_a_plain_count_says_nothing() -> None:
    assert less_is_better(figure("x", [1.0], "share", ">= 0.5")) is False
    assert less_is_better(figure("x", [1.0], "nats", "< 10")) is True
    assert less_is_better(figure("x", [1.0], "tokens")) is None


def test_times_faster_and_milliseconds_a_token_have_their_way() -> None:
    assert less_is_better(figure("x", [2.0], "times")) is False
    assert less_is_better(figure("x", [2.0], "ms a token")) is True
    assert changes(result(figure("x", [1.0], "tokens")), result(figure("x", [9.0], "tokens"))) == []


def test_other_work_is_not_compared() -> None:
    old, new = result(figure("x", [1.0]), batch=16), result(figure("x", [9.0]), date="2026-01-02", batch=64)
    assert differences(old.config, new.config) == ["batch"]
    lines, worse = report([old], [old, new])
    assert not worse and any("cannot be compared" in line and "other batch" in line for line in lines)


def test_what_is_new_is_compared_with_what_is_committed() -> None:
    old = result(figure("slow", [1.0, 1.1]), figure("kept", [1.0, 1.1]))
    new = result(figure("slow", [2.0, 2.2]), figure("kept", [1.0, 1.1]), date="2026-01-02")
    lines, worse = report([old], [old, new])
    assert worse and "  1 figures as before" in lines
    assert [line for line in lines if "slow" in line] == ["  worse: slow: 1.05 -> 2.10 s (x 2.00)"]
    assert report([old], [old]) == (["no result differs from the committed ones"], False)
    assert report([old], [old, new], ["levers"])[1] is False


def test_measured_again_on_the_same_day_is_still_compared() -> None:
    old, new = result(figure("x", [1.0, 1.1])), result(figure("x", [2.0, 2.1]))
    assert old.file_name == new.file_name and report([old], [new])[1]


def test_the_first_of_its_kind_has_nothing_to_be_compared_with() -> None:
    lines, worse = report([], [result(figure("x", [1.0]))])
    assert not worse and "nothing is committed" in lines[1]


def test_committed_results_are_those_of_git(tmp_path: Path) -> None:
    """Of this checkout: all of them are read as what they are."""
    there = {each.file_name for each in read_results()}
    assert {each.file_name for each in committed()} <= there | {each.file_name for each in committed()}
    assert {each.name for each in committed()} >= {"peer", "levers"}
    outside = tmp_path / "benchmarks" / "results"
    outside.mkdir(parents=True)
    with pytest.raises(ValueError, match="git said"):
        committed(outside, tmp_path)


def test_a_change_reads_as_one_line() -> None:
    change = Change("learn", "s", figure("learn", [1.0, 1.2]), figure("learn", [2.0, 2.4]), less_is_better=True)
    assert str(change) == "worse: learn: 1.10 -> 2.20 s (x 2.00)"
