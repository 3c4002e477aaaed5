"""The sampler in this process: batched decoding with KV caches, rows leave as they finish.

The trunk runs once over every token and its output is kept: scoring and learning start from there. A token's trunk
pass follows its sampling at once, so the cache also covers the last token, which only the reward model looks at. A
trained trunk's output is not kept, and the ids are what the roles get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.algorithms.masking import position_ids
from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSizes
from fourfold.models.adapters import is_adapted
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy, by_length, copy_policy, freeze, micro_batch
from fourfold.models.split import Part
from fourfold.models.trunk import copy_trunk
from fourfold.rollout.draw import draw_tokens
from fourfold.rollout.quantised import quantised_policy
from fourfold.rollout.sampler import Listener, PromptBatch


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float
    stop_strings: tuple[str, ...] = ()
    weights: str = "as_trained"  # or the kind in which decoding holds what is trained (memory/quantization.py)


class LocalSampler:
    """Draws from `policy` over the trunk of `base`.

    Each row has a generator of its own, so its response does not depend on the rows beside it (exactly so in float32).
    """

    def __init__(
        self,
        base: Base,
        policy: Policy,
        settings: SamplingSettings,
        sizes: BatchSizes,
        listener: Listener | None = None,
    ) -> None:
        self._base = base
        self._policy = policy
        self._settings = settings
        self._rows = sizes.generate
        self._scored_rows = sizes.log_probs
        self._half = policy.branch.compute_dtype != torch.float32
        self._working: Policy | None = None
        self._listener = listener

    @torch.no_grad()
    def generate(self, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        """One response a row; log-probs are taken again by the training engine over the cached activations."""
        width = max(len(tokens) for tokens in prompts.tokens)
        rows = len(prompts.tokens)
        _require_finite(self._policy)
        policy = self._current_policy()
        chunks: list[_Decoder] = []

        def decode(piece: slice) -> None:
            chosen = range(rows)[piece]
            chunks.append(_Decoder(self._base, policy, self._settings, prompts, chosen, width).run())
            if self._listener is not None:
                self._listener.finished(*self._joined(chunks[-1:], prompts, chosen, policy_version))

        if self._listener is not None:
            self._listener.begin()
        with self._rows.working("actor"):
            self._rows.through(rows, decode)
        if policy.trunk is not None:
            self._working = None  # where it is a copy, it is one of the whole trunk too: learn needs the room
        rollout, activations = self._joined(chunks, prompts, range(rows), policy_version)
        return replace(rollout, log_probs=self._training_log_probs(activations, rollout)), activations

    @torch.no_grad()
    def taken_up(self, rollout: Rollout) -> tuple[Rollout, Activations]:
        """Responses that another engine drew, with the training engine's log-probs and the trunk's activations."""
        inputs, trunk = rollout.sequences, self._base.trunk
        if trunk is not None and self._policy.trunk is None:
            shape = (*inputs.shape, trunk.hidden_size)
            inputs = torch.zeros(shape, dtype=trunk.compute_dtype, device=inputs.device)

            def through(piece: slice) -> None:
                inputs[piece] = trunk(rollout.sequences[piece], rollout.attention_mask[piece])

            with self._scored_rows.working("actor"):
                self._scored_rows.through(len(inputs), through)
        activations = Activations(inputs, rollout.attention_mask)
        return replace(rollout, log_probs=self._training_log_probs(activations, rollout)), activations

    def _joined(
        self, chunks: Sequence[_Decoder], prompts: PromptBatch, rows: Sequence[int], policy_version: int
    ) -> tuple[Rollout, Activations]:
        """These rows as one rollout, still without the training engine's log-probs."""
        width, longest = chunks[0].width, max(int(chunk.lengths.max()) for chunk in chunks)
        lengths = torch.cat([chunk.lengths for chunk in chunks])
        sequences = torch.cat([chunk.sequences[:, : width + longest] for chunk in chunks])
        sampled = torch.cat([chunk.log_probs[:, :longest] for chunk in chunks])
        device = sequences.device
        rollout = Rollout(
            prompt_mask=torch.cat([chunk.prompt_mask for chunk in chunks]),
            response_mask=torch.arange(longest, device=device) < lengths[:, None],
            sequences=sequences,
            log_probs=torch.zeros_like(sampled),
            sampler_log_probs=sampled,
            truncated=torch.cat([chunk.truncated for chunk in chunks]),
            policy_version=torch.full((len(rows),), policy_version, device=device),
            prompt_id=torch.tensor([prompts.prompt_ids[row] for row in rows], device=device),
        )
        inputs = sequences
        if self._base.trunk is not None and self._policy.trunk is None:
            inputs = torch.cat([chunk.activations[:, : width + longest] for chunk in chunks])
        return rollout, Activations(inputs, rollout.attention_mask)

    def _training_log_probs(self, activations: Activations, rollout: Rollout) -> Tensor:
        found = torch.zeros_like(rollout.sampler_log_probs)
        order = by_length(rollout, torch.arange(len(found), device=found.device))

        def take(piece: slice) -> None:
            part, inputs = micro_batch(rollout, activations, order[piece])
            log_probs, _ = self._policy.log_probs(inputs, part, self._settings.temperature)
            found[order[piece], : log_probs.shape[1]] = log_probs

        with self._scored_rows.working("actor"):
            self._scored_rows.through(len(order), take)
        return found

    def _current_policy(self) -> Policy:
        """The policy in the compute type: casting its masters once a rollout is cheaper than once a token."""
        if self._settings.weights != "as_trained":
            return quantised_policy(self._policy, self._base, self._settings.weights)
        masters = any(p.dtype == torch.float32 and p.ndim >= 2 for p in _all_parameters(self._policy))
        if not self._half or not masters or is_adapted(self._policy.branch):
            return self._policy  # adapters are too small for their casts to count
        if self._working is None:
            self._working = copy_policy(self._policy, share_head=self._base.shares_head)
            freeze(self._working, with_language_head=not self._base.shares_head)
            if self._policy.trunk is not None and self._base.trunk is not None:
                self._working.stand_on(copy_trunk(self._base.trunk))  # the frozen one has the compute type already
        for target, source in zip(_all_parameters(self._working), _all_parameters(self._policy), strict=True):
            if target is not source:
                target.copy_(source)
        return self._working


