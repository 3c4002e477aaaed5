"""Checks before the first step: the update starts from ratio 1, KL 0 and a sampler that agrees with the trainer.

Each of these goes wrong silently in practice (positions, masks, dropout, temperature, precision), and each ruins a
run; so the run stops here with the number and the usual causes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fourfold.batch import ScoredRollout
from fourfold.config.schema import PrecisionSection, RunConfig
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize
from fourfold.memory.offload import is_elsewhere
from fourfold.memory.quantization import kind_of
from fourfold.models.assembly import FourModels
from fourfold.models.quantized import PROBE
from fourfold.models.reference import OwnPolicy
from fourfold.models.roles import Activations, Policy
from fourfold.models.split import Part
from fourfold.planner.quantization import QUANTIZED


@dataclass(frozen=True)
class Bounds:
    """Allowed gaps in nats a token: (mean, max)."""

    ratio: tuple[float, float]
    kl: tuple[float, float]
    sampler: tuple[float, float]


# float32: rounding of sums in another order. bfloat16: logits near 20 carry steps of 1/16, and another batch shape
# rounds otherwise, so single tokens differ while the mean does not. float16 has three binary digits more.
BOUNDS = {
    torch.float32: Bounds(ratio=(1e-5, 1e-4), kl=(1e-5, 1e-4), sampler=(1e-4, 1e-3)),
    torch.float16: Bounds(ratio=(3e-3, 0.15), kl=(2e-4, 2e-2), sampler=(2e-2, 0.3)),
    torch.bfloat16: Bounds(ratio=(2e-2, 1.0), kl=(1e-3, 1e-1), sampler=(1e-1, 2.0)),
}


@dataclass(frozen=True)
class ReferenceBias:
    """What KL reads where it is 0, because the reference computes otherwise than the actor; nats.

    The difference is log p - log p_held of the same weights, p in the actor's numerics, p_held in the reference's. Its
    mean over tokens drawn from p estimates KL(p, p_held), which every KL is off by; its size at a single token is
    noise, which a mean over tokens takes out, and is reported only.
    """

    per_token_mean: float
    per_sequence_mean: float
    absolute_mean: float  # of a token
    absolute_max: float
    tokens: int

    @classmethod
    def measured(cls, scored: ScoredRollout) -> ReferenceBias:
        """Before the first step, when both roles have the same weights."""
        gaps = (scored.log_probs - scored.ref_log_probs)[scored.response_mask]
        return cls._of(gaps, len(scored.sequences))

    @classmethod
    def of_own(cls, reference: OwnPolicy) -> ReferenceBias:
        """Of a model of its own, as it was loaded: on given sentences, because the actor has other weights."""
        assert reference.rounding is not None, "loading has measured it"
        return cls._of(reference.rounding, len(PROBE))

    @classmethod
    def _of(cls, gaps: Tensor, sequences: int) -> ReferenceBias:
        return cls(
            per_token_mean=float(gaps.mean()),
            per_sequence_mean=float(gaps.sum()) / sequences,
            absolute_mean=float(gaps.abs().mean()),
            absolute_max=float(gaps.abs().max()),
            tokens=len(gaps),
        )


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
    own_reference: bool
    reference_bias: ReferenceBias | None = None  # where actor and reference compute alike there is none

    def with_stored(self, earlier: Mapping[str, Any] | None) -> Preflight:
        """With the bias that was measured when the run began: later the actor has moved."""
        bias = (earlier or {}).get("reference_bias")
        return self if self.fresh or bias is None else replace(self, reference_bias=ReferenceBias(**bias))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """One line for the terminal."""
        kl = f"KL to reference {self.kl_gap_mean:.1e}" if self.fresh else "KL not checked (resumed)"
        if self.own_reference:
            kl = f"|log ratio| to reference.model {self.kl_gap_mean:.2g} (another model: not 0)"
        ratio, sampler = f"|log ratio| {self.ratio_gap_mean:.1e}", f"sampler gap {self.sampler_gap_mean:.1e}"
        return f"pre-flight: {ratio} · {kl} · {sampler} nats a token"

    def warning(self) -> str | None:
        """What to know of a reference that computes otherwise than the actor."""
        bias = self.reference_bias
        if bias is None:
            return None
        when = "measured" if self.fresh else "measured when the run began"
        tokens = f"{bias.tokens:,} tokens{' of given sentences' * self.own_reference}"
        return (
            f"KL bias of the reference: {bias.per_token_mean:+.2e} nats a token ({bias.per_sequence_mean:+.2e} a "
            f"sequence), |difference| {bias.absolute_mean:.2e} on average and {bias.absolute_max:.2e} at most, {when} "
            f"on {tokens}: it is held in {self.reference_dtype.removeprefix('torch.')}, and the actor computes in "
            f"{self.actor_dtype.removeprefix('torch.')}"
        )


def preflight(
    models: FourModels,
    scored: ScoredRollout,
    activations: Activations,
    config: RunConfig,
    *,
    fresh: bool,
    size: BatchSize | None = None,
) -> Preflight:
    """Measure the gaps on a scored rollout, or on as many of its first rows as memory takes; RunFailed names the one
    that is too large.

    `fresh` is False for a resumed run, whose actor has rightly moved away from the reference. The distance to a
    reference with a model of its own is told, not judged.
    """

    def first(rows: int) -> Preflight:
        chosen = torch.arange(rows, device=scored.sequences.device)
        return _measure(models, scored.select(chosen), activations.select(chosen), config, fresh)

    return (size or BatchSize("learn", "actor", 0)).fitting(first, len(scored.sequences))


def _measure(
    models: FourModels, scored: ScoredRollout, activations: Activations, config: RunConfig, fresh: bool
) -> Preflight:
    actor, temperature, differs = models.actor, config.sampling.temperature, config.precision.reference_differs
    mask = scored.response_mask
    log_probs, _ = actor.log_probs(activations, scored, temperature)  # the training path, with its graph
    bounds = bounds_of(actor.branch, models.base.trunk)
    own_reference = isinstance(models.reference, OwnPolicy)
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
        reference_dtype=_held(models, config),
        fresh=fresh,
        own_reference=own_reference,
        reference_bias=_bias(models.reference, scored) if differs and fresh else None,
    )
    if result.actor_dtype != result.reference_dtype and not differs:
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
    if result.reference_bias is not None:
        _require_small(result.reference_bias, config.precision)
    elif fresh and not own_reference:
        # A service makes the trunk's activations anew, as the trainer does after the sampler.
        anew = models.base.trunk is not None and is_elsewhere(models.reference)
        allowed = bounds.sampler if anew else bounds.kl
        _require("KL to the reference is not 0 at step 0", kl, allowed, "the reference is not the actor as it starts")
    _require(
        "sampler and trainer disagree on log-probs",
        sampler,
        bounds.sampler,
        "temperature, positions or weights differ in the sampler",
    )
    return result


def _bias(reference: Policy, scored: ScoredRollout) -> ReferenceBias:
    return ReferenceBias.of_own(reference) if isinstance(reference, OwnPolicy) else ReferenceBias.measured(scored)


def _held(models: FourModels, config: RunConfig) -> str:
    """How the reference's own weights are held: in fewer bits, or in the type that it computes in."""
    kind = config.precision.reference
    return kind if kind in QUANTIZED else str(models.reference.branch.compute_dtype)


