"""How many numbers low-rank adapters have: r (m + n) for a matrix [m, n] (Hu et al. 2021, "LoRA", section 4.1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fourfold.planner.architectures import Architecture

Shape = tuple[int, int]  # inputs, outputs


def linear_layers(architecture: Architecture) -> Mapping[str, tuple[Shape, ...]]:
    """The matrices of one decoder layer by the names that `adapters.targets` takes; GPT-2 has two of one name."""
    hidden, wide = architecture.hidden, architecture.intermediate
    queries, keys = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    if architecture.family == "gpt2":
        down = ((queries, hidden), (wide, hidden))
        return {"c_attn": ((hidden, queries + 2 * keys),), "c_proj": down, "c_fc": ((hidden, wide),)}
    if architecture.family == "gpt_neox":
        return {
            "query_key_value": ((hidden, queries + 2 * keys),),
            "dense": ((queries, hidden),),
            "dense_h_to_4h": ((hidden, wide),),
            "dense_4h_to_h": ((wide, hidden),),
        }
    gate = {"gate_proj": ((hidden, wide),)} if architecture.gated_mlp else {}
    return {
        "q_proj": ((hidden, queries),),
        "k_proj": ((hidden, keys),),
        "v_proj": ((hidden, keys),),
        "o_proj": ((queries, hidden),),
        **gate,
        "up_proj": ((hidden, wide),),
        "down_proj": ((wide, hidden),),
    }


def adapter_parameters(architecture: Architecture, rank: int, targets: Collection[str] = (), layers: int = 0) -> int:
    """Numbers of the low-rank matrices on `layers` layers (0: all); no targets: on all linear layers.

    DoRA's lengths are not among them. ValueError for a target that the architecture does not have.
    """
    known = linear_layers(architecture)
    if unknown := sorted(set(targets) - set(known)):
        raise ValueError(
            f"adapters.targets: given {', '.join(unknown)}; this model's linear layers are {', '.join(sorted(known))}; "
            "leave it out to adapt them all"
        )
    shapes = (shape for name in targets or known for shape in known[name])
    return (layers or architecture.layers) * rank * sum(inputs + outputs for inputs, outputs in shapes)
