"""A frozen role that computes on the host: a copy of all it reads is there, and it says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.diagnostics.tables import role_rows
from fourfold.models.residency import HOST, HostResidency, place
from fourfold.models.roles import Activations, Scorer, checksum
from fourfold.training.trainer import Trainer
from training.runs import SHARINGS, by_function, by_model, make_config, make_trainer, merged, settings


def trainer_of(folder: Path, sharing: str, changes: dict[str, Any]) -> Trainer:
    tree = settings(folder, merged(by_function("pays_by_hash", steps=1), SHARINGS[sharing]))
    return make_trainer(make_config(merged(by_model(tree, folder / "scorer"), changes)))


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_role_on_the_host_shares_nothing_and_says_the_same(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host stands for itself here: a run on the CPU refuses 'cpu', but the mechanism asks for no device."""
    trainer = trainer_of(tmp_path, sharing, {})
    models = trainer.models
    assert isinstance(models.reward, Scorer)
    before = [checksum([role]) for role in (models.reference, models.reward, models.actor)]
    heads = (models.actor.head, models.actor.head.weight)
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    expected, _ = trainer._score(rollout, activations)

    for role in (models.reference, models.reward):
        place(role, "cpu", models.own_parameters(role), tmp_path / "unused")
        assert isinstance(role.residency, HostResidency) and not any(p.requires_grad for p in role.parameters())
        others = (models.base.trunk, models.actor, models.critic)
        shared = {p.data_ptr() for module in others if module is not None for p in module.parameters()}
        # On the CPU itself a copy to the host is the tensor that was there; its parameter is another one all the same.
        held = {id(p) for module in others if module is not None for p in module.parameters()}
        assert not held & {id(p) for p in role.parameters()}
        assert sharing == "none" or shared & {p.data_ptr() for p in role.parameters()} or role is models.reward
    assert (models.actor.head, models.actor.head.weight) == heads, "the actor's head is where it was"
    assert [checksum([role]) for role in (models.reference, models.reward, models.actor)] == before

    moved: list[torch.device] = []
    to = Activations.to
    monkeypatch.setattr(Activations, "to", lambda self, device: moved.append(device) or to(self, device))
    scored, _ = trainer._score(rollout, activations)
    assert moved == [HOST] * 8, "both roles' four micro-batches"
    for name in ("ref_log_probs", "kl", "values", "scores"):
        assert torch.equal(getattr(scored, name), getattr(expected, name)), name
    taken = models.reference.residency.take() if models.reference.residency is not None else {}
    assert taken["pass_seconds"] > 0 and taken["moved_bytes"] == 0
    rows = {row.model: row for row in role_rows(models)}
    assert rows["reference"].device == rows["reward"].device == "cpu, computes there"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_below_a_gpu_scores_are_the_same_but_for_rounding(tmp_path: Path, sharing: str, overlap: bool) -> None:
    away = {"reference": {"residency": "cpu"}, "reward": {"residency": "cpu"}}
    changes = {"system": {"device": "cuda"}, "sampling": {"batch_size": 3}}
    plain = trainer_of(tmp_path, sharing, changes)
    trainer = trainer_of(tmp_path, sharing, merged(merged(changes, away), {"sampling": {"overlap_scoring": overlap}}))
    assert {p.device.type for p in trainer.models.reference.parameters()} == {"cpu"}
    assert {p.device.type for p in trainer.models.actor.parameters()} == {"cuda"}
    found = []
    for each in (plain, trainer):
        rollout, activations = each.sampler.generate(each.prompts.batch(0), policy_version=0)
        found.append(each._score(rollout, activations)[0])
    assert torch.equal(found[0].sequences, found[1].sequences)
    for name in ("ref_log_probs", "scores"):
        assert torch.allclose(getattr(found[0], name), getattr(found[1], name), atol=1e-3), name
    trainer.step()
