"""The four roles as modules, and the pass each of them makes over a batch.

Every role reads `Activations`: the trunk's cached output where there is a trunk, the token ids where there is none.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from fourfold.algorithms.log_probs import Entropy
from fourfold.algorithms.masking import last_index
from fourfold.batch import Rollout
from fourfold.config.schema import MemorySection
from fourfold.memory.activation_offload import offload_activations
from fourfold.memory.activations import checkpoint_modules
from fourfold.memory.offload import Residency, residency_of
from fourfold.models.adapters import adapter_parameters, copy_part, is_adapted
from fourfold.models.heads import LanguageHead, ScalarHead
from fourfold.models.products import rounded
from fourfold.models.split import Part

AnyRollout = TypeVar("AnyRollout", bound=Rollout)


@dataclass(frozen=True)
class Activations:
    """Input of the branches: `inputs` is [batch, time, hidden] (trunk output) or int64 [batch, time] (ids)."""

    inputs: Tensor
    mask: Bool[Tensor, "batch time"]

    def select(self, rows: Tensor) -> Activations:
        """The same with these rows only."""
        return Activations(self.inputs[rows], self.mask[rows])

    def states(self) -> Activations:
        """Without the last token of each row: the state after it belongs to no action, so most passes skip it."""
        return Activations(self.inputs[:, :-1], self.mask[:, :-1] & self.mask[:, 1:])

    @property
    def bytes(self) -> int:
        """Bytes that the cache holds."""
        return self.inputs.numel() * self.inputs.element_size()


def micro_batches(
    batch: AnyRollout, activations: Activations, rows: Int64[Tensor, "rows"], size: int
) -> Iterator[tuple[Tensor, AnyRollout, Activations]]:
    """Cut `rows` into micro-batches of at most `size` rows of similar length, without columns of mere padding.

    Yields the row numbers, the rows and their activations. Every row comes once; what is computed for a real token
    does not depend on the rows beside it, so only the order of sums differs from any other way to cut.
    """
    for chosen in by_length(batch, rows).split(size):
        yield chosen, *micro_batch(batch, activations, chosen)


def by_length(batch: Rollout, rows: Int64[Tensor, "rows"]) -> Int64[Tensor, "rows"]:
    """The same rows, those with the fewest tokens first."""
    return rows[batch.attention_mask[rows].sum(dim=1).argsort(stable=True)]


def micro_batch(batch: AnyRollout, activations: Activations, chosen: Tensor) -> tuple[AnyRollout, Activations]:
    """These rows and their activations, without columns of mere padding."""
    part = batch.select(chosen).trimmed()
    start = batch.prompt_length - part.prompt_length
    columns = slice(start, start + part.sequences.shape[1])
    return part, Activations(activations.inputs[chosen, columns], activations.mask[chosen, columns])


class Policy(nn.Module):
    """Actor or reference: a branch and a language head."""

    residency: Residency | None = None  # how a frozen role is held that is not always in memory

    def __init__(self, branch: Part, head: LanguageHead) -> None:
        super().__init__()
        self.branch = branch
        self.head = head

    def hidden_before(self, activations: Activations, rollout: Rollout) -> Float32[Tensor, "tokens hidden"]:
        """Hidden states before each response token, rows one after the other, padding left out."""
        states = activations.states()
        return self.branch(states.inputs, states.mask)[:, rollout.prompt_length - 1 :][rollout.response_mask]

    def log_probs(
        self,
        activations: Activations,
        rollout: Rollout,
        temperature: float,
        *,
        entropy: Entropy = "none",
    ) -> tuple[Float32[Tensor, "batch response"], Float32[Tensor, "batch response"]]:
        """Log-probs of the response tokens and entropies (0 where `entropy` is "none" or the mask is False)."""
        flat, entropies = self.head.log_probs(
            self.hidden_before(activations, rollout),
            rollout.sequences[:, rollout.prompt_length :][rollout.response_mask],
            temperature,
            self.branch.compute_dtype,
            entropy=entropy,
        )
        return _unflatten(flat, rollout.response_mask), _unflatten(entropies, rollout.response_mask)


class Scorer(nn.Module):
    """Critic or reward model: a branch and a scalar head."""

    residency: Residency | None = None

    def __init__(self, branch: Part, head: ScalarHead) -> None:
        super().__init__()
        self.branch = branch
        self.head = head

    def values(self, activations: Activations, rollout: Rollout) -> Float32[Tensor, "batch response"]:
        """V of the state before each response token; 0 where the response has ended."""
        states = activations.states()
        every = self.head(self.branch(states.inputs, states.mask)[:, rollout.prompt_length - 1 :])
        return torch.where(rollout.response_mask, every, 0.0)

    def values_and_last(
        self, activations: Activations, rollout: Rollout
    ) -> tuple[Float32[Tensor, "batch response"], Float32[Tensor, "batch"]]:
        """As `values`, and V of the state after the last response token."""
        every = self.head(self.branch(activations.inputs, activations.mask)[:, rollout.prompt_length - 1 :])
        last = every.gather(1, rollout.lengths[:, None])[:, 0]
        return torch.where(rollout.response_mask, every[:, :-1], 0.0), last

    def scores(self, activations: Activations) -> Float32[Tensor, "batch"]:
        """The number at the last real token of each row."""
        hidden = self.branch(activations.inputs, activations.mask)
        return self.head(hidden[torch.arange(len(hidden), device=hidden.device), last_index(activations.mask)])


def _unflatten(flat: Float32[Tensor, "tokens"], mask: Bool[Tensor, "batch response"]) -> Tensor:
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def freeze(role: Policy | Scorer, dtype: torch.dtype | None = None, *, with_language_head: bool = True) -> None:
    """Take a role out of training: no gradients, its matrices kept in the type that it computes in: `dtype` from here
    on, or as before.

    Vectors (norms, biases) and scalar heads stay float32: autocast does not touch them in the trained role either, so
    a frozen copy in the same type computes bit for bit what the trained one computes. A language head that belongs to
    a shared trunk or base stays as it is, and so does the base below adapters.
    """
    role.requires_grad_(False)
    same = dtype in (None, role.branch.compute_dtype)
    role.branch.compute_dtype = dtype = dtype or role.branch.compute_dtype
    if is_adapted(role.branch):
        # Beside trained ones in the same type they are float32, as those are.
        held = [] if same else adapter_parameters(role.branch)
    else:
        parts = [role.branch, role.head] if isinstance(role, Policy) and with_language_head else [role.branch]
        held = [p for part in parts for p in part.parameters()]
    for parameter in held:
        if parameter.ndim >= 2:
            parameter.data = rounded(parameter.data, dtype)


def make_trainable(role: Policy | Scorer, *, with_language_head: bool, memory: MemorySection | None = None) -> None:
    """Turn the role's own weights into float32 masters with gradients.

    A language head above a shared trunk belongs to the trunk (it is the embedding in most models) and stays frozen, and
    so does the base below adapters.
    """
    if memory is not None and memory.checkpointing != "none":
        layers = role.branch.layers if memory.checkpointing == "layers" else role.branch.attentions
        checkpoint_modules(layers, memory.checkpoint_every)
    if memory is not None and memory.activation_offload:
        offload_activations(role.branch)
    role.requires_grad_(False)
    if is_adapted(role.branch):
        for p in adapter_parameters(role.branch):
            p.requires_grad_(True)
        if isinstance(role, Scorer):
            role.head.requires_grad_(True)
        return
    parts: list[nn.Module] = [role.branch]
    if isinstance(role, Scorer) or with_language_head:
        parts.append(role.head)
    for part in parts:
        part.float()
        part.requires_grad_(True)


def copy_policy(policy: Policy, *, share_head: bool) -> Policy:
    """A second policy with weights of its own; with `share_head` both hold the same language head."""
    if share_head:
        return Policy(copy_part(policy.branch), policy.head)
    return copy.deepcopy(policy)


def scorer_on(policy: Policy) -> Scorer:
    """A scorer with a copy of a policy's branch and a new (zero) head."""
    head = ScalarHead(policy.branch.hidden_size).to(next(policy.parameters()).device)
    return Scorer(copy_part(policy.branch), head)


def copy_scorer(scorer: Scorer) -> Scorer:
    """A second scorer with weights of its own."""
    return Scorer(copy_part(scorer.branch), copy.deepcopy(scorer.head))


def checksum(modules: Iterable[nn.Module]) -> str:
    """BLAKE2 over the bytes of all parameters and buffers: two modules with one checksum hold the same numbers.

    Tensors that are parked are read one at a time.
    """
    digest = hashlib.blake2b(digest_size=16)
    for module in modules:
        held = residency_of(module)
        # Without keep_vars the tensors would be other objects than those that are parked.
        for name, tensor in sorted(module.state_dict(keep_vars=True).items(), key=lambda item: item[0]):
            tensor = tensor if held is None else held.read(tensor)
            digest.update(name.encode())
            content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(content)
    return digest.hexdigest()
