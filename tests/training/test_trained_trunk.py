"""A trunk that actor and critic train together: its gradient, and who moves it when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fourfold.algorithms.masking import position_ids
from fourfold.batch import Experience
from fourfold.config.describe import all_settings
from fourfold.diagnostics.metrics import METRICS
from fourfold.models.roles import checksum
from fourfold.models.split import layout_of
from fourfold.training.trainer import Trainer
from fourfold.training.update import update
from training.runs import Tree, make_experience
from training.trained_trunk import disturbed, moved, record, trainer_for


class Composed:
    """The same roles as one plain transformers model: before the first step their layers are the base's."""

    def __init__(self, trainer: Trainer) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(trainer.config.model.path, dtype=torch.float32).eval()
        self.trainer = trainer
        layout = layout_of(self.model)
        body = getattr(self.model, layout.body)
        assert trainer.models.trunk is not None
        lower = getattr(body, layout.layers)[: trainer.models.trunk.num_layers]
        self.trunk = [p for layer in lower for p in layer.parameters()]
        self.norm = getattr(body, layout.norm)

    def losses(self, experience: Experience) -> tuple[Tensor, Tensor, Tensor]:
        """Policy loss, value loss and penalty, token means, by the formulas of the papers."""
        e, critic = experience, self.trainer.models.critic
        ids, mask, start = e.sequences, e.attention_mask, e.prompt_length - 1
        out = self.model(
            input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), output_hidden_states=True
        )
        chosen = e.response_mask
        log_p = out.logits.log_softmax(-1).gather(2, ids[:, 1:, None].expand(-1, -1, 1))[:, start:, 0]
        ratio = (log_p - e.log_probs).exp()[chosen]
        advantages = e.advantages[chosen]
        policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        hidden = out.hidden_states[-1][:, start:-1][chosen]
        values = hidden @ critic.head.linear.weight[0] + critic.head.linear.bias
        old, returns = e.values[chosen], e.returns[chosen]
        clipped = old + (values - old).clamp(-0.2, 0.2)
        value = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy, value, hidden

    def gradient(self, loss: Tensor) -> Tensor:
        """Of the lower layers, flat."""
        found = torch.autograd.grad(loss, self.trunk, retain_graph=True)
        return torch.cat([g.flatten().double() for g in found])


PLAIN: Tree = {"num_epochs": 2, "mini_batch_size": 8, "micro_batch_size": 3, "entropy_coef": 0.0, "kl_coef": 0.0}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("own", [2, 0])
def test_the_trunks_gradient_is_that_of_one_plain_model(tmp_path: Path, family: str, own: int) -> None:
    """Apart in the first epoch, in one product in the second: both equal autograd of policy loss + s x value loss.

    Norms and cosine are those of two backward passes through all of it.
    """
    trainer = trainer_for(tmp_path, {"branch_layers": own, "critic_grad_scale": 0.7}, family=family)
    experience, activations = make_experience(trainer)
    assert activations.inputs.dtype == torch.int64, "nothing below a trained trunk is cached"
    experience = disturbed(experience)
    recorded = record(trainer, experience, activations, **PLAIN)
    composed = Composed(trainer)
    policy, value, _ = composed.losses(experience)
    a, c = composed.gradient(policy), composed.gradient(value)
    assert len(recorded.trunk) == 2
    for found in recorded.trunk:
        torch.testing.assert_close(found, a + 0.7 * c, rtol=1e-4, atol=1e-5 * float(c.abs().max()))
    metrics = recorded.learned.metrics
    assert metrics["trunk_actor_grad_norm"] == pytest.approx(float(a.norm()), rel=1e-4)
    assert metrics["trunk_critic_grad_norm"] == pytest.approx(float(c.norm()), rel=1e-4)
    assert metrics["trunk_gradient_cosine"] == pytest.approx(float(a @ c / a.norm() / c.norm()), abs=1e-4)
    assert metrics["policy_loss_per_token"] == pytest.approx(policy.item(), rel=1e-4)
    assert metrics["value_loss_per_token"] == pytest.approx(value.item(), rel=1e-4)


def test_balanced_the_critics_gradient_has_its_share_of_the_actors_norm(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, {"critic_grad_scale": 0.25, "balance": "grad_norm"})
    experience, activations = make_experience(trainer)
    experience = disturbed(experience)
    recorded = record(trainer, experience, activations, **PLAIN)
    composed = Composed(trainer)
    a, c = (composed.gradient(loss) for loss in composed.losses(experience)[:2])
    for found in recorded.trunk:
        torch.testing.assert_close(found, a + 0.25 * a.norm() / c.norm() * c, rtol=1e-3, atol=1e-4)
    scale = recorded.learned.metrics["trunk_critic_scale_mean"]
    assert scale == pytest.approx(0.25 * float(a.norm() / c.norm()), rel=1e-4)


