"""Put the four roles together from a base model and the stages' results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fourfold.config.schema import RunConfig
from fourfold.memory.precision import dtype_of
from fourfold.models.adapters import is_adapted, is_adapter
from fourfold.models.loading import Base
from fourfold.models.products import hold_narrowly
from fourfold.models.roles import Policy, Scorer, checksum, copy_policy, copy_scorer, freeze, make_trainable, scorer_on
from fourfold.models.storage import RoleRecord, load_role


@dataclass
class FourModels:
    """Actor and critic, which are trained; reference and reward, which stand still."""

    base: Base
    actor: Policy
    critic: Scorer
    reference: Policy
    reward: Scorer | None

    def shared_parameters(self) -> dict[str, list[nn.Parameter]]:
        """What several roles hold: the trunk with the language head above it, and the base of adapters."""
        shared: dict[str, list[nn.Parameter]] = {}
        if self.base.trunk is not None:
            shared["trunk"] = [*self.base.trunk.parameters(), *self.actor.head.parameters()]
        if is_adapted(self.actor.branch):
            shared["base"] = [p for name, p in self.actor.named_parameters() if not is_adapter(name)]
        return shared

    def own_parameters(self, role: Policy | Scorer) -> list[nn.Parameter]:
        """What no other role and no trunk holds."""
        holders = (self.base.trunk, self.base.policy, self.actor, self.critic, self.reference, self.reward)
        others = {id(p) for held in holders if held is not None and held is not role for p in held.parameters()}
        return [p for p in role.parameters() if id(p) not in others]

    def frozen_checksum(self) -> str:
        """Checksum of everything that must not change: trunk, reference, reward."""
        parts = (self.base.trunk, self.reference, self.reward)
        return checksum(part for part in parts if part is not None)


def record_for(config: RunConfig, kind: str) -> RoleRecord:
    """What a stored role of this run says about itself."""
    mode, given = config.sharing.mode, config.adapters
    layers = {"trunk": config.trunk.branch_layers, "adapters": given.layers, "none": 0}[mode]
    kinds = "+".join(name for name in ("dora", "rslora") if getattr(given, name)) or "lora"
    targets = ",".join(sorted(given.targets)) or "all"
    adapters = f"{kinds} rank {given.rank} alpha {given.alpha:g} on {targets}" if mode == "adapters" else ""
    return RoleRecord(kind, config.model.path, mode, layers, adapters)


def assemble(config: RunConfig, base: Base, sft: Path | None, reward: Path | None) -> FourModels:
    """The four roles; `sft` and `reward` are folders of stored roles, None means the base model or no reward model.

    The actor takes over the base's own weights, so at most four models are resident at any time.
    """
    room = base.room(config)
    own = room.planned.weights["actor"]
    fresh = None
    if config.critic.init == "base" or reward is not None:
        with room.role("critic" if config.critic.init == "base" else "reward", own):
            fresh = base.new_scorer()
    actor, compute = base.policy, base.policy.branch.compute_dtype
    with room.role("actor"):
        if sft is not None:
            load_role(sft, actor, record_for(config, "policy"))
    with room.role("reference", own):
        reference = copy_policy(actor, share_head=base.shares_head)
        own_head = not base.shares_head
        freeze(reference, dtype_of(config.precision.reference, compute), with_language_head=own_head)
    scorer = None
    critic = fresh
    if reward is not None and fresh is not None:
        with room.role("reward", own if config.critic.init == "base" else 0):
            scorer = fresh if config.critic.init != "base" else copy_scorer(fresh)
            load_role(reward, scorer, record_for(config, "scorer"))
        with room.role("critic", own if config.critic.init == "reward" else 0):
            critic = copy_scorer(scorer) if config.critic.init == "reward" else fresh
    if config.critic.init == "actor":
        with room.role("critic", own):
            critic = scorer_on(actor)
    if critic is None or critic is scorer:
        raise ValueError(
            f"critic.init = {config.critic.init!r} needs a reward model, and reward.source = {config.reward.source!r} "
            'has none; try critic.init = "actor" or "base"'
        )
    if scorer is not None:
        freeze(scorer, dtype_of(config.precision.reward, compute))
    make_trainable(actor, with_language_head=not base.shares_head, memory=config.memory)
    make_trainable(critic, with_language_head=False, memory=config.memory)
    for role in (reference, scorer):
        if role is not None and not is_adapted(role.branch):
            hold_narrowly(role.branch)
    for role in (actor, critic, reference, scorer):
        if role is not None:
            role.train()  # dropout is 0 everywhere; train mode is what lets checkpointing act
    return FourModels(base, actor, critic, reference, scorer)


def set_new_head_bias(critic: Scorer, mean_score: float) -> None:
    """Start a new value head at the mean score, so that the first advantages are centred."""
    with torch.no_grad():
        critic.head.linear.bias.fill_(mean_score)
