"""What the critic is made of: reward model, actor or base, the lowest layers of one of them, or a model of its own.

The reward model is made here too: the critic may be a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.config.checks.critic import critic_layers
from fourfold.config.schema import RunConfig
from fourfold.memory.budget import tensor_bytes
from fourfold.models.adapters import is_adapted, is_adapter
from fourfold.models.ensemble import EnsembleHead
from fourfold.models.heads import ScalarHead
from fourfold.models.loading import Base
from fourfold.models.own_critic import check_own_critic, load_critic, own_critic_bytes
from fourfold.models.roles import Scorer, copy_scorer, hollow_copy, scorer_on, scorer_over
from fourfold.models.room import Room
from fourfold.models.split import keep_lowest
from fourfold.models.storage import RoleRecord, load_role


@dataclass(frozen=True)
class Scorers:
    """Critic and reward model (None: there is none of the base's family), and whether the critic's head is new."""

    critic: Scorer
    reward: Scorer | None
    new_value_head: bool


def layers_above_trunk(config: RunConfig, base: Base) -> int | None:
    """How many layers of a role's own the critic keeps under `critic.layers`; None for all of them (or ValueError)."""
    below = 0 if base.trunk is None else base.trunk.num_layers
    return critic_layers(config, below + base.policy.branch.num_layers, below)


def check_critic(config: RunConfig, base: Base) -> None:
    """ValueError where the settings want a critic that cannot be made of this base; no weights are read."""
    if config.critic.of_the_run:
        layers_above_trunk(config, base)
    else:
        check_own_critic(config, base)


def critic_bytes(config: RunConfig, base: Base) -> int | None:
    """Float32 bytes that the critic takes where it is no copy of all that a role has for its own; else None."""
    if not config.critic.of_the_run:
        return own_critic_bytes(config)
    if (layers := layers_above_trunk(config, base)) is None:
        return None
    branch = base.policy.branch
    adapted, dropped = is_adapted(branch), {id(p) for layer in branch.layers[layers:] for p in layer.parameters()}
    own = (p for name, p in branch.named_parameters() if not adapted or is_adapter(name))
    return tensor_bytes(p for p in own if id(p) not in dropped)


def critic_and_reward(
    config: RunConfig,
    base: Base,
    room: Room,
    fresh: Scorer | None,
    reward: tuple[Path, RoleRecord] | None,
    *,
    away: bool,
) -> Scorers:
    """`fresh` is a scorer on the base model, which one of the two becomes; a reward model that is `away` is neither."""
    init = config.critic.init if config.critic.of_the_run else "model"
    layers, own = layers_above_trunk(config, base), room.planned.weights["critic"]
    scorer, critic, new_head = None, fresh, not config.critic.from_reward or layers is not None
    if reward is not None and fresh is not None and not (away and init == "base"):
        with room.role("reward", room.copied if init == "base" else 0):
            scorer = fresh if init != "base" else copy_scorer(fresh)
            load_role(reward[0], scorer, reward[1])
        with room.role("critic", own if init == "reward" and not away else 0):
            critic = copy_scorer(scorer, layers) if init == "reward" and not away else fresh
    if init == "actor":
        with room.role("critic", own):
            critic = scorer_on(base.policy, layers)
    if init == "model":
        with room.role("critic", own):
            critic, new_head = load_critic(config, base)
    if critic is None or (critic is scorer and not away):
        raise ValueError(
            f"critic.init = {init!r} needs a reward model, and reward.source = {config.reward.source!r} "
            'has none; try critic.init = "actor" or "base"'
        )
    if layers is not None and critic.branch.num_layers > layers:
        keep_lowest(critic.branch, layers)
    if layers is not None and init == "reward":  # its head reads what stands above all layers
        critic.head = ScalarHead(critic.branch.hidden_size).to(base.budget.device)
    if config.critic.ensemble > 1:
        assert isinstance(critic.head, ScalarHead), "several values are put on it later, and no ensemble with them"
        critic.head = EnsembleHead.of(critic.head, config.critic.ensemble)
    if away and reward is not None:
        scorer = hollow_copy(scorer_over(base.policy), share_head=False)
    return Scorers(critic, scorer, new_head)
