"""The roles that a service holds, and their answers to rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fourfold.batch import Rollout
from fourfold.data.records import TextRecord
from fourfold.data.tokenize import encode_text
from fourfold.memory.budget import BatchSize, Budget, tensor_bytes
from fourfold.models.external import External
from fourfold.models.identity import ModelIdentity, ReaderIdentity, RoleWeights, vocabulary_checksum
from fourfold.models.loading import Base
from fourfold.models.micro_batches import by_length, micro_batch
from fourfold.models.reference import Alone
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.models.split import Part
from fourfold.models.storage import RoleRecord
from fourfold.scoring.external import ExternalReward, NothingToRead
from fourfold.scoring.service import wire
from fourfold.scoring.service.wire import BadMessage, Rows

# What every request may hold.
ROWS = ("prompts", "responses", "micro_batch_size")


class TooLate(Exception):
    """A request's time is over."""


@dataclass(frozen=True)
class Identity:
    """What a role of the run's own model computes with; two sides with equal ones compute the same but for rounding."""

    sharing: str
    layers: int
    adapters: str
    compute: str
    attention: str
    vocabulary: str
    own_weights: str
    shared_weights: str

    @classmethod
    def of(cls, base: Base, record: RoleRecord, weights: RoleWeights) -> Identity:
        """Of a role over a loaded base."""
        return cls(
            sharing=record.sharing,
            layers=record.branch_layers,
            adapters=record.adapters,
            compute=str(base.policy.branch.compute_dtype).removeprefix("torch."),
            attention=str(getattr(base.config, "_attn_implementation", "")),
            vocabulary=vocabulary_checksum(base.tokenizer),
            own_weights=weights.own,
            shared_weights=weights.shared,
        )


AnyIdentity = Identity | ModelIdentity


@dataclass(frozen=True)
class IdRows:
    """How rows of token ids go through a role: the ids it knows, its positions, what fills rows up, what is below."""

    token_ids: int
    max_positions: int | None
    pad_id: int
    budget: Budget
    trunk: Part | None = None

    @classmethod
    def of_base(cls, base: Base) -> IdRows:
        """To roles of the run's own model."""
        positions = getattr(base.config, "max_position_embeddings", None)
        return cls(base.policy.head.weight.shape[0], positions, base.pad_id, base.budget, base.trunk)

    @classmethod
    def of_reference(cls, found: Alone, budget: Budget) -> IdRows:
        """To a reference with a model of its own."""
        return cls(found.policy.head.weight.shape[0], found.positions, found.pad_id, budget)

    def fitting(self, rows: Rows) -> Rows:
        """The rows; BadMessage where one is longer than the model bears."""
        longest = max(len(p) + len(r) for p, r in zip(rows.prompts, rows.responses, strict=True))
        if self.max_positions is not None and longest > self.max_positions:
            raise BadMessage(
                f"a row has {longest} tokens; allowed: at most {self.max_positions}, the model's positions"
            )
        return rows

    @torch.no_grad()
    def through(
        self, rows: Rows, size: BatchSize, take: Callable[[Tensor, Activations, Rollout], None], deadline: float
    ) -> None:
        """Micro-batches as the score phase of a run cuts them, so that the numbers are the same."""
        rollout = wire.rollout_of(rows, self.pad_id, self.budget.device)
        order = by_length(rollout, torch.arange(len(rows), device=self.budget.device))
        ids = Activations(rollout.sequences, rollout.attention_mask)

        def piece(chosen: slice) -> None:
            if time.monotonic() > deadline:
                raise TooLate
            part, inputs = micro_batch(rollout, ids, order[chosen])
            if self.trunk is not None:
                inputs = Activations(self.trunk(inputs.inputs, inputs.mask), inputs.mask)
            take(order[chosen], inputs, part)

        size.through(len(order), piece)


class HostedRole(Protocol):
    """A role that answers requests."""

    known: ClassVar[tuple[str, ...]]  # keys of a request

    @property
    def identity(self) -> AnyIdentity:
        """What a client compares with its own run."""
        ...

    @property
    def ids(self) -> IdRows | None:
        """How it reads token ids; None where it reads texts only."""
        ...

    def size(self) -> dict[str, int]:
        """Parameters and bytes of its weights."""
        ...

    def answer(self, message: dict[str, Any], size: int, deadline: float) -> dict[str, Any]:
        """The answer to a request, `size` rows a pass; BadMessage says what is wrong with it."""
        ...


