"""The parts of a combined reward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fourfold.config.checks.inputs import function_problem

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def reward_parts(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.source != "combined":
        return
    if not reward.parts:
        yield "reward.parts: none given, but reward.source = 'combined' adds them up; give [reward.parts.NAME] tables"
    elif not any(part.weight for part in reward.parts.values()):
        yield (
            "reward.parts: every weight is 0, so that all responses score alike; allowed: at least one weight that is "
            "not 0"
        )
    for name, part in reward.parts.items():
        key = f"reward.parts.{name}"
        if not re.fullmatch("[a-z][a-z0-9_]*", name) or name == "score":
            yield (
                f"{key}: given the name {name!r}, which metrics bear; allowed: small letters, digits and underlines, a "
                "letter first, but not 'score', which is the sum; try 'brevity'"
            )
        if part.source == "function":
            yield from function_problem(key, part.function)
