"""A rollout in pieces: rows of similar length that pass a role together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from jaxtyping import Int64
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.memory.budget import rows_within
from fourfold.models.roles import Activations

AnyRollout = TypeVar("AnyRollout", bound=Rollout)


def micro_batches(
    batch: AnyRollout, activations: Activations, pieces: Iterable[Tensor]
) -> Iterator[tuple[Tensor, AnyRollout, Activations]]:
    """The row numbers of each piece, its rows and their activations, without columns of mere padding."""
    for chosen in pieces:
        yield chosen, *micro_batch(batch, activations, chosen)


def cut_rows(batch: Rollout, rows: Int64[Tensor, "rows"], size: int, tokens: int = 0) -> list[Tensor]:
    """Cut `rows` into pieces of similar length: of at most `size` rows and, unless 0, `tokens` (`rows_within`).

    Every row comes once; what is computed for a real token does not depend on the rows beside it, so only the order of
    sums differs from any other way to cut.
    """
    ordered = by_length(batch, rows)
    if not tokens:
        return list(ordered.split(size))
    lengths, pieces = tokens_of(batch, ordered), list[Tensor]()
    while len(ordered):
        count = rows_within(lengths[:size], tokens)
        pieces.append(ordered[:count])
        ordered, lengths = ordered[count:], lengths[count:]
    return pieces


def tokens_of(batch: Rollout, rows: Int64[Tensor, "rows"]) -> list[int]:
    """Of each of these rows, prompt and response."""
    return batch.attention_mask[rows].sum(dim=1).tolist()


def by_length(batch: Rollout, rows: Int64[Tensor, "rows"]) -> Int64[Tensor, "rows"]:
    """The same rows, those with the fewest tokens first."""
    return rows[batch.attention_mask[rows].sum(dim=1).argsort(stable=True)]


def micro_batch(batch: AnyRollout, activations: Activations, chosen: Tensor) -> tuple[AnyRollout, Activations]:
    """These rows and their activations, without columns of mere padding."""
    part = batch.select(chosen).trimmed()
    start = batch.prompt_length - part.prompt_length
    columns = slice(start, start + part.sequences.shape[1])
    return part, Activations(activations.inputs[chosen, columns], activations.mask[chosen, columns])
