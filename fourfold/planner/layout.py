"""How a job is spread over devices, and which spreads make sense on which hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism; their product (experts aside) is the number of devices.

    Expert parallelism splits the experts among devices that are data parallel to each other. ZeRO shards over the
    data-parallel ranks: 1 Adam's states and masters, 2 gradients too, 3 weights too (Rajbhandari et al. 2020). That is
    for what is trained: frozen weights are whole on every device, unless `shard_frozen` says otherwise under ZeRO-3,
    because they have no states and would be gathered for every pass.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1  # of sequences: context or sequence parallelism
    expert: int = 1
    zero: ZeroStage = 0
    shard_frozen: bool = False

    def __post_init__(self) -> None:
        degrees = (self.data, self.tensor, self.pipeline, self.context, self.expert)
        if min(degrees) < 1 or self.zero not in (0, 1, 2, 3):
            raise ValueError(f"{self}: degrees must be at least 1 and zero 0 to 3; try Layout() for one device")
        if self.shard_frozen and self.zero != 3:
            raise ValueError(f"{self}: frozen weights are sharded under ZeRO-3 only; try zero = 3")
        if self.data % self.expert:
            raise ValueError(
                f"expert = {self.expert}, data = {self.data}: experts are split among data-parallel devices, so expert "
                "must divide data; try one of data's divisors"
            )

    @property
    def devices(self) -> int:
        """Devices that it takes."""
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        named = {"DP": self.data, "TP": self.tensor, "PP": self.pipeline, "CP": self.context, "EP": self.expert}
        parts = [f"{name} {degree}" for name, degree in named.items() if degree > 1]
        parts += [f"ZeRO-{self.zero}" + (" of all" if self.shard_frozen else "")] if self.zero else []
        return " x ".join(parts) or "one device"
