"""Multi-head latent attention (DeepSeek-V2, section 2.1), as operations: keys and values come from one small vector."""

from __future__ import annotations

from fourfold.planner.footprint import ops
from fourfold.planner.footprint.attention import Cache, attend, remembered
from fourfold.planner.footprint.form import Batch, Layer
from fourfold.planner.footprint.projections import project
from fourfold.planner.footprint.tape import Tape, Value


def latent_attention(t: Tape, x: Value, layer: Layer, batch: Batch, mask: Value | None, cache: Cache | None) -> Value:
    """The cache holds the small vectors; keys and values of all heads are made of them anew."""
    a = layer.form.architecture
    latent = a.latent
    assert latent is not None
    queries, tokens = a.heads * a.key_dim, batch.tokens
    small = project(t, x, layer, "q_a_proj", latent.query_rank, batch) if latent.query_rank else x
    query = project(t, small, layer, "q_b_proj" if latent.query_rank else "q_proj", queries, batch)
    del small
    query = ops.custom(t, query.numbers, query.width, [query], [])  # its rotary part is turned and put back
    down = project(t, x, layer, "kv_a_proj_with_mqa", latent.rank + latent.rotary, batch)
    vector, rotary = ops.view(t, down, tokens * latent.rank), ops.view(t, down, tokens * latent.rotary)
    del down
    vector, rotary = remembered(t, vector, rotary, layer, batch, cache)
    seen = Batch(batch.rows, batch.keys, batch.keys, batch.padded) if cache is not None else batch
    up = project(t, vector, layer, "kv_b_proj", a.heads * (latent.plain + latent.value), seen)
    key = ops.custom(t, seen.tokens * queries, up.width, [up, rotary], [])
    value = ops.view(t, up, seen.tokens * a.heads * latent.value)
    del up
    out = attend(t, query, key, value, layer, batch, mask)
    return project(t, out, layer, "o_proj", a.hidden, batch)
