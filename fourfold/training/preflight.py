"""Checks before the first step: the update starts from ratio 1, KL 0 and a sampler that agrees with the trainer.

Each of these goes wrong silently in practice (positions, masks, dropout, temperature, precision), and each ruins a
run; so the run stops here with the number and the usual causes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fourfold.batch import ScoredRollout
from fourfold.config.schema import RunConfig
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize
from fourfold.memory.offload import computes_elsewhere, residency_of
from fourfold.memory.quantization import kind_of
from fourfold.models.assembly import FourModels
from fourfold.models.llama_roles import EnginePolicy
from fourfold.models.priors import UniformPolicy
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


# A bias may exceed its bound by so many standard errors: one that is at the bound is refused in 2.3 % of the runs.
ERRORS_ALLOWED = 2.0


@dataclass(frozen=True)
class ReferenceBias:
    """What KL reads where it is 0, because the reference computes otherwise than the actor; nats.

    The difference is log p - log p_held of the same weights, p in the actor's numerics, p_held in the reference's. Its
    mean over tokens drawn from p estimates KL(p, p_held), which every KL is off by; its size at a single token is
    noise, which a mean over tokens takes out, and is reported only. Tokens of one response are not independent, so
    standard errors count responses: with S_i the sum over response i, n_i its tokens and m = sum S_i / sum n_i, the
    mean of a token has that of a ratio, sqrt(B / (B - 1) sum (S_i - m n_i)^2) / sum n_i (Cochran 1977, section 6.3).
    """

    per_token_mean: float
    per_token_error: float  # standard error; infinite where there is one response
    per_sequence_mean: float
    per_sequence_error: float
    absolute_mean: float  # of a token
    absolute_max: float
    tokens: int
    sequences: int

    @classmethod
    def measured(cls, scored: ScoredRollout) -> ReferenceBias:
        """Before the first step, when both roles have the same weights."""
        return cls.of(scored.log_probs - scored.ref_log_probs, scored.response_mask)

    @classmethod
    def of(cls, differences: Tensor, mask: Tensor) -> ReferenceBias:
        """Of log p - log p_held of the tokens [batch, time] where the mask is True."""
        gaps = torch.where(mask, differences, 0.0).double()
        sums, lengths, count = gaps.sum(dim=1), mask.sum(dim=1).double(), len(gaps)
        mean, tokens = float(sums.sum() / lengths.sum()), int(lengths.sum())
        return cls(
            per_token_mean=mean,
            per_token_error=_error_of_sum(sums - mean * lengths) / tokens,
            per_sequence_mean=float(sums.mean()),
            per_sequence_error=_error_of_sum(sums - sums.mean()) / count,
            absolute_mean=float(gaps.abs().sum()) / tokens,
            absolute_max=float(gaps.abs().max()),
            tokens=tokens,
            sequences=count,
        )

    def beyond(self, bound: float) -> bool:
        """Whether the mean of a token is larger than `bound` by more than ERRORS_ALLOWED standard errors, or NaN."""
        return not abs(self.per_token_mean) - ERRORS_ALLOWED * self.per_token_error <= bound

    def __str__(self) -> str:
        return (
            f"{self.per_token_mean:+.2e} nats a token (standard error {self.per_token_error:.1e}), "
            f"{self.per_sequence_mean:+.2e} a sequence ({self.per_sequence_error:.1e})"
        )


def _error_of_sum(centred: Tensor) -> float:
    """Standard error of the sum of independent numbers, of which these are the distances from their mean."""
    count = len(centred)
    return math.sqrt(count / (count - 1) * float(centred.square().sum())) if count > 1 else math.inf


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
    own_reference: bool  # another policy than the actor at step 0
    reference_where: str = ""  # where it computes, if that is elsewhere than the actor does
    reference_bias: ReferenceBias | None = None  # where actor and reference compute alike there is none

    @property
    def reference_differs(self) -> bool:
        """Whether the same weights may give the reference other numbers than the actor."""
        return not self.own_reference and (self.actor_dtype != self.reference_dtype or bool(self.reference_where))

    def with_stored(self, earlier: Mapping[str, Any] | None) -> Preflight:
        """With the bias that was measured when the run began: later the actor has moved."""
        bias = (earlier or {}).get("reference_bias")
        if self.fresh or bias is None or not self.reference_differs:
            return self
        return replace(self, reference_bias=ReferenceBias(**bias))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """One line for the terminal."""
        kl = f"KL to reference {self.kl_gap_mean:.1e}" if self.fresh else "KL not checked (resumed)"
        if self.own_reference:
            kl = f"|log ratio| to the reference {self.kl_gap_mean:.2g} (another policy: not 0)"
        ratio, sampler = f"|log ratio| {self.ratio_gap_mean:.1e}", f"sampler gap {self.sampler_gap_mean:.1e}"
        return f"pre-flight: {ratio} · {kl} · {sampler} nats a token"

    def warning(self) -> str | None:
        """What to know of a reference that computes otherwise than the actor."""
        bias = self.reference_bias
        if bias is None:
            return None
        when = "measured" if self.fresh or self.own_reference else "measured when the run began"
        return (
            f"KL bias of the reference: {bias}, |difference| {bias.absolute_mean:.2e} on average and "
            f"{bias.absolute_max:.2e} at most, {when} on {self.measured_on(bias)}: it is held {self.held()}, and the "
            "actor computes in "
            f"{self.actor_dtype.removeprefix('torch.')}"
        )

    def measured_on(self, bias: ReferenceBias) -> str:
        """The tokens that a bias is a mean over: an actor with other weights says nothing of a model of its own."""
        return (
            f"{bias.tokens:,} tokens of {bias.sequences:,} {'given sentences' if self.own_reference else 'responses'}"
        )

    def held(self) -> str:
        """How the reference is held, and where it computes if not where the actor does."""
        elsewhere = f" and computed elsewhere ({self.reference_where})" if self.reference_where else ""
        return f"in {self.reference_dtype.removeprefix('torch.')}{elsewhere}"


def preflight(
    models: FourModels,
    scored: ScoredRollout,
    activations: Activations,
    config: RunConfig,
    bias: ReferenceBias | None,
    *,
    fresh: bool,
    size: BatchSize | None = None,
) -> Preflight:
    """Measure the gaps on a scored rollout, or on as many of its first rows as memory takes, and judge them and the
    reference's `bias` (where `reference_differs`; that of a model of its own was measured when it was loaded);
    RunFailed names the one that is too large.

    `fresh` is False for a resumed run, whose actor has rightly moved away from the reference. The distance to a
    reference with a model of its own is told, not judged.
    """
    if isinstance(models.reference, OwnPolicy) and models.reference.rounding is not None:
        bias = ReferenceBias.of(*models.reference.rounding)

    def first(rows: int) -> Preflight:
        chosen = torch.arange(rows, device=scored.sequences.device)
        return _measure(models, scored.select(chosen), activations.select(chosen), config, fresh, bias)

    return (size or BatchSize("learn", "actor", 0)).fitting(first, len(scored.sequences))


def _measure(
    models: FourModels,
    scored: ScoredRollout,
    activations: Activations,
    config: RunConfig,
    fresh: bool,
    bias: ReferenceBias | None,
) -> Preflight:
    actor, temperature = models.actor, config.sampling.temperature
    mask = scored.response_mask
    log_probs, _ = actor.log_probs(activations, scored, temperature)  # the training path, with its graph
    bounds = bounds_of(actor.branch, models.base.trunk)
    own_reference = not config.reference.starts_as_the_actor
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
        reference_where=_elsewhere(models.reference),
        reference_bias=bias,
    )
    rounded = config.precision.reference_differs or isinstance(models.reference, EnginePolicy)
    if result.actor_dtype != result.reference_dtype and not rounded:
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
    if bias is not None:
        _require_small(bias, result, config)
    if fresh and not own_reference and not rounded:
        # Elsewhere other kernels compute, and a service makes the trunk's activations anew: as between the sampler and
        # the trainer.
        allowed = bounds.sampler if result.reference_where else bounds.kl
        cause = "the reference is not the actor as it starts"
        _require("KL to the reference is not 0 at step 0", kl, allowed, cause, blamed="reference")
    _require(
        "sampler and trainer disagree on log-probs",
        sampler,
        _sampler_bound(config, bounds),
        "temperature, positions or weights differ in the sampler",
    )
    return result


def reference_differs(models: FourModels, config: RunConfig) -> bool:
    """Whether a reference with the actor's weights may have other numbers, of which a bias is to be measured."""
    same = config.reference.starts_as_the_actor
    return same and (config.precision.reference_differs or computes_elsewhere(models.reference))


