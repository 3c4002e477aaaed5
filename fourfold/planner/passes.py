"""Which passes a PPO step makes: the same list that fourfold.training.accounting keeps, before anything has run.

A whole rollout that every role goes through as the run does it: decoding, log-probs by the training engine, one pass of
each scorer, and epochs of forward and backward passes. A frozen trunk decodes once and its output is kept: every later
pass is one of branches. tests/planner/test_passes.py compares rows, tokens and FLOPs with those of real steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fourfold.config.checks.critic import one_pass
from fourfold.config.schema import RunConfig
from fourfold.planner.adapters import adapter_parameters
from fourfold.planner.architectures import Architecture
from fourfold.planner.bill import Phase
from fourfold.planner.compute import Head, backward_flops, forward_flops
from fourfold.planner.number_head import ONE_NUMBER, NumberHead
from fourfold.planner.scene import Lengths, Scene

# Rows of logits that exist at a time: fourfold.algorithms.log_probs.CHUNK_TOKENS, which a test compares.
CHUNK_TOKENS = 1024
Direction = Literal["forward", "backward"]


class Batch(NamedTuple):
    """Rows of a pass and what is in them: tokens, keys attended to, response tokens; sums over the rows."""

    rows: int
    tokens: float
    attended: float
    responses: float

    @classmethod
    def of(cls, rows: int, lengths: Lengths, *, with_last: bool = True) -> Batch:
        """Rows of the mean length; without the last token of each, which most passes do not see."""
        length = lengths.mean_prompt + lengths.mean_response - int(not with_last)
        return cls(rows, rows * length, rows * length * (length + 1) / 2, rows * lengths.mean_response)


@dataclass(frozen=True, slots=True)
class Pass:
    """One role's pass over a batch, and how many there are like it."""

    role: str  # or "trunk"
    phase: Phase
    direction: Direction
    batch: Batch
    architecture: Architecture
    layers: range  # of the architecture
    head: Head
    flops: float  # of one
    decodes: bool = False  # token by token
    times: int = 1


class Cut(NamedTuple):
    """How the run's model is divided among the roles."""

    trunk: int  # layers below the branches; 0: none
    branch: int  # layers that every role has, or adapts
    trunk_trained: bool
    head_trained: bool  # the language head
    adapter_parameters: int  # of one role, low-rank matrices only
    critic: int  # of a role's layers, those that the critic has; all of its own where it has another model

    @classmethod
    def of(cls, scene: Scene) -> Cut:
        """As the settings divide it."""
        config, layers = scene.config, scene.base.layers
        mode, adapters = config.sharing.mode, config.adapters
        asked = {"none": 0, "trunk": config.trunk.branch_layers, "adapters": adapters.layers}[mode]
        branch = min(asked, layers) if mode == "trunk" else asked or layers
        low_rank = adapter_parameters(scene.base, adapters.rank, adapters.targets, branch) if mode == "adapters" else 0
        critic = branch
        if config.critic.layers:
            critic = max(min(config.critic.layers, layers) - (layers - branch), 0)
        if other := scene.models.get("critic"):
            critic = other.layers
        trained = mode == "trunk" and config.trunk.train
        return cls(layers - branch, branch, trained, mode == "none", low_rank, critic)

    def adapters_of(self, scene: Scene, role: str) -> int:
        """Numbers of a role's low-rank matrices."""
        if role in scene.models:
            return 0
        fewer = role == "critic" and self.critic < self.branch
        return self.adapter_parameters * self.critic // self.branch if fewer else self.adapter_parameters


class Batches(NamedTuple):
    """Mini-batches of a PPO step that the critic learns from alone, the actor alone, and both in one pass."""

    critic: int
    actor: int
    together: int

    @classmethod
    def of(cls, config: RunConfig) -> Batches:
        """As the settings have it, when no epoch ends early."""
        updates, ratio = config.ppo.updates_a_rollout, config.critic.updates_per_actor
        if one_pass(config):
            return cls(0, 0, updates)
        in_turns = config.sharing.mode == "trunk" and config.trunk.train and config.critic.of_the_run
        turns = config.trunk.turns(updates) if in_turns else {"critic": 0, "actor": 0}
        return cls(ratio * (updates - turns["actor"]), updates - turns["critic"], 0)

    def steps(self) -> dict[str, int]:
        """The optimizer's, of each part."""
        actor = self.actor + self.together
        return {"critic": self.critic + self.together, "actor": actor, "trunk": actor}


def passes(scene: Scene) -> list[Pass]:
    """All passes of one PPO step, of the whole job whatever the layout; an update that ends early makes fewer."""
    maker = _Maker(scene)
    return [*maker.generate(), *maker.score(), *maker.learn()]


