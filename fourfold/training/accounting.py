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
from fourfold.models.priors import UniformPolicy
from fourfold.models.reference import OwnPolicy
from fourfold.models.roles import Policy, Scorer
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


class Accountant:
    """Turns the passes of a step into metrics."""

    def __init__(self, models: FourModels, memory: MemorySection, ahead: Ahead | None = None) -> None:
        self._again = _forgotten(models.actor.branch, memory)
        self._trunk_again = {} if models.trunk is None else _forgotten(models.trunk, memory)
        self._trained_trunk = models.trunk is not None
        self._architecture = Architecture.from_config(models.base.config.to_dict())
        self._own_reference = _shape_of(models.reference)
        self._uniform = isinstance(models.reference, UniformPolicy)
        self._step_0 = models.step_0 is not None
        self._trunk_layers = models.base.trunk.num_layers if models.base.trunk is not None else 0
        self._branch_layers = models.actor.branch.num_layers
        self._values = _numbers_of(models.critic.head)
        self._head_trained = models.actor.head.weight.requires_grad
        self._externals = [m for m in (models.reward, *models.classifiers.values()) if isinstance(m, External)]
        self._has_reward = isinstance(models.reward, Scorer)
        matrices = [p for p in adapter_parameters(models.actor.branch) if p.ndim >= 2]
        self._adapter_parameters = sum(p.numel() for p in matrices)
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
        if self._trunk_layers:
            self._forward(counter, "trunk", "generate", whole, self._trunk_layers, "none")
        self._forward(counter, "actor", "generate", states, self._branch_layers, "lm")
        self._from_ids(counter, "actor", "generate", states, "lm")  # log-probs by the training engine
        if full_kl:
            self._from_ids(counter, "actor", "score", states, "lm")
        for _ in range(2 if full_kl else 1):
            self._reference(counter, states)
        if self._step_0:
            self._from_ids(counter, "reference", "score", states, "lm")
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
            self._forward(counter, role, "learn", work, self._branch_layers, head)
            trained = isinstance(head, NumberHead) or self._head_trained
            sizes = self._sizes(work, self._branch_layers, head)
            flops = backward_flops(**sizes, head_trained=trained, head_tokens_again=work.head_again, **self._again)
            counter.count(role, "learn", "backward", work.rows, work.tokens, flops)
        if self._trained_trunk:
            self._forward(counter, "trunk", "learn", learned.trunk.forward, self._trunk_layers, "none")
            work = learned.trunk.backward
            sizes = self._sizes(work, self._trunk_layers, "none")
            flops = backward_flops(**sizes, head_trained=False, **self._trunk_again)
            counter.count("trunk", "learn", "backward", work.rows, work.tokens, flops)

    def _from_ids(self, counter: PassCounter, role: str, phase: str, work: Work, head: Head) -> None:
        """A pass of a role over the cached trunk, or through the one that it stands on."""
        if self._trained_trunk:
            self._forward(counter, "trunk", phase, work, self._trunk_layers, "none")
        self._forward(counter, role, phase, work, self._branch_layers, head)

    def _reference(self, counter: PassCounter, work: Work) -> None:
        if self._uniform:
            return
        if self._own_reference is None:
            self._from_ids(counter, "reference", "score", work, "lm")
            return
        sizes = self._sizes(work, self._own_reference.layers, "lm")
        sizes |= {"architecture": self._own_reference, "adapter_parameters": 0}
        counter.count("reference", "score", "forward", work.rows, work.tokens, forward_flops(**sizes))

    def _forward(self, counter: PassCounter, role: str, phase: str, work: Work, layers: int, head: Head) -> None:
        counter.count(role, phase, "forward", work.rows, work.tokens, forward_flops(**self._sizes(work, layers, head)))

    def _sizes(self, work: Work, layers: int, head: Head) -> dict[str, Any]:
        return {
            "architecture": self._architecture,
            "layers": layers,
            "tokens": work.tokens,
            "attended_tokens": work.attended,
            "head": head,
            "head_tokens": 0 if head == "none" else work.responses,
            "adapter_parameters": 0 if head == "none" else self._adapter_parameters,
        }


def _shape_of(reference: Policy) -> Architecture | None:
    """The architecture of a reference with a model of its own; None where it is the actor's."""
    if not isinstance(reference, OwnPolicy):
        return None
    return Architecture.from_config(reference.branch.body.config.to_dict())


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