def _elsewhere(reference: Policy) -> str:
    held = residency_of(reference)
    return held.where if held is not None and computes_elsewhere(reference) else ""


def _held(models: FourModels, config: RunConfig) -> str:
    """How the reference's own weights are held: by another engine, in fewer bits, or in the type it computes in."""
    if isinstance(models.reference, EnginePolicy):
        return models.reference.held
    if isinstance(models.reference, UniformPolicy):
        return str(models.actor.branch.compute_dtype)  # its log-probs are a constant of any type
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


def _require_small(bias: ReferenceBias, found: Preflight, config: RunConfig) -> None:
    precision, engine = config.precision, config.reference.engine != "torch"
    if bias.beyond(precision.max_reference_bias):
        causes = {
            "precision.reference": precision.reference_differs,
            "reference.engine": engine,
            "reference.residency": found.reference_where and not engine,
        }
        raise RunFailed(
            f"pre-flight: the reference {found.held()} biases every KL by {bias} (allowed a token by "
            f"precision.max_reference_bias: {precision.max_reference_bias:g}, and {ERRORS_ALLOWED:g} standard errors): "
            f"the mean difference, on {found.measured_on(bias)}, from the same weights in the "
            f"actor's own numerics ({precision.compute}), whose size is {bias.absolute_mean:.2e} on average and "
            f"{bias.absolute_max:.2e} at most; leave out {' and '.join(filter(causes.get, causes))}, or allow more"
        )


def _sampler_bound(config: RunConfig, bounds: Bounds) -> tuple[float, float]:
    """Of a sampler with another distribution what its guard lets through: its own, or the exact one's."""
    if not config.sampling.differs:
        return bounds.sampler
    return max(config.sampling.max_gap, bounds.sampler[0]), math.inf


def _gap(a: Tensor, b: Tensor, mask: Tensor) -> tuple[float, float]:
    gaps = (a - b).abs()[mask]
    return float(gaps.mean()), float(gaps.max())


def _require(what: str, gap: tuple[float, float], bound: tuple[float, float], cause: str, *, blamed: str = "") -> None:
    if not (gap[0] <= bound[0] and gap[1] <= bound[1]):
        raise RunFailed(
            f"pre-flight: {what}: mean {gap[0]:.2e}, max {gap[1]:.2e} nats a token "
            f"(allowed {bound[0]:.0e} and {bound[1]:.0e}); likely: {cause}",
            blamed=blamed,
        )
