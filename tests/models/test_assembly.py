"""Where each of the four roles takes its weights from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.models.assembly import FourModels, assemble, record_for, set_new_head_bias
from fourfold.models.loading import Base
from fourfold.models.roles import Policy, Scorer, checksum
from fourfold.models.storage import save_role
from tiny import tiny_directory
from tiny_roles import MODES, activations_of, tiny_base, tiny_config, tiny_rollout


def shaken(role: Policy | Scorer, seed: int, *, head: bool) -> Policy | Scorer:
    """The role with other weights: what a stage has trained."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for part in (role.branch, role.head) if head else (role.branch,):
            for tensor in part.parameters():
                tensor.add_(0.05 * torch.randn_like(tensor))
    return role


class Stages:
    """A base on disk and what sft and reward have made of it."""

    def __init__(self, path: Path, mode: str, family: str = "llama") -> None:
        self.path, self.mode = path, mode
        tiny_directory(path / "m", family)
        config = tiny_config(path / "m", mode)
        self.sft = shaken(self.base().new_policy(), 1, head=mode == "none")
        self.reward = shaken(self.base().new_scorer(), 2, head=True)
        assert isinstance(self.reward, Scorer)
        self.reward.head.scale.fill_(0.5)
        self.reward.head.shift.fill_(0.25)
        save_role(path / "sft", self.sft, record_for(config, "policy"))
        save_role(path / "reward", self.reward, record_for(config, "scorer"))

    def base(self) -> Base:
        return tiny_base(self.path / "m", mode=self.mode)

    def assemble(self, init: str, *, sft: bool = True, reward: bool = True, **critic: Any) -> FourModels:
        named = {f"critic__{name}": value for name, value in critic.items()}
        config = tiny_config(self.path / "m", self.mode, critic__init=init, **named)
        return assemble(
            config, self.base(), self.path / "sft" if sft else None, self.path / "reward" if reward else None
        )


def storages(module: nn.Module) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers()) if t.numel()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("init", ["reward", "actor", "base"])
def test_the_critic_starts_from_the_named_source(tmp_path: Path, mode: str, init: str) -> None:
    """FAULTS E6, E11: from the reward model with its head; from actor and base with a new, zero head."""
    stages = Stages(tmp_path, mode)
    models = stages.assemble(init)
    sources = {"reward": stages.reward.branch, "actor": stages.sft.branch, "base": stages.base().policy.branch}
    sums = {name: checksum([source]) for name, source in sources.items()}
    assert len(set(sums.values())) == 3, "the sources must differ for this test to mean anything"
    assert checksum([models.critic.branch]) == sums[init]
    if init == "reward":
        assert checksum([models.critic.head]) == checksum([stages.reward.head])
    else:
        assert not any(p.any() for p in models.critic.head.parameters())
        assert (float(models.critic.head.scale), float(models.critic.head.shift)) == (1.0, 0.0)
    assert models.reward is not None
    assert checksum([models.reward]) == checksum([stages.reward])
    for other in (models.reward, models.actor, models.reference):
        assert not storages(models.critic) & storages(other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sft", [True, False])
def test_actor_and_reference_start_as_the_sft_model_or_the_base(tmp_path: Path, mode: str, sft: bool) -> None:
    """FAULTS D2 (its kind): the reference is the actor as it was at step 0."""
    stages = Stages(tmp_path, mode)
    models = stages.assemble("reward", sft=sft)
    source = stages.sft if sft else stages.base().policy
    assert checksum([models.actor]) == checksum([models.reference]) == checksum([source])
    assert not storages(models.actor.branch) & storages(models.reference.branch)
    with torch.no_grad():
        next(iter(models.actor.branch.parameters())).add_(1.0)
    assert checksum([models.reference]) == checksum([source])


def test_a_critic_from_the_reward_model_says_what_the_reward_model_says(tmp_path: Path) -> None:
    models = Stages(tmp_path, "trunk").assemble("reward")
    rollout = tiny_rollout([(3, 4), (5, 2)])
    activations = activations_of(models.base, rollout)
    assert isinstance(models.reward, Scorer)
    with torch.no_grad():
        scores = models.reward.scores(activations)
        assert torch.equal(models.critic.scores(activations), scores)
        torch.testing.assert_close(models.critic.values_and_last(activations, rollout)[1], scores)
        assert scores.abs().min() > 1e-3


def test_a_critic_from_a_reward_model_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"critic.init = 'reward' needs a reward model.*try critic.init = \"actor\""):
        Stages(tmp_path, "trunk").assemble("reward", reward=False)


