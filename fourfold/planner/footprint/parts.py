"""A pass through a part: look-up, mask and positions, decoder layers, norm (fourfold/models/split.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from fourfold.planner.footprint import layers, ops
from fourfold.planner.footprint.attention import Cache
from fourfold.planner.footprint.form import Batch, Form, Layer
from fourfold.planner.footprint.tape import Gradients, Storage, Tape, Value, Weight

# Share of a GPT-NeoX head that is rotated where config.json does not say otherwise (rotary_pct).
ROTARY_SHARE = {"gpt_neox": 0.25}


def _as_given(x: Value) -> tuple[Value, tuple[Value, ...]]:
    """The first input of the layers, and what the pass holds on to until its end."""
    return x, (x,)


@dataclass(slots=True)
class Part:
    """A part with its weights."""

    form: Form
    stack: list[Layer] = field(init=False)
    table: Weight = field(init=False)
    last: Layer = field(init=False)

    def __post_init__(self) -> None:
        form, a = self.form, self.form.architecture
        self.stack = [Layer(form, index) for index in range(form.layers)]
        self.table = Weight(a.vocabulary * a.hidden, form.table, trained=form.table_trained)
        self.last = Layer(form, form.layers)

    def forward(self, t: Tape, batch: Batch, x: Value | None = None, cache: Cache | None = None) -> Value:
        """Activations of ids (x: None) or of the activations below."""
        form, before = self.form, t.offload
        t.offload = before or (form.offload and t.grad)
        positions = t.empty(2 * batch.tokens, 8)  # and the mask of tokens as integers
        with t.casting(form.autocast):
            hidden, given = self._looked_up(t, batch) if x is None else _as_given(ops.cast(t, x, form.compute))
            del x
            around = layers.Surroundings(form, batch, self._mask(t, batch), self._rotary(t, batch), cache)
            for layer in self.stack:
                hidden = layers.run_layer(t, hidden, layer, around)
                hidden = self._watched(t, hidden, layer.index)
            if form.norm:
                hidden = layers.norm(t, hidden, self.last, "norm")
        del positions, given
        t.offload = before
        return hidden

    def _watched(self, t: Tape, hidden: Value, index: int) -> Value:
        """Begins a stage of the backward pass at the layer, counted from below or from above, whichever is nearer."""
        if hidden.node is None:
            return hidden
        above = self.form.layers - 1 - index
        name = f"backward, layer {index}" if index < above else f"backward, layer -{above + 1}"

        def back(g: Storage) -> Gradients:
            t.meter.stage(name)
            return [g]

        return Value(hidden.numbers, hidden.width, hidden.storage, t.node([hidden], [], back))

    def _looked_up(self, t: Tape, batch: Batch) -> tuple[Value, tuple[Value, ...]]:
        """Rows of the table in the compute type, to which learned positions are added; and what the pass holds on to.

        Gemma multiplies by a scale.
        """
        form, a, table = self.form, self.form.architecture, self.table
        size = table.numbers * 4
        numbers = batch.tokens * a.hidden
        rows = t.made(numbers, table.width, [table], [], lambda g: [t.storage(size)])
        if a.family in ("gemma", "gemma2"):
            rows = ops.elementwise(t, rows)
        rows = ops.cast(t, rows, form.compute)
        found = (rows,)
        if a.learned_positions:
            places = Weight(a.learned_positions * a.hidden, form.table, trained=form.table_trained)
            of_places = places.numbers * 4
            added = t.made(numbers, places.width, [places], [], lambda g: [t.storage(of_places)])
            added = ops.cast(t, added, form.compute)
            found = (rows, added)
            rows = ops.add(t, rows, added)
        return rows, found

    def _mask(self, t: Tape, batch: Batch) -> Value | None:
        """Who sees whom, where rows have padding; the eager kernel always has one, as numbers."""
        numbers = batch.rows * batch.time * batch.keys
        if self.form.attention == "eager":
            return t.empty(numbers, self.form.compute)
        return t.empty(numbers, 1) if batch.padded else None

    def _rotary(self, t: Tape, batch: Batch) -> tuple[Value, Value] | None:
        a = self.form.architecture
        if a.learned_positions:
            return None
        size = a.head_dim if a.latent is None else a.latent.rotary
        numbers = round(batch.tokens * size * ROTARY_SHARE.get(a.family, 1.0))
        return t.empty(numbers, self.form.compute), t.empty(numbers, self.form.compute)
