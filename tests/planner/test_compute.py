"""FLOPs against those that torch counts while a model runs, and against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fourfold.planner.architectures import Architecture
from fourfold.planner.compute import backward_flops, causal_attended_tokens, forward_flops
from fourfold.planner.number_head import ONE_NUMBER

ROWS, TIME = 3, 20
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "llama": ("LlamaConfig", SIZES | GROUPED),
    "mistral": ("MistralConfig", SIZES | GROUPED),
    "qwen2": ("Qwen2Config", SIZES | GROUPED),
    "qwen3": ("Qwen3Config", SIZES | GROUPED | {"head_dim": 24}),
    "gemma": ("GemmaConfig", SIZES | {"num_key_value_heads": 1, "head_dim": 24}),
    "gemma2": ("Gemma2Config", SIZES | GROUPED | {"head_dim": 24}),
    "gemma3_text": ("Gemma3TextConfig", SIZES | GROUPED | {"head_dim": 24}),
    "mixtral": ("MixtralConfig", SIZES | GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", SIZES | GROUPED | EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | GROUPED | EXPERTS | {"head_dim": 24}),
    "deepseek_v2": ("DeepseekV2Config", SIZES | DEEPSEEK),
    "deepseek_v2, plain queries": ("DeepseekV2Config", SIZES | DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", SIZES | DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 96, "dropout": 0.0}),
    "gpt2": ("GPT2Config", {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32} | IDS),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
}


def build(family: str) -> tuple[Any, torch.nn.Linear, Architecture]:
    """A decoder body, a language head that is not tied to it, and the architecture.

    Eager attention is made of plain matrix products over all pairs of positions, and eager experts of one over the
    tokens of each, which torch's counter sees.
    """
    name, settings = CONFIGS[family]
    config = getattr(transformers, name)(**settings, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    body = transformers.AutoModel.from_config(config).train()
    head = torch.nn.Linear(64, 128, bias=False)
    return body, head, Architecture.from_config(config.to_dict())


def counted(run) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", CONFIGS)
def test_forward_flops_equal_what_torch_counts(family: str) -> None:
    body, head, architecture = build(family)
    ids = torch.arange(ROWS * TIME).reshape(ROWS, TIME) % 128
    with torch.no_grad():
        measured = counted(lambda: head(body(input_ids=ids, use_cache=False).last_hidden_state[:, -7:]))
    predicted = forward_flops(
        architecture,
        layers=2,
        tokens=ROWS * TIME,
        attended_tokens=ROWS * TIME * TIME,
        head="lm",
        head_tokens=ROWS * 7,
    )
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("trained", [True, False])
def test_backward_flops_equal_what_torch_counts(family: str, trained: bool) -> None:
    body, head, architecture = build(family)
    head.requires_grad_(trained)
    ids = torch.arange(ROWS * TIME).reshape(ROWS, TIME) % 128
    loss = head(body(input_ids=ids, use_cache=False).last_hidden_state[:, -7:]).square().sum()
    measured = counted(loss.backward)
    predicted = backward_flops(
        architecture,
        layers=2,
        tokens=ROWS * TIME,
        attended_tokens=ROWS * TIME * TIME,
        head="lm",
        head_tokens=ROWS * 7,
        head_trained=trained,
    )
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_a_branch_on_cached_activations_with_a_scalar_head(family: str) -> None:
    """The critic's case: some upper layers, input without gradient, one number a token."""
    body, _, architecture = build(family)
    body.layers = body.layers[1:]
    body.config.num_hidden_layers = 1
    for layer in body.layers:
        layer.self_attn.layer_idx = 0
    head = torch.nn.Linear(64, 1)
    cached = torch.randn(ROWS, TIME, 64, generator=torch.Generator().manual_seed(0))
    pairs = ROWS * TIME * TIME
    sizes: dict[str, Any] = {"layers": 1, "tokens": ROWS * TIME, "attended_tokens": pairs, "head_tokens": ROWS * TIME}
    sizes["start"] = 1
    losses = []
    forward = counted(
        lambda: losses.append(head(body(inputs_embeds=cached, use_cache=False).last_hidden_state).square().sum())
    )
    assert forward_flops(architecture, head=ONE_NUMBER, **sizes) == pytest.approx(forward, rel=0.02)
    predicted = backward_flops(architecture, head=ONE_NUMBER, head_trained=True, **sizes)
    assert predicted == pytest.approx(counted(losses[0].backward), rel=0.02)


def test_smollm2_by_hand() -> None:
    """SmolLM2-135M, one row of 2 tokens, every layer and the head on both tokens."""
    smollm2 = Architecture(
        family="llama",
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocabulary=49152,
        tied_embeddings=True,
        gated_mlp=True,
    )
    matrices = 576 * 576 + 2 * 576 * 192 + 576 * 576 + 3 * 576 * 1536  # q, k and v, o, MLP
    layer = 2 * 2 * matrices + 3 * (2 * 576 + 2 * 576)  # token 1 sees one key, token 2 sees two
    head = 2 * 2 * 576 * 49152
    sizes: dict[str, Any] = {"layers": 30, "tokens": 2, "attended_tokens": 3.0, "head_tokens": 2}
    assert forward_flops(smollm2, head="lm", **sizes) == 30 * layer + head
    assert forward_flops(smollm2, head="none", **sizes) == 30 * layer
    frozen = backward_flops(smollm2, head="lm", head_trained=False, **sizes)
    assert frozen == 60 * layer + head
    assert backward_flops(smollm2, head="lm", head_trained=False, head_tokens_again=2, **sizes) == frozen + head


def test_layers_that_differ_are_counted_by_their_place() -> None:
    """Below, DeepSeek's layers are dense; above, a token passes two experts of six and the shared ones."""
    _, _, deepseek = build("deepseek_v2")
    sizes: dict[str, Any] = {"tokens": 5, "attended_tokens": 15.0, "head": "none", "head_tokens": 0}
    lower = forward_flops(deepseek, layers=1, **sizes)
    upper = forward_flops(deepseek, layers=1, start=1, **sizes)
    assert forward_flops(deepseek, layers=2, **sizes) == lower + upper
    mlp, experts = 3 * 64 * 96, 3 * 64 * (2 * 32 + 2 * 32) + 6 * 64
    assert upper - lower == 2 * 5 * (experts - mlp)


@settings(deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=40), max_size=8), st.integers(min_value=0, max_value=50))
def test_causal_attention_counts_the_lower_triangle(lengths: list[int], window: int) -> None:
    """Within a window, the band below the diagonal."""
    triangles = [int(torch.ones(n, n).tril().triu(1 - (window or 1000)).sum()) for n in lengths]
    assert causal_attended_tokens(lengths, window) == sum(triangles)


def test_the_planner_does_not_import_torch() -> None:
    code = (
        "import sys, fourfold.planner.compute, fourfold.planner.architectures; "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
