"""Keys and values of rows that are being sampled: a row has a slot, and a token the column of its position.

The tensors are made once and written in place, so a token costs no copy of those before it, a row that has ended leaves
its slot to another one, and a prefix that two rows share is copied from slot to slot instead of being computed again.
Columns behind a row's last token hold what earlier rows have left there, or zeros: always finite, and never looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of a pass are: row i in slot `slots[i]`, its tokens in the columns `positions[i]`.

    `length` is more than every position: nothing looks at a column from there on. A slice of slots is read in place.
    """

    slots: Tensor | slice
    positions: Int64[Tensor, "rows time"]
    length: int

    def unseen(self, dtype: torch.dtype, window: int = 0) -> Float[Tensor, "rows 1 time length"]:
        """What is added to scores: the least number where a token does not look, which is at later ones and at those
        that lie `window` or more before it."""
        columns = torch.arange(self.length, device=self.positions.device)
        at = self.positions[:, None, :, None]
        hidden = columns > at
        if window:
            hidden |= columns <= at - window
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


# A faster way to take tokens through a part (models/slot_pass.py): inputs [rows, time, ...] to [rows, time, hidden].
SlotPass = Callable[[Tensor, "SlotCache"], Tensor]


class SlotCache:
    """The cache of a part, as transformers' attention layers and `SlotPass` write and read it.

    With `keys_by_column` the numbers of one feature lie side by side for all columns, which is how products of a few
    queries with many keys read them fastest on a CPU; shapes are the same.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self, layers: int, slots: int, capacity: int, *, keys_by_column: bool = False, slot_pass: SlotPass | None = None
    ) -> None:
        self._layers, self._slots, self._capacity = layers, slots, capacity
        self._keys_by_column = keys_by_column
        self._made = False
        self.slot_pass = slot_pass
        self.at(Places(slice(0, 0), torch.empty(0, 1, dtype=torch.int64), 0))

    def at(self, places: Places) -> SlotCache:
        """The cache for a pass over tokens in these places."""
        self.places, slots = places, places.slots
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=places.positions.device)
        self._written = slots[:, None]
        return self

    def write(self, layer: int, keys: Float[Tensor, "rows heads time size"], values: Tensor) -> None:
        """Put the keys and values of the pass into their places."""
        if not self._made:
            self._make(keys, values)
        # Two index tensors with a slice between them: rows and columns come first.
        self.keys[layer][self._written, :, self.places.positions] = keys.transpose(1, 2)
        self.values[layer][self._written, :, self.places.positions] = values.transpose(1, 2)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What transformers' layers ask for: what the pass looks at, its own keys and values among them."""
        self.write(layer_idx, keys, values)
        return self.seen(layer_idx)

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, heads, length, size] of the rows of the pass."""
        slots, length = self.places.slots, self.places.length
        return self.keys[layer][:, :, :length][slots], self.values[layer][:, :, :length][slots]

    def share(self, source: int, targets: Int64[Tensor, "rows"], columns: int) -> None:
        """Copy the first columns of a slot into others."""
        if self._made and columns:
            for held in (self.keys, self.values):
                held[:, targets, :, :columns] = held[:, source : source + 1, :, :columns]

    def swap(self, one: int, other: int, columns: int) -> None:
        """Exchange the first columns of two slots."""
        if self._made:
            for held in (self.keys, self.values):
                held[:, [one, other], :, :columns] = held[:, [other, one], :, :columns]

    def _make(self, keys: Tensor, values: Tensor) -> None:
        """In the shapes and the type that the first layer gives; zeros, because what is not looked at has weight 0."""
        self._made = True
        heads, (for_keys, for_values) = keys.shape[1], (keys.shape[3], values.shape[3])
        shape = (self._layers, self._slots, heads)
        if self._keys_by_column:
            self.keys = keys.new_zeros((*shape, for_keys, self._capacity)).transpose(3, 4)
        else:
            self.keys = keys.new_zeros((*shape, self._capacity, for_keys))
        self.values = values.new_zeros((*shape, self._capacity, for_values))
