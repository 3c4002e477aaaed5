"""The four roles as modules, and the pass each of them makes over a batch.

Every role reads `Activations`: the trunk's cached output where there is a frozen trunk, the token ids where there is
none or where it is trained; a role that stands on a trunk passes ids through it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float32
from torch import Tensor, nn

from fourfold.algorithms.log_probs import Entropy
from fourfold.algorithms.masking import last_index, over_dimensions
from fourfold.batch import Rollout
from fourfold.config.schema import MemorySection
from fourfold.memory.activation_offload import offload_activations
from fourfold.memory.activations import Forgetting, checkpoint_modules
from fourfold.memory.offload import Residency, absent, residency_of
from fourfold.memory.optimizer_offload import OffloadedStates
from fourfold.models.adapters import adapter_parameters, copy_part, is_adapted, is_adapter
from fourfold.models.flush_rows import FlushRows
from fourfold.models.heads import AnyNumberHead, LanguageHead, ScalarHead
from fourfold.models.products import rounded
from fourfold.models.split import Part

AnyRole = TypeVar("AnyRole", "Policy", "Scorer")


@dataclass(frozen=True)
class Activations:
    """Input of the branches: `inputs` is [batch, time, hidden] (trunk output) or int64 [batch, time] (ids)."""

    inputs: Tensor
    mask: Bool[Tensor, "batch time"]

    def select(self, rows: Tensor) -> Activations:
        """The same with these rows only."""
        return Activations(self.inputs[rows], self.mask[rows])

    def to(self, device: torch.device) -> Activations:
        """The same on another device."""
        return Activations(self.inputs.to(device), self.mask.to(device))

    def states(self) -> Activations:
        """Without the last token of each row: the state after it belongs to no action, so most passes skip it."""
        return Activations(self.inputs[:, :-1], self.mask[:, :-1] & self.mask[:, 1:])

    @property
    def bytes(self) -> int:
        """Bytes that the cache holds."""
        return self.inputs.numel() * self.inputs.element_size()


class _Role(nn.Module):
    """A branch, and the trunk below it where the role passes token ids through one."""

    residency: Residency | None = None  # how a frozen role is held that is not always in memory
    masters: OffloadedStates | None = None  # where a trained role's float32 numbers are that lie below the device
    _below: tuple[Part, ...] = ()

    def __init__(self, branch: Part) -> None:
        super().__init__()
        self.branch = branch

    def stand_on(self, trunk: Part) -> None:
        """From here on token ids go through this trunk, which stays another's: not among the role's parameters."""
        self._below = (trunk,)  # a tuple, because a module would become the role's own

    @property
    def trunk(self) -> Part | None:
        """What the role stands on; None where what it reads is the trunk's output already, or there is no trunk."""
        return self._below[0] if self._below else None

    def through(self, activations: Activations, state: int | None = None) -> Tensor:
        """The branch's output [batch, time, hidden]; the trunk comes first for ids, where the role stands on one.

        Rows are computed from their first real token on, or from the column `state`, whichever comes first; where that
        saves columns, what lies outside of a row comes back as 0.
        """
        rows, time = FlushRows.of(activations.mask, state), activations.mask.shape[1]
        if rows is not None:
            activations = Activations(rows.flush(activations.inputs), rows.flush_mask(activations.mask))
        inputs = activations.inputs
        if self.trunk is not None and not inputs.is_floating_point():
            inputs = self._through_trunk(self.trunk, activations)
        out = self.branch(inputs, activations.mask)
        return out if rows is None else rows.put_back(out, time)

    def _through_trunk(self, trunk: Part, activations: Activations) -> Tensor:
        return trunk(activations.inputs, activations.mask)