def _require_finite(policy: Policy) -> None:
    """Logits do not show every damage: attention kernels may turn NaN into a number, some on one processor only."""
    # A bias may bar tokens by -inf; codes of a quantised base are whole numbers, and finite.
    named = [(name, p) for name, p in policy.named_parameters() if p.ndim >= 2 and p.is_floating_point()]
    largest = torch.stack([torch.linalg.vector_norm(p.detach(), math.inf).float() for _, p in named])
    if bad := (~torch.isfinite(largest)).nonzero()[:, 0].tolist():
        raise RunFailed(
            f"generate: {len(bad)} of the actor's {len(named)} weights are not finite, the first {named[bad[0]][0]!r}; "
            "the learning rate is too high or the weights are damaged; the last good checkpoint is kept"
        )


def _all_parameters(policy: Policy) -> list[nn.Parameter]:
    """Its own and those of the trunk that it stands on."""
    return [*policy.parameters(), *([] if policy.trunk is None else policy.trunk.parameters())]


class _Decoder:
    """The state of one batch of rows while it is decoded."""

    def __init__(
        self,
        base: Base,
        policy: Policy,
        settings: SamplingSettings,
        prompts: PromptBatch,
        rows: Sequence[int],
        width: int,
    ) -> None:
        self._base, self._policy, self._settings = base, policy, settings
        device = next(policy.parameters()).device
        count, limit = len(rows), settings.max_new_tokens
        self.width = width
        self.sequences = torch.full((count, width + limit), base.pad_id, dtype=torch.int64, device=device)
        self.prompt_mask = torch.zeros((count, width), dtype=torch.bool, device=device)
        for i, row in enumerate(rows):
            tokens = torch.tensor(prompts.tokens[row], dtype=torch.int64)
            self.sequences[i, width - len(tokens) : width] = tokens
            self.prompt_mask[i, width - len(tokens) :] = True
        uniforms = [
            torch.rand(limit, generator=torch.Generator().manual_seed(prompts.seeds[row]), dtype=torch.float64)
            for row in rows
        ]
        self._uniforms = torch.stack(uniforms).to(device)
        self.log_probs = torch.zeros((count, limit), device=device)
        self.lengths = torch.full((count,), limit, device=device)
        self.truncated = torch.ones(count, dtype=torch.bool, device=device)
        self._trunk = policy.trunk or base.trunk
        self._keeps = base.trunk is not None and policy.trunk is None
        self.activations = torch.zeros(0)
        if base.trunk is not None and self._keeps:
            shape = (count, width + limit, base.trunk.hidden_size)
            self.activations = torch.zeros(shape, dtype=base.trunk.compute_dtype, device=device)
        self._eos = torch.tensor(sorted(base.eos_ids), device=device)
        self._active = torch.arange(count, device=device)
        self._caches: list[Any] = []

    def run(self) -> _Decoder:
        """Decode until every row has ended or reached the limit."""
        from transformers import DynamicCache

        def cache(part: Part | None) -> Any:
            return DynamicCache(config=part.body.config) if part is not None and part.num_layers else None

        self._caches = [cache(self._trunk), cache(self._policy.branch)]
        inputs = self._through_trunk(0, self.width)
        for t in range(self._settings.max_new_tokens):
            hidden = self._policy.branch(inputs, self._mask(t), self._positions(inputs.shape[1], t), self._caches[1])
            ended = self._sample(t, hidden[:, -1])
            inputs = self._through_trunk(self.width + t, self.width + t + 1)
            if bool(ended.any()):
                inputs = self._retire(t, ended, inputs)
                if not len(self._active):
                    break
        self._caches = []  # the next rows need their room, and so do the log-probs
        return self

    def _mask(self, t: int) -> Tensor:
        """Attention mask of the active rows when t response tokens are known: bool [rows, width + t]."""
        prompt = self.prompt_mask[self._active]
        return torch.cat([prompt, prompt.new_ones(len(prompt), t)], dim=1)

    def _positions(self, time: int, t: int) -> Tensor:
        return position_ids(self._mask(t))[:, -time:]

    def _through_trunk(self, start: int, stop: int) -> Tensor:
        """Feed columns [start, stop) of the active rows to the trunk; returns the branch's input."""
        ids = self.sequences[self._active, start:stop]
        if self._trunk is None:
            return ids
        t = stop - self.width
        out = self._trunk(ids, self._mask(t), self._positions(stop - start, t), self._caches[0])
        if self._keeps:
            self.activations[self._active, start:stop] = out
        return out

    def _sample(self, t: int, hidden: Tensor) -> Tensor:
        """Draw token t of the active rows; True where the row ends."""
        logits = self._policy.head.logits(hidden, self._policy.branch.compute_dtype) / self._settings.temperature
        drawn = draw_tokens(logits, self._uniforms[self._active, t])
        if drawn is None:
            below = self._keeps and not bool(torch.isfinite(self.activations[self._active]).all())
            trunk = ", nor are the trunk's activations below them" if below else ""
            raise RunFailed(
                f"generate: the actor's logits for response token {t} are not finite{trunk}; weights are damaged or "
                "the learning rate is too high; the last good checkpoint is kept"
            )
        token, self.log_probs[self._active, t] = drawn
        self.sequences[self._active, self.width + t] = token
        ended = torch.isin(token, self._eos)
        return ended | self._completes_stop_string(t) if self._settings.stop_strings else ended

    def _completes_stop_string(self, t: int) -> Tensor:
        ids = self.sequences[self._active, self.width : self.width + t + 1].tolist()
        texts = self._base.tokenizer.batch_decode(ids, skip_special_tokens=False)
        found = [any(stop in text for stop in self._settings.stop_strings) for text in texts]
        return torch.tensor(found, device=self.sequences.device)

    def _retire(self, t: int, ended: Tensor, inputs: Tensor) -> Tensor:
        """Note the end of finished rows and take them out of the batch."""
        done, keep = self._active[ended], (~ended).nonzero()[:, 0]
        self.lengths[done] = t + 1
        self.truncated[done] = False
        self._active = self._active[keep]
        if len(keep):
            for cache in self._caches:
                if cache is not None:
                    cache.batch_select_indices(keep)
        return inputs[keep]
