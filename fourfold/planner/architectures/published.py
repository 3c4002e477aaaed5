"""Published models by name: what their config.json says of their shape.

The figures are those of the config.json in the hub repository that stands beside each name; tests build every model
from them with transformers, on no memory, and hold its parameters against the totals that papers and model cards give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """A model's repository on the hub and the part of its config.json that its shape follows from."""

    hub: str
    config: Mapping[str, Any]


# A name, a repository, numbers by the keys of a family, and a table of what is not the same for all of it.
Rows = tuple[tuple[Any, ...], ...]

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_GROUPED = (*_SIZES[:3], "num_key_value_heads", *_SIZES[3:])
_TIED = {"tie_word_embeddings": True}

# _GROUPED: layers, hidden, heads, KV heads, intermediate, vocabulary.
_LLAMA: Rows = (
    ("llama-2-7b", "meta-llama/Llama-2-7b-hf", 32, 4096, 32, 32, 11008, 32000),
    ("llama-2-13b", "meta-llama/Llama-2-13b-hf", 40, 5120, 40, 40, 13824, 32000),
    ("llama-2-70b", "meta-llama/Llama-2-70b-hf", 80, 8192, 64, 8, 28672, 32000),
    ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32, 4096, 32, 8, 14336, 128256),
    ("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80, 8192, 64, 8, 28672, 128256),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 28672, 128256),
    ("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, 16384, 128, 8, 53248, 128256),
    ("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128256, _TIED),
    ("llama-3.2-3b", "meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 8192, 128256, _TIED),
    ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 80, 8192, 64, 8, 28672, 128256),
    ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", 30, 576, 9, 3, 1536, 49152, _TIED),
    ("smollm2-360m", "HuggingFaceTB/SmolLM2-360M", 32, 960, 15, 5, 2560, 49152, _TIED),
    ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", 24, 2048, 32, 32, 8192, 49152, _TIED),
)
_MISTRAL: Rows = (
    ("mistral-7b", "mistralai/Mistral-7B-v0.1", 32, 4096, 32, 8, 14336, 32000, {"sliding_window": 4096}),
    ("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", 32, 4096, 32, 8, 14336, 32768, {"sliding_window": None}),
)
_EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MIXTRAL: Rows = (
    ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 32, 4096, 32, 8, 14336, 32000, _EIGHT),
    ("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", 56, 6144, 48, 8, 16384, 32000, _EIGHT),
)
_QWEN2: Rows = (
    ("qwen2-0.5b", "Qwen/Qwen2-0.5B", 24, 896, 14, 2, 4864, 151936, _TIED),
    ("qwen2-1.5b", "Qwen/Qwen2-1.5B", 28, 1536, 12, 2, 8960, 151936, _TIED),
    ("qwen2-7b", "Qwen/Qwen2-7B", 28, 3584, 28, 4, 18944, 152064),
    ("qwen2-72b", "Qwen/Qwen2-72B", 80, 8192, 64, 8, 29568, 152064),
    ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, _TIED),
    ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, _TIED),
    ("qwen2.5-3b", "Qwen/Qwen2.5-3B", 36, 2048, 16, 2, 11008, 151936, _TIED),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064),
    ("qwen2.5-14b", "Qwen/Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064),
    ("qwen2.5-32b", "Qwen/Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064),
    ("qwen2.5-72b", "Qwen/Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064),
)
_QWEN_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_SHARED = (*_QWEN_EXPERTS, "shared_expert_intermediate_size")
_A2_7B = dict(zip(_SHARED, (60, 4, 1408, 5632), strict=True))
_A14B = dict(zip(_SHARED, (64, 8, 2560, 20480), strict=True))
_QWEN2_MOE: Rows = (
    ("qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B", 24, 2048, 16, 16, 5632, 151936, _A2_7B),
    ("qwen2-57b-a14b", "Qwen/Qwen2-57B-A14B", 28, 3584, 28, 4, 18944, 151936, _A14B),
)
_QWEN3: Rows = (
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, _TIED),
    ("qwen3-1.7b", "Qwen/Qwen3-1.7B", 28, 2048, 16, 8, 6144, 151936, _TIED),
    ("qwen3-4b", "Qwen/Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, _TIED),
    ("qwen3-8b", "Qwen/Qwen3-8B", 36, 4096, 32, 8, 12288, 151936),
    ("qwen3-14b", "Qwen/Qwen3-14B", 40, 5120, 40, 8, 17408, 151936),
    ("qwen3-32b", "Qwen/Qwen3-32B", 64, 5120, 64, 8, 25600, 151936),
)
_A3B = dict(zip(_QWEN_EXPERTS, (128, 8, 768), strict=True))
_A22B = dict(zip(_QWEN_EXPERTS, (128, 8, 1536), strict=True))
_QWEN3_MOE: Rows = (
    ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, 2048, 32, 4, 6144, 151936, _A3B),
    ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, 4096, 64, 4, 12288, 151936, _A22B),
)
_GEMMA: Rows = (
    ("gemma-2b", "google/gemma-2b", 18, 2048, 8, 1, 16384, 256000, {"head_dim": 256}),
    ("gemma-7b", "google/gemma-7b", 28, 3072, 16, 16, 24576, 256000, {"head_dim": 256}),
)
_GEMMA2: Rows = (
    ("gemma-2-2b", "google/gemma-2-2b", 26, 2304, 8, 4, 9216, 256000, {"head_dim": 256, "sliding_window": 4096}),
    ("gemma-2-9b", "google/gemma-2-9b", 42, 3584, 16, 8, 14336, 256000, {"head_dim": 256, "sliding_window": 4096}),
    ("gemma-2-27b", "google/gemma-2-27b", 46, 4608, 32, 16, 36864, 256000, {"head_dim": 128, "sliding_window": 4096}),
)
_LOCAL = {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
_GEMMA3: Rows = (
    ("gemma-3-270m", "google/gemma-3-270m", 18, 640, 4, 1, 2048, 262144, _LOCAL),
    ("gemma-3-1b", "google/gemma-3-1b-pt", 26, 1152, 4, 1, 6912, 262144, _LOCAL),
)
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_EXPERTS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("first_k_dense_replace", "q_lora_rank"),
)
_LITE = dict(zip(_DEEPSEEK_EXPERTS, (64, 6, 1408, 2, 1, None), strict=True)) | _MLA
_V2 = dict(zip(_DEEPSEEK_EXPERTS, (160, 6, 1536, 2, 1, 1536), strict=True)) | _MLA
_V3 = dict(zip(_DEEPSEEK_EXPERTS, (256, 8, 2048, 1, 3, 1536), strict=True)) | _MLA
_DEEPSEEK2: Rows = (
    ("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 27, 2048, 16, 16, 10944, 102400, _LITE),
    ("deepseek-v2", "deepseek-ai/DeepSeek-V2", 60, 5120, 128, 128, 12288, 102400, _V2),
)
_DEEPSEEK3: Rows = (
    ("deepseek-v3", "deepseek-ai/DeepSeek-V3", 61, 7168, 128, 128, 18432, 129280, _V3),
    ("deepseek-r1", "deepseek-ai/DeepSeek-R1", 61, 7168, 128, 128, 18432, 129280, _V3),
)
# _SIZES: layers, hidden, heads, intermediate, vocabulary.
_PYTHIA: Rows = (
    ("pythia-70m", "EleutherAI/pythia-70m", 6, 512, 8, 2048, 50304),
    ("pythia-160m", "EleutherAI/pythia-160m", 12, 768, 12, 3072, 50304),
    ("pythia-410m", "EleutherAI/pythia-410m", 24, 1024, 16, 4096, 50304),
    ("pythia-1b", "EleutherAI/pythia-1b", 16, 2048, 8, 8192, 50304),
    ("pythia-1.4b", "EleutherAI/pythia-1.4b", 24, 2048, 16, 8192, 50304),
    ("pythia-2.8b", "EleutherAI/pythia-2.8b", 32, 2560, 32, 10240, 50304),
    ("pythia-6.9b", "EleutherAI/pythia-6.9b", 32, 4096, 32, 16384, 50432),
    ("pythia-12b", "EleutherAI/pythia-12b", 36, 5120, 40, 20480, 50688),
)
# layers, hidden, heads, ffn_dim, vocabulary.
_NARROW = {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
_OPT: Rows = (
    ("opt-125m", "facebook/opt-125m", 12, 768, 12, 3072, 50272),
    ("opt-350m", "facebook/opt-350m", 24, 1024, 16, 4096, 50272, _NARROW),
    ("opt-1.3b", "facebook/opt-1.3b", 24, 2048, 32, 8192, 50272),
    ("opt-2.7b", "facebook/opt-2.7b", 32, 2560, 32, 10240, 50272),
    ("opt-6.7b", "facebook/opt-6.7b", 32, 4096, 32, 16384, 50272),
    ("opt-13b", "facebook/opt-13b", 40, 5120, 40, 20480, 50272),
    ("opt-30b", "facebook/opt-30b", 48, 7168, 56, 28672, 50272),
    ("opt-66b", "facebook/opt-66b", 64, 9216, 72, 36864, 50272),
)
# layers, width, heads, vocabulary, positions.
_GPT2: Rows = (
    ("gpt2", "openai-community/gpt2", 12, 768, 12, 50257, 1024),
    ("gpt2-medium", "openai-community/gpt2-medium", 24, 1024, 16, 50257, 1024),
    ("gpt2-large", "openai-community/gpt2-large", 36, 1280, 20, 50257, 1024),
    ("gpt2-xl", "openai-community/gpt2-xl", 48, 1600, 25, 50257, 1024),
)
_OPT_SIZES = (*_SIZES[:3], "ffn_dim", "vocab_size")


def _models(family: str, keys: tuple[str, ...], rows: Rows, **same: Any) -> Iterator[tuple[str, Published]]:
    for name, hub, *numbers in rows:
        own = numbers.pop() if isinstance(numbers[-1], dict) else {}
        yield name, Published(hub, {"model_type": family, **dict(zip(keys, numbers, strict=True)), **same, **own})


PUBLISHED: Mapping[str, Published] = dict(
    (
        *_models("llama", _GROUPED, _LLAMA),
        *_models("mistral", _GROUPED, _MISTRAL),
        *_models("mixtral", _GROUPED, _MIXTRAL),
        *_models("qwen2", _GROUPED, _QWEN2),
        *_models("qwen2_moe", _GROUPED, _QWEN2_MOE),
        *_models("qwen3", _GROUPED, _QWEN3, head_dim=128),
        *_models("qwen3_moe", _GROUPED, _QWEN3_MOE, head_dim=128),
        *_models("gemma", _GROUPED, _GEMMA),
        *_models("gemma2", _GROUPED, _GEMMA2),
        *_models("gemma3_text", _GROUPED, _GEMMA3),
        *_models("deepseek_v2", _GROUPED, _DEEPSEEK2),
        *_models("deepseek_v3", _GROUPED, _DEEPSEEK3),
        *_models("gpt_neox", _SIZES, _PYTHIA),
        *_models("opt", _OPT_SIZES, _OPT, max_position_embeddings=2048),
        *_models("gpt2", ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"), _GPT2),
    )
)
