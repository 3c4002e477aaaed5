"""Rule sets: what each rule counts, by hand and against other ways to count."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config.schema import RuleSection
from fourfold.scoring.rules import RuleSet, count_of


def score(text: str, **rule: Any) -> float | None:
    return RuleSet({"rule": RuleSection(**rule)})(["a prompt"], [text])[0]


WORDS = st.lists(st.text(string.ascii_letters, min_size=1, max_size=6), max_size=12)


@given(WORDS, st.integers(0, 10), st.integers(0, 10))
@settings(deadline=None)
def test_length_and_excess_are_two_views_of_one_range(words: list[str], one: int, other: int) -> None:
    """A length holds where nothing is in excess; every further word costs the excess score once."""
    shortest, longest = min(one, other), max(one, other) or 1
    text, bounds = "  " + " ".join(words) + "\n", {"shortest": shortest, "longest": longest}
    beyond = sum(1 for length in range(len(words)) if length >= longest)
    short = sum(1 for length in range(shortest) if length >= len(words))
    assert score(text, kind="excess", score=-0.5, **bounds) == -0.5 * (beyond + short)
    assert score(text, kind="length", score=2.0, **bounds) == (2.0 if beyond + short == 0 else 0.0)


@given(st.text(string.ascii_lowercase + " !", max_size=30), st.integers(0, 3))
@settings(deadline=None)
def test_matches_count_once_or_each_up_to_a_limit(text: str, at_most: int) -> None:
    marks = text.count("!")
    assert score(text, kind="regex", pattern="!", score=0.25) == 0.25 * bool(marks)
    limited = min(marks, at_most) if at_most else marks
    assert score(text, kind="regex", pattern="!", score=0.25, each=True, at_most=at_most) == 0.25 * limited
    assert score(text, kind="regex", pattern="!", inverted=True) == (0.0 if marks else 1.0)


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("Gonna go, gonna GONNA.", 3),
        ("begonna gonnas", 0),
        ("kind  of\nnice, kind of", 2),
        ("kind. of", 0),
        ("it's c++ and C++!", 2),
        ("", 0),
    ],
)
def test_keywords_are_whole_words_whatever_their_case(text: str, times: int) -> None:
    assert score(text, kind="keywords", words=["gonna", "kind of", "c++"], each=True) == times


def test_the_longest_phrase_is_found_first() -> None:
    assert score("not good", kind="keywords", words=["not", "not good"], each=True) == 1


@pytest.mark.parametrize(
    ("text", "words", "sentences", "lines"),
    [
        ("One. Two! Three?", 3, 3, 1),
        ('He said "no." Then he left', 6, 2, 1),
        (" a b\n\n c ", 3, 1, 2),
        ("", 0, 0, 0),
        ("3.14 is pi", 3, 1, 1),
    ],
)
def test_units(text: str, words: int, sentences: int, lines: int) -> None:
    counted = [count_of(text, unit) for unit in ("words", "sentences", "lines", "characters")]
    assert counted == [words, sentences, lines, len(text.strip())]


FORMATS = {
    "ended": (["It is.", ' "So it is!"', "what (?)", "well\u2026"], ["It is", "", "a, ", "e.g. this"]),
    "one_line": (["a", " a \n"], ["a\nb", ""]),
    "number": (["12", "-3.5", "1,000", ".5", " 7% "], ["", "1 2", "a", ".", "-", "1,00"]),
}


@pytest.mark.parametrize("name", ["ended", "one_line", "number"])
def test_formats(name: str) -> None:
    good, bad = FORMATS[name]
    for texts, expected in ((good, 1.0), (bad, 0.0)):
        for text in texts:
            assert score(text, kind="format", format=name) == expected, text
            assert score(text, kind="format", format=name, inverted=True) == 1.0 - expected, text


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
@settings(deadline=None)
def test_any_json_value_is_json_and_half_of_one_is_not(value: Any) -> None:
    text = json.dumps([value])
    assert score(text, kind="format", format="json") == 1.0
    assert score(text[:-1], kind="format", format="json") == 0.0


def test_a_set_is_the_sum_of_its_rules_and_each_response_is_alone() -> None:
    rules = RuleSet(
        {
            "short": RuleSection(kind="excess", longest=3, score=-0.5),
            "calm": RuleSection(kind="regex", pattern="!", each=True, score=-1.0),
            "ended": RuleSection(kind="format", score=2.0),
        }
    )
    texts = ["fine.", "a b c d e", "no!!", ""]
    assert rules([""] * 4, texts) == [2.0, -1.0, 0.0, 0.0]
    assert rules([""], texts[1:2]) == [-1.0]
