"""Put the four roles together from a base model and the stages' results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fourfold.config.checks import reference_at_llama_cpp, roles_at_a_service, roles_of_the_base
from fourfold.config.schema import RunConfig
from fourfold.memory.offload import is_elsewhere
from fourfold.memory.precision import dtype_of
from fourfold.models.adapters import is_adapted, is_adapter
from fourfold.models.critics import critic_and_reward, critic_bytes
from fourfold.models.external import External, weight_bytes
from fourfold.models.heads import MultiHead, ScalarHead, VectorHead
from fourfold.models.identity import RoleWeights, weights_of_role
from fourfold.models.llama_roles import reference_by_llama_cpp
from fourfold.models.loading import Base
from fourfold.models.outside import Absent
from fourfold.models.priors import MovingReference, UniformPolicy, hold_as_trained
from fourfold.models.products import hold_narrowly
from fourfold.models.quantized import quantize_checked
from fourfold.models.reference import load_reference, reference_form
from fourfold.models.roles import (
    Policy,
    Scorer,
    checksum,
    copy_policy,
    freeze,
    hollow_copy,
    make_trainable,
    scorer_over,
)
from fourfold.models.room import Room
from fourfold.models.split import Part
from fourfold.models.storage import RoleRecord, load_role
from fourfold.models.text_rewards import classifiers_of, text_reward
from fourfold.models.trunk import hold_frozen_layers_narrowly, layer_parameters, trainable_copy
from fourfold.planner.advice import STEP_0, TRAINED_TRUNK
from fourfold.planner.quantization import QUANTIZED


@dataclass
class FourModels:
    """Actor and critic, which are trained; reference and reward, which stand still or, the first, move by a rule."""

    base: Base
    actor: Policy
    critic: Scorer
    reference: Policy
    reward: Scorer | External | Absent | None
    room: Room  # in which they were loaded, and their optimizers will be
    trunk: Part | None = None  # the trained one; the base's is the trunk as it was at step 0
    step_0: Policy | None = None  # the actor as it was there, where the reference is another policy
    moving: MovingReference | None = None  # the rule by which the reference moves
    # Of a combined reward, by the key of the first table that names them: text classifiers of other families.
    classifiers: dict[str, External] = field(default_factory=dict)
    new_value_head: bool = False  # whether nothing has trained the critic's head yet

    def shared_parameters(self) -> dict[str, list[nn.Parameter]]:
        """What several roles hold: the trunk with the language head above it, and the base of adapters."""
        shared: dict[str, list[nn.Parameter]] = {}
        if self.base.trunk is not None:
            shared["trunk"] = [*self.base.trunk.parameters(), *self.actor.head.parameters()]
        if self.trunk is not None:
            shared[TRAINED_TRUNK] = layer_parameters(self.trunk)
        if is_adapted(self.actor.branch):
            shared["base"] = [p for name, p in self.actor.named_parameters() if not is_adapter(name)]
        return shared

    def own_parameters(self, role: nn.Module) -> list[nn.Parameter]:
        """What no other role and no trunk holds."""
        frozen = (self.reference, self.reward, self.step_0, *self.classifiers.values())
        holders = (self.base.trunk, self.base.policy, self.actor, self.critic, *frozen)
        others = {id(p) for held in holders if held is not None and held is not role for p in held.parameters()}
        return [p for p in role.parameters() if id(p) not in others]

    def frozen_checksums(self) -> dict[str, str]:
        """Checksums of everything that must not change: trunk, reference, reward; not of roles held elsewhere.

        A reference that moves has marks of its own (`moving`).
        """
        parts = {"trunk": self.base.trunk, "reference": self.reference, "reward": self.reward, "step_0": self.step_0}
        parts |= self.classifiers
        if self.moving is not None:
            del parts["reference"]
        held = {name: part for name, part in parts.items() if part is not None and not is_elsewhere(part)}
        return {name: checksum([part]) for name, part in held.items()}


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

    The actor takes over the base's own weights, so at most four models are resident at any time. A role that is at a
    service is a form without weights; a reward model of another family that is there is nothing yet.
    """
    room = base.room(config, critic_bytes(config, base))
    # First, so that what an export takes for a moment lies beside the base only.
    away = roles_at_a_service(config)
    external = text_reward(config, room) if config.reward.source == "model" and "reward" not in away else None
    classifiers = classifiers_of(config, room)
    from_base = config.critic.of_the_run and config.critic.init == "base"
    fresh = None
    if from_base or (reward is not None and ("reward" not in away or config.critic.from_reward)):
        with room.role("critic" if from_base else "reward", room.copied):
            fresh = base.new_scorer()
    actor = base.policy
    with room.role("actor"):
        if sft is not None:
            load_role(sft, actor, record_for(config, "policy"))
    reference = _reference(config, base, room, actor, away="reference" in away)
    step_0 = _step_0(config, base, room, actor)
    stored = None if reward is None else (reward, record_for(config, "scorer"))
    scorers = critic_and_reward(config, base, room, fresh, stored, away="reward" in away)
    critic, scorer = scorers.critic, scorers.reward
    if scorer is not None and "reward" not in away:
        _freeze(scorer, config.precision.reward, base)
        room.froze("reward")
    give_value_head(config, critic, trained=not scorers.new_value_head)
    make_trainable(actor, with_language_head=not base.shares_head, memory=config.memory)
    make_trainable(critic, with_language_head=False, memory=config.memory)
    critic.branch.compute_dtype = dtype_of(config.precision.critic, critic.branch.compute_dtype)
    trunk = None
    if base.trunk is not None and config.trunk.train:
        with room.role(TRAINED_TRUNK, room.planned.weights[TRAINED_TRUNK]):
            trunk = trainable_copy(base.trunk, config.memory)
        hold_frozen_layers_narrowly(base.trunk)
        _stand(base.trunk, trunk, frozen=(reference, scorer, step_0), trained=(actor, critic))
    if "reference" in roles_of_the_base(config) and "reference" not in away and config.reference.kind != "moving":
        _hold(reference, config.precision.reference, base, "reference")
    if step_0 is not None:
        _hold(step_0, "auto", base, "reference")
    if scorer is not None and "reward" not in away:
        _hold(scorer, config.precision.reward, base, "reward")
    for role in (actor, critic, reference, scorer, step_0):
        if role is not None:
            role.train()  # dropout is 0 everywhere; train mode is what lets checkpointing act
    return FourModels(
        base=base,
        actor=actor,
        critic=critic,
        reference=reference,
        reward=scorer if external is None else external,
        room=room,
        trunk=trunk,
        step_0=step_0,
        classifiers=classifiers,
        new_value_head=scorers.new_value_head or config.critic.heads != "scalar",
    )


