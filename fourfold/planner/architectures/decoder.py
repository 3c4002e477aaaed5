"""The shape of a decoder, its exact number of parameters, and what a token leaves in the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that stands in place of a layer's MLP: a router chooses `per_token` of `count`.

    Shared experts see every token; they are one MLP of their widths' sum (0: there are none), with a gate of one number
    a token where `shared_gate` says so (Qwen2-MoE). Experts and shared ones are gated MLPs.
    """

    count: int
    per_token: int
    intermediate: int  # of one expert
    shared_intermediate: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"{self.per_token} experts a token of {self.count}: allowed are 1 to {self.count}")


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values come from one small vector a token.

    A head's query and key have `plain` numbers without and `rotary` with rotary positions; the key's rotary numbers are
    the same for all heads.
    """

    query_rank: int  # 0: queries are projected at once
    rank: int  # of keys and values
    plain: int
    rotary: int
    value: int  # numbers of a head's value


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder; every count of parameters and FLOPs follows from these numbers.

    Layers are equal but for their MLP, where `dense_layers` of a model with experts have none, and for the window that
    their attention looks back through. `kv_heads` < `heads` is grouped-query attention. `norm_vectors` is 1 for
    RMSNorm (weight) and 2 for LayerNorm (weight and bias).
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
    final_norm: bool = True
    query_key_norm: bool = False
    learned_positions: int = 0  # length of the table; 0: rotary positions
    embedding_width: int = 0  # of a token, projected to `hidden` and back (OPT-350M); 0: `hidden`
    windows: tuple[int, ...] = ()  # tokens that each layer's attention sees, 0 for all; (): all layers see all
    experts: Experts | None = None
    dense_layers: frozenset[int] = frozenset()  # that have an MLP of `intermediate` in place of experts
    latent: Latent | None = None

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary")
        wrong = [f"{name} = {size!r}" for name in sizes if not isinstance(size := getattr(self, name), int) or size < 1]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: allowed are whole numbers from 1 on; try the model's own config")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads and {self.kv_heads} KV heads: allowed is a divisor of the heads")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """The architecture of a Hugging Face config (the dict of a config.json)."""
        from fourfold.planner.architectures.families import architecture_of

        return architecture_of(config)

    @property
    def key_dim(self) -> int:
        """Numbers of one head's query, and of its key."""
        return self.head_dim if self.latent is None else self.latent.plain + self.latent.rotary

    @property
    def value_dim(self) -> int:
        """Numbers of one head's value."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def attention_matrix_parameters(self) -> int:
        """Weights of one layer's projections to queries, keys and values and from them, biases left out."""
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        rank, queries = self.latent.query_rank, self.heads * self.key_dim
        query = rank * (self.hidden + queries) if rank else self.hidden * queries
        down = self.hidden * (self.latent.rank + self.latent.rotary)
        up = self.latent.rank * self.heads * (self.latent.plain + self.latent.value)
        return query + down + up + self.heads * self.latent.value * self.hidden

    @property
    def mlp_matrix_parameters(self) -> int:
        """Weights of a dense layer's MLP, biases left out: three matrices when it is gated, else two."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts in place of an MLP."""
        return self.experts is not None and layer not in self.dense_layers

    def expert_layers(self, start: int = 0, stop: int | None = None) -> int:
        """How many of the layers [start, stop) have experts."""
        if self.experts is None:
            return 0
        stop = self.layers if stop is None else stop
        return stop - start - sum(start <= layer < stop for layer in self.dense_layers)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 in a dense model."""
        return 0 if self.experts is None else 3 * self.hidden * self.experts.intermediate

    def layer_matrices(self, layer: int, *, active: bool = False) -> int:
        """Weights in the matrices of a layer, biases left out; `active`: those that one token is multiplied with."""
        return self.matrices_of(layer, layer + 1, active=active)

    def matrices_of(self, start: int, stop: int, *, active: bool = False) -> int:
        """The same of the layers [start, stop) together."""
        mixed = self.expert_layers(start, stop)
        dense = (stop - start - mixed) * self.mlp_matrix_parameters
        return (stop - start) * self.attention_matrix_parameters + dense + mixed * self._mixture(active)

    def _mixture(self, active: bool) -> int:
        """Weights of one layer's router, shared experts and experts, all or those that one token is sent to."""
        if self.experts is None:
            return 0
        router = self.hidden * (self.experts.count + int(self.experts.shared_gate))
        shared = 3 * self.hidden * self.experts.shared_intermediate
        return router + shared + (self.experts.per_token if active else self.experts.count) * self.expert_parameters

    def _attention_vectors(self) -> int:
        """Biases and norms within one layer's attention."""
        latent, bias = self.latent, int(self.qkv_bias)
        if latent is None:
            projections = bias * self.head_dim * (self.heads + 2 * self.kv_heads)
        else:
            # The norms of the small vectors, and the biases of the projections to them.
            projections = latent.query_rank + latent.rank + bias * (latent.query_rank + latent.rank + latent.rotary)
        return projections + self.output_bias * self.hidden + self.query_key_norm * 2 * self.head_dim

    def _mlp_biases(self, width: int) -> int:
        return self.hidden + (2 if self.gated_mlp else 1) * width if self.mlp_bias and width else 0

    def parameters_of(self, start: int, stop: int) -> int:
        """Parameters of the layers [start, stop) together, norms and biases included."""
        mixed = self.expert_layers(start, stop)
        shared = 0 if self.experts is None else self.experts.shared_intermediate
        biases = (stop - start - mixed) * self._mlp_biases(self.intermediate) + mixed * self._mlp_biases(shared)
        vectors = self._attention_vectors() + self.norms_per_layer * self.norm_vectors * self.hidden
        return self.matrices_of(start, stop) + biases + (stop - start) * vectors

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, norms and biases included: of the uppermost, where they differ."""
        return self.parameters_of(self.layers - 1, self.layers)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and, where there are such, the position table and the two projections."""
        width = self.embedding_width or self.hidden
        projections = 2 * width * self.hidden if self.embedding_width else 0
        return self.vocabulary * width + self.learned_positions * self.hidden + projections

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm above the last layer."""
        return self.norm_vectors * self.hidden if self.final_norm else 0

    @property
    def head_parameters(self) -> int:
        """Parameters that the language head adds: none when it is the embedding."""
        return 0 if self.tied_embeddings else self.vocabulary * (self.embedding_width or self.hidden)

    def parameters(self) -> int:
        """Parameters of the whole causal language model, tied ones counted once."""
        body = self.embedding_parameters + self.parameters_of(0, self.layers) + self.final_norm_parameters
        return body + self.head_parameters

    def active_parameters(self) -> int:
        """Parameters less the experts that one token leaves aside; of a dense model all."""
        unused = 0 if self.experts is None else self.experts.count - self.experts.per_token
        return self.parameters() - unused * self.expert_parameters * self.expert_layers()

    def window(self, layer: int) -> int:
        """Tokens that this layer's attention looks back through, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def cached_numbers(self) -> int:
        """Numbers that one layer caches for one token: keys and values of the KV heads.

        Of latent attention the small vector and the shared rotary key, as transformers 5 and vLLM hold them.
        """
        if self.latent is not None:
            return self.latent.rank + self.latent.rotary
        return 2 * self.kv_heads * self.head_dim

    def cache_bytes(self, tokens: int, width: int, start: int = 0, stop: int | None = None) -> int:
        """Bytes of the KV cache of one row of `tokens` tokens in the layers [start, stop), `width` bytes a number.

        A layer with a window holds no more tokens than that.
        """
        held = 0
        for layer in range(start, self.layers if stop is None else stop):
            window = self.window(layer)
            held += min(tokens, window) if window else tokens
        return held * self.cached_numbers * width
