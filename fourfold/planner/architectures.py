"""The shape of a decoder, read from a Hugging Face config, and its exact number of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "gpt_neox")

# What transformers assumes where a config.json leaves the key out.
_TIED_BY_DEFAULT = {"gemma", "gemma2", "gpt2"}
_HEAD_DIM_BY_DEFAULT = {"qwen3": 128, "gemma": 256, "gemma2": 256}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder of `layers` equal layers; every count of parameters and FLOPs follows from these numbers.

    `kv_heads` < `heads` is grouped-query attention. `norm_vectors` is 1 for RMSNorm (weight) and 2 for LayerNorm
    (weight and bias). `learned_positions` is the length of a learned position table, 0 with rotary positions.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool
    gated_mlp: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norms_per_layer: int = 2
    norm_vectors: int = 1
    query_key_norm: bool = False
    learned_positions: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """The architecture of a Hugging Face config (the dict of a config.json)."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(
                f"model_type {family!r}: its parameters cannot be counted; allowed: {', '.join(FAMILIES)}; "
                "try a model of one of these families"
            )
        if family == "gpt2":
            return _gpt2(config)
        return _gpt_neox(config) if family == "gpt_neox" else _llama_like(config, family)

    @property
    def attention_matrix_parameters(self) -> int:
        """Weights of the query, key, value and output projections of one layer, biases left out."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_matrix_parameters(self) -> int:
        """Weights of one layer's MLP, biases left out: three matrices when it is gated, else two."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, norms and biases included."""
        biases = 0
        if self.qkv_bias:
            biases += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.output_bias:
            biases += self.hidden
        if self.mlp_bias:
            biases += self.hidden + (2 if self.gated_mlp else 1) * self.intermediate
        norms = self.norms_per_layer * self.norm_vectors * self.hidden
        if self.query_key_norm:
            norms += 2 * self.head_dim
        return self.attention_matrix_parameters + self.mlp_matrix_parameters + biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and, where there is one, the position table."""
        return (self.vocabulary + self.learned_positions) * self.hidden

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm above the last layer."""
        return self.norm_vectors * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters that the language head adds: none when it is the embedding."""
        return 0 if self.tied_embeddings else self.vocabulary * self.hidden

    def parameters(self) -> int:
        """Parameters of the whole causal language model, tied ones counted once."""
        body = self.embedding_parameters + self.layers * self.layer_parameters + self.final_norm_parameters
        return body + self.head_parameters


def _required(config: Mapping[str, Any], *keys: str) -> list[int]:
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(
            f"the {config['model_type']} config has no {', '.join(missing)}; "
            f"needed are {', '.join(keys)}; try the config.json that came with the weights"
        )
    return [int(config[key]) for key in keys]


def _head_dim(hidden: int, heads: int, given: int | None) -> int:
    if given:
        return given
    if hidden % heads:
        raise ValueError(
            f"hidden size {hidden} is not a multiple of {heads} attention heads; "
            "give head_dim in the config, or mend the two"
        )
    return hidden // heads


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A bool key of a config; transformers treats a missing key and null alike."""
    value = config.get(key)
    return default if value is None else bool(value)


def _llama_like(config: Mapping[str, Any], family: str) -> Architecture:
    layers, hidden, heads, intermediate, vocabulary = _required(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"
    )
    bias = family in ("llama", "qwen3", "gemma", "gemma2") and _flag(config, "attention_bias", False)
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=_head_dim(hidden, heads, config.get("head_dim") or _HEAD_DIM_BY_DEFAULT.get(family)),
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied_embeddings=_flag(config, "tie_word_embeddings", family in _TIED_BY_DEFAULT),
        gated_mlp=True,
        qkv_bias=bias or family == "qwen2",  # Qwen2 has biases on query, key and value only, whatever its config says
        output_bias=bias,
        mlp_bias=family == "llama" and _flag(config, "mlp_bias", False),
        norms_per_layer=4 if family == "gemma2" else 2,
        query_key_norm=family == "qwen3",
    )


def _gpt2(config: Mapping[str, Any]) -> Architecture:
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


def _gpt_neox(config: Mapping[str, Any]) -> Architecture:
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
