"""Judges of texts that know nothing of the reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

JUDGES = ("none", "vader")


def make_judge(name: str) -> Callable[[Sequence[str]], list[float]] | None:
    """The judge of this name, or None for "none": texts in, one number a text out.

    "vader": compound sentiment of the VADER lexicon, -1 to 1 (Hutto & Gilbert 2014).
    """
    if name not in JUDGES:
        raise ValueError(f"evaluation.judge = {name!r}; allowed: {', '.join(JUDGES)}")
    if name == "none":
        return None
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ValueError(
            "evaluation.judge = 'vader' needs the package vaderSentiment, which is not installed; "
            "try `pip install 'fourfold[reviews]'`, or evaluation.judge = 'none'"
        ) from error
    analyzer = SentimentIntensityAnalyzer()
    return lambda texts: [float(analyzer.polarity_scores(text)["compound"]) for text in texts]