def test_the_penalty_pulls_the_features_of_the_two_heads_apart(tmp_path: Path) -> None:
    """Autograd through both branches at once gives what each branch got by itself; steps make the penalty smaller."""
    trainer = trainer_for(
        tmp_path, {"decoupling": 2.0, "critic_grad_scale": 1.0}, more={"critic": {"learning_rate": 1e-2}}
    )
    models = trainer.models
    assert models.trunk is not None
    with torch.no_grad():  # at a cosine of 1, where a critic made from the actor starts, the penalty has no slope
        for number, p in enumerate(models.critic.branch.parameters()):
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    experience, activations = make_experience(trainer)
    nothing = torch.zeros_like(experience.advantages)
    experience = replace(experience, advantages=nothing, returns=experience.values)
    recorded = record(trainer, experience, activations, **PLAIN)

    states, chosen = activations.states(), experience.response_mask
    hidden = models.trunk(states.inputs, states.mask)
    x, y = (
        role.branch(hidden, states.mask)[:, experience.prompt_length - 1 :][chosen]
        for role in (models.actor, models.critic)
    )
    cosines = (x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1)
    (2.0 * cosines.square().mean()).backward()
    expected = torch.cat([p.grad.flatten().double() for p in models.trunk.parameters() if p.grad is not None])
    for module in (models.trunk, models.actor, models.critic):
        module.zero_grad(set_to_none=True)
    assert float(expected.norm()) > 0.1
    for found in recorded.trunk:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    penalties = [
        update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=n).metrics[
            "trunk_decoupling_penalty"
        ]
        for n in range(6)
    ]
    assert recorded.learned.metrics["trunk_decoupling_penalty"] == pytest.approx(
        cosines.square().mean().item(), rel=1e-4
    )
    assert penalties[-1] < 0.5 * penalties[0]


def test_with_a_scale_of_0_the_critic_moves_no_bit_of_the_trunk(tmp_path: Path) -> None:
    """FAULTS E8: the update is that of the policy alone, which the actor's turns of an alternating run take."""
    detached = trainer_for(tmp_path, {"critic_grad_scale": 0.0}, clip_eps=0.5)
    experience, activations = make_experience(detached)
    found = moved(detached, experience, activations)
    nonsense = replace(experience, returns=100.0 + 50.0 * torch.randn_like(experience.returns))
    other = moved(trainer_for(tmp_path, {"critic_grad_scale": 0.0}, clip_eps=0.5), nonsense, activations)
    assert all(torch.equal(found[name], other[name]) for name in found)

    alone = trainer_for(tmp_path, {"alternate": 1}, clip_eps=0.5)
    assert alone.learner.trunk is not None
    actors = replace(alone.learner.trunk, settings=alone.config.trunk.model_copy(update={"alternate": 0}))
    policy_only = replace(alone.learner, trunk=replace(actors, settings=_ActorsTurn()))
    alone.learner = policy_only
    pure = moved(alone, experience, activations)
    assert all(torch.equal(found[name], pure[name]) for name in found)
    attached = moved(trainer_for(tmp_path, {"critic_grad_scale": 0.5}, clip_eps=0.5), experience, activations)
    assert any(not torch.equal(found[name], attached[name]) for name in found)


class _ActorsTurn:
    """Settings of a trunk that only the actor ever learns over."""

    decoupling = 0.0

    def turn(self, index: int) -> str:
        return "actor"


def test_turns_are_taken_as_the_settings_say(tmp_path: Path) -> None:
    """Four mini-batches of 2 rows an epoch, three epochs, turns of 3: by hand, from the critic's on in any rollout."""
    trainer = trainer_for(tmp_path, {"alternate": 3})
    experience, activations = make_experience(trainer)
    ppo = {"num_epochs": 3, "mini_batch_size": 2, "micro_batch_size": 1}
    critics, actors = ["critic"] * 3, ["actor", "trunk"] * 3
    for _ in range(2):
        recorded = record(trainer, experience, activations, **ppo)
        assert recorded.log == critics + actors + critics + actors
        assert "trunk_gradient_cosine" not in recorded.learned.metrics, "one gradient has no angle"
    assert "none under `trunk.alternate`" in METRICS["ppo_step"]["trunk_gradient_cosine"].denominator
    assert "their cosine is not logged" in all_settings()["trunk.alternate"].description
    config = trainer.config.model_copy(update={"ppo": trainer.config.ppo.model_copy(update=ppo | {"steps": 5})})
    assert config.optimizer_steps == {"actor": 30, "critic": 30}


def test_in_the_critics_turns_the_trunk_stands_still(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, {"alternate": 2})
    experience, activations = make_experience(trainer)
    trainer.config = trainer.config.model_copy(update={"ppo": trainer.config.ppo.model_copy(update={"num_epochs": 1})})
    assert trainer.models.trunk is not None
    before, critic = checksum([trainer.models.trunk, trainer.models.actor]), checksum([trainer.models.critic])
    update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=1)  # two mini-batches
    assert checksum([trainer.models.trunk, trainer.models.actor]) == before
    assert checksum([trainer.models.critic]) != critic