def bounds_of(*parts: Part | None) -> Bounds:
    """Of the roughest numerics among the parts that a policy passes through.

    Activations in int8 carry as few bits as bfloat16, and sums in another order move them.
    """
    found = [
        BOUNDS[torch.bfloat16 if kind_of(p) == "int8_dynamic" else p.compute_dtype] for p in parts if p is not None
    ]
    return max(found, key=lambda bounds: bounds.ratio)


def _require_small(bias: ReferenceBias, precision: PrecisionSection) -> None:
    if not abs(bias.per_token_mean) <= precision.max_reference_bias:
        raise RunFailed(
            f"pre-flight: the reference in {precision.reference} biases every KL by {bias.per_token_mean:+.2e} nats a "
            f"token (allowed by precision.max_reference_bias: {precision.max_reference_bias:g}) and "
            f"{bias.per_sequence_mean:+.2e} a sequence: the mean difference, on {bias.tokens:,} tokens, from the same "
            f"weights in the actor's own numerics ({precision.compute}), whose size is {bias.absolute_mean:.2e} on "
            f"average and {bias.absolute_max:.2e} at most; leave out precision.reference, or allow more"
        )


def _gap(a: Tensor, b: Tensor, mask: Tensor) -> tuple[float, float]:
    gaps = (a - b).abs()[mask]
    return float(gaps.mean()), float(gaps.max())


def _require(what: str, gap: tuple[float, float], bound: tuple[float, float], cause: str) -> None:
    if not (gap[0] <= bound[0] and gap[1] <= bound[1]):
        raise RunFailed(
            f"pre-flight: {what}: mean {gap[0]:.2e}, max {gap[1]:.2e} nats a token "
            f"(allowed {bound[0]:.0e} and {bound[1]:.0e}); likely: {cause}"
        )
