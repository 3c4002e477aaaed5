"""What is planned: a run's settings, the models in it, the lengths of its texts, and the hardware under it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fourfold.config.schema import RunConfig
from fourfold.planner.architectures import Architecture
from fourfold.planner.hardware.machine import Cluster
from fourfold.planner.layout import Layout

# Bytes of one number; quantised kinds are not here, because their scales depend on the matrix (planner.quantization).
WIDTHS: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class Lengths(NamedTuple):
    """Tokens of prompts and responses: the longest of a batch, which memory goes by, and the mean, which time does."""

    prompt: int
    response: int
    mean_prompt: float
    mean_response: float

    @classmethod
    def longest(cls, prompt: int, response: int) -> Lengths:
        """All rows as long as they may be."""
        return cls(prompt, response, prompt, response)


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a plan depends on.

    `models` has the architecture of the run's own model under "base", and of roles with a model of their own under the
    roles' names. `stored` has the type of their weights' files by the same names where that is not
    bfloat16, as it is of most published models: what is bfloat16 to begin with, frozen roles hold as that.
    """

    config: RunConfig
    models: Mapping[str, Architecture]
    cluster: Cluster
    lengths: Lengths
    layout: Layout = field(default_factory=Layout)
    stored: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {"base", "critic", "reference", *self.config.reward.classifiers}
        assert "base" in self.models and set(self.models) <= known, sorted(self.models)
        if self.layout.devices > self.cluster.devices:
            raise ValueError(
                f"the layout {self.layout} takes {self.layout.devices} devices; there are {self.cluster.devices}; "
                "try smaller degrees or more devices"
            )

    @property
    def micro_rows(self) -> int:
        """Rows of a pass in which all are as long as they may be."""
        ppo, longest = self.config.ppo, self.lengths.prompt + self.lengths.response
        fit = ppo.micro_batch_tokens // longest if ppo.micro_batch_tokens else ppo.micro_batch_size
        return max(1, min(fit, ppo.micro_batch_size))

    def micro_batches(self, rows: float) -> int:
        """Passes over so many rows, on one device of those that share them."""
        ppo, mine = self.config.ppo, rows / self.layout.data
        mean = self.lengths.mean_prompt + self.lengths.mean_response
        by_tokens = mine * mean / ppo.micro_batch_tokens if ppo.micro_batch_tokens else 0.0
        return math.ceil(max(mine / ppo.micro_batch_size, min(by_tokens, mine)))

    @property
    def base(self) -> Architecture:
        """The run's own model."""
        return self.models["base"]

    @property
    def classifiers(self) -> dict[str, Architecture]:
        """Reward models of other families whose architecture is known, by the first table that names each."""
        return {key: self.models[key] for key in self.config.reward.held_classifiers if key in self.models}

    @property
    def compute(self) -> Literal["float32", "bfloat16", "float16"]:
        """The type of the trained roles' products; 'auto' as the run itself decides it (decision 0003)."""
        asked = self.config.precision.compute
        if asked != "auto":
            return asked
        return "bfloat16" if self.cluster.device.multiplies("bfloat16") else "float32"

    def stored_in(self, model: str) -> str:
        """The type of a model's weights as they are published."""
        return self.stored.get(model, "bfloat16")

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU: then the tier below it is the disk, not host memory."""
        return self.cluster.device.kind == "cpu"
