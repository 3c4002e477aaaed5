"""Texts of the stage sft behind the weights that their own scores suggest, so that a policy heeds weights before PPO.

Yang et al. 2024, "Rewards-in-Context", section 3.1, put scores in front of texts; here it is weights, as in front of
the prompts of PPO: what a text is good at, beside the other texts, is what it was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fourfold.config.schema import RunConfig
from fourfold.data.told_weights import ToldWeights
from fourfold.models.loading import Base
from fourfold.training.reward_sources import text_source
from fourfold.training.supervised import Texts

Say = Callable[[str], None]


def tell_texts(config: RunConfig, base: Base, texts: Texts, name: str, say: Say) -> Texts:
    """The texts of a data set with weights in front; those that a part has no score for are left out, and counted."""
    told = ToldWeights.of(config, base.tokenizer)
    assert told is not None, "the settings ask for reward.weights = 'sampled' beside sft.tell_weights"
    scores = _scores(config, base, texts)
    scored = [row for row, some in enumerate(scores) if all(map(math.isfinite, some))]
    weights = told.suggested([scores[row] for row in scored])
    most = [max(tenths) for tenths in weights]
    left_out = f"; {len(texts) - len(scored):,} without a valid score left out" if len(scored) < len(texts) else ""
    if not scored:
        raise ValueError(f"data.{name}: none of {len(texts):,} texts has a score of every part; look at reward.parts")
    example = told.text(weights[0]).strip()
    say(
        f"data.{name}: {len(scored):,} texts are told weights by their own scores (sft.tell_weights); the largest "
        f"is {sum(most) / len(most) / 10:.1f} on average; first row: {example!r}{left_out}"
    )
    return [told.tell_text(texts[row], tenths) for row, tenths in zip(scored, weights, strict=True)]


def _scores(config: RunConfig, base: Base, texts: Texts) -> list[tuple[float, ...]]:
    """What each part says of each text: as of a response to an empty prompt, as many at a time as a rollout has."""
    written = [base.tokenizer.decode(list(text), skip_special_tokens=True) for text in texts]
    columns = []
    for name, part in config.reward.parts.items():
        source = text_source(name, part, base.tokenizer)
        column: list[float] = []
        for start in range(0, len(written), config.ppo.rollout_batch_size):
            some = written[start : start + config.ppo.rollout_batch_size]
            column += source.numbers([""] * len(some), some)
        columns.append(column)
    return list(zip(*columns, strict=True))
