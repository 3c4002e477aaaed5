"""A part's pass over one token a row above a cache, for layers like Llama's: the step that sampling spends its time in.

Norms, linear layers and rotary embedding are the layers' own modules, so adapters, quantised and widened weights work
as ever; attention is ours. transformers repeats grouped keys and values for every head, and torch's kernel takes them
one query at a time: with 64 rows of 128 tokens in bfloat16 that is 226 ms a step of 30 layers on one core, beside 58 ms
for all products with weights. Here the queries of a group are the rows of one product (22 ms).
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class _Layer(NamedTuple):
    """What a step needs of a decoder layer, looked up once."""

    module: nn.Module
    attention: Any
    norm: nn.Module
    second_norm: nn.Module
    mlp: nn.Module
    window: int


class LlamaStep:
    """The step of a part, by its own modules; what hooks its layers have are called as the layers would call them."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._layers = [
            _Layer(
                layer,
                layer.self_attn,
                layer.get_submodule("input_layernorm"),
                layer.get_submodule("post_attention_layernorm"),
                layer.get_submodule("mlp"),
                window_of(part, index),
            )
            for index, layer in enumerate(part.layers)
        ]

    def __call__(self, inputs: Tensor, cache: SlotCache) -> Float[Tensor, "rows 1 hidden"]:
        """As the part itself, of inputs [rows, 1] or [rows, 1, hidden]."""
        body: Any = self._part.body
        x = (body.get_input_embeddings()(inputs) if self._part.takes_ids else inputs)[:, 0]
        cos, sin = body.rotary_emb(x, cache.places.positions)  # [rows, 1, head size]: the same for all heads
        unseen = {
            window: cache.places.unseen(torch.float32, window) for window in {each.window for each in self._layers}
        }
        for index, layer in enumerate(self._layers):
            for before in layer.module._forward_pre_hooks.values():
                before(layer.module, (x,))
            x = x + _attention(layer.attention, layer.norm(x), (cos, sin), cache, index, unseen[layer.window])
            x = x + layer.mlp(layer.second_norm(x))
            for after in layer.module._forward_hooks.values():
                after(layer.module, (x,), x)
        return body.norm(x)[:, None]


def _attention(
    module: Any,
    x: Float[Tensor, "rows hidden"],
    rotary: tuple[Tensor, Tensor],
    cache: SlotCache,
    index: int,
    unseen: Tensor,
) -> Float[Tensor, "rows hidden"]:
    rows, size = len(x), module.head_dim
    query, key = module.q_proj(x).view(rows, -1, size), module.k_proj(x).view(rows, -1, size)
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = _rotated(query, *rotary), _rotated(key, *rotary)
    cache.write(index, key[:, :, None], module.v_proj(x).view(rows, -1, 1, size))
    keys, values = cache.seen(index)
    grouped = query.view(rows, keys.shape[1], -1, size)
    return module.o_proj(attend(grouped, keys, values, unseen, module.scaling).view(rows, -1))


def _rotated(x: Float[Tensor, "rows heads size"], cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attend(
    query: Float[Tensor, "rows heads group size"], keys: Tensor, values: Tensor, unseen: Tensor, scale: float
) -> Float[Tensor, "rows heads group size"]:
    """softmax(scale x query keys^T + unseen) values, where the queries of a group look at the same keys."""
    if query.device.type != "cpu":
        mask = unseen.to(query.dtype).expand(-1, 1, query.shape[2], -1)
        return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = matmul(query, keys.transpose(2, 3)).float().mul_(scale).add_(unseen)
    return matmul(scores.softmax(dim=-1).to(values.dtype), values)


def window_of(part: Part, index: int) -> int:
    """How many tokens a layer looks back at most, itself included; 0 is no bound."""
    config = part.body.config
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or (kinds is not None and kinds[index] != "sliding_attention"):
        return 0
    return window


def one_token_of(part: Part) -> LlamaStep | None:
    """The step of a part for which it computes what the part itself does; None for others."""
    return LlamaStep(part) if step_agrees(part) else None


@torch.no_grad()
def step_agrees(part: Part) -> bool:
    """Whether a part is like Llama's and its step, on a probe, computes what the part itself does."""
    if part.body.config.model_type not in LIKE_LLAMA or not part.num_layers or _has_odd_hooks(part):
        return False
    step, device = LlamaStep(part), next(part.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (PROBE_ROWS, PROBE_TOKENS)
    if part.takes_ids:
        inputs = torch.randint(part.body.config.vocab_size, shape, generator=generator).to(device)
    else:
        inputs = torch.randn((*shape, part.hidden_size), generator=generator).to(device, part.compute_dtype)
    cache = SlotCache(part.num_layers, PROBE_ROWS, PROBE_TOKENS)
    positions = torch.arange(PROBE_TOKENS, device=device).expand(shape)
    slots, last = slice(0, PROBE_ROWS), PROBE_TOKENS - 1
    # Not by way of the part's hooks, which are meant for passes over a run's own rows.
    part.forward(inputs[:, :last], None, cache=cache.at(Places(slots, positions[:, :last], last)))
    cache.at(Places(slots, positions[:, last:], PROBE_TOKENS))
    expected = part.forward(inputs[:, last:], None, cache=cache).float()
    cache.one_token = step
    gap = (part.forward(inputs[:, last:], None, cache=cache).float() - expected).abs().max() / expected.abs().max()
    return float(gap) <= TOLERANCE[part.compute_dtype]


def _has_odd_hooks(part: Part) -> bool:
    """Whether hooks of the layers want more than the layer, its input and its output."""
    return any(layer._forward_hooks_with_kwargs or layer._forward_pre_hooks_with_kwargs for layer in part.layers)