def _stand(
    start: Part,
    trunk: Part,
    *,
    frozen: tuple[Policy | Scorer | None, ...],
    trained: tuple[Policy, Scorer],
) -> None:
    """Where the trunk is trained nothing is cached: every role passes ids through the one that it stands on."""
    for roles, below in ((frozen, start), (trained, trunk)):
        for role in roles:
            if role is not None:
                role.stand_on(below)


def _reference(config: RunConfig, base: Base, room: Room, actor: Policy, *, away: bool) -> Policy:
    """A prior without weights, a model of its own, another policy of the base, or the actor as it is now."""
    given = config.reference
    if given.kind == "uniform":
        return UniformPolicy(len(actor.head.weight))
    if reference_at_llama_cpp(config):
        return hollow_copy(actor, share_head=base.shares_head)
    if given.engine != "torch":
        with room.role("reference"):
            return reference_by_llama_cpp(config, base, start_of_reference(config, base, actor))
    if given.model and away:
        return reference_form(config, base)
    if given.model:
        with room.role("reference", weight_bytes(given.model)):
            return load_reference(config, base)
    with room.role("reference", 0 if away else room.planned.weights["actor"]):
        if away:
            return hollow_copy(actor, share_head=base.shares_head)
        start = start_of_reference(config, base, actor)
        reference = copy_policy(actor, share_head=base.shares_head) if start is actor else start
        if given.kind == "moving":
            hold_as_trained(reference, shares_head=base.shares_head)
        else:
            _freeze(reference, config.precision.reference, base)
    room.froze("reference")
    return reference


