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


def critic_layers(config: RunConfig, total: int, below: int) -> int | None:
    """Layers that the critic keeps above a trunk of `below` of the model's `total` under `critic.layers`; None: all.

    ValueError where they end inside a trunk, whose activations are known above its last layer only, and where a critic
    would be left without anything of its own to train below its head.
    """
    asked = config.critic.layers
    if not asked:
        return None
    adapted = config.sharing.mode == "adapters"
    least = below + 1 if adapted else max(below, 1)
    if least <= asked < total:
        return asked - below
    given = f"critic.layers: given {asked} of the model's {total} layers"
    if asked >= total:
        raise ValueError(f"{given}; allowed: {least} to {total - 1}, or 0 for all of them")
    cut = "adapters.layers" if adapted else "trunk.branch_layers"
    instead = f"a larger {cut}" + ("" if adapted else ", or sharing.mode = 'none'")
    raise ValueError(
        f"{given}, of which the lowest {below} are the shared trunk, whose activations are there above its last layer "
        f"only; allowed: {least} to {total - 1}, or 0 for all; try {instead}"
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
