"""What a part of a model is made of, and the batch that goes through it: all that its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fourfold.planner.architectures import Architecture
from fourfold.planner.footprint.tape import Weight
from fourfold.planner.linears import Linear, linears_between

Attention = Literal["sdpa", "sdpa_wide", "eager"]


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of a part: their rank, on which linear layers (none: on all), and whether they are DoRA's."""

    rank: int
    targets: tuple[str, ...] = ()
    dora: bool = False
    trained: bool = True
    width: int = 4

    def on(self, name: str) -> bool:
        """Whether this linear layer has them."""
        return not self.targets or name in self.targets


@dataclass(frozen=True, slots=True)
class Form:
    """Consecutive decoder layers, how they are held, and how they compute.

    Widths are bytes of a number. `embedding` says that ids are looked up, `norm` that the final norm is there.
    `quantized` is the kind of the layers' matrices where they are held in fewer bits.
    """

    architecture: Architecture
    layers: int
    embedding: bool
    norm: bool
    compute: int
    matrices: int = 4
    vectors: int = 4
    table: int = 4
    trained: bool = False
    table_trained: bool = False
    quantized: str = ""
    lora: Lora | None = None
    attention: Attention = "sdpa"
    checkpointing: Literal["none", "layers", "attention"] = "none"
    checkpoint_every: int = 1
    offload: bool = False
    cuda: bool = False
    above: int = 0  # layers of the architecture above its own

    @property
    def start(self) -> int:
        """The first of its layers, counted in the whole model."""
        return 0 if self.embedding else self.architecture.layers - self.above - self.layers

    @property
    def autocast(self) -> int:
        """The width that products are cast to; 0 where none is."""
        return self.compute if self.compute != 4 else 0

    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of all its layers."""
        return linears_between(self.architecture, self.start, self.start + self.layers)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of `time` tokens that see `keys` tokens each; `padded` ones need a mask."""

    rows: int
    time: int
    keys: int
    padded: bool

    @classmethod
    def full(cls, rows: int, time: int, padded: bool) -> Batch:
        """Without a cache."""
        return cls(rows, time, time, padded)

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.rows * self.time


@dataclass(slots=True)
class Layer:
    """The weights of one decoder layer, each the same object whenever it is asked for; `index` counts in the part."""

    form: Form
    index: int
    _known: dict[str, Weight] = field(default_factory=dict)

    def matrix(self, name: str, numbers: int) -> Weight:
        """A linear layer's."""
        if name not in self._known:
            self._known[name] = Weight(numbers, self.form.matrices, trained=self.form.trained)
        return self._known[name]

    def vector(self, name: str, numbers: int) -> Weight:
        """A norm's or a bias."""
        if name not in self._known:
            self._known[name] = Weight(numbers, self.form.vectors, trained=self.form.trained)
        return self._known[name]

    def adapter(self, name: str, numbers: int) -> Weight:
        """One of the two of an adapter."""
        lora = self.form.lora
        assert lora is not None
        if name not in self._known:
            self._known[name] = Weight(numbers, lora.width, trained=lora.trained)
        return self._known[name]
