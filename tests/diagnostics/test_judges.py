"""The VADER judge against the scores that its authors publish."""

from __future__ import annotations

import sys

import pytest

from fourfold.diagnostics.judges import make_judge

# Example sentences and compound scores of the VADER documentation (Hutto & Gilbert 2014).
PUBLISHED = {
    "VADER is smart, handsome, and funny.": 0.8316,
    "VADER is not smart, handsome, nor funny.": -0.7424,
    "The book was good.": 0.4404,
    "Today SUX!": -0.5461,
}


def test_vader_gives_its_published_scores() -> None:
    pytest.importorskip("vaderSentiment")
    judge = make_judge("vader")
    assert judge is not None
    assert judge(list(PUBLISHED)) == pytest.approx(list(PUBLISHED.values()), abs=1e-4)
    assert judge([]) == []
    assert judge([""]) == [0.0]


def test_no_judge_is_a_choice() -> None:
    assert make_judge("none") is None


def test_an_unknown_judge_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'vadar'; allowed: none, vader"):
        make_judge("vadar")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS N2, N4: what is missing is said at the start."""
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(ValueError, match=r"fourfold\[reviews\]"):
        make_judge("vader")
