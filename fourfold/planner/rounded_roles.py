"""Levers that hold a frozen role's own matrices in fewer bits, one a kind.

What rounding does to what real models say, `fourfold bench quantization` tells. On tiny random models a reference in
int8 changes an update by 0.002, on 135M parameters by 0.07 (in nf4 by 0.01 and 0.45).
"""

from __future__ import annotations

from fourfold.planner.lever import Lever

# Of a kind: how a lever is called, what it saves, and the bounds of a reference and of a reward model, each beside the
# same rounded weights in float32 and, where an update without rounding can be compared, by the rounding.
_HALF, _THREE_QUARTERS = "half of the half-precision matrices", "three quarters of the half-precision matrices"
_KINDS = {
    "int8": ("int8", _HALF, (1e-4, 0.1), (1e-4, 0.2)),
    # Activations are rounded too, which no run in float32 does alike: one bound for all.
    "int8_dynamic": ("int8 dynamic", _HALF, (0.25, 0.0), (0.3, 0.0)),
    "nf4": ("nf4", _THREE_QUARTERS, (1e-4, 0.6), (1e-4, 0.6)),
}
REFERENCES = tuple(f"{name} reference" for name, *_ in _KINDS.values())
REWARDS = tuple(f"{name} reward" for name, *_ in _KINDS.values())
_NOT_PLANNED = {"int8_dynamic": "saves what int8 does and rounds more", "nf4": "of KL and scores too much is rounding"}
_BESIDE = ("adapters", "adapters over a trunk", "half-precision frozen roles")


def _lever(
    kind: str, role: str, whose: str, costs: str, bounds: tuple[float, float], excludes: tuple[str, ...]
) -> Lever:
    name, saves, *_ = _KINDS[kind]
    others = tuple(each for each in (*REFERENCES, *REWARDS) if each.endswith(role) and each != f"{name} {role}")
    return Lever(
        name=f"{name} {role}",
        where="fourfold.memory.quantization",
        settings={f"precision.{role}": kind},
        saves=f"{saves} that are {whose} own",
        costs=costs,
        change="bounded",
        bound=bounds[0],
        rounding=bounds[1],
        excludes=(*others, *_BESIDE, *excludes),
        not_planned=_NOT_PLANNED.get(kind, ""),
    )


ROUNDED_ROLES: tuple[Lever, ...] = (
    *(
        _lever(
            kind,
            "reference",
            "the reference's",
            "a KL that is off by the rounding; widening the weights for each product",
            reference,
            ("llama.cpp reference", "service reference"),
        )
        for kind, (_, _, reference, _) in _KINDS.items()
    ),
    *(
        _lever(
            kind,
            "reward",
            "the reward model's",
            "scores that are off by the rounding; widening the weights for each product",
            reward,
            ("ONNX int8 reward", "service reward"),
        )
        for kind, (_, _, _, reward) in _KINDS.items()
    ),
)
