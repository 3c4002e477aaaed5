"""What the critic is made of, and how often it learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def critic(config: RunConfig) -> Iterator[str]:
    if "ppo" not in config.stages:
        return
    given = config.critic
    if given.updates_per_actor > 1 and one_pass(config):
        yield (
            f"critic.updates_per_actor: given {given.updates_per_actor} beside trunk.train = true, where actor and "
            "critic learn from one pass over the trunk, whose optimizer step they share; set trunk.alternate to 1 or "
            "more, give critic.model, or leave critic.updates_per_actor out"
        )
    if given.ensemble > 1 and given.heads != "scalar":
        yield (
            f"critic.ensemble: given {given.ensemble} beside critic.heads = {given.heads!r}, which has heads for parts "
            "of the reward; set one of the two to its default"
        )
    if given.ensemble > 1 and config.ppo.value_clip_eps > 0:
        yield (
            f"critic.ensemble: given {given.ensemble} beside ppo.value_clip_eps = {config.ppo.value_clip_eps:g}, which "
            "clips the move of a value from that of the rollout: this holds the mean of the heads, which is no head's "
            "own; set ppo.value_clip_eps = 0, or critic.ensemble = 1"
        )


def one_pass(config: RunConfig) -> bool:
    """Whether actor and critic learn from one pass over a trained trunk."""
    trained = config.sharing.mode == "trunk" and config.trunk.train
    return trained and config.critic.of_the_run and config.trunk.alternate == 0


def critic_warnings(config: RunConfig) -> Iterator[str]:
    """What is allowed and has a price that the user should know of before anything is loaded."""
    ratio, epochs = config.critic.updates_per_actor, config.ppo.num_epochs
    if "ppo" in config.stages and ratio > 1:
        yield (
            f"critic.updates_per_actor = {ratio}: the critic goes {ratio * epochs} times through every rollout, and "
            "may learn its responses by heart; where value_loss_last_pass_per_token falls while "
            "value_loss_fresh_per_token, of responses that it has not seen yet, rises: fewer updates, critic.dropout, "
            "critic.weight_decay or more responses"
        )
