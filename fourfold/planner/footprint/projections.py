"""Linear layers of a decoder: plain, held narrowly or in fewer bits, with or without adapters."""

from __future__ import annotations

from fourfold.planner.footprint import ops
from fourfold.planner.footprint.form import Batch, Layer, Lora
from fourfold.planner.footprint.tape import Gradients, Storage, Tape, Value, Weight

# Up to this many rows a product in float32 on a CPU is made the other way round, and turned (models/products.py).
FEW_ROWS = 64


def project(t: Tape, x: Value, layer: Layer, name: str, outputs: int, batch: Batch) -> Value:
    """x W^T, and beside it the adapters' two products where the layer has them."""
    form, inputs = layer.form, x.numbers // batch.tokens
    few = batch.tokens <= FEW_ROWS and not form.autocast and not form.cuda and x.width == 4
    weight = layer.matrix(name, inputs * outputs)
    out = _quantized(t, x, weight, outputs) if form.quantized else ops.linear(t, x, weight, outputs, few)
    lora = form.lora
    if lora is None or not lora.on(name.removesuffix("_mlp")):
        return out
    wide = ops.cast(t, x, lora.width)
    beside = ops.elementwise(t, _adapted(t, wide, layer, lora, name, inputs, outputs))
    if lora.dora:
        out, beside = _turned(t, out, beside, layer, name, inputs, outputs)
    return ops.cast(t, ops.add(t, out, beside), out.width)


def _adapted(t: Tape, x: Value, layer: Layer, lora: Lora, name: str, inputs: int, outputs: int) -> Value:
    """B A x."""
    down = ops.linear(t, x, layer.adapter(f"{name}.A", inputs * lora.rank), lora.rank)
    return ops.linear(t, down, layer.adapter(f"{name}.B", outputs * lora.rank), outputs)


def _turned(
    t: Tape, out: Value, beside: Value, layer: Layer, name: str, inputs: int, outputs: int
) -> tuple[Value, Value]:
    """DoRA's lengths on both products; for them the adapted matrix is made (by peft, from a unit one) and dropped."""
    matrices = t.storage(4 * (inputs**2 + 3 * inputs * outputs), "buffers")
    del matrices
    lengths = layer.adapter(f"{name}.m", outputs)
    return ops.cast(t, ops.scale(t, lengths, out), out.width), ops.scale(t, lengths, beside)


def _quantized(t: Tape, x: Value, weight: Weight, outputs: int) -> Value:
    """The weight is widened for the product and again for its backward pass, which keeps nothing."""
    x = ops.cast(t, x, t.autocast or x.width)
    rows = x.numbers * outputs // weight.numbers
    widened = t.empty(weight.numbers, x.width, "buffers")

    again, size = weight.numbers * x.width, ops.size_of(x)

    def back(g: Storage) -> Gradients:
        widened = t.storage(again, "buffers")
        made = ops.made_of(t, size)
        del widened
        return made

    out = t.made(rows * outputs, x.width, [x], [], back)
    del widened
    return out
