"""Checks before the first step: the update starts from ratio 1, KL 0 and a sampler that agrees with the trainer.

Each of these goes wrong silently in practice (positions, masks, dropout, temperature, precision), and each ruins a
run; so the run stops here with the number and the usual causes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fourfold.batch import ScoredRollout
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize
from fourfold.memory.offload import is_elsewhere
from fourfold.memory.quantization import kind_of
from fourfold.models.assembly import FourModels
from fourfold.models.quantized import LOG_PROB_BOUNDS
from fourfold.models.roles import Activations


@dataclass(frozen=True)
class Bounds:
    """Allowed gaps in nats a token: (mean, max)."""

    ratio: tuple[float, float]
    kl: tuple[float, float]
    sampler: tuple[float, float]


# float32: rounding of sums in another order. bfloat16: logits near 20 carry steps of 1/16, and another batch shape
# rounds otherwise, so single tokens differ while the mean does not.
BOUNDS = {
    torch.float32: Bounds(ratio=(1e-5, 1e-4), kl=(1e-5, 1e-4), sampler=(1e-4, 1e-3)),
    torch.bfloat16: Bounds(ratio=(2e-2, 1.0), kl=(1e-3, 1e-1), sampler=(1e-1, 2.0)),
}


@dataclass(frozen=True)
class Preflight:
    """What was measured, in nats a token."""

    ratio_gap_mean: float
    ratio_gap_max: float
    kl_gap_mean: float
    kl_gap_max: float
    sampler_gap_mean: float
    sampler_gap_max: float
    actor_dtype: str
    reference_dtype: str
    fresh: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """One line for the terminal."""
        kl = f"KL to reference {self.kl_gap_mean:.1e}" if self.fresh else "KL not checked (resumed)"
        ratio, sampler = f"|log ratio| {self.ratio_gap_mean:.1e}", f"sampler gap {self.sampler_gap_mean:.1e}"
        return f"pre-flight: {ratio} · {kl} · {sampler} nats a token"


def preflight(
    models: FourModels,
    scored: ScoredRollout,
    activations: Activations,
    *,
    temperature: float,
    fresh: bool,
    size: BatchSize | None = None,
) -> Preflight:
    """Measure the gaps on a scored rollout, or on as many of its first rows as memory takes; RunFailed names the one
    that is too large.

    `fresh` is False for a resumed run, whose actor has rightly moved away from the reference.
    """

    def first(rows: int) -> Preflight:
        chosen = torch.arange(rows, device=scored.sequences.device)
        return _measure(models, scored.select(chosen), activations.select(chosen), temperature, fresh)

    return (size or BatchSize("learn", "actor", 0)).fitting(first, len(scored.sequences))


def _measure(
    models: FourModels, scored: ScoredRollout, activations: Activations, temperature: float, fresh: bool
) -> Preflight:
    actor = models.actor
    mask = scored.response_mask
    log_probs, _ = actor.log_probs(activations, scored, temperature)  # the training path, with its graph
    bounds = _bounds(models)
    ratio = _gap(log_probs.detach(), scored.log_probs, mask)
    kl = _gap(scored.log_probs, scored.ref_log_probs, mask)
    sampler = _gap(scored.sampler_log_probs, scored.log_probs, mask)
    result = Preflight(
        ratio_gap_mean=ratio[0],
        ratio_gap_max=ratio[1],
        kl_gap_mean=kl[0],
        kl_gap_max=kl[1],
        sampler_gap_mean=sampler[0],
        sampler_gap_max=sampler[1],
        actor_dtype=str(actor.branch.compute_dtype),
        reference_dtype=str(models.reference.branch.compute_dtype),
        fresh=fresh,
    )
    if actor.branch.compute_dtype != models.reference.branch.compute_dtype:
        raise RunFailed(
            f"pre-flight: actor runs in {result.actor_dtype}, reference in {result.reference_dtype}; the KL between "
            "them would be biased; give both the same precision"
        )
    _require(
        "ratio is not 1 before the first update",
        ratio,
        bounds.ratio,
        "dropout, position ids or masks differ between passes",
    )
    if fresh:
        allowed = _kl_bound(models, bounds)
        _require("KL to the reference is not 0 at step 0", kl, allowed, "the reference is not the actor as it starts")
    _require(
        "sampler and trainer disagree on log-probs",
        sampler,
        bounds.sampler,
        "temperature, positions or weights differ in the sampler",
    )
    return result


def _bounds(models: FourModels) -> Bounds:
    """Of the compute type; activations in int8 carry as few bits as bfloat16, and sums in another order move them."""
    policy = (models.actor.branch, models.base.trunk)
    if any(part is not None and kind_of(part) == "int8_dynamic" for part in policy):
        return BOUNDS[torch.bfloat16]
    return BOUNDS[models.actor.branch.compute_dtype]


def _kl_bound(models: FourModels, bounds: Bounds) -> tuple[float, float]:
    """A reference in fewer bits than the actor is off by what its rounding does: as much as its probe may be."""
    if models.base.trunk is not None and is_elsewhere(models.reference):
        return bounds.sampler  # a service makes the trunk's activations anew, as the trainer does after the sampler
    kind = kind_of(models.reference.branch)
    if not kind or kind == kind_of(models.actor.branch):
        return bounds.kl
    return LOG_PROB_BOUNDS[kind], math.inf


def _gap(a: Tensor, b: Tensor, mask: Tensor) -> tuple[float, float]:
    gaps = (a - b).abs()[mask]
    return float(gaps.mean()), float(gaps.max())


def _require(what: str, gap: tuple[float, float], bound: tuple[float, float], cause: str) -> None:
    if not (gap[0] <= bound[0] and gap[1] <= bound[1]):
        raise RunFailed(
            f"pre-flight: {what}: mean {gap[0]:.2e}, max {gap[1]:.2e} nats a token "
            f"(allowed {bound[0]:.0e} and {bound[1]:.0e}); likely: {cause}"
        )
