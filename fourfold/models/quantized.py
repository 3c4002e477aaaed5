"""What holding weights in fewer bits does to a role, measured on a probe when it is loaded, and refused beyond a bound.

A quantised part must say nearly what it said before (log-probs of a policy in nats a token, scores of a scorer in their
own standard deviations), and gradients through it must be those through its dequantised weights, also after a pass
without gradients, as every rollout is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from fourfold.errors import RunFailed
from fourfold.memory.quantization import exact_products, kind_of, quantize
from fourfold.models.roles import Policy, Scorer
from fourfold.models.split import Part
from fourfold.models.stored import into_memory

# Plain sentences of several kinds: what a language model is used for, where ids at random are not.
PROBE = (
    "The film starts slowly, but the second half is funny, moving and very well acted.",
    "I would not watch it again: the story makes no sense and the jokes are older than the actors.",
    "Water boils at a lower temperature on a mountain because the air presses less on its surface.",
    "She opened the letter, read it twice, put it back on the table and went out without a word.",
)

# Largest mean |difference| of log-probs, nats a token: twice what the smallest real model that was tried shows (135M
# parameters, 0.08, 0.28 and 0.65; larger models lose less), and below the several nats of damaged weights.
LOG_PROB_BOUNDS = {"int8": 0.16, "int8_dynamic": 0.6, "nf4": 1.3}
# The same of scores, in standard deviations over the probe's tokens (there 0.13, 0.19 and 0.23); from 1 on they say
# nothing any longer.
SCORE_BOUNDS = {"int8": 0.3, "int8_dynamic": 0.4, "nf4": 0.8}


@dataclass(frozen=True)
class GradientBound:
    """How far gradients may be from those through the dequantised weights."""

    cosine: float  # at least
    norm: float  # |ratio of the norms - 1| at most


# The kernels' sums run in another order; int8_dynamic also rounds the activations that the layers above see.
GRADIENT_BOUNDS = {
    "int8": GradientBound(0.99, 0.05),
    "int8_dynamic": GradientBound(0.9, 0.2),
    "nf4": GradientBound(0.99, 0.05),
}


@dataclass(frozen=True)
class Probe:
    """Right-padded texts."""

    ids: Int64[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]

    @classmethod
    def of(cls, tokenizer: Any, pad_id: int, device: torch.device) -> Probe:
        """The probe's sentences in a model's tokens."""
        texts = [torch.tensor(tokenizer(text)["input_ids"]) for text in PROBE]
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad_id)
        lengths = torch.tensor([len(text) for text in texts])
        return cls(ids.to(device), (torch.arange(ids.shape[1]) < lengths[:, None]).to(device))

    def inputs(self, trunk: Part | None) -> Tensor:
        """What a branch reads."""
        return self.ids if trunk is None else trunk(self.ids, self.mask)


@torch.no_grad()
def opinions(role: Policy | Scorer, trunk: Part | None, probe: Probe) -> Float32[Tensor, "tokens"]:
    """A policy's log-probs of the probe's tokens but the first of each text, or a scorer's number at each token."""
    hidden = role.branch(probe.inputs(trunk), probe.mask)
    if isinstance(role, Scorer):
        return role.head(hidden)[probe.mask]
    mask = probe.mask[:, 1:]
    labels, compute = probe.ids[:, 1:][mask], role.branch.compute_dtype
    return role.head.log_probs(hidden[:, :-1][mask], labels, 1.0, compute, entropy="none")[0]


def quantize_checked(
    role: Policy | Scorer, trunk: Part | None, part: Part, kind: str, probe: Probe, setting: str
) -> float:
    """Quantise the decoder layers of `part`, below which or in which `role` computes; ValueError beyond the bound.

    Returns the mean |difference| that `opinions` shows, of scores in standard deviations.
    """
    before = opinions(role, trunk, probe)
    for number, layer in enumerate(part.layers):
        into_memory(layer)
        quantize(nn.ModuleDict({str(number): layer}), kind)
    gaps = (opinions(role, trunk, probe) - before).abs()
    policy = isinstance(role, Policy)
    bound, unit = (LOG_PROB_BOUNDS, 1.0) if policy else (SCORE_BOUNDS, float(before.std()))
    mean = float(gaps.mean())
    if not mean <= bound[kind] * unit:
        what = f"log-probs change by {mean:.2g} nats a token" if policy else f"scores change by {mean:.2g}"
        allowed = f"{bound[kind]:g}" if policy else f"{bound[kind] * unit:.2g}, {bound[kind]:g} standard deviations"
        raise ValueError(
            f"precision.{setting} = {kind!r}: on a probe, {what} on average (allowed {allowed}); this model does not "
            f"bear it; try {_others(kind)}"
        )
    return mean / unit if unit else mean


def _others(kind: str) -> str:
    return "'auto'" if kind == "int8" else "'int8' or 'auto'"


@dataclass(frozen=True)
class Agreement:
    """Gradients through quantised weights beside those through the dequantised ones."""

    cosine: float
    norm_ratio: float

    def within(self, bound: GradientBound) -> bool:
        """Whether they are near enough."""
        return self.cosine >= bound.cosine and abs(self.norm_ratio - 1) <= bound.norm


def gradient_agreement(part: Part, trunk: Part | None, probe: Probe) -> Agreement:
    """Of everything that is trained in `part`, after a pass without gradients as in a rollout.

    The loss is a fixed random combination of the activations, so that it needs no head.
    """
    trained = [p for p in part.parameters() if p.requires_grad]
    with torch.no_grad():
        training = part.training
        inputs = probe.inputs(trunk)
        part.eval()(inputs, probe.mask)
        part.train(training)
    direction = torch.randn(part.hidden_size, generator=torch.Generator().manual_seed(0)).to(probe.ids.device)

    @torch.enable_grad()
    def gradient() -> tuple[Tensor, ...]:
        loss = (part(inputs, probe.mask).float() @ direction)[probe.mask].sum()
        # Not backward(): a step in the backward pass would take place.
        return torch.autograd.grad(loss, trained, materialize_grads=True)

    ours = gradient()
    with exact_products(part):
        theirs = gradient()
    mine, other = math.sqrt(_dot(ours, ours)), math.sqrt(_dot(theirs, theirs))
    if not mine * other:
        return Agreement(float(mine == other), 1.0)
    return Agreement(_dot(ours, theirs) / (mine * other), mine / other)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """In float64, of which one tensor is there at a time."""
    return sum(float(x.flatten().double() @ y.flatten().double()) for x, y in zip(a, b, strict=True))


def check_gradients(part: Part, trunk: Part | None, probe: Probe, who: str) -> Agreement | None:
    """RunFailed where gradients through the quantised layers of a trained part are wrong; None where there are none."""
    kind = kind_of(part)
    if not kind:
        return None
    found, bound = gradient_agreement(part, trunk, probe), GRADIENT_BOUNDS[kind]
    if not found.within(bound):
        raise RunFailed(
            f"precision.frozen = {kind!r}: the {who}'s gradients are not those through the same weights dequantised: "
            f"cosine {found.cosine:.3f} (at least {bound.cosine:g}), norm {found.norm_ratio:.3f} of theirs (within "
            f"{bound.norm:g} of 1); try {_others(kind)}"
        )
    return found
