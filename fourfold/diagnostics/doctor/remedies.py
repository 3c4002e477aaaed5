"""Settings that a verdict proposes: only those that the run's other settings take."""

from __future__ import annotations

from fourfold.config import RunConfig
from fourfold.config.loading import ConfigError, apply_override, parse_config


def proposed(remedy: str) -> list[str]:
    """The settings of a remedy ('a.b = 1; c.d = 2  # why'), each 'KEY = VALUE'; none where it has no setting."""
    return [each for each in remedy.partition("#")[0].strip().split("; ") if each]


def is_taken(config: RunConfig, remedy: str) -> bool:
    """Whether a run with these settings would start with what a remedy proposes.

    Settings that are at their defaults, which a run writes down too, stand in no user's file as a rule: where a remedy
    makes one of them needless, that is no contradiction.
    """
    tree = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    try:
        for each in proposed(remedy):
            apply_override(tree, each)
        parse_config(tree, source="remedy")
    except ConfigError:
        return False
    return True


def first_taken(config: RunConfig, *remedies: str) -> str:
    """The first remedy that is taken; "" where none is."""
    return next((remedy for remedy in remedies if remedy and is_taken(config, remedy)), "")
