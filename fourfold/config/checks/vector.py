"""Several values, and weights that are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

MOST_TOLD = 8  # parts whose weights are told in prompts, in 19,448 ways


def values(config: RunConfig) -> Iterator[str]:
    """Of critic.heads = 'vector' and 'multi'; with 'scalar' these settings are refused as ignored."""
    names = config.value_dimensions
    if not names:
        return
    if names.count(names[-1]) > 1:
        yield (
            f"reward.parts.{names[-1]}: a critic of several values has one of this name for KL and other penalties; "
            "give the part another name, or set critic.heads = 'scalar'"
        )
    for key in ("loss_weights", "value_clip_eps"):
        for name, number in getattr(config.critic, key).items():
            if name not in names:
                yield f"critic.{key}.{name}: no value has this name; allowed: {', '.join(names)}"
            elif number < 0:
                yield f"critic.{key}.{name}: given {number}; allowed: a number >= 0; leave it out for the default"
    if not any(config.critic.loss_weights.get(name, 1.0) for name in names):
        yield "critic.loss_weights: every one is 0, so that the critic learns nothing; allowed: at least one above 0"


def told_texts(config: RunConfig) -> Iterator[str]:
    """Of sft.tell_weights."""
    reward = config.reward
    if not config.sft.tell_weights:
        return
    if reward.source != "combined" or reward.weights != "sampled":
        yield (
            "sft.tell_weights: given true, but prompts are told of no weights; allowed beside reward.source = "
            "'combined' and reward.weights = 'sampled'"
        )
        return
    if models := [name for name, part in reward.parts.items() if part.source not in ("function", "rules", "http")]:
        yield (
            f"sft.tell_weights: given true, but {' and '.join(f'reward.parts.{name}' for name in models)} cannot score "
            "the texts of the stage sft: models are loaded by ppo, and a verifier has no answers to them; allowed: "
            "parts whose source is 'function', 'rules' or 'http' (fourfold serve hosts a model for http)"
        )


def sampled_weights(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.weights == "fixed" or reward.source != "combined":
        return
    if len(reward.parts) < 2:
        yield (
            f"reward.weights: given 'sampled', but there are {len(reward.parts)} reward.parts to weigh; allowed: at "
            "least two"
        )
    if len(reward.parts) > MOST_TOLD:
        yield (
            f"reward.weights: given 'sampled' beside {len(reward.parts)} reward.parts, whose weights can be told "
            f"in {math.comb(10 + len(reward.parts) - 1, 10):,} ways, in tenths; allowed: at most {MOST_TOLD} parts"
        )
    for name, part in reward.parts.items():
        if part.weight <= 0:
            yield (
                f"reward.parts.{name}.weight: given {part.weight} beside reward.weights = 'sampled', whose mean it is; "
                "allowed: a number above 0 (a part that shall be low: let its source return the negative)"
            )
