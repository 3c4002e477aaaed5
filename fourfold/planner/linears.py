"""The linear layers of decoder layers by name and shape: what is quantised, adapted and rounded in 8-bit states."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fourfold.planner.architectures import Architecture


class Linear(NamedTuple):
    """`count` layers of this name with equal shapes."""

    name: str
    outputs: int
    inputs: int
    count: int = 1

    @property
    def numbers(self) -> int:
        """Of one of them."""
        return self.outputs * self.inputs


@lru_cache(maxsize=1024)  # a search asks thousands of times
def linears_between(a: Architecture, start: int, stop: int) -> tuple[Linear, ...]:
    """Those of the layers [start, stop)."""
    mixed = a.expert_layers(start, stop)
    groups = ((stop - start - mixed, False), (mixed, True))
    return tuple(
        each._replace(count=each.count * layers)
        for layers, experts in groups
        if layers
        for each in linear_layers(a, experts=experts)
    )


def linear_layers(a: Architecture, *, experts: bool = False) -> list[Linear]:
    """Those of one decoder layer, with an MLP or with experts."""
    h, inner = a.hidden, a.intermediate
    if a.family == "gpt2":
        return [
            Linear("c_attn", 3 * h, h),
            Linear("c_proj", h, h),
            Linear("c_fc", inner, h),
            Linear("c_proj", h, inner),
        ]
    if a.family == "gpt_neox":
        joined = [Linear("query_key_value", 3 * h, h), Linear("dense", h, h)]
        return [*joined, Linear("dense_h_to_4h", inner, h), Linear("dense_4h_to_h", h, inner)]
    if a.family == "opt":
        return [*_attention(a), Linear("fc1", inner, h), Linear("fc2", h, inner)]
    return [*_attention(a), *(_mixture(a) if experts else _gated(inner, h, 1))]


def _attention(a: Architecture) -> list[Linear]:
    h, latent = a.hidden, a.latent
    if latent is None:
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        out = "out_proj" if a.family == "opt" else "o_proj"
        return [Linear("q_proj", q, h), Linear("k_proj", kv, h), Linear("v_proj", kv, h), Linear(out, h, q)]
    queries, rank = a.heads * a.key_dim, latent.query_rank
    query = [Linear("q_a_proj", rank, h), Linear("q_b_proj", queries, rank)] if rank else [Linear("q_proj", queries, h)]
    return [
        *query,
        Linear("kv_a_proj_with_mqa", latent.rank + latent.rotary, h),
        Linear("kv_b_proj", a.heads * (latent.plain + latent.value), latent.rank),
        Linear("o_proj", h, a.heads * latent.value),
    ]


def _gated(inner: int, hidden: int, count: int) -> list[Linear]:
    into = [Linear(name, inner, hidden, count) for name in ("gate_proj", "up_proj")]
    return [*into, Linear("down_proj", hidden, inner, count)]


def _mixture(a: Architecture) -> list[Linear]:
    experts = a.experts
    assert experts is not None
    shared = _gated(experts.shared_intermediate, a.hidden, 1) if experts.shared_intermediate else []
    router = [Linear("gate", experts.count + experts.shared_gate, a.hidden)]
    return [*router, *shared, *_gated(experts.intermediate, a.hidden, experts.count)]
