"""Credit by dimension: which tokens helped one part of the reward and hurt another.

A vector critic's advantage of dimension k at token t, A_k,t = R_k,t - V_k,t, says how much better the rest went, for
that part alone, than the critic expected before the token. Weighted, so that all dimensions are in the unit of the
total, it is what the part had to say about the token: where two have opposite signs, one was bought by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.algorithms.statistics import correlations, opposed_shares
from fourfold.batch import Experience

Decode = Callable[[list[int]], str]

# Tokens shown before and after one that is shown in its place.
AROUND = 6


@dataclass(frozen=True)
class TokenCredit:
    """A token of the vocabulary with its mean weighted advantage in each dimension, over its `count` uses."""

    token: int
    text: str
    count: int
    advantages: list[float]
    helped: str  # the dimension that it helped most
    hurt: str  # the one that it hurt most


@dataclass(frozen=True)
class PlaceCredit:
    """One use of a token, with the text around it and its weighted advantages."""

    row: int
    column: int  # response token, counted from 0
    before: str
    text: str
    after: str
    advantages: list[float]
    helped: str
    hurt: str


@dataclass(frozen=True)
class Credit:
    """What the dimensions say of the tokens of a rollout.

    `deviations` are the standard deviations of the weighted advantages: how much each dimension steers. `correlations`
    and `opposed_shares` (of all tokens, those at which two dimensions have opposite signs) are square, in the order of
    `dimensions`.
    """

    dimensions: tuple[str, ...]
    tokens: int
    deviations: list[float]
    correlations: list[list[float]]
    opposed_shares: list[list[float]]
    trade_offs: list[TokenCredit]
    places: list[PlaceCredit]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def credit_of(experience: Experience, dimensions: Sequence[str], decode: Decode, *, top: int = 12) -> Credit:
    """The report on one rollout, learned from or held out; `dimensions` name the critic's numbers, penalties last.

    ValueError where the critic was scalar. Trade-offs are the `top` tokens by sqrt(count) x min(gain, loss), with gain
    and loss the means in the dimension that they helped and hurt most: a mean over few uses is noise.
    """
    if not experience.by_dimension:
        raise ValueError(
            "the critic has one value, so that its advantages do not tell the parts of the reward apart; allowed: a "
            "run with critic.heads = 'vector' or 'multi'"
        )
    advantages = token_advantages(experience)
    mask = experience.response_mask
    flat = advantages[mask].double()
    ids = experience.sequences[:, experience.prompt_length :][mask]
    return Credit(
        dimensions=tuple(dimensions),
        tokens=len(flat),
        deviations=flat.std(dim=0, unbiased=False).tolist(),
        correlations=correlations(flat).tolist(),
        opposed_shares=opposed_shares(flat).tolist(),
        trade_offs=list(_trade_offs(flat, ids, dimensions, decode, top)),
        places=list(_places(experience, advantages, dimensions, decode, top)),
    )


def token_advantages(experience: Experience) -> Tensor:
    """Weighted advantages of each dimension before any whitening, float32 [batch, response, dimensions]; 0 outside."""
    apart = experience.returns - experience.values
    weighted = apart * experience.dimension_weights[:, None]
    return torch.where(experience.response_mask[..., None], weighted, 0.0)


def _trade_offs(
    flat: Tensor, ids: Tensor, dimensions: Sequence[str], decode: Decode, top: int
) -> Iterator[TokenCredit]:
    tokens, place, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    means = torch.zeros(len(tokens), flat.shape[1], dtype=flat.dtype).index_add_(0, place, flat) / counts[:, None]
    between = torch.minimum(means.amax(dim=1), -means.amin(dim=1)).clamp_min(0.0)
    weight = between * counts.sqrt()
    for i in weight.argsort(descending=True, stable=True)[:top].tolist():
        if weight[i] > 0:
            token = int(tokens[i])
            yield TokenCredit(
                token, decode([token]), int(counts[i]), means[i].tolist(), *_helped_and_hurt(means[i], dimensions)
            )


def _places(
    experience: Experience, advantages: Tensor, dimensions: Sequence[str], decode: Decode, top: int
) -> Iterator[PlaceCredit]:
    between = torch.minimum(advantages.amax(dim=2), -advantages.amin(dim=2)).clamp_min(0.0)
    width, start = between.shape[1], experience.prompt_length
    attended = experience.attention_mask
    for at in between.flatten().argsort(descending=True, stable=True)[:top].tolist():
        row, column = divmod(at, width)
        if between[row, column] <= 0:
            return
        here = start + column

        def text(first: int, last: int, row: int = row) -> str:
            columns = [c for c in range(max(first, 0), last) if c < attended.shape[1] and attended[row, c]]
            return decode(experience.sequences[row, columns].tolist())

        found = advantages[row, column]
        yield PlaceCredit(
            row,
            column,
            before=text(here - AROUND, here),
            text=text(here, here + 1),
            after=text(here + 1, here + 1 + AROUND),
            advantages=found.tolist(),
            **dict(zip(("helped", "hurt"), _helped_and_hurt(found, dimensions), strict=True)),
        )


def _helped_and_hurt(advantages: Tensor, dimensions: Sequence[str]) -> tuple[str, str]:
    return dimensions[int(advantages.argmax())], dimensions[int(advantages.argmin())]
