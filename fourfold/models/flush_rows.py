"""Rows of real tokens between padding, moved so that all begin in the first column and fewer columns are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class FlushRows:
    """Where each row begins, and how many columns the longest one has.

    Prompts end and responses begin in one column, so rows with prompts and responses of other lengths are padded on
    both sides. What is computed for a real token depends on the real ones before it only.
    """

    starts: Int64[Tensor, "batch"]
    ends: Int64[Tensor, "batch"]
    width: int

    @classmethod
    def of(cls, mask: Bool[Tensor, "batch time"], state: int | None = None) -> FlushRows | None:
        """None where no column is saved, or where a row's real tokens are not beside each other.

        The column `state`, which is read even where no token before it is real, stays among the columns of a row.
        """
        columns = torch.arange(mask.shape[1], device=mask.device)
        starts = mask.int().argmax(dim=1)
        ends = starts + mask.sum(dim=1)
        if not torch.equal((columns >= starts[:, None]) & (columns < ends[:, None]), mask):
            return None
        if state is not None:
            starts, ends = starts.clamp(max=state), ends.clamp(min=state + 1)
        width = int((ends - starts).max()) if len(mask) else 0
        return cls(starts, ends, width) if 0 < width < mask.shape[1] else None

    def flush(self, x: Tensor) -> Tensor:
        """[batch, time] or [batch, time, hidden] to the same of `width` columns."""
        columns = self.starts[:, None] + torch.arange(self.width, device=x.device)
        return _columns(x, columns.clamp(max=x.shape[1] - 1))

    def flush_mask(self, mask: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch width"]:
        """The same of a mask; columns after a row's end are padding."""
        return self.flush(mask) & (torch.arange(self.width, device=mask.device) < (self.ends - self.starts)[:, None])

    def put_back(self, out: Float[Tensor, "batch width hidden"], time: int) -> Float[Tensor, "batch time hidden"]:
        """What was computed, in the columns where it was; 0 outside of the rows."""
        columns = torch.arange(time, device=out.device)
        there = (columns >= self.starts[:, None]) & (columns < self.ends[:, None])
        moved = _columns(out, (columns - self.starts[:, None]).clamp(0, self.width - 1))
        return torch.where(there[..., None], moved, 0.0)


def _columns(x: Tensor, columns: Int64[Tensor, "batch columns"]) -> Tensor:
    """Each row's own columns."""
    return x.gather(1, columns) if x.ndim == 2 else x.gather(1, columns[..., None].expand(-1, -1, x.shape[2]))