@pytest.mark.parametrize("init", ["actor", "base"])
def test_a_run_without_a_reward_model_has_three_models(tmp_path: Path, init: str) -> None:
    models = Stages(tmp_path, "trunk").assemble(init, reward=False)
    assert models.reward is None
    assert not storages(models.critic) & storages(models.actor)
    assert all(len(text) == 32 for text in models.frozen_checksums().values())


def test_a_role_of_another_cut_is_refused(tmp_path: Path) -> None:
    stages = Stages(tmp_path, "trunk")
    config = tiny_config(tmp_path / "m", trunk__branch_layers=3)
    with pytest.raises(ValueError, match=r"made with branch_layers = 2, this run has 3"):
        assemble(config, stages.base(), tmp_path / "sft", tmp_path / "reward")


@pytest.mark.parametrize("mode", MODES)
def test_frozen_roles_of_bfloat16_weights_take_half_the_memory(tmp_path: Path, mode: str) -> None:
    """A model as it is published: the reference holds it as published, the actor holds float32 masters."""
    tiny_directory(tmp_path / "m", "llama", dtype=torch.bfloat16)
    models = assemble(
        tiny_config(tmp_path / "m", mode, critic__init="actor"), tiny_base(tmp_path / "m", mode=mode), None, None
    )
    for role, dtype in ((models.reference, torch.bfloat16), (models.actor, torch.float32)):
        assert {p.dtype for p in role.branch.parameters() if p.ndim >= 2} == {dtype}
    rollout = tiny_rollout([(3, 4), (5, 2)])
    activations = activations_of(models.base, rollout)
    actor, reference = (role.log_probs(activations, rollout, 1.0)[0] for role in (models.actor, models.reference))
    assert torch.equal(actor, reference)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_trained_is_float32_and_train_mode_is_on(tmp_path: Path, mode: str) -> None:
    models = Stages(tmp_path, mode).assemble("reward")
    for role in (models.actor, models.critic):
        trained = [p for p in role.parameters() if p.requires_grad]
        assert trained and all(p.dtype == torch.float32 for p in trained)
    assert models.actor.head.weight.requires_grad == (mode == "none")
    assert models.reward is not None
    assert not any(p.requires_grad for role in (models.reference, models.reward) for p in role.parameters())
    assert all(role.training for role in (models.actor, models.critic, models.reference, models.reward))


@pytest.mark.parametrize("mode", MODES)
def test_the_frozen_checksum_watches_trunk_reference_and_reward(tmp_path: Path, mode: str) -> None:
    """FAULTS D6 (its kind)."""
    models = Stages(tmp_path, mode).assemble("reward")
    before = models.frozen_checksums()
    with torch.no_grad():
        for free in (models.actor.branch, models.critic):
            for parameter in free.parameters():
                parameter.add_(1.0)
        assert models.frozen_checksums() == before
        watched = [part for part in (models.base.trunk, models.reference, models.reward) if part is not None]
        for part in watched:
            for tensor in (next(iter(part.parameters())), list(part.parameters())[-1]):
                kept = tensor.flatten()[0].clone()
                tensor.view(-1)[0] += 0.5
                assert models.frozen_checksums() != before
                tensor.view(-1)[0] = kept
                assert models.frozen_checksums() == before
        assert isinstance(models.reward, Scorer)
        models.reward.head.shift += 0.5
        assert models.frozen_checksums() != before


def test_a_new_value_head_starts_at_the_mean_score(tmp_path: Path) -> None:
    models = Stages(tmp_path, "trunk").assemble("actor")
    set_new_head_bias(models.critic, torch.tensor(0.75))
    rollout = tiny_rollout([(3, 4), (5, 2)])
    values, last = models.critic.values_and_last(activations_of(models.base, rollout), rollout)
    assert set(values[rollout.response_mask].tolist()) == {0.75} == set(last.tolist())
