"""The data contract: what one stage of PPO hands to the next.

One index law holds everywhere: column t of a `[batch, response]` tensor is response token t, that is
`sequences[:, P + t]`; its logits and its value are read at position `P + t - 1`, the state before the action.
Prompts are left-padded to P tokens, responses right-padded to T. A stage that lacks a tensor is another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from beartype import beartype
from jaxtyping import Bool, Float32, Int64, jaxtyped
from torch import Tensor

# Fields with a second axis that is not the response's.
_WITHOUT_TOKENS = ("score_parts", "score_weights", "last_values")


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True, slots=True)
class Rollout:
    """Prompts and sampled responses, with what the sampler knows about them.

    `response_mask` is True on tokens that the policy chose (EOS included): a prefix of each row, never empty.
    `log_probs` are those of the policy that sampled, by the training engine; `sampler_log_probs` as the generator
    reported them. `truncated` rows were cut by the length limit.
    """

    prompt_mask: Bool[Tensor, "batch prompt"]
    response_mask: Bool[Tensor, "batch response"]
    sequences: Int64[Tensor, "batch prompt+response"]
    log_probs: Float32[Tensor, "batch response"]
    sampler_log_probs: Float32[Tensor, "batch response"]
    truncated: Bool[Tensor, "batch"]
    policy_version: Int64[Tensor, "batch"]
    prompt_id: Int64[Tensor, "batch"]

    def __post_init__(self) -> None:
        lengths = self.response_mask.sum(dim=1)
        prefix = torch.arange(self.response_mask.shape[1], device=lengths.device) < lengths[:, None]
        if not bool((lengths > 0).all()):
            raise ValueError("response_mask: every row needs at least one True")
        if not torch.equal(prefix, self.response_mask):
            raise ValueError("response_mask: the True tokens of a row must be a prefix of it")

    @staticmethod
    def of_tokens(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> Rollout:
        """Prompts and responses as lists of ids, padded on the CPU; what only a sampler knows of them is 0."""
        width = max(1, *(len(prompt) for prompt in prompts))  # the state before the first token needs a column
        longest = max(len(response) for response in responses)
        sequences = torch.full((len(prompts), width + longest), pad_id, dtype=torch.int64)
        mask = torch.zeros_like(sequences, dtype=torch.bool)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            real = slice(width - len(prompt), width + len(response))
            sequences[i, real] = torch.tensor([*prompt, *response])
            mask[i, real] = True
        numbers, ids = torch.zeros(len(prompts), longest), torch.zeros(len(prompts), dtype=torch.int64)
        return Rollout(mask[:, :width], mask[:, width:], sequences, numbers, numbers, ids.bool(), ids, ids)

    @property
    def prompt_length(self) -> int:
        """P, the padded prompt length in tokens."""
        return self.prompt_mask.shape[1]

    @property
    def attention_mask(self) -> Bool[Tensor, "batch prompt+response"]:
        """True on every real token, prompt and response."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    @property
    def lengths(self) -> Int64[Tensor, "batch"]:
        """Response tokens a row, EOS included."""
        return self.response_mask.sum(dim=1)

    def select(self, rows: Int64[Tensor, "rows"]) -> Self:
        """The same stage with these rows only, in this order."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def trimmed(self) -> Self:
        """The same rows without the outer columns that are padding in all of them; the index law holds as ever."""
        if not len(self.sequences):
            return self
        # Without any prompt token this is 0: the state before the first response token keeps its column.
        start = int(self.prompt_mask.any(dim=0).int().argmax()) if self.prompt_length else 0
        longest = int(self.lengths.max())
        kept = {
            "prompt_mask": self.prompt_mask[:, start:],
            "sequences": self.sequences[:, start : self.prompt_length + longest],
        }
        others = {*kept, *_WITHOUT_TOKENS}
        responses = [f.name for f in fields(self) if f.name not in others and getattr(self, f.name).ndim > 1]
        return replace(self, **kept, **{name: getattr(self, name)[:, :longest] for name in responses})

    def to(self, device: torch.device) -> Self:
        """The same stage on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True, slots=True)
class ScoredRollout(Rollout):
    """A rollout with the opinions of reference, critic and reward.

    `score_parts` are the raw scores of the parts of the reward, one column a part in the order of the settings (one
    column where the reward has one source); `scores` are their sum by `score_weights`, raw too. A critic of several
    dimensions has a value for each part and a last one for the penalties; a scalar one has no such axis.

    `kl` is the per-token KL(actor, reference) by the estimator of the run. It is kept because the exact one ("full")
    cannot be derived from the two log-probs; it is the number that is penalised and the number that is logged.
    `last_values` is V of the state after the last response token; it stands for the rest of a response cut by length.
    """

    ref_log_probs: Float32[Tensor, "batch response"]
    kl: Float32[Tensor, "batch response"]
    values: Float32[Tensor, "batch response *values"]
    last_values: Float32[Tensor, "batch *values"]
    scores: Float32[Tensor, "batch"]
    score_parts: Float32[Tensor, "batch parts"]
    score_weights: Float32[Tensor, "batch parts"]

    @property
    def by_dimension(self) -> bool:
        """Whether values, rewards and returns are there for each part of the reward and the penalties."""
        return self.values.ndim > self.response_mask.ndim

    @property
    def dimension_weights(self) -> Float32[Tensor, "batch values"]:
        """What each dimension of the critic counts in the total: the parts' weights, and 1 for the penalties."""
        return torch.cat([self.score_weights, torch.ones_like(self.score_weights[:, :1])], dim=1)

    def total(self, x: Float32[Tensor, "batch *any values"]) -> Float32[Tensor, "batch *any"]:
        """sum over dimensions k of w_k x_k with each row's weights; of a scalar critic x is the total already.

        A product of matrices would round otherwise with other rows beside it; this is the same number for each row.
        """
        if not self.by_dimension:
            return x
        weights = self.dimension_weights
        return (x * weights.view(len(weights), *[1] * (x.ndim - 2), -1)).sum(dim=-1)


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True, slots=True)
class Experience(ScoredRollout):
    """A scored rollout with shaped per-token `rewards`, and the `advantages` and `returns` that are learned from.

    Advantages are those of the weighted total, whatever dimensions the critic has.
    """

    rewards: Float32[Tensor, "batch response *values"]
    advantages: Float32[Tensor, "batch response"]
    returns: Float32[Tensor, "batch response *values"]
