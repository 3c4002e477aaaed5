"""Decoder layers as the operations that transformers 5 makes of them, family by family.

Names are those of the modeling files, and a value lives as long here as its tensor does there: that decides the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fourfold.planner.footprint import ops
from fourfold.planner.footprint.attention import Cache, attend, remembered
from fourfold.planner.footprint.form import Batch, Form, Layer
from fourfold.planner.footprint.latent import latent_attention
from fourfold.planner.footprint.mixture import mixture
from fourfold.planner.footprint.projections import project
from fourfold.planner.footprint.tape import Tape, Value


@dataclass(slots=True)
class Surroundings:
    """What every layer of a pass is given beside its input."""

    form: Form
    batch: Batch
    mask: Value | None
    rotary: tuple[Value, Value] | None  # cos and sin
    cache: Cache | None


def rms_norm(t: Tape, x: Value, layer: Layer, name: str, size: int) -> Value:
    """weight * (x / sqrt(mean x^2 + eps)) in float32 inside; the product has the weight's type."""
    wide = ops.cast(t, x, 4)
    scale = _root(t, wide, size)
    normed = ops.multiply(t, wide, scale)
    del wide
    return ops.scale(t, layer.vector(name, size), ops.cast(t, normed, x.width))


def _root(t: Tape, wide: Value, size: int) -> Value:
    mean = ops.reduced(t, ops.power(t, wide), wide.numbers // size)
    return ops.keeping_output(t, mean.numbers, mean.width, [mean], [])


def gemma_norm(t: Tape, x: Value, layer: Layer, name: str, size: int) -> Value:
    """(1 + weight) * normed in float32, then in the type of x."""
    wide = ops.cast(t, x, 4)
    output = ops.multiply(t, wide, _root(t, wide, size))
    del wide
    output = ops.scale(t, layer.vector(name, size), output)
    return ops.cast(t, output, x.width)


def layer_norm(t: Tape, x: Value, layer: Layer, name: str, size: int) -> Value:
    """torch's own: keeps its input, mean and deviation; CUDA's autocast runs it in float32."""
    if t.autocast and layer.form.cuda:
        x = ops.cast(t, x, 4)
    weight, statistics = layer.vector(name, 2 * size), t.empty(2 * x.numbers // size, 4)
    back = ops.fresh(t, ops.size_of(x), weight.numbers * weight.width if weight.trained else None)
    return t.made(x.numbers, x.width, [x, weight], [x, statistics], back)


def silu(t: Tape, x: Value, form: Form) -> Value:
    """silu and torch's gelu keep their input."""
    return ops.elementwise(t, x, [x])


def new_gelu(t: Tape, x: Value, form: Form) -> Value:
    """GPT-2's: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), one operation after the other."""
    half = ops.elementwise(t, x)
    cube = ops.power(t, ops.cast(t, x, 4) if t.autocast and form.cuda else x)
    inner = ops.elementwise(t, cube)
    del cube
    inner = ops.add(t, x, inner)
    inner = ops.elementwise(t, inner)
    hyperbolic = ops.keeping_output(t, inner.numbers, inner.width, [inner], [])
    del inner
    one_more = ops.elementwise(t, hyperbolic)
    del hyperbolic
    return ops.multiply(t, half, one_more)


def relu(t: Tape, x: Value, form: Form) -> Value:
    """OPT's: keeps its output, which the next product keeps as well."""
    return ops.keeping_output(t, x.numbers, x.width, [x], [])


def gated_mlp(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """down(act(gate(x)) * up(x)), or experts in its place."""
    if layer.form.architecture.has_experts(layer.form.architecture.layers - 1):
        return mixture(t, x, layer, around.batch)
    inner = layer.form.architecture.intermediate
    gate = silu(t, project(t, x, layer, "gate_proj", inner, around.batch), layer.form)
    product = ops.multiply(t, gate, project(t, x, layer, "up_proj", inner, around.batch))
    del gate
    return project(t, product, layer, "down_proj", layer.form.architecture.hidden, around.batch)


def plain_mlp(
    t: Tape, x: Value, layer: Layer, around: Surroundings, names: tuple[str, str], act: Callable[..., Value]
) -> Value:
    """out(act(in(x)))."""
    hidden = project(t, x, layer, names[0], layer.form.architecture.intermediate, around.batch)
    hidden = act(t, hidden, layer.form)
    return project(t, hidden, layer, names[1], layer.form.architecture.hidden, around.batch)


def _attention(t: Tape, x: Value, layer: Layer, around: Surroundings, run: Callable[..., Value]) -> Value:
    """With its own checkpoint where the settings say so; `index` counts within the part."""
    form, index = layer.form, layer.index
    if form.checkpointing == "attention" and index % form.checkpoint_every == 0:
        return ops.checkpointed(t, x, lambda given: run(t, given, layer, around))
    return run(t, x, layer, around)


def llama_attention(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """Separate projections, rotary positions, grouped keys; Qwen3 norms queries and keys by head."""
    a, batch = layer.form.architecture, around.batch
    if a.latent is not None:
        return latent_attention(t, x, layer, batch, around.mask, around.cache)
    head_norm = NORMS.get(a.family, rms_norm)
    query = project(t, x, layer, "q_proj", a.heads * a.head_dim, batch)
    query = head_norm(t, query, layer, "q_norm", a.head_dim) if a.query_key_norm else query
    key = project(t, x, layer, "k_proj", a.kv_heads * a.head_dim, batch)
    key = head_norm(t, key, layer, "k_norm", a.head_dim) if a.query_key_norm else key
    value = project(t, x, layer, "v_proj", a.kv_heads * a.head_dim, batch)
    if around.rotary is not None:
        query, key = rotated(t, query, *around.rotary), rotated(t, key, *around.rotary)
    key, value = remembered(t, key, value, layer, batch, around.cache)
    out = attend(t, query, key, value, layer, batch, around.mask)
    return project(t, out, layer, "o_proj", a.hidden, batch)


def rotated(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """x cos + rotate_half(x) sin."""
    return ops.add(t, ops.multiply(t, x, cos), ops.multiply(t, _turned(t, x), sin))


def _turned(t: Tape, x: Value) -> Value:
    """rotate_half: one half is negated, and both are put together."""
    return ops.custom(t, x.numbers, x.width, [ops.elementwise(t, ops.view(t, x, x.numbers // 2)), x], [])


def llama_layer(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """Pre-norm attention and gated MLP; also Mistral, Qwen2, Qwen3."""
    size = layer.form.architecture.hidden
    residual = x
    hidden = rms_norm(t, x, layer, "input_layernorm", size)
    del x
    hidden = _attention(t, hidden, layer, around, llama_attention)
    hidden = ops.add(t, residual, hidden)
    residual = hidden
    hidden = rms_norm(t, hidden, layer, "post_attention_layernorm", size)
    hidden = gated_mlp(t, hidden, layer, around)
    return ops.add(t, residual, hidden)


def gemma_layer(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """As Llama's with Gemma's norm; Gemma 2 has one after each of the two as well."""
    size, four = layer.form.architecture.hidden, layer.form.architecture.norms_per_layer == 4
    residual = x
    hidden = gemma_norm(t, x, layer, "input_layernorm", size)
    del x
    hidden = _attention(t, hidden, layer, around, llama_attention)
    if four:
        hidden = gemma_norm(t, hidden, layer, "post_attention_layernorm", size)
    hidden = ops.add(t, residual, hidden)
    residual = hidden
    hidden = gemma_norm(t, hidden, layer, "pre_feedforward_layernorm", size)
    hidden = gated_mlp(t, hidden, layer, around)
    if four:
        hidden = gemma_norm(t, hidden, layer, "post_feedforward_layernorm", size)
    return ops.add(t, residual, hidden)


def gpt2_attention(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """One projection for all three, of which queries, keys and values are views."""
    a, batch = layer.form.architecture, around.batch
    joined = project(t, x, layer, "c_attn", 3 * a.hidden, batch)
    query, key, value = thirds(t, joined)
    del joined
    key, value = remembered(t, key, value, layer, batch, around.cache)
    out = attend(t, query, key, value, layer, batch, around.mask)
    return project(t, out, layer, "c_proj", a.hidden, batch)


def thirds(t: Tape, joined: Value) -> tuple[Value, Value, Value]:
    """Three views; their gradients are joined again."""
    third = joined.numbers // 3
    return ops.view(t, joined, third), ops.view(t, joined, third), ops.view(t, joined, third)


def gpt2_layer(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """LayerNorms, biases, an MLP without a gate."""
    size = layer.form.architecture.hidden
    residual = x
    hidden = layer_norm(t, x, layer, "ln_1", size)
    del x
    out = _attention(t, hidden, layer, around, gpt2_attention)
    hidden = ops.add(t, out, residual)
    residual = hidden
    hidden = layer_norm(t, hidden, layer, "ln_2", size)
    forward = plain_mlp(t, hidden, layer, around, ("c_fc", "c_proj_mlp"), new_gelu)
    return ops.add(t, residual, forward)


def neox_attention(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """One projection for all three; a part of each head is rotated."""
    a, batch = layer.form.architecture, around.batch
    joined = project(t, x, layer, "query_key_value", 3 * a.hidden, batch)
    query, key, value = thirds(t, joined)
    assert around.rotary is not None
    query, key = neox_rotated(t, query, around), neox_rotated(t, key, around)
    key, value = remembered(t, key, value, layer, batch, around.cache)
    out = attend(t, query, key, value, layer, batch, around.mask)
    if not layer.form.cuda and layer.form.attention != "eager":
        # The kernel for CPUs gives its output the queries' layout, which is not that of the product.
        out = ops.custom(t, out.numbers, out.width, [out], [])
    return project(t, out, layer, "dense", a.hidden, batch)


def neox_rotated(t: Tape, x: Value, around: Surroundings) -> Value:
    """The rotated part and the rest are put together anew."""
    assert around.rotary is not None
    cos, sin = around.rotary
    turned = rotated(t, ops.view(t, x, cos.numbers * around.form.architecture.heads), cos, sin)
    return ops.custom(t, x.numbers, x.width, [turned, x], [])


def neox_layer(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """Attention and MLP side by side over one residual stream."""
    size = layer.form.architecture.hidden
    out = _attention(t, layer_norm(t, x, layer, "input_layernorm", size), layer, around, neox_attention)
    normed = layer_norm(t, x, layer, "post_attention_layernorm", size)
    names = ("dense_h_to_4h", "dense_4h_to_h")
    forward = plain_mlp(t, normed, layer, around, names, silu)
    del normed
    return ops.add(t, ops.add(t, forward, out), x)


def opt_layer(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """LayerNorms, separate projections without rotary positions, an MLP without a gate."""
    size = layer.form.architecture.hidden
    residual = x
    hidden = layer_norm(t, x, layer, "self_attn_layer_norm", size)
    del x
    hidden = ops.add(t, residual, _attention(t, hidden, layer, around, llama_attention))
    residual = hidden
    hidden = layer_norm(t, hidden, layer, "final_layer_norm", size)
    return ops.add(t, residual, plain_mlp(t, hidden, layer, around, ("fc1", "fc2"), relu))


LAYERS: dict[str, Callable[[Tape, Value, Layer, Surroundings], Value]] = {
    "gemma": gemma_layer,
    "gemma2": gemma_layer,
    "gemma3_text": gemma_layer,
    "opt": opt_layer,
    "gpt2": gpt2_layer,
    "gpt_neox": neox_layer,
}
NORMS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), gemma_norm),
    **dict.fromkeys(("gpt2", "gpt_neox", "opt"), layer_norm),
}


def run_layer(t: Tape, x: Value, layer: Layer, around: Surroundings) -> Value:
    """One decoder layer of whatever family, with its checkpoint where the settings say so."""
    form = layer.form
    run = LAYERS.get(form.architecture.family, llama_layer)
    if form.checkpointing == "layers" and layer.index % form.checkpoint_every == 0:
        return ops.checkpointed(t, x, lambda given: run(t, given, layer, around))
    return run(t, x, layer, around)


def norm(t: Tape, x: Value, layer: Layer, name: str) -> Value:
    """The family's norm."""
    return NORMS.get(layer.form.architecture.family, rms_norm)(t, x, layer, name, layer.form.architecture.hidden)
