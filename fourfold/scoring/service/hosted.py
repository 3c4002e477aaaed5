"""The roles that a service holds, and their answers to rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.data.records import TextRecord
from fourfold.data.tokenize import encode_text
from fourfold.memory.budget import BatchSize, tensor_bytes
from fourfold.models.identity import RoleWeights, vocabulary_checksum
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy, Scorer, by_length, micro_batch
from fourfold.models.storage import RoleRecord
from fourfold.scoring.service import wire
from fourfold.scoring.service.wire import BadMessage, Rows


class TooLate(Exception):
    """A request's time is over."""


@dataclass(frozen=True)
class Identity:
    """What a role computes with; two sides whose identities are equal compute the same but for rounding."""

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


class Hosted:
    """Frozen roles over one base; every method may be called by one thread at a time."""

    def __init__(
        self,
        base: Base,
        *,
        model: str,
        reference: Policy | None,
        reward: Scorer | None,
        identities: dict[str, Identity],
        micro_batch_size: int,
        eos_id: int,
    ) -> None:
        self._base = base
        self._model = model
        self._reference = reference
        self._reward = reward
        self._identities = identities
        self._micro_batch_size = micro_batch_size
        self._eos_id = eos_id
        self._vocabulary = base.policy.head.weight.shape[0]
        self._device = next(base.policy.parameters()).device
        self._positions = getattr(base.config, "max_position_embeddings", None)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that are held."""
        return tuple(self._identities)

    def describe(self) -> dict[str, Any]:
        """What a client compares with its own run."""
        modules = {"reference": self._reference, "reward": self._reward}
        roles = {}
        for name, identity in self._identities.items():
            role = modules[name]
            assert role is not None
            size = {"parameters": sum(p.numel() for p in role.parameters()), "bytes": tensor_bytes(role.parameters())}
            roles[name] = {"path": wire.ROLE_PATHS[name], **size, **asdict(identity)}
        return {
            "protocol": wire.PROTOCOL,
            "model": self._model,
            "token_ids": self._vocabulary,
            "max_positions": self._positions,
            "roles": roles,
        }

    def answer(self, role: str, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The answer to a request; BadMessage says what is wrong with it, TooLate that its time is over."""
        known = ("prompts", "responses", "micro_batch_size", *(["temperature"] if role == "reference" else []))
        wire.refuse_unknown_keys(message, known)
        rows = self._rows(role, message)
        size = int(wire.positive(message, "micro_batch_size", self._micro_batch_size, int))
        if role == "reference":
            temperature = wire.positive(message, "temperature", 1.0, float)
            return {"log_probs": self._log_probs(rows, temperature, size, deadline)}
        return {"scores": self._scores(rows, size, deadline)}

    def _rows(self, role: str, message: dict[str, Any]) -> Rows:
        if wire.is_text(message) and role == "reward":
            prompts, responses = wire.text_rows(message)
            texts = [TextRecord(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
            ids = [encode_text(self._base.tokenizer, text, eos_id=self._eos_id) for text in texts]
            rows = Rows([row[:-1] for row in ids], [row[-1:] for row in ids])
        else:
            rows = wire.token_rows(message, self._vocabulary)
        longest = max(len(p) + len(r) for p, r in zip(rows.prompts, rows.responses, strict=True))
        if self._positions is not None and longest > self._positions:
            raise BadMessage(f"a row has {longest} tokens; allowed: at most {self._positions}, the model's positions")
        return rows

    def _log_probs(self, rows: Rows, temperature: float, size: int, deadline: float) -> list[list[float]]:
        reference = self._reference
        assert reference is not None
        found: list[list[float]] = [[] for _ in range(len(rows))]

        def take(chosen: Tensor, inputs: Activations, part: Rollout) -> None:
            log_probs, _ = reference.log_probs(inputs, part, temperature)
            for row, numbers, length in zip(chosen.tolist(), log_probs.tolist(), part.lengths.tolist(), strict=True):
                found[row] = numbers[:length]

        self._through(rows, BatchSize("score", "reference", size, self._base.budget), take, deadline)
        return found

    def _scores(self, rows: Rows, size: int, deadline: float) -> list[float]:
        reward = self._reward
        assert reward is not None
        found = [0.0] * len(rows)

        def take(chosen: Tensor, inputs: Activations, part: Rollout) -> None:
            for row, number in zip(chosen.tolist(), reward.scores(inputs).tolist(), strict=True):
                found[row] = number

        self._through(rows, BatchSize("score", "reward", size, self._base.budget), take, deadline)
        return found

    @torch.no_grad()
    def _through(
        self, rows: Rows, size: BatchSize, take: Callable[[Tensor, Activations, Rollout], None], deadline: float
    ) -> None:
        """Micro-batches as the score phase of a run cuts them, so that the numbers are the same."""
        rollout = wire.rollout_of(rows, self._base.pad_id, self._device)
        order = by_length(rollout, torch.arange(len(rows), device=self._device))
        ids = Activations(rollout.sequences, rollout.attention_mask)

        def piece(chosen: slice) -> None:
            if time.monotonic() > deadline:
                raise TooLate
            part, inputs = micro_batch(rollout, ids, order[chosen])
            if self._base.trunk is not None:
                inputs = Activations(self._base.trunk(inputs.inputs, inputs.mask), inputs.mask)
            take(order[chosen], inputs, part)

        size.through(len(order), piece)
