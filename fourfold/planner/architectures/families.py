"""From a Hugging Face config to an `Architecture`, family by family, with what transformers takes for missing keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fourfold.planner.architectures.decoder import Architecture, Experts, Latent

Config = Mapping[str, Any]

# What transformers assumes where a config.json leaves the key out.
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
_HEAD_DIM_BY_DEFAULT = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256}
_WINDOW_BY_DEFAULT = 4096
# Families whose attention has biases where `attention_bias` says so; Qwen2's has them on query, key and value always.
_BIAS_AS_GIVEN = ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
_QUERY_KEY_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3_text")


def architecture_of(config: Config) -> Architecture:
    """The architecture of a config; ValueError where its family is not known or a size is missing."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        inside = " (the text model alone: its text_config)" if "text_config" in config else ""
        raise ValueError(
            f"model_type {family!r}: its parameters cannot be counted; allowed: {', '.join(FAMILIES)}; "
            f"try a model of one of these families{inside}"
        )
    return _READERS[family](config)


def _required(config: Config, *keys: str) -> list[int]:
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(
            f"the {config['model_type']} config has no {', '.join(missing)}; "
            f"needed are {', '.join(keys)}; try the config.json that came with the weights"
        )
    wrong = [f"{key} = {config[key]!r}" for key in keys if not _is_count(config[key])]
    if wrong:
        raise ValueError(
            f"the {config['model_type']} config has {', '.join(wrong)}; allowed are whole numbers from 0 on; try the "
            "config.json that came with the weights"
        )
    return [int(config[key]) for key in keys]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _head_dim(hidden: int, heads: int, given: int | None) -> int:
    if given:
        return given
    if not heads or hidden % heads:
        raise ValueError(
            f"hidden size {hidden} is not a multiple of {heads} attention heads; "
            "give head_dim in the config, or mend the two"
        )
    return hidden // heads


def _flag(config: Config, key: str, default: bool) -> bool:
    """A bool key of a config; transformers treats a missing key and null alike."""
    value = config.get(key)
    return default if value is None else bool(value)


def _llama_like(config: Config) -> Architecture:
    """Rotary positions, RMSNorm, a gated MLP or experts."""
    family = config["model_type"]
    layers, hidden, heads, vocabulary = _required(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
    )
    bias = family in _BIAS_AS_GIVEN and _flag(config, "attention_bias", False)
    qkv_bias = bias or family == "qwen2" or (family == "qwen2_moe" and _flag(config, "qkv_bias", True))
    experts, dense_layers = _experts(config, family, layers)
    only_experts = experts is not None and not dense_layers
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=_head_dim(hidden, heads, config.get("head_dim") or _HEAD_DIM_BY_DEFAULT.get(family)),
        intermediate=0 if only_experts else _required(config, "intermediate_size")[0],
        vocabulary=vocabulary,
        tied_embeddings=_flag(config, "tie_word_embeddings", family in _TIED_BY_DEFAULT),
        gated_mlp=True,
        qkv_bias=qkv_bias,
        output_bias=bias,
        mlp_bias=family == "llama" and _flag(config, "mlp_bias", False),
        norms_per_layer=4 if family in _FOUR_NORMS else 2,
        query_key_norm=family in _QUERY_KEY_NORM,
        windows=_windows(config, family, layers),
        experts=experts,
        dense_layers=dense_layers,
    )


