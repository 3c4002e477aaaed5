"""Rules on the text of a response, each with a score: what a rule set gives is their sum."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from fourfold.config.schema import RuleSection

# A sentence's end, with the quotes and brackets that may close after it.
_ENDED = re.compile(r"[.!?\u2026][\"'\u201d\u2019)\]]*$")
_NUMBER = re.compile(r"[+-]?(\d+(,\d{3})*|\d*)(\.\d+)?%?")


class RuleSet:
    """The sum of the scores of the rules that hold for a response; prompts are not looked at."""

    def __init__(self, rules: Mapping[str, RuleSection]) -> None:
        self._rules = tuple((rule, times_of(rule)) for rule in rules.values())

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float | None]:
        """One number a response: sum over rules of score x how often the rule holds."""
        return [sum(rule.score * times(text) for rule, times in self._rules) for text in responses]


def times_of(rule: RuleSection) -> Callable[[str], int]:
    """How often a rule holds for a text: 0 or 1, or a number of matches or units up to `at_most`."""
    if rule.kind == "excess":
        return lambda text: _limited(_outside(rule, count_of(text, rule.unit)), rule.at_most)
    found = _found(rule)
    if rule.inverted:
        return lambda text: int(not found(text))
    if rule.each:
        return lambda text: _limited(found(text), rule.at_most)
    return lambda text: int(found(text) > 0)


def _found(rule: RuleSection) -> Callable[[str], int]:
    """Matches in a text; of a length or a format whether it fits."""
    if rule.kind in ("regex", "keywords"):
        pattern = re.compile(rule.pattern) if rule.kind == "regex" else any_word(rule.words)
        return lambda text: sum(1 for _ in pattern.finditer(text))
    if rule.kind == "length":
        return lambda text: int(_outside(rule, count_of(text, rule.unit)) == 0)
    fits = FORMATS[rule.format]
    return lambda text: int(fits(text.strip()))


def any_word(words: tuple[str, ...]) -> re.Pattern[str]:
    """Any of the words or phrases as whole words, whatever their case and the spaces inside; the longest first."""
    phrases = sorted({r"\s+".join(map(re.escape, word.split())) for word in words if word.strip()}, key=len)
    return re.compile(rf"(?<!\w)({'|'.join(reversed(phrases))})(?!\w)", re.IGNORECASE)


def count_of(text: str, unit: str) -> int:
    """How many words, characters, sentences or lines a text has; spaces around it do not count."""
    text = text.strip()
    if unit == "characters":
        return len(text)
    if unit == "sentences":
        return len([part for part in re.split(r"(?<=[.!?\u2026])[\"'\u201d\u2019)\]]*\s+", text) if part])
    return len([part for part in (text.split() if unit == "words" else text.splitlines()) if part.strip()])


def _outside(rule: RuleSection, length: int) -> int:
    """Units by which a length is too short or too long."""
    return max(rule.shortest - length, length - rule.longest if rule.longest else 0, 0)


def _limited(times: int, at_most: int) -> int:
    return min(times, at_most) if at_most else times


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# Of a text without spaces around it.
FORMATS: dict[str, Callable[[str], bool]] = {
    "ended": lambda text: _ENDED.search(text) is not None,
    "one_line": lambda text: len(text.splitlines()) == 1,
    "number": lambda text: any(map(str.isdigit, text)) and _NUMBER.fullmatch(text) is not None,
    "json": _is_json,
}
