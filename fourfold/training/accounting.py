"""What each model did in a step: passes, tokens and FLOPs.

Which passes generate and score make is written down here; the rows and tokens of each are those of the rollout, and in
the learn phase those of the mini-batches that were worked through. A test counts the same at the modules. A prompt that
rows share counts for each of them, though the sampler computes it once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fourfold.batch import Rollout
from fourfold.config.schema import MemorySection
from fourfold.memory.meter import PassCounter
from fourfold.models.adapters import adapter_parameters
from fourfold.models.assembly import FourModels
from fourfold.models.external import External
from fourfold.models.heads import AnyNumberHead, MultiHead
from fourfold.models.own_critic import OwnCritic
from fourfold.models.priors import UniformPolicy
from fourfold.models.reference import OwnPolicy
from fourfold.models.roles import Scorer
from fourfold.models.split import Part
from fourfold.planner.architectures import Architecture
from fourfold.planner.compute import Head, backward_flops, forward_flops
from fourfold.planner.number_head import ONE_NUMBER, NumberHead
from fourfold.scoring.ahead import Ahead
from fourfold.training.hiding import Hiding

if TYPE_CHECKING:
    from fourfold.training.learner import Learned


@dataclass
class Work:
    """Rows of a pass and their tokens: real ones (prompt and response), keys attended to, response tokens.

    `head_again` counts response tokens whose logits the backward pass made a second time.
    """

    rows: int = 0
    tokens: int = 0
    attended: int = 0
    responses: int = 0
    head_again: int = 0

    def add(self, rollout: Rollout, rows: Tensor | None = None, *, with_last: bool = True) -> None:
        """Count these rows of a rollout, or all; without their last tokens, which most passes do not see."""
        mask = rollout.attention_mask if rows is None else rollout.attention_mask[rows]
        lengths = mask.sum(dim=1) - int(not with_last)
        self.rows += len(lengths)
        self.tokens += int(lengths.sum())
        self.attended += int((lengths * (lengths + 1) // 2).sum())
        self.responses += int((rollout.response_mask if rows is None else rollout.response_mask[rows]).sum())


@dataclass
class TrunkWork:
    """What a trained trunk did in learn; each product with a gradient of its output is a backward pass."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Shape:
    """What a pass of a role, or of the trunk, goes through, and what its backward pass computes again."""

    architecture: Architecture
    layers: int
    adapters: int  # parameters in matrices of adapters
    own_model: bool
    again: dict[str, Any]

    @classmethod
    def of(cls, part: Part, base: Architecture, memory: MemorySection, *, own_model: bool = False) -> Shape:
        """Of a part of the run's own model, or of a model of its own."""
        shape = Architecture.from_config(part.body.config.to_dict()) if own_model else base
        matrices = [p for p in adapter_parameters(part) if p.ndim >= 2]
        return cls(shape, part.num_layers, sum(p.numel() for p in matrices), own_model, _forgotten(part, memory))


