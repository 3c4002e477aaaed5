"""A step computes in float32 or in bfloat16; what is learned from and what is learned stays float32."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.batch import Experience, Rollout
from fourfold.models.adapters import is_adapter
from fourfold.training import trainer as trainer_module
from fourfold.training.preflight import BOUNDS
from fourfold.training.trainer import Trainer
from training.runs import (
    SHARINGS,
    by_function,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    settings,
    steps_of,
    weights_of,
)

COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trainer_for(folder: Path, family: str, sharing: str, compute: str, **ppo: Any) -> Trainer:
    tree = merged(by_function("pays_by_hash", steps=1, entropy_coef=0.01, **ppo), SHARINGS[sharing])
    # At the default the first steps of a tiny model would overflow.
    precision = {"compute": compute, "loss_scale": 64.0 if compute == "float16" else None}
    trainer = make_trainer(make_config(settings(folder, merged(tree, {"precision": precision}), family=family)))
    give_value_head(trainer.models)
    return trainer


def keep_experience(monkeypatch: pytest.MonkeyPatch) -> list[Experience]:
    """What the learn phase of each step gets, as it is made."""
    kept: list[Experience] = []
    make = trainer_module.estimate_advantages

    def keeping(*args: Any) -> Experience:
        kept.append(make(*args))
        return kept[-1]

    monkeypatch.setattr(trainer_module, "estimate_advantages", keeping)
    return kept


FAMILY_AND_TYPE = [*((family, compute) for family in ("llama", "gpt2") for compute in COMPUTE), ("gpt2", "float16")]


@pytest.mark.parametrize(("family", "compute"), FAMILY_AND_TYPE)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_step_keeps_its_numbers_and_its_masters_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, sharing: str, compute: str
) -> None:
    """FAULTS G1: log-probs, KL, GAE and the optimizer run in float32 whatever the models compute in."""
    trainer = trainer_for(tmp_path, family, sharing, compute)
    models, kept = trainer.models, keep_experience(monkeypatch)
    report = trainer.check()
    assert report.actor_dtype == report.reference_dtype == f"torch.{compute}"
    actor, critic, frozen = weights_of(models.actor), weights_of(models.critic), models.frozen_checksums()
    [row] = steps_of(trainer)

    [experience] = kept
    floats = {f.name: getattr(experience, f.name) for f in fields(experience)}
    floats = {name: tensor for name, tensor in floats.items() if tensor.is_floating_point()}
    assert {"log_probs", "sampler_log_probs", "ref_log_probs", "kl", "values", "advantages", "returns"} <= set(floats)
    for name, tensor in floats.items():
        assert tensor.dtype == torch.float32 and bool(torch.isfinite(tensor).all()), name
    assert all(math.isfinite(value) for value in row.values())
    assert row["actor_optimizer_steps"] == row["critic_optimizer_steps"] == 4

    for role, before in ((models.actor, actor), (models.critic, critic)):
        masters = {name: p for name, p in role.named_parameters() if p.requires_grad}
        assert masters and all(p.dtype == torch.float32 for p in masters.values())
        assert max(float((p.detach() - before[name]).abs().max()) for name, p in masters.items()) > 1e-4
    assert models.frozen_checksums() == frozen
    matrices = [p for name, p in models.reference.named_parameters() if p.ndim >= 2 and not is_adapter(name)]
    assert {p.dtype for p in matrices} == {getattr(torch, compute)}, "what stands still is kept in the compute type"


@pytest.mark.parametrize("sharing", SHARINGS)
def test_bfloat16_really_computes_in_bfloat16_and_stays_within_its_bounds(tmp_path: Path, sharing: str) -> None:
    """The same responses scored in both types: close, not equal; the gaps that pre-flight allows are not those of 1."""
    scored: dict[str, Tensor] = {}
    rollout: Rollout | None = None
    for compute in COMPUTE:
        trainer = trainer_for(tmp_path, "llama", sharing, compute)
        if rollout is None:
            rollout, _ = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
        mask, base = rollout.attention_mask, trainer.models.base
        inputs = rollout.sequences if base.trunk is None else base.trunk(rollout.sequences, mask)
        with torch.no_grad():
            hidden = trainer.models.actor.branch(inputs, mask)
            logits = trainer.models.actor.head.logits(hidden[mask], COMPUTE[compute])
        assert logits.dtype == torch.float32
        scored[compute] = logits.log_softmax(-1)
    gap = (scored["float32"] - scored["bfloat16"]).abs()
    mean_bound, max_bound = BOUNDS[torch.bfloat16].sampler
    assert 1e-4 < float(gap.mean()) < mean_bound and float(gap.max()) < max_bound


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_run_in_bfloat16_starts_at_kl_zero(tmp_path: Path, sharing: str) -> None:
    """Actor and reference compute alike; how far sampler and trainer are apart depends on the processor's kernels."""
    report = trainer_for(tmp_path, "llama", sharing, "bfloat16", micro_batch_size=4).check()
    assert report.sampler_gap_max < BOUNDS[torch.bfloat16].sampler[1]
    assert report.kl_gap_max == 0.0
