"""Priors that are no frozen model: the uniform distribution, and a reference whose weights follow the actor's.

What they save: the uniform one, all weights of a reference and its passes. What they cost: the one that moves is
float32 as the actor's own part is, and one pass over these weights a step. What they change: the objective. What they
exclude: engines and services, which hold weights that stand still (fourfold.config.checks.prior).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from fourfold.algorithms.log_probs import Entropy
from fourfold.batch import Rollout
from fourfold.config.schema import ReferenceSection
from fourfold.errors import RunFailed
from fourfold.models.roles import Activations, Policy, make_trainable
from fourfold.models.storage import holder_of, own_parts, source_of
from fourfold.tensor_files import Source

# Numbers of a tensor that are looked at together for its mark: int64 copies of them take 8 MiB.
_MARKED_AT_ONCE = 1 << 20


class UniformPolicy(Policy):
    """p = 1 / V for each of the V tokens that the actor has logits for, whatever came before: no weights, no pass.

    KL(p, uniform) = log V - H(p), so the penalty on it is a bonus for entropy with the same factor.
    """

    def __init__(self, vocabulary: int) -> None:
        nn.Module.__init__(self)  # neither branch nor head
        self.vocabulary = vocabulary

    def log_probs(
        self, activations: Activations, rollout: Rollout, temperature: float, *, entropy: Entropy = "none"
    ) -> tuple[Float32[Tensor, "batch response"], Float32[Tensor, "batch response"]]:
        """-log V at every response token."""
        assert entropy == "none", "a reference is asked for log-probs only"
        found = torch.where(rollout.response_mask, -math.log(self.vocabulary), 0.0)
        return found, torch.zeros_like(found)

    def kl_from(
        self, actor: Policy, activations: Activations, rollout: Rollout, temperature: float
    ) -> Float32[Tensor, "batch response"]:
        """log V - H(actor) of every response token."""
        _, entropy = actor.log_probs(activations, rollout, temperature, entropy="report")
        # Rounding alone can make the entropy of a flat distribution larger than log V.
        kl = (math.log(self.vocabulary) - entropy).clamp_min(0.0)
        return torch.where(rollout.response_mask, kl, 0.0)


def hold_as_trained(reference: Policy, *, shares_head: bool) -> None:
    """Frozen, in the types in which the actor's own weights are trained: float32, computing in the same type."""
    make_trainable(reference, with_language_head=not shares_head)
    reference.requires_grad_(False)


class MovingReference:
    """Moves a reference after the actor by one rule, and knows from a mark of each tensor what it holds in between.

    With `reference.decay` d, after every step: weights = d weights + (1 - d) actor, an exponential moving average, as
    the anchor of Ramé et al. 2024, "WARP", or the soft update of Gorbatovski et al. 2024, "Learn Your Reference Model
    for Real Good Alignment". With `reference.copy_every` n, after every n-th step: weights = actor, their hard update.
    Of adapters it is the two factors that are averaged, not their product.
    """

    def __init__(self, settings: ReferenceSection, actor: Policy, reference: Policy, *, shares_head: bool) -> None:
        self._settings = settings
        self._actor, self._reference = actor, reference
        self._parts = own_parts(reference, shares_head=shares_head)
        self._sources = own_parts(actor, shares_head=shares_head)
        assert self._parts.keys() == self._sources.keys(), "the reference was copied from the actor"
        self._marks = self._marked()

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move as the rule says after `step` steps; RunFailed where anything else has moved it before."""
        every = self._settings.copy_every
        if every and step % every:
            return
        decay = 0.0 if every else self._settings.decay
        for name, part in self._parts.items():
            before = self._read(part)
            self._require([name] if mark(before) != self._marks[name] else [])
            actor = self._sources[name]
            new = self._read_from(self._actor, actor).to(before.device)
            # Two equal numbers give the same one again: an actor that stands still moves nothing.
            after = before.lerp(new, 1.0 - decay) if decay else new
            self._write(part, after)
            self._marks[name] = mark(after)

    def require_unmoved(self) -> None:
        """RunFailed where the weights are not what the rule has left."""
        self._require([name for name, found in self._marked().items() if found != self._marks[name]])

    def tensors(self) -> dict[str, Source]:
        """The weights by name, for a checkpoint."""
        return {name: source_of(self._reference, part) for name, part in self._parts.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Those of a checkpoint."""
        if tensors.keys() != self._parts.keys():
            raise ValueError("the checkpoint's reference has other tensors than this run's; it belongs to another run")
        for name, part in self._parts.items():
            self._write(part, tensors[name])
        self._marks = self._marked()

    def _marked(self) -> dict[str, int]:
        return {name: mark(self._read(part)) for name, part in self._parts.items()}

    def _require(self, moved: list[str]) -> None:
        if moved:
            raise RunFailed(
                f"the weights of the reference have changed otherwise than by reference.prior = 'moving' "
                f"({len(moved)} tensors, first {moved[0]!r}), which they must never do; nothing was saved, the "
                "checkpoint before is intact"
            )

    def _read(self, part: Tensor) -> Tensor:
        return self._read_from(self._reference, part)

    def _read_from(self, role: Policy, part: Tensor) -> Tensor:
        held: Any = holder_of(role)
        return part.detach() if held is None else held.read(part)

    def _write(self, part: Tensor, numbers: Tensor) -> None:
        held: Any = holder_of(self._reference)
        part.copy_(numbers) if held is None else held.write(part, numbers)


@torch.no_grad()
def mark(tensor: Tensor) -> int:
    """A number that another one stands for as soon as a single number of a float32 tensor has changed.

    The sum of the bits of number i times 2 i + 1, modulo 2^64: odd factors have inverses there, so no single change is
    lost. It is made where the tensor lies, in one pass; `checksum` would bring a GPU's weights to the host every step.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(torch.int32)
    total, start = torch.zeros((), dtype=torch.int64, device=bits.device), 0
    for piece in bits.split(_MARKED_AT_ONCE):
        places = torch.arange(start, start + len(piece), device=bits.device)
        total += (piece * (2 * places + 1)).sum()
        start += len(piece)
    return int(total)
