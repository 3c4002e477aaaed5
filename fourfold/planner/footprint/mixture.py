"""A layer's mixture of experts, as operations: every token goes to some of them (transformers 5, grouped products)."""

from __future__ import annotations

from fourfold.planner.footprint import ops
from fourfold.planner.footprint.form import Batch, Layer
from fourfold.planner.footprint.projections import project
from fourfold.planner.footprint.tape import Tape, Value


def mixture(t: Tape, x: Value, layer: Layer, batch: Batch) -> Value:
    """Router, the chosen experts' products over the tokens that they are given, and the shared experts beside them."""
    a = layer.form.architecture
    experts = a.experts
    assert experts is not None
    router = ops.linear(t, x, layer.matrix("router", a.hidden * experts.count), experts.count)
    chances = ops.keeping_output(t, router.numbers, 4, [ops.cast(t, router, 4)], [])
    del router
    sent = batch.tokens * experts.per_token
    share = ops.custom(t, sent, 4, [chances], [])
    given = ops.custom(t, sent * a.hidden, x.width, [x], [])
    inner, count = experts.intermediate, experts.count
    both = _by_experts(t, given, layer, "experts.gate_up_proj", a.hidden, 2 * inner, count)
    del given
    gate = ops.elementwise(t, ops.view(t, both, sent * inner), [ops.view(t, both, sent * inner)])
    product = ops.multiply(t, gate, ops.view(t, both, sent * inner))
    del gate, both
    down = _by_experts(t, product, layer, "experts.down_proj", inner, a.hidden, count)
    del product
    weighted = ops.multiply(t, ops.cast(t, down, 4) if down.width != 4 and t.grad else down, share)
    del down, share
    out = ops.cast(t, ops.custom(t, batch.tokens * a.hidden, weighted.width, [weighted], []), x.width)
    del weighted
    if not experts.shared_intermediate:
        return out
    beside = ops.elementwise(t, *_kept(project(t, x, layer, "gate_proj", experts.shared_intermediate, batch)))
    beside = ops.multiply(t, beside, project(t, x, layer, "up_proj", experts.shared_intermediate, batch))
    return ops.add(t, out, project(t, beside, layer, "down_proj", a.hidden, batch))


def _kept(x: Value) -> tuple[Value, list[Value]]:
    return x, [x]


def _by_experts(t: Tape, x: Value, layer: Layer, name: str, inputs: int, outputs: int, count: int) -> Value:
    """Each token's product with the matrix of its expert; the gradient of the weight is one of all experts."""
    weight, rows = layer.matrix(name, count * inputs * outputs), x.numbers // inputs
    x = ops.cast(t, x, t.autocast or x.width)
    held = t.for_product(weight)
    back = ops.fresh(t, ops.size_of(x), weight.numbers * x.width if weight.trained else None)
    saved = [*([x] if weight.trained else []), *([held] if held is not None and x.node else [])]
    return t.made(rows * outputs, x.width, [x, weight if held is None else held], saved, back)
