"""Attention over queries, keys and values, by the kernels that the run may use, and the cache of a sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

from fourfold.planner.footprint import ops
from fourfold.planner.footprint.form import Batch, Layer
from fourfold.planner.footprint.tape import Gradients, Storage, Tape, Value


@dataclass(slots=True)
class Cache:
    """Keys and values of all layers in slots (models/slot_cache.py): made once, for all tokens of all rows.

    Layers with a window hold no less. Rows of a prompts' pass are copied out of their slots, those of a step are not.
    """

    layers: int
    rows: int
    tokens: int
    held: list[tuple[Value, Value]] = field(default_factory=list)

    def update(self, t: Tape, index: int, key: Value, value: Value, batch: Batch) -> tuple[Value, Value]:
        """What the tokens of a batch look at, these among them."""
        numbers = [each.numbers // batch.tokens for each in (key, value)]
        if not self.held:
            whole = [self.rows * self.tokens * each for each in numbers]
            self.held = [
                (t.empty(whole[0], key.width, "KV cache"), t.empty(whole[1], value.width, "KV cache"))
                for _ in range(self.layers)
            ]
        seen = [batch.rows * batch.keys * each for each in numbers]
        if batch.time > 1:
            return t.empty(seen[0], key.width), t.empty(seen[1], value.width)
        held = self.held[index]
        return Value(seen[0], key.width, held[0].storage), Value(seen[1], value.width, held[1].storage)


def remembered(
    t: Tape, key: Value, value: Value, layer: Layer, batch: Batch, cache: Cache | None
) -> tuple[Value, Value]:
    """Keys and values with those of earlier tokens."""
    return (key, value) if cache is None else cache.update(t, layer.index, key, value, batch)


def attend(t: Tape, query: Value, key: Value, value: Value, layer: Layer, batch: Batch, mask: Value | None) -> Value:
    """The weighted sums of values, [batch, time, heads x head size]."""
    form = layer.form
    if form.attention == "eager":
        return _eager(t, query, key, value, layer, batch, mask)
    if _is_wide(value, layer, batch):
        return _wide(t, query, key, value, layer, batch, mask)
    groups = 1 if form.architecture.latent else form.architecture.heads // form.architecture.kv_heads
    # torch's kernels group keys themselves where there is no mask; transformers repeats them for a mask.
    if groups > 1 and mask is not None and batch.time > 1:
        key, value = _repeated(t, key, groups), _repeated(t, value, groups)
    if t.autocast:
        query, key, value = (ops.cast(t, each, t.autocast) for each in (query, key, value))
    saved = [query, key, value]
    if mask is not None:
        saved.append(t.empty(mask.numbers, query.width))  # as numbers that are added to the scores
    saved.append(t.empty(batch.tokens * form.architecture.heads, 4))  # logsumexp
    a = form.architecture
    return ops.keeping_output(t, batch.tokens * a.heads * a.value_dim, query.width, [query, key, value], saved)


def _is_wide(value: Value, layer: Layer, batch: Batch) -> bool:
    """Whether the kernel of memory/wide_attention.py takes this; decoding and other widths are left to torch's."""
    a = layer.form.architecture
    whole = 1 < batch.time == batch.keys
    return layer.form.attention == "sdpa_wide" and value.width < 4 and whole and a.key_dim == a.value_dim


def _wide(t: Tape, query: Value, key: Value, value: Value, layer: Layer, batch: Batch, mask: Value | None) -> Value:
    """In float32 from narrower inputs, which alone are kept, with the output and a sum for each query and head."""
    a, inputs = layer.form.architecture, [query, key, value]
    numbers = batch.tokens * a.heads * a.value_dim
    out_width, added = value.width, 0 if mask is None else mask.numbers
    sizes = [(x.numbers, x.width, x.node is not None) for x in inputs]
    sums = t.empty(batch.tokens * a.heads, 4)

    def copies(*more: int) -> list[Storage]:
        """What is there in float32: the inputs, unless they are that already, the mask, and so many numbers more."""
        return [t.storage(4 * n) for n in (*(n for n, width, _ in sizes if width < 4), added, *more)]

    def back(g: Storage) -> Gradients:
        wide, found = copies(numbers, numbers), [t.storage(4 * n) for n, _, _ in sizes]
        made: Gradients = [
            None if not wanted else of if width == 4 else t.storage(n * width)
            for of, (n, width, wanted) in zip(found, sizes, strict=True)
        ]
        del wide
        return made

    wide = copies(numbers)
    out = t.empty(numbers, out_width)
    del wide
    saved = [x.storage for x in (*inputs, sums, out)] + ([] if mask is None else [mask.storage])
    out.node = t.node(inputs, saved, back)
    return out


def _repeated(t: Tape, x: Value, groups: int) -> Value:
    return ops.custom(t, groups * x.numbers, x.width, [x], [])


def _eager(t: Tape, query: Value, key: Value, value: Value, layer: Layer, batch: Batch, mask: Value | None) -> Value:
    """Scores and weights as [batch, heads, time, keys], one operation after the other; softmax in float32."""
    a = layer.form.architecture
    groups = a.heads // a.kv_heads
    if groups > 1:
        key, value = _repeated(t, key, groups), _repeated(t, value, groups)
    numbers = batch.rows * a.heads * batch.time * batch.keys
    if t.autocast:
        query, key, value = (ops.cast(t, each, t.autocast) for each in (query, key, value))
    laid, laid_key = ops.custom(t, query.numbers, query.width, [query], []), key
    if groups == 1:
        laid_key = ops.custom(t, key.numbers, key.width, [key], [])
    scores = ops.elementwise(t, ops.custom(t, numbers, query.width, [laid, laid_key], [laid, laid_key]))
    del laid, laid_key
    if a.family == "gemma2":  # softcap x tanh(scores / softcap)
        scores = ops.elementwise(t, ops.keeping_output(t, numbers, scores.width, [ops.elementwise(t, scores)], []))
    if mask is not None:
        scores = ops.add(t, scores, mask)
    weights = ops.keeping_output(t, numbers, 4, [ops.cast(t, scores, 4)], [])
    del scores
    weights = ops.cast(t, weights, query.width)
    laid_value = value if groups > 1 else ops.custom(t, value.numbers, value.width, [value], [])
    out = ops.custom(t, query.numbers, query.width, [weights, laid_value], [weights, laid_value])
    del weights, laid_value
    return ops.custom(t, out.numbers, out.width, [out], [])