class Policy(_Role):
    """Actor or reference: a branch and a language head."""

    def __init__(self, branch: Part, head: LanguageHead) -> None:
        super().__init__(branch)
        self.head = head

    def hidden_before(self, activations: Activations, rollout: Rollout) -> Float32[Tensor, "tokens hidden"]:
        """Hidden states before each response token, rows one after the other, padding left out."""
        return self.hidden_at(activations.states(), rollout)

    def hidden_at(self, states: Activations, rollout: Rollout) -> Float32[Tensor, "tokens hidden"]:
        """The same from activations that are without the last token already."""
        state = rollout.prompt_length - 1
        return self.through(states, state)[:, state:][rollout.response_mask]

    def log_probs(
        self,
        activations: Activations,
        rollout: Rollout,
        temperature: float,
        *,
        entropy: Entropy = "none",
    ) -> tuple[Float32[Tensor, "batch response"], Float32[Tensor, "batch response"]]:
        """Log-probs of the response tokens and entropies (0 where `entropy` is "none" or the mask is False)."""
        return self.log_probs_of(self.hidden_before(activations, rollout), rollout, temperature, entropy=entropy)

    def log_probs_of(
        self, hidden: Float32[Tensor, "tokens hidden"], rollout: Rollout, temperature: float, *, entropy: Entropy
    ) -> tuple[Float32[Tensor, "batch response"], Float32[Tensor, "batch response"]]:
        """The same from the hidden states before each response token."""
        flat, entropies = self.head.log_probs(
            hidden,
            rollout.sequences[:, rollout.prompt_length :][rollout.response_mask],
            temperature,
            self.branch.compute_dtype,
            entropy=entropy,
        )
        return _unflatten(flat, rollout.response_mask), _unflatten(entropies, rollout.response_mask)

    def kl_from(
        self, actor: Policy, activations: Activations, rollout: Rollout, temperature: float
    ) -> Float32[Tensor, "batch response"]:
        """KL(actor, self) of every response token over the vocabulary, 0 where the response has ended; no gradient."""
        exact = actor.head.full_kl(
            actor.hidden_before(activations, rollout),
            self.head,
            self.hidden_before(activations, rollout),
            temperature,
            (actor.branch.compute_dtype, self.branch.compute_dtype),
        )
        return _unflatten(exact, rollout.response_mask)


class Scorer(_Role):
    """Critic or reward model: a branch and a head that says a number a token, or (of a critic) one for each dimension.

    It never moves the trunk that it stands on: the critic's gradient into a trained trunk goes by way of
    fourfold.training.joint, which scales it.
    """

    def __init__(self, branch: Part, head: AnyNumberHead) -> None:
        super().__init__(branch)
        self.head = head

    def _through_trunk(self, trunk: Part, activations: Activations) -> Tensor:
        with torch.no_grad():
            return super()._through_trunk(trunk, activations)

    def values(self, activations: Activations, rollout: Rollout) -> Float32[Tensor, "batch response *dimensions"]:
        """V of the state before each response token; 0 where the response has ended."""
        return self.values_of(self.hidden_at(self.reads(activations, rollout).states(), rollout), rollout)

    def reads(self, activations: Activations, rollout: Rollout) -> Activations:
        """What its passes over a rollout begin with."""
        return activations

    def hidden_at(self, states: Activations, rollout: Rollout) -> Float32[Tensor, "batch response hidden"]:
        """Hidden states before each response token, from activations that are without the last token already."""
        state = rollout.prompt_length - 1
        return self.through(states, state)[:, state:]

    def values_of(
        self, hidden: Float32[Tensor, "batch response hidden"], rollout: Rollout
    ) -> Float32[Tensor, "batch response *dimensions"]:
        """The same from the hidden states before each response token."""
        return _where_responding(self.head(hidden), rollout)

    def values_and_last(
        self, activations: Activations, rollout: Rollout
    ) -> tuple[Float32[Tensor, "batch response *dimensions"], Float32[Tensor, "batch *dimensions"]]:
        """As `values`, and V of the state after the last response token."""
        state = rollout.prompt_length - 1
        every = self.head(self.through(self.reads(activations, rollout), state)[:, state:])
        last = every[torch.arange(len(every), device=every.device), rollout.lengths]
        return _where_responding(every[:, :-1], rollout), last

    def scores(self, activations: Activations) -> Float32[Tensor, "batch"]:
        """The number at the last real token of each row."""
        hidden = self.through(activations)
        return self.head(hidden[torch.arange(len(hidden), device=hidden.device), last_index(activations.mask)])


def _where_responding(values: Tensor, rollout: Rollout) -> Tensor:
    return torch.where(over_dimensions(rollout.response_mask, values), values, 0.0)


def casts_once(role: Policy | Scorer, *, several: bool) -> AbstractContextManager[Any]:
    """Within, autocast's copies of a trained role's masters serve `several` passes instead of being made for each.

    Autocast forgets them when its outermost context ends, so one that casts nothing is put around the passes. It takes
    no room: as a second pass goes backward, all copies and all gradients are there anyway. Where layers forget what
    they computed that is not so, and each pass makes its own.
    """
    forgets = any(isinstance(module, Forgetting) for module in role.branch.modules())
    if not several or forgets or role.branch.compute_dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(next(role.parameters()).device.type, enabled=False)


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
        held = [] if same else [p for p in adapter_parameters(role.branch) if p.ndim >= 2]
    else:
        held = _matrices(role, with_language_head=with_language_head)
    for parameter in held:
        parameter.data = rounded(parameter.data, dtype)


