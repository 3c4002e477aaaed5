"""Roles whose weights torch does not hold in this process: how they stand in the table of roles."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fourfold.memory.offload import Residency


@dataclass(frozen=True)
class Outside:
    """Weights that another engine than torch holds, or another process, for the table of roles."""

    parameters: int
    dtype: str
    where: str
    bytes: int


class Absent(nn.Module):
    """A reward model of another family that a service holds: nothing of it is here but its place among the roles."""

    def __init__(self, residency: Residency, outside_torch: Outside) -> None:
        super().__init__()
        self.residency = residency
        self.outside_torch = outside_torch
