"""The sampler in this process: decoding in slots (decoder.py), and the rollout that comes of it.

The trunk runs once over every token and its output is kept: scoring and learning start from there. A token's trunk
pass follows its sampling at once, so the cache also covers the last token, which only the reward model looks at. A
trained trunk's output is not kept, and the ids are what the roles get.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSizes
from fourfold.memory.offload import absent
from fourfold.models.adapters import is_adapted
from fourfold.models.loading import Base
from fourfold.models.micro_batches import by_length, micro_batch, tokens_of
from fourfold.models.packed import passes_for_decoding
from fourfold.models.roles import Activations, Policy, copy_policy, freeze
from fourfold.models.slot_pass import pass_agrees
from fourfold.models.split import Part
from fourfold.models.trunk import copy_trunk
from fourfold.rollout.decoder import Decoder, Drawn, SamplingSettings
from fourfold.rollout.quantised import quantised_policy
from fourfold.rollout.sampler import Listener, PromptBatch


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
        self._agrees: WeakKeyDictionary[Part, bool] = WeakKeyDictionary()
        self._listener = listener

    @torch.no_grad()
    def generate(self, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        """One response a row; log-probs are taken again by the training engine over the cached activations."""
        rows = len(prompts.tokens)
        _require_finite(self._policy)
        policy, settings = self._current_policy(), self._settings.limited(prompts)
        trunk = policy.trunk or self._base.trunk

        def decode(slots: int) -> tuple[Rollout, Activations]:
            if self._listener is not None:
                self._listener.begin()  # what it heard of a rollout that ran out of memory is void
            told: list[int] = []

            def finished(drawn: Drawn, more: Sequence[int]) -> None:
                nonlocal told
                told += more
                if self._listener is not None and len(told) >= slots:
                    self._tell(drawn, told, prompts, policy_version)
                    told = []

            with passes_for_decoding(policy, trunk, self._agree) as slot_pass:
                drawn = Decoder(self._base, policy, settings, prompts, slots, slot_pass, finished).run()
            if self._listener is not None and told:
                self._tell(drawn, told, prompts, policy_version)
            return self._joined(drawn, range(rows), prompts, policy_version)

        with self._rows.working("actor"):
            rollout, activations = self._rows.fitting(decode, rows)
        self._put_working_away()
        return replace(rollout, log_probs=self._training_log_probs(activations, rollout)), activations

    def _tell(self, drawn: Drawn, rows: Sequence[int], prompts: PromptBatch, policy_version: int) -> None:
        assert self._listener is not None
        self._listener.finished(rows, *self._joined(drawn, rows, prompts, policy_version))

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
                self._scored_rows.through(len(inputs), through, lambda: [inputs.shape[1]] * len(inputs))
        activations = Activations(inputs, rollout.attention_mask)
        return replace(rollout, log_probs=self._training_log_probs(activations, rollout)), activations

    def _joined(
        self, drawn: Drawn, rows: Sequence[int], prompts: PromptBatch, policy_version: int
    ) -> tuple[Rollout, Activations]:
        """These rows as a rollout, still without the training engine's log-probs; copies, unless they are all."""
        device, whole = drawn.sequences.device, len(rows) == len(drawn.sequences)
        chosen = slice(None) if whole else torch.tensor(rows, device=device)
        lengths = drawn.lengths[chosen]
        longest = int(lengths.max())
        stop = drawn.width + longest
        sampled = drawn.log_probs[chosen, :longest]
        rollout = Rollout(
            prompt_mask=drawn.prompt_mask[chosen],
            response_mask=torch.arange(longest, device=device) < lengths[:, None],
            sequences=drawn.sequences[chosen, :stop],
            log_probs=torch.zeros_like(sampled),
            sampler_log_probs=sampled,
            truncated=drawn.truncated[chosen],
            policy_version=torch.full((len(rows),), policy_version, device=device),
            prompt_id=torch.tensor([prompts.prompt_ids[row] for row in rows], device=device),
        )
        inputs = rollout.sequences if drawn.activations is None else drawn.activations[chosen, :stop]
        return rollout, Activations(inputs, rollout.attention_mask)

    def _agree(self, part: Part) -> bool:
        """Whether the part has a faster pass, tried out when it is first asked for."""
        if part not in self._agrees:
            self._agrees[part] = pass_agrees(part)
        return self._agrees[part]

    def _training_log_probs(self, activations: Activations, rollout: Rollout) -> Tensor:
        found = torch.zeros_like(rollout.sampler_log_probs)
        order = by_length(rollout, torch.arange(len(found), device=found.device))

        def take(piece: slice) -> None:
            part, inputs = micro_batch(rollout, activations, order[piece])
            log_probs, _ = self._policy.log_probs(inputs, part, self._settings.temperature)
            found[order[piece], : log_probs.shape[1]] = log_probs

        with self._scored_rows.working("actor"):
            self._scored_rows.through(len(order), take, lambda: tokens_of(rollout, order))
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
        for target, source in self._copied(self._working):
            target.data = source.detach().to(target.dtype, copy=True)
        return self._working

    def _put_working_away(self) -> None:
        """Keep the form of the copy alone: its numbers are the next rollout's, and learn needs the room."""
        if self._working is not None:
            for target, _ in self._copied(self._working):
                target.data = absent(target)

    def _copied(self, working: Policy) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters of the copy and those that they are cast from; what both hold is no copy."""
        both = zip(_all_parameters(working), _all_parameters(self._policy), strict=True)
        return ((target, source) for target, source in both if target is not source)


def _require_finite(policy: Policy) -> None:
    """Logits do not show every damage: attention kernels may turn NaN into a number, some on one processor only."""
    # A bias may bar tokens by -inf; codes of a quantised base are whole numbers, and finite.
    named = [(name, p) for name, p in policy.named_parameters() if p.ndim >= 2 and p.is_floating_point()]
    # Of NaN both are NaN; isfinite and a norm take thirty times as long.
    ends = torch.stack([torch.stack(torch.aminmax(p.detach())).float() for _, p in named])
    if bad := (~torch.isfinite(ends).all(dim=1)).nonzero()[:, 0].tolist():
        raise RunFailed(
            f"generate: {len(bad)} of the actor's {len(named)} weights are not finite, the first {named[bad[0]][0]!r}; "
            "the learning rate is too high or the weights are damaged; the last good checkpoint is kept"
        )


def _all_parameters(policy: Policy) -> list[nn.Parameter]:
    """Its own and those of the trunk that it stands on."""
    return [*policy.parameters(), *([] if policy.trunk is None else policy.trunk.parameters())]