def _matrices(role: Policy | Scorer, *, with_language_head: bool = True) -> list[nn.Parameter]:
    """What is multiplied in the compute type whatever it is held in."""
    if is_adapted(role.branch):
        return []  # the base has its type already; adapters are float32
    parts = [role.branch, role.head] if isinstance(role, Policy) and with_language_head else [role.branch]
    return [p for part in parts for p in part.parameters() if p.ndim >= 2]


def narrow_matrices(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Keep what autocast would cast for every product in the compute type; vectors stay as they are."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(compute_dtype)


def narrowed(module: nn.Module) -> tuple[list[nn.Parameter], torch.dtype]:
    """The trained parameters of a role whose passes need them in its compute type only, and that type."""
    if not isinstance(module, Policy | Scorer):
        return [], torch.float32
    return [p for p in _matrices(module) if p.requires_grad], module.branch.compute_dtype


def make_trainable(role: Policy | Scorer, *, with_language_head: bool, memory: MemorySection | None = None) -> None:
    """Turn the role's own weights into float32 masters with gradients.

    A language head above a shared trunk belongs to the trunk (it is the embedding in most models) and stays frozen, and
    so does the base below adapters.
    """
    if memory is not None:
        save_activations(role.branch, memory)
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


def save_activations(part: Part, memory: MemorySection) -> None:
    """Let what the backward pass of a trained part needs be kept, computed again or moved, as the settings say."""
    if memory.checkpointing != "none":
        layers = part.layers if memory.checkpointing == "layers" else part.attentions
        checkpoint_modules(layers, memory.checkpoint_every)
    if memory.activation_offload:
        offload_activations(part)


def copy_policy(policy: Policy, *, share_head: bool) -> Policy:
    """A second policy with weights of its own; with `share_head` both hold the same language head."""
    if share_head:
        return Policy(copy_part(policy.branch), policy.head)
    return copy.deepcopy(policy)


def scorer_on(policy: Policy, layers: int | None = None) -> Scorer:
    """A scorer with a copy of a policy's branch, or of its lowest layers, and a new (zero) head."""
    scorer = scorer_over(policy)
    return Scorer(copy_part(scorer.branch, layers), scorer.head)


def scorer_over(policy: Policy) -> Scorer:
    """A scorer on the very branch of a policy, which then serves as nothing else, and a new (zero) head."""
    head = ScalarHead(policy.branch.hidden_size).to(next(policy.parameters()).device)
    return Scorer(policy.branch, head)


def copy_scorer(scorer: Scorer, layers: int | None = None) -> Scorer:
    """A second scorer with weights of its own, or one of the lowest layers."""
    return Scorer(copy_part(scorer.branch, layers), copy.deepcopy(scorer.head))


def hollow_copy(role: AnyRole, *, share_head: bool) -> AnyRole:
    """The form of a role without weights of its own, for one that another process holds; what is shared is shared."""
    adapted, memo = is_adapted(role.branch), dict[int, Any]()
    for name, p in role.named_parameters():
        of_base = adapted and name.startswith("branch.") and not is_adapter(name)
        of_trunk = share_head and isinstance(role, Policy) and name.startswith("head.")
        memo[id(p)] = p if of_base or of_trunk else nn.Parameter(absent(p), requires_grad=False)
    return copy.deepcopy(role, memo)


def checksum(modules: Iterable[nn.Module]) -> str:
    """BLAKE2 over the bytes of all parameters and buffers: two modules with one checksum hold the same numbers.

    Tensors that are parked are read one at a time, and masters instead of what was rounded from them.
    """
    return checksum_of(pair for module in modules for pair in _tensors(module))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    held = residency_of(module) or getattr(module, "masters", None)
    # Without keep_vars the tensors would be other objects than those that are parked.
    for name, tensor in sorted(module.state_dict(keep_vars=True).items(), key=lambda item: item[0]):
        yield name, tensor if held is None else held.read(tensor)


def checksum_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """BLAKE2 over names and bytes of tensors, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(name.encode())
        content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()
