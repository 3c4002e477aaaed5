"""A reference with a whole model of its own instead of the actor as it was at step 0.

What it saves: nothing by itself; parked or streamed it is in memory in the score phase only. What it costs: its
weights, and passes through all of its layers where the other roles' begin above a cached trunk. What it changes: the
KL, which is not 0 at step 0 any more. What it excludes: models with another vocabulary. At a service its weights are
in another process, which needs no other model for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float32
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.config.checks import reference_at_llama_cpp
from fourfold.config.schema import RunConfig
from fourfold.memory.attention import use_attention
from fourfold.memory.budget import Budget
from fourfold.memory.precision import DTYPES, dtype_of, resolve_compute
from fourfold.models.heads import LanguageHead
from fourfold.models.loading import (
    SPLIT_TOLERANCE,
    Base,
    embedding_rows,
    load_causal_lm,
    out_of_the_file,
    require_positions,
    shape_of_causal_lm,
)
from fourfold.models.products import hold_narrowly, prepare_for_decoding
from fourfold.models.quantized import Probe, opinions, quantize_checked
from fourfold.models.roles import Activations, Policy, freeze, hollow_copy
from fourfold.models.split import Part, cut_whole, layout_of, verify_whole
from fourfold.models.vocabulary import vocabulary_difference
from fourfold.planner.quantization import QUANTIZED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OwnPolicy(Policy):
    """A policy over a whole model: it reads the rollout's ids, whatever the activations of the other roles are."""

    # log p - log p_held of the probe's tokens [texts, time] in nats, and where they are: p in the actor's numerics,
    # p_held as the weights are held. None where that is the same.
    rounding: tuple[Tensor, Tensor] | None = None

    def stand_on(self, trunk: Part) -> None:
        """Its own layers begin at the ids: no trunk is below them."""

    def hidden_before(self, activations: Activations, rollout: Rollout) -> Float32[Tensor, "tokens hidden"]:
        """Hidden states before each response token."""
        return super().hidden_before(Activations(rollout.sequences, rollout.attention_mask), rollout)


def load_reference(config: RunConfig, base: Base) -> OwnPolicy:
    """`reference.model`, frozen, held as `precision.reference` says; ValueError where KL to it is not defined."""
    model = comparable_model(config, base, _read_as(config, base.budget.device))
    return _frozen(config, model, base.budget, base.probe())


@dataclass(frozen=True)
class Alone:
    """A reference without the run's own model beside it."""

    policy: OwnPolicy
    tokenizer: Any
    pad_id: int
    positions: int | None


def load_reference_alone(config: RunConfig, budget: Budget) -> Alone:
    """As `load_reference`, for a service: whether a KL to it is defined is for the run to see, which has the actor."""
    model, tokenizer = _read(config, _read_as(config, budget.device))
    pad, rows = tokenizer.pad_token_id, embedding_rows(model)
    pad = pad if pad is not None and 0 <= pad < rows else 0  # masks travel with the rows: any id may fill them
    policy = _frozen(config, model, budget, Probe.of(tokenizer, pad, budget.device))
    return Alone(policy, tokenizer, pad, getattr(model.config, "max_position_embeddings", None))


def reference_form(config: RunConfig, base: Base) -> Policy:
    """The form of one that a service holds, without weights; ValueError where KL to it is not defined."""
    model, tokenizer = shape_of_causal_lm(config.reference.model, Path(config.model.cache), "reference.model")
    _require_comparable(config, base, model, tokenizer)
    return form_of(model, _compute(config, base.budget.device))


def check_reference(config: RunConfig, base: Base) -> None:
    """ValueError where KL to `reference.model` is not defined. Its weights are not read."""
    if config.reference.model and not reference_at_llama_cpp(config):
        reference_form(config, base)


def form_of(model: PreTrainedModel, compute_dtype: torch.dtype = torch.float32) -> Policy:
    """A policy of this shape without weights."""
    form = OwnPolicy(cut_whole(model, compute_dtype), LanguageHead.of(model))
    return hollow_copy(form, share_head=False)


