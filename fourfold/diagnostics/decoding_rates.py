"""What decoding takes on a CPU: products of a few rows whose weights come from memory, and a layer beside its products.

A share of the rate of large products says neither: it differs between processors, and the many small operations of a
layer's step take about three quarters as long as its products do with 16 rows (seen on an AMD EPYC with AVX2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from fourfold.models.products import is_packable, linear_few_rows, linear_packed, packed, prepare_for_decoding
from fourfold.models.slot_cache import Places, SlotCache
from fourfold.models.slot_pass import LlamaPass
from fourfold.models.split import cut_whole
from fourfold.planner.hardware.machine import LAYER_STEP_HIDDEN

# Rows of a decoding step, and the MLP in whose shape the weights of one are read.
FEW_ROWS, DECODED = (1, 8, 64), (LAYER_STEP_HIDDEN, 1536)
# Layers as those of SmolLM2-135M, each row with so many tokens before the one that is computed.
STEP_ROWS, STEP_LAYERS, STEP_TOKENS = (1, 64), 4, 64

Best = Callable[[Callable[[], object]], float]  # the shortest time of some work, seconds


def product_rates(dtype: torch.dtype, weight_bytes: int, best: Best) -> tuple[tuple[int, float], ...]:
    """Rows and FLOP/s, as the sampler multiplies: of `weight_bytes` in float32, more than caches hold."""
    inputs, outputs = DECODED
    count = math.ceil(weight_bytes / (4 * inputs * outputs))
    weights = [torch.full((outputs, inputs), 0.5, dtype=dtype) for _ in range(count)]
    multiply = linear_few_rows
    if is_packable(weights[0], dtype):
        weights, multiply = [packed(weight) for weight in weights], linear_packed

    @torch.inference_mode()
    def step(x: torch.Tensor) -> None:
        for weight in weights:
            multiply(x, weight, None)

    work = {rows: partial(step, torch.full((rows, inputs), 0.5, dtype=dtype)) for rows in FEW_ROWS}
    return tuple((rows, 2 * rows * inputs * outputs * count / best(each)) for rows, each in work.items())


def step_seconds(rates: Mapping[int, float], best: Best) -> tuple[tuple[int, float], ...]:
    """Rows and seconds of a layer's step less those of its products at these rates, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    inputs, outputs = DECODED
    config = LlamaConfig(
        hidden_size=inputs, intermediate_size=outputs, num_hidden_layers=STEP_LAYERS, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=8, max_position_embeddings=2 * STEP_TOKENS, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    part = cut_whole(model, torch.float32)
    prepare_for_decoding(part)
    step = LlamaPass(part)
    matrices = sum(module.weight.numel() for module in part.layers[0].modules() if isinstance(module, nn.Linear))
    found = []
    for rows in STEP_ROWS:
        cache = SlotCache(STEP_LAYERS, rows, STEP_TOKENS + 1, keys_by_column=True)
        cache.at(Places(slice(0, rows), torch.full((rows, 1), STEP_TOKENS), STEP_TOKENS + 1))
        work = partial(torch.inference_mode()(step), torch.zeros(rows, 1, dtype=torch.int64), cache)
        products = 2 * rows * matrices / rates[rows]
        found.append((rows, max(best(work) / STEP_LAYERS - products, 0.0)))
    return tuple(found)
