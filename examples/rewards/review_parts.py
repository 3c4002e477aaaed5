"""What vector.toml pays for, beside positivity: short snippets, and words that a newspaper would print.

Functions of prompts and responses (lists of str) that return a list of float; PYTHONPATH=examples/rewards finds them.
"""

from __future__ import annotations

import re
from functools import cache

# What a unit of a word's valence (-4 to 4) is worth. Its sum over the words, not VADER's compound, which one strong
# word already fills: praise has to take words, or it would not be against brevity.
WORTH_OF_VALENCE = 0.4
# Words that a response may have without paying for them, and what every word beyond them costs.
FREE_WORDS, COST_OF_A_WORD = 3, 0.25
COST_OF_A_COLLOQUIALISM = 0.5
COLLOQUIAL = re.compile(
    r"\b(?:really|pretty|kind of|sort of|lots?|fun|funny|stupid|dumb|cool|guys?|stuff|things?|just|you|your|i|we)\b"
    r"|n't|'(?:s|re|ll|ve|d)\b|!|\.\.\.|--",
    re.IGNORECASE,
)


@cache
def _lexicon() -> dict[str, float]:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer().lexicon


def positivity(prompts: list[str], responses: list[str]) -> list[float]:
    """The valences of VADER's lexicon (Hutto and Gilbert 2014), summed over different words."""
    lexicon = _lexicon()
    words = ({word.strip(".,;:!?()\"'").lower() for word in response.split()} for response in responses)
    return [WORTH_OF_VALENCE * sum(lexicon.get(word, 0.0) for word in some) for some in words]


def brevity(prompts: list[str], responses: list[str]) -> list[float]:
    """Nothing for up to FREE_WORDS words, less for every further one."""
    return [-COST_OF_A_WORD * max(len(response.split()) - FREE_WORDS, 0) for response in responses]


def formality(prompts: list[str], responses: list[str]) -> list[float]:
    """Less for every colloquial word, contraction, exclamation mark or row of dots."""
    return [-COST_OF_A_COLLOQUIALISM * len(COLLOQUIAL.findall(response)) for response in responses]