def _compute(config: RunConfig, device: torch.device) -> torch.dtype:
    return DTYPES[resolve_compute(config.precision.compute, device)]


def _read_as(config: RunConfig, device: torch.device) -> torch.dtype:
    """Rounded as the base is, then frozen as its copies; what is to be rounded otherwise must not be rounded twice."""
    as_the_base = config.sharing.mode != "none" and not config.precision.reference_differs
    return _compute(config, device) if as_the_base else torch.float32


def _read(config: RunConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    return load_causal_lm(config.reference.model, Path(config.model.cache), dtype, key="reference.model")


def _frozen(config: RunConfig, model: PreTrainedModel, budget: Budget, probe: Probe) -> OwnPolicy:
    device, dtype = budget.device, _compute(config, budget.device)
    use_attention(model, config.memory.attention, device)
    branch = cut_whole(model, dtype)
    verify_whole(model, branch, tolerance=SPLIT_TOLERANCE[dtype])
    reference = OwnPolicy(branch, LanguageHead.of(model, budget)).to(device)
    _hold(reference, config, probe)
    out_of_the_file(reference)
    prepare_for_decoding(reference.branch)
    budget.watch(reference.branch.layers)
    return reference


def _hold(reference: OwnPolicy, config: RunConfig, probe: Probe) -> None:
    """Freeze it in its type or in fewer bits, and note what that changes where the actor computes otherwise."""
    kind = config.precision.reference
    differs = config.precision.reference_differs
    before = opinions(reference.requires_grad_(False), None, probe) if differs else None
    freeze(reference, None if kind in QUANTIZED else dtype_of(kind, reference.branch.compute_dtype))
    if kind in QUANTIZED:
        quantize_checked(reference, None, reference.branch, kind, probe, "reference")
    hold_narrowly(reference.branch)
    if before is not None:
        mask = probe.mask[:, 1:]
        changes = before - opinions(reference, None, probe)
        reference.rounding = changes.new_zeros(mask.shape).masked_scatter(mask, changes), mask


def comparable_model(config: RunConfig, base: Base, dtype: torch.dtype) -> PreTrainedModel:
    """`reference.model` as it is stored, in `dtype`; ValueError where KL to it is not defined."""
    model, tokenizer = _read(config, dtype)
    _require_comparable(config, base, model, tokenizer)
    return model


def _require_comparable(config: RunConfig, base: Base, model: PreTrainedModel, tokenizer: Any) -> None:
    _require_same_vocabulary(config, base.tokenizer, tokenizer)
    _require_rows(config, embedding_rows(model), len(base.policy.head.weight))
    if layout_of(model).learned_positions:
        require_positions(config, model.config.max_position_embeddings)


def _require_rows(config: RunConfig, theirs: int, actors: int) -> None:
    """Rows beyond the vocabulary fill the embedding up: the actor can still sample those that it has."""
    full = config.ppo.kl_estimator == "full"
    if theirs < actors or (full and theirs > actors):
        allowed = "exactly" if full else "at least"
        raise ValueError(
            f"reference.model: {config.reference.model!r} has logits for {theirs:,} ids, the actor for {actors:,}; "
            f"allowed with ppo.kl_estimator = {config.ppo.kl_estimator!r}: {allowed} as many; try another size of the "
            "family"
        )


def _require_same_vocabulary(config: RunConfig, actors: Any, references: Any) -> None:
    """KL compares probabilities of the same tokens, so every id must be the same text to both."""
    if (found := vocabulary_difference(actors, references)) is not None:
        raise ValueError(
            f"reference.model: {config.reference.model!r} has another vocabulary than model.path = "
            f"{config.model.path!r} ({found}), and a KL needs the same tokens; try a model of the actor's family, or "
            "score by it: reward.source = 'model'"
        )