class Accountant:
    """Turns the passes of a step into metrics."""

    def __init__(self, models: FourModels, memory: MemorySection, ahead: Ahead | None = None) -> None:
        base = Architecture.from_config(models.base.config.to_dict())
        self._trained_trunk = models.trunk is not None
        roles = {"actor": models.actor, "critic": models.critic}
        self._uniform = isinstance(models.reference, UniformPolicy)
        self._step_0 = models.step_0 is not None
        self._values = _numbers_of(models.critic.head)
        if not self._uniform:
            roles["reference"] = models.reference
        self._has_reward = isinstance(models.reward, Scorer)
        if isinstance(models.reward, Scorer):
            roles["reward"] = models.reward
        self._shapes = {
            name: Shape.of(role.branch, base, memory, own_model=isinstance(role, OwnPolicy | OwnCritic))
            for name, role in roles.items()
        }
        for trunk in (models.base.trunk, models.trunk):
            if trunk is not None:
                self._shapes["trunk"] = Shape.of(trunk, base, memory)
        self._head_trained = models.actor.head.weight.requires_grad
        self._externals = [m for m in (models.reward, *models.classifiers.values()) if isinstance(m, External)]
        self.hiding = Hiding(models, ahead)

    def begin(self) -> None:
        """Forget what was done between two steps, in an evaluation or in pre-flight."""
        self.hiding.begin()
        for external in self._externals:
            external.take_work()

    def step(self, rollout: Rollout, learned: Learned, *, full_kl: bool) -> dict[str, float]:
        """Metrics of a step with this learn phase."""
        counter, whole, states = PassCounter(), Work(), Work()
        whole.add(rollout)
        states.add(rollout, with_last=False)
        if "trunk" in self._shapes:
            self._forward(counter, "trunk", "generate", whole, "none")
        self._forward(counter, "actor", "generate", states, "lm")
        self._from_ids(counter, "actor", "generate", states, "lm")  # log-probs by the training engine
        if full_kl:
            self._from_ids(counter, "actor", "score", states, "lm")
        for _ in range(2 if full_kl else 1):
            if not self._uniform:
                self._from_ids(counter, "reference", "score", states, "lm")
        if self._step_0:  # the actor as it was, whatever model the reference is
            self._from_ids(counter, "reference", "score", states, "lm", shape="actor")
        self._from_ids(counter, "critic", "score", whole, self._values)
        if self._has_reward:
            self._from_ids(counter, "reward", "score", whole, ONE_NUMBER)
        for external in self._externals:
            read, flops = external.take_work()
            counter.count("reward", "score", "forward", read.rows, read.tokens, flops)
        self._learn(counter, learned)
        return counter.take(whole.rows) | self.hiding.step()

    def _learn(self, counter: PassCounter, learned: Learned) -> None:
        trained_roles: tuple[tuple[str, Work, Head], ...] = (
            ("actor", learned.actor, "lm"),
            ("critic", learned.critic, self._values),
        )
        for role, work, head in trained_roles:
            self._forward(counter, role, "learn", work, head)
            self._backward(counter, role, work, head, head_trained=isinstance(head, NumberHead) or self._head_trained)
        if self._trained_trunk:
            self._forward(counter, "trunk", "learn", learned.trunk.forward, "none")
            self._backward(counter, "trunk", learned.trunk.backward, "none", head_trained=False)

    def _from_ids(
        self, counter: PassCounter, role: str, phase: str, work: Work, head: Head, *, shape: str = ""
    ) -> None:
        """A pass of a role over the cached trunk, or through the one that it stands on; `shape` is a role's of that."""
        if self._trained_trunk and not self._shapes[shape or role].own_model:
            self._forward(counter, "trunk", phase, work, "none")
        self._forward(counter, role, phase, work, head, shape=shape)

    def _forward(self, counter: PassCounter, role: str, phase: str, work: Work, head: Head, *, shape: str = "") -> None:
        flops = forward_flops(**self._sizes(shape or role, work, head))
        counter.count(role, phase, "forward", work.rows, work.tokens, flops)

    def _backward(self, counter: PassCounter, role: str, work: Work, head: Head, *, head_trained: bool) -> None:
        sizes, again = self._sizes(role, work, head), self._shapes[role].again
        flops = backward_flops(**sizes, head_trained=head_trained, head_tokens_again=work.head_again, **again)
        counter.count(role, "learn", "backward", work.rows, work.tokens, flops)

    def _sizes(self, role: str, work: Work, head: Head) -> dict[str, Any]:
        shape = self._shapes[role]
        return {
            "architecture": shape.architecture,
            "layers": shape.layers,
            "tokens": work.tokens,
            "attended_tokens": work.attended,
            "head": head,
            "head_tokens": 0 if head == "none" else work.responses,
            "adapter_parameters": shape.adapters,
        }


def _numbers_of(head: AnyNumberHead) -> NumberHead:
    width = head.outer.shape[1] if isinstance(head, MultiHead) else 0
    return NumberHead(head.linear.out_features, width)


def _forgotten(part: Part, memory: MemorySection) -> dict[str, Any]:
    """What the backward pass of a part computes again."""
    again = len(part.layers[:: memory.checkpoint_every])
    return {
        "layers_again": again if memory.checkpointing == "layers" else 0,
        "attentions_again": again if memory.checkpointing == "attention" else 0,
    }