class _Maker:
    """The passes of one scene, phase by phase."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._config = scene, scene.config
        self._cut = Cut.of(scene)
        rows = scene.config.ppo.rollout_batch_size
        self._whole = Batch.of(rows, scene.lengths)
        self._states = Batch.of(rows, scene.lengths, with_last=False)

    def generate(self) -> Iterator[Pass]:
        """Decoding, and log-probs by the training engine."""
        if self._cut.trunk:
            yield self._forward("trunk", "generate", self._whole, "none", decodes=True)
        yield self._forward("actor", "generate", self._states, "lm", decodes=True)
        yield from self._from_ids("actor", "generate", self._states, "lm")

    def score(self) -> Iterator[Pass]:
        """Reference, critic and reward; the exact KL looks at actor and reference once more."""
        exact = self._config.ppo.kl_estimator == "full"
        if exact:
            yield from self._from_ids("actor", "score", self._states, "lm")
        for _ in range(2 if exact else 1):
            yield from self._reference()
        if self._config.reference.holds_step_0:  # the actor as it was, beside another prior or model
            for each in self._from_ids("actor", "score", self._states, "lm"):
                yield replace(each, role="reference") if each.role == "actor" else each
        yield from self._from_ids("critic", "score", self._whole, NumberHead.of_critic(self._config))
        if self._config.reward.of_the_base:
            yield from self._from_ids("reward", "score", self._whole, ONE_NUMBER)
        for other in self._scene.classifiers.values():
            yield self._of_another("reward", other, self._whole, ONE_NUMBER)

    def learn(self) -> Iterator[Pass]:
        """Epochs x mini-batches of actor and critic, and of a trained trunk below them."""
        batches = Batches.of(self._config)
        mini = Batch.of(self._config.ppo.mini_batch_size, self._scene.lengths, with_last=False)
        steps = batches.steps()
        yield from self._trained("critic", mini, NumberHead.of_critic(self._config), steps["critic"])
        yield from self._trained("actor", mini, "lm", steps["actor"])
        if not self._cut.trunk_trained:
            return
        # A critic that learns alone passes ids through the trunk, unless it has a model of its own.
        alone = batches.critic if self._config.critic.of_the_run else 0
        yield replace(self._forward("trunk", "learn", mini, "none"), times=steps["trunk"] + alone)
        # The first mini-batch, and every one that is balanced, keeps the two gradients apart.
        balanced = self._config.trunk.balance == "grad_norm"
        apart = batches.together if balanced else min(batches.together, 1)
        yield replace(self._backward("trunk", mini, "none"), times=steps["trunk"] + apart)

    def _trained(self, role: str, mini: Batch, head: Head, times: int) -> Iterator[Pass]:
        yield replace(self._forward(role, "learn", mini, head), times=times)
        yield replace(self._backward(role, mini, head), times=times)

    def _from_ids(self, role: str, phase: Phase, batch: Batch, head: Head) -> Iterator[Pass]:
        """A pass of a role over the cached trunk, or through the one that it stands on."""
        if self._cut.trunk_trained and role not in self._scene.models:
            yield self._forward("trunk", phase, batch, "none")
        yield self._forward(role, phase, batch, head)

    def _reference(self) -> Iterator[Pass]:
        if self._config.reference.kind == "uniform":
            return
        other = self._scene.models.get("reference")
        if other is None:
            yield from self._from_ids("reference", "score", self._states, "lm")
        else:
            yield self._of_another("reference", other, self._states, "lm")

    def _of_another(self, role: str, model: Architecture, batch: Batch, head: Head) -> Pass:
        layers = range(model.layers)
        sizes = self._sizes(role, batch, layers, head) | {"architecture": model, "adapter_parameters": 0}
        return Pass(role, "score", "forward", batch, model, layers, head, forward_flops(**sizes))

    def _layers(self, role: str) -> range:
        """Those of the trunk, those above it that a role has, or all of a model of its own."""
        cut = self._cut
        if role == "trunk" or role in self._scene.models:
            return range(cut.trunk if role == "trunk" else self._scene.models[role].layers)
        return range(cut.trunk, cut.trunk + (cut.critic if role == "critic" else cut.branch))

    def _forward(self, role: str, phase: Phase, batch: Batch, head: Head, *, decodes: bool = False) -> Pass:
        layers = self._layers(role)
        sizes = self._sizes(role, batch, layers, head)
        return Pass(role, phase, "forward", batch, sizes["architecture"], layers, head, forward_flops(**sizes), decodes)

    def _backward(self, role: str, batch: Batch, head: Head) -> Pass:
        memory, layers = self._config.memory, self._layers(role)
        again = len(layers[:: memory.checkpoint_every])
        sizes = self._sizes(role, batch, layers, head)
        flops = backward_flops(
            **sizes,
            head_trained=isinstance(head, NumberHead) or (head == "lm" and self._cut.head_trained),
            head_tokens_again=self._head_again(batch) if head == "lm" else 0,
            layers_again=again if memory.checkpointing == "layers" else 0,
            attentions_again=again if memory.checkpointing == "attention" else 0,
        )
        return Pass(role, "learn", "backward", batch, sizes["architecture"], layers, head, flops)

    def _head_again(self, mini: Batch) -> int:
        """Response tokens whose logits are made again: all of a micro-batch but those of the last chunk."""
        ppo = self._config.ppo
        if not self._cut.head_trained and not ppo.entropy_coef:
            return 0
        rows = min(self._scene.micro_rows, mini.rows)
        tokens = round(mini.responses / mini.rows * rows)
        return max(tokens - 1, 0) // CHUNK_TOKENS * CHUNK_TOKENS * (mini.rows // rows)

    def _sizes(self, role: str, batch: Batch, layers: range, head: Head) -> dict[str, Any]:
        return {
            "architecture": self._scene.models.get(role, self._scene.base),
            "layers": len(layers),
            "start": layers.start,
            "tokens": batch.tokens,
            "attended_tokens": batch.attended,
            "head": head,
            "head_tokens": 0 if head == "none" else batch.responses,
            "adapter_parameters": 0 if head == "none" else self._cut.adapters_of(self._scene, role),
        }
