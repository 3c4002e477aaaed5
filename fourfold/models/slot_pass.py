"""A part's pass over tokens of rows that have slots, for layers like Llama's: what sampling spends its time in.

Norms and rotary embedding are the layers' own modules, and so are linear layers and MLPs unless they are packed
(models/packed.py): adapters, quantised and widened weights work as ever. Attention of one token a row is ours.
transformers repeats grouped keys and values for every head, and torch's kernel takes them one query at a time: with 64
rows of 128 tokens in bfloat16 that is 226 ms a step of 30 layers on one core, beside 58 ms for all products with
weights. Here the queries of a group are the rows of one product (22 ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fourfold.algorithms.products import matmul
from fourfold.models.slot_cache import Places, SlotCache
from fourfold.models.split import Part

# Model types whose layer is x + attention(norm(x)), then x + mlp(norm(x)), with rotary positions and no softcap.
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
PROBE_ROWS, PROBE_TOKENS = 2, 6


class LayerProducts(Protocol):
    """The products of a decoder layer with its weights, of inputs [..., hidden]."""

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of all heads and the keys after them [..., (heads + key heads) x size], and values."""
        ...

    def attention_output(self, x: Tensor) -> Tensor:
        """[..., heads x size] to [..., hidden]."""
        ...

    def mlp(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        ...


class ModuleProducts:
    """By the layer's own modules, whatever they are."""

    def __init__(self, layer: nn.Module) -> None:
        self._attention: Any = layer.get_submodule("self_attn")
        self._mlp = layer.get_submodule("mlp")

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of all heads and the keys after them [..., (heads + key heads) x size], and values."""
        module = self._attention
        return torch.cat((module.q_proj(x), module.k_proj(x)), dim=-1), module.v_proj(x)

    def attention_output(self, x: Tensor) -> Tensor:
        """[..., heads x size] to [..., hidden]."""
        return self._attention.o_proj(x)

    def mlp(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self._mlp(x)


class _Layer(NamedTuple):
    """What a pass needs of a decoder layer, looked up once."""

    module: nn.Module
    attention: Any
    products: LayerProducts
    norm: nn.Module
    second_norm: nn.Module
    window: int


class LlamaPass:
    """The pass of a part; what hooks its layers have are called as the layers would call them."""

    def __init__(self, part: Part, products: Sequence[LayerProducts] | None = None) -> None:
        self._part = part
        self._layers = [
            _Layer(
                layer,
                layer.self_attn,
                ModuleProducts(layer) if products is None else products[index],
                layer.get_submodule("input_layernorm"),
                layer.get_submodule("post_attention_layernorm"),
                window_of(part, index),
            )
            for index, layer in enumerate(part.layers)
        ]

    def __call__(self, inputs: Tensor, cache: SlotCache) -> Float[Tensor, "rows time hidden"]:
        """As the part itself, of inputs [rows, time] or [rows, time, hidden]."""
        body: Any = self._part.body
        x = body.get_input_embeddings()(inputs) if self._part.takes_ids else inputs
        cos, sin = body.rotary_emb(x, cache.places.positions)  # [rows, time, head size]
        rotary = _Rotary(cos[:, :, None], sin[:, :, None])  # the same for all heads
        one_token = x.shape[1] == 1
        unseen = {
            window: cache.places.unseen(torch.float32 if one_token else self._part.compute_dtype, window)
            for window in {each.window for each in self._layers}
        }
        for index, layer in enumerate(self._layers):
            for before in layer.module._forward_pre_hooks.values():
                before(layer.module, (x,))
            x = x + _attention(layer, layer.norm(x), rotary, cache, index, unseen[layer.window])
            x = x + layer.products.mlp(layer.second_norm(x))
            for after in layer.module._forward_hooks.values():
                after(layer.module, (x,), x)
        return body.norm(x)


class _Rotary:
    """x cos + (-x_2, x_1) sin, where x_1 and x_2 are the halves of a head; the sign is taken by sin."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._half = cos.shape[-1] // 2
        self._cos, self._sin = cos, torch.cat((-sin[..., : self._half], sin[..., self._half :]), dim=-1)

    def __call__(self, x: Float[Tensor, "rows time heads size"]) -> Tensor:
        swapped = torch.cat((x[..., self._half :], x[..., : self._half]), dim=-1)
        return x * self._cos + swapped * self._sin


def _attention(
    layer: _Layer,
    x: Float[Tensor, "rows time hidden"],
    rotary: _Rotary,
    cache: SlotCache,
    index: int,
    unseen: Tensor,
) -> Float[Tensor, "rows time hidden"]:
    module, shape = layer.attention, (*x.shape[:2], -1, layer.attention.head_dim)
    both, value = layer.products.attention_inputs(x)
    both, value = both.view(shape), value.view(shape)
    heads = both.shape[2] - value.shape[2]
    if hasattr(module, "q_norm"):
        both = torch.cat((module.q_norm(both[:, :, :heads]), module.k_norm(both[:, :, heads:])), dim=2)
    both = rotary(both)
    query, key = both[:, :, :heads], both[:, :, heads:]
    cache.write(index, key.transpose(1, 2), value.transpose(1, 2))
    keys, values = cache.seen(index)
    if x.shape[1] == 1:
        grouped = query.reshape(len(x), keys.shape[1], -1, shape[-1])
        found = attend(grouped, keys, values, unseen, module.scaling)
    else:
        found = attend_many(query.transpose(1, 2), keys, values, unseen, module.scaling).transpose(1, 2)
    return layer.products.attention_output(found.reshape(*x.shape[:2], -1))


def attend(
    query: Float[Tensor, "rows heads group size"], keys: Tensor, values: Tensor, unseen: Tensor, scale: float
) -> Float[Tensor, "rows heads group size"]:
    """softmax(scale x query keys^T + unseen) values, where the queries of a group look at the same keys."""
    if query.device.type != "cpu":
        mask = unseen.to(query.dtype).expand(-1, 1, query.shape[2], -1)
        return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = matmul(query, keys.transpose(2, 3)).float().mul_(scale).add_(unseen)
    return matmul(scores.softmax(dim=-1).to(values.dtype), values)


def attend_many(
    query: Float[Tensor, "rows heads time size"], keys: Tensor, values: Tensor, unseen: Tensor, scale: float
) -> Float[Tensor, "rows heads time size"]:
    """The same for several tokens a row, by torch's kernel, where the heads of a group have the same keys."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=unseen, scale=scale)


def window_of(part: Part, index: int) -> int:
    """How many tokens a layer looks back at most, itself included; 0 is no bound."""
    config = part.body.config
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or (kinds is not None and kinds[index] != "sliding_attention"):
        return 0
    return window


def slot_pass_of(part: Part) -> LlamaPass | None:
    """The pass of a part for which it computes what the part itself does; None for others."""
    return LlamaPass(part) if pass_agrees(part) else None


@torch.no_grad()
def pass_agrees(part: Part) -> bool:
    """Whether a part is like Llama's and its pass, on a probe, computes what the part itself does."""
    if part.body.config.model_type not in LIKE_LLAMA or not part.num_layers or _has_odd_hooks(part):
        return False
    device = next(part.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (PROBE_ROWS, PROBE_TOKENS)
    if part.takes_ids:
        inputs = torch.randint(part.body.config.vocab_size, shape, generator=generator).to(device)
    else:
        inputs = torch.randn((*shape, part.hidden_size), generator=generator).to(device, part.compute_dtype)
    expected, found = (_probed(part, inputs, by) for by in (None, LlamaPass(part)))
    gap = (found - expected).abs().max() / expected.abs().max()
    return float(gap) <= TOLERANCE[part.compute_dtype]


def _probed(part: Part, inputs: Tensor, by: LlamaPass | None) -> Float[Tensor, "rows time hidden"]:
    """All tokens but the last in one pass, then that one; not by way of the part's hooks, which are meant for passes
    over a run's own rows."""
    rows, tokens = inputs.shape[:2]
    positions = torch.arange(tokens, device=inputs.device).expand(rows, tokens)
    cache = SlotCache(part.num_layers, rows, tokens, slot_pass=by)
    slots, last = slice(0, rows), tokens - 1
    first = part.forward(inputs[:, :last], None, cache=cache.at(Places(slots, positions[:, :last], last)))
    then = part.forward(inputs[:, last:], None, cache=cache.at(Places(slots, positions[:, last:], tokens)))
    return torch.cat((first, then), dim=1).float()


def _has_odd_hooks(part: Part) -> bool:
    """Whether hooks of the layers want more than the layer, its input and its output."""
    return any(layer._forward_hooks_with_kwargs or layer._forward_pre_hooks_with_kwargs for layer in part.layers)