def _experts(config: Config, family: str, layers: int) -> tuple[Experts | None, frozenset[int]]:
    """Mixtral's and Qwen's experts, and the layers that have an MLP in their place."""
    if family == "mixtral":
        count, per_token, intermediate = _required(
            config, "num_local_experts", "num_experts_per_tok", "intermediate_size"
        )
        return Experts(count, per_token, intermediate), frozenset()
    if not family.endswith("_moe"):
        return None, frozenset()
    # transformers writes Qwen3's count of experts under either name.
    named = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count, per_token, intermediate = _required(config, named, "num_experts_per_tok", "moe_intermediate_size")
    shared = _required(config, "shared_expert_intermediate_size")[0] if family == "qwen2_moe" else 0
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    dense_layers = frozenset(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
    return Experts(count, per_token, intermediate, shared, shared_gate=shared > 0), dense_layers


def _windows(config: Config, family: str, layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 for none; () where no layer has one."""
    switched = family.startswith("qwen")
    absent = None if switched or family in ("llama", "mixtral", "gemma") else _WINDOW_BY_DEFAULT
    window = config.get("sliding_window", absent)
    if not window or (switched and not config.get("use_sliding_window")):
        return ()
    first = config.get("max_window_layers", 28)
    if family in ("llama", "gemma"):
        return ()  # transformers' models have no windows, whatever their config says
    if config.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    elif family in ("gemma2", "gemma3_text"):
        every = 2 if family == "gemma2" else config.get("sliding_window_pattern") or 6
        slides = [(layer + 1) % every != 0 for layer in range(layers)]
    elif family in ("qwen2", "qwen3"):
        slides = [layer >= first for layer in range(layers)]
    elif family == "qwen2_moe":
        slides = [layer % 2 == 0 and layer < first for layer in range(layers)]
    else:
        slides = [True] * layers
    return tuple(window if slide else 0 for slide in slides) if any(slides) else ()


def _deepseek(config: Config) -> Architecture:
    layers, hidden, heads, intermediate, vocabulary = _required(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"
    )
    rank, plain, rotary, value = _required(config, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    experts, per_token, expert, shared, dense = _required(
        config,
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
        "first_k_dense_replace",
    )
    bias = _flag(config, "attention_bias", False)
    return Architecture(
        family=config["model_type"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=plain + rotary,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        gated_mlp=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config["model_type"] == "deepseek_v2" and _flag(config, "mlp_bias", False),
        experts=Experts(experts, per_token, expert, shared * expert),
        dense_layers=frozenset(range(min(dense, layers))),
        latent=Latent(int(config.get("q_lora_rank") or 0), rank, plain, rotary, value),
    )


def _gpt2(config: Config) -> Architecture:
    layers, hidden, heads, vocabulary, positions = _required(
        config, "n_layer", "n_embd", "n_head", "vocab_size", "n_positions"
    )
    return Architecture(
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_head_dim(hidden, heads, None),
        intermediate=config.get("n_inner") or 4 * hidden,
        vocabulary=vocabulary,
        tied_embeddings=_flag(config, "tie_word_embeddings", True),
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_vectors=2,
        learned_positions=positions,
    )


def _gpt_neox(config: Config) -> Architecture:
    layers, hidden, heads, intermediate, vocabulary = _required(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"
    )
    bias = _flag(config, "attention_bias", True)
    return Architecture(
        family="gpt_neox",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_head_dim(hidden, heads, None),
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        norm_vectors=2,
    )


def _opt(config: Config) -> Architecture:
    layers, hidden, heads, intermediate, vocabulary, positions = _required(
        config,
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim", "vocab_size"),
        "max_position_embeddings",
    )
    bias, width = _flag(config, "enable_bias", True), int(config.get("word_embed_proj_dim") or hidden)
    before = _flag(config, "do_layer_norm_before", True)
    return Architecture(
        family="opt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_head_dim(hidden, heads, None),
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied_embeddings=_flag(config, "tie_word_embeddings", True),
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_vectors=2 if _flag(config, "layer_norm_elementwise_affine", True) else 0,
        final_norm=before and not _flag(config, "_remove_final_layer_norm", False),
        learned_positions=positions + 2,  # transformers' OPTLearnedPositionalEmbedding: an offset of two
        embedding_width=0 if width == hidden else width,
    )


_READERS: Mapping[str, Callable[[Config], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _llama_like),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _llama_like),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}
FAMILIES = tuple(_READERS)