@dataclass(frozen=True)
class HostedReference:
    """Log-probs of token ids."""

    policy: Policy
    ids: IdRows
    identity: AnyIdentity

    known: ClassVar[tuple[str, ...]] = (*ROWS, "temperature")

    def size(self) -> dict[str, int]:
        """Parameters and bytes of its weights."""
        return _size(self.policy)

    def answer(self, message: dict[str, Any], size: int, deadline: float) -> dict[str, Any]:
        """One list of log-probs a row."""
        rows = self.ids.fitting(wire.token_rows(message, self.ids.token_ids))
        temperature = wire.positive(message, "temperature", 1.0, float)
        found: list[list[float]] = [[] for _ in range(len(rows))]

        def take(chosen: Tensor, inputs: Activations, part: Rollout) -> None:
            log_probs, _ = self.policy.log_probs(inputs, part, temperature)
            for row, numbers, length in zip(chosen.tolist(), log_probs.tolist(), part.lengths.tolist(), strict=True):
                found[row] = numbers[:length]

        self.ids.through(rows, BatchSize("score", "reference", size, self.ids.budget), take, deadline)
        return {"log_probs": found}


@dataclass(frozen=True)
class HostedReward:
    """Scores of token ids, or of texts in the run's own tokens, by a reward model made of the run's own model."""

    scorer: Scorer
    ids: IdRows
    identity: AnyIdentity
    tokenizer: Any
    eos_id: int

    known: ClassVar[tuple[str, ...]] = ROWS

    def size(self) -> dict[str, int]:
        """Parameters and bytes of its weights."""
        return _size(self.scorer)

    def answer(self, message: dict[str, Any], size: int, deadline: float) -> dict[str, Any]:
        """One score a row."""
        rows = self.ids.fitting(self._rows(message))
        found = [0.0] * len(rows)

        def take(chosen: Tensor, inputs: Activations, part: Rollout) -> None:
            for row, number in zip(chosen.tolist(), self.scorer.scores(inputs).tolist(), strict=True):
                found[row] = number

        self.ids.through(rows, BatchSize("score", "reward", size, self.ids.budget), take, deadline)
        return {"scores": found}

    def _rows(self, message: dict[str, Any]) -> Rows:
        if not wire.is_text(message):
            return wire.token_rows(message, self.ids.token_ids)
        prompts, responses = wire.text_rows(message)
        texts = [TextRecord(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
        ids = [encode_text(self.tokenizer, text, eos_id=self.eos_id) for text in texts]
        return Rows([row[:-1] for row in ids], [row[-1:] for row in ids])


class HostedReader:
    """Scores of texts by a reward model of another family, which makes tokens of its own of them."""

    known: ClassVar[tuple[str, ...]] = ROWS
    ids: IdRows | None = None

    def __init__(self, external: External, identity: ReaderIdentity, budget: Budget) -> None:
        self.identity: AnyIdentity = identity
        self._source = ExternalReward(external)
        self._budget = budget

    def size(self) -> dict[str, int]:
        """Parameters and bytes of its weights, by whatever engine."""
        external = self._source.external
        outside = external.outside_torch
        return _size(external) if outside is None else {"parameters": outside.parameters, "bytes": outside.bytes}

    def answer(self, message: dict[str, Any], size: int, deadline: float) -> dict[str, Any]:
        """One score a row. Rows go through as they come: a run sends them as its score phase cuts them."""
        if not wire.is_text(message):
            raise BadMessage(
                "prompts and responses: allowed are texts, which this reward model reads in its own tokens"
            )
        prompts, responses = wire.text_rows(message)
        found: list[float] = []

        def piece(chosen: slice) -> None:
            if time.monotonic() > deadline:
                raise TooLate
            found.extend(self._source.of_texts(prompts[chosen], responses[chosen]).tolist())

        try:
            BatchSize("score", "reward", size, self._budget).through(len(responses), piece)
        except NothingToRead as error:
            raise BadMessage(str(error)) from error
        return {"scores": found}


def _size(role: nn.Module) -> dict[str, int]:
    return {"parameters": sum(p.numel() for p in role.parameters()), "bytes": tensor_bytes(role.parameters())}


class Hosted:
    """Frozen roles; every method may be called by one thread at a time."""

    def __init__(self, held: Mapping[str, HostedRole], *, model: str, micro_batch_size: int) -> None:
        self.held = held
        self._model = model
        self._micro_batch_size = micro_batch_size

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that are held."""
        return tuple(self.held)

    def describe(self) -> dict[str, Any]:
        """What a client compares with its own run; the ids and positions are those that every role of ids has."""
        read = [role.ids for role in self.held.values() if role.ids is not None]
        roles = {
            name: {
                "path": wire.ROLE_PATHS[name],
                "reads": "texts" if role.ids is None else "ids",
                **role.size(),
                **asdict(role.identity),
            }
            for name, role in self.held.items()
        }
        return {
            "protocol": wire.PROTOCOL,
            "model": self._model,
            "token_ids": min((ids.token_ids for ids in read), default=None),
            "max_positions": min((ids.max_positions for ids in read if ids.max_positions is not None), default=None),
            "roles": roles,
        }

    def answer(self, role: str, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The answer to a request; BadMessage says what is wrong with it, TooLate that its time is over."""
        held = self.held[role]
        wire.refuse_unknown_keys(message, held.known)
        size = int(wire.positive(message, "micro_batch_size", self._micro_batch_size, int))
        return held.answer(message, size, deadline)