def start_of_reference(config: RunConfig, base: Base, actor: Policy) -> Policy:
    """The weights of a reference that is made of the base: `reference.checkpoint`, or the actor's as they are now."""
    if not config.reference.checkpoint:
        return actor
    policy = copy_policy(actor, share_head=base.shares_head)
    load_role(Path(config.reference.checkpoint).expanduser(), policy, record_for(config, "policy"))
    return policy


def _step_0(config: RunConfig, base: Base, room: Room, actor: Policy) -> Policy | None:
    """The actor as it is now, frozen, where the reference is another policy and the settings want both."""
    if not config.reference.holds_step_0:
        return None
    with room.role(STEP_0, room.planned.weights["actor"]):
        policy = copy_policy(actor, share_head=base.shares_head)
        _freeze(policy, "auto", base)
    room.froze(STEP_0)
    return policy


def _freeze(role: Policy | Scorer, held: str, base: Base) -> None:
    """In the type that a setting names; weights in fewer bits compute as the actor does."""
    dtype = None if held in QUANTIZED else dtype_of(held, role.branch.compute_dtype)
    freeze(role, dtype, with_language_head=not base.shares_head)


def frozen_roles(
    config: RunConfig, base: Base, sft: Path | None, reward: Path | None, roles: Collection[str]
) -> tuple[Policy | None, Scorer | None, dict[str, RoleWeights]]:
    """Reference and reward as `assemble` makes them, those of them that `roles` names, and what their weights are.

    The reference takes over the base's own weights; without one the reward model does.
    """
    weights: dict[str, RoleWeights] = {}
    policy, scorer = base.policy, None
    if "reward" in roles:
        scorer = base.new_scorer() if "reference" in roles else scorer_over(policy)
        assert reward is not None, "a run without a reward model serves none"
        load_role(reward, scorer, record_for(config, "scorer"))
        weights["reward"] = weights_of_role(base, scorer)
        _freeze(scorer, config.precision.reward, base)
    if "reference" in roles:
        start = Path(config.reference.checkpoint).expanduser() if config.reference.checkpoint else sft
        if start is not None:
            load_role(start, policy, record_for(config, "policy"))
        weights["reference"] = weights_of_role(base, policy)
        _freeze(policy, config.precision.reference, base)
    held: list[tuple[Policy | Scorer, str, str]] = []
    if "reference" in roles:
        held.append((policy, config.precision.reference, "reference"))
    if scorer is not None:
        held.append((scorer, config.precision.reward, "reward"))
    for role, kind, name in held:
        _hold(role, kind, base, name)
        role.train()
    return policy if "reference" in roles else None, scorer, weights


def _hold(role: Policy | Scorer, kind: str, base: Base, setting: str) -> None:
    """Hold the own weights of a frozen role in fewer bytes: the same numbers, or rounded ones where that is asked."""
    if is_adapted(role.branch):
        return
    if kind in QUANTIZED:
        quantize_checked(role, base.trunk, role.branch, kind, base.probe(), setting)
    hold_narrowly(role.branch)


def set_new_head_bias(critic: Scorer, mean_score: Tensor) -> None:
    """Start a new value head at the mean score (one a dimension), so that the first advantages are centred.

    Of a vector head the dimension that says what the reward model says stays as it is.
    """
    linear = critic.head.linear
    with torch.no_grad():
        fresh = (linear.weight == 0).all(dim=1)
        linear.bias.copy_(torch.where(fresh, mean_score.to(linear.bias.device), linear.bias))


def give_value_head(config: RunConfig, critic: Scorer, *, trained: bool) -> None:
    """Put the head of the settings on a critic that has a scalar one, whose dimension goes on saying what that says.

    What a reward model scores is the value of its own part; all other dimensions are new.
    """
    names, hidden = config.value_dimensions, critic.branch.hidden_size
    if not names:
        return
    if config.critic.heads == "multi":
        head: VectorHead = MultiHead(hidden, len(names), config.critic.head_width, config.seed)
    else:
        head = VectorHead(hidden, len(names))
    if trained:
        assert isinstance(critic.head, ScalarHead), "a reward model has one number"
        head.start_from(critic.head, config.reward.trained_dimension)
    if config.critic.loss_balance == "fixed":
        counts = [config.critic.loss_weights.get(name, 1.0) for name in names]
        head.loss_weights.copy_(torch.tensor(counts))
    critic.head = head.to(critic.head.linear.weight.device)
