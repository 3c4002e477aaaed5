"""A trunk that actor and critic train together: its gradient, who moves it and when, and who never sees it move."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fourfold.algorithms.masking import position_ids
from fourfold.batch import Experience
from fourfold.errors import Interrupted
from fourfold.memory.budget import BatchSizes
from fourfold.models.loading import load_base
from fourfold.models.roles import Activations, checksum
from fourfold.models.split import layout_of
from fourfold.training.folder import RunFolder
from fourfold.training.learner import Learner, TrunkLearner
from fourfold.training.results import export_actor, load_actor, load_reference
from fourfold.training.trainer import Trainer
from fourfold.training.update import Learned, update
from training.runs import (
    Tree,
    by_function,
    by_model,
    give_value_head,
    interrupt_at,
    make_config,
    make_experience,
    make_trainer,
    merged,
    outcome,
    run,
    settings,
    steps_of,
    weights_of,
)

TRAINED: Tree = {"train": True, "lr_scale": 0.5}


def trainer_for(
    folder: Path, trunk: Tree | None = None, *, family: str = "llama", more: Tree | None = None, **ppo: Any
):
    """A trainer before its first step, over a trained trunk of 2 layers; its values differ."""
    changes = merged(by_function("pays_by_hash", **ppo), {"trunk": TRAINED | (trunk or {})})
    trainer = make_trainer(make_config(settings(folder, merged(changes, more or {}), family=family)))
    give_value_head(trainer.models)
    return trainer


class Recording:
    """An optimizer that keeps each step's gradients, in float64 and flat, and moves nothing."""

    learning_rate = 0.0

    def __init__(self, name: str, module: nn.Module, log: list[str]) -> None:
        self.name, self.module, self.log = name, module, log
        self.gradients: list[Tensor] = []

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> float:
        self.log.append(self.name)
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([g.flatten().double() for g in found]))
        self.discard()
        return 0.0

    def discard(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def state_bytes(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("an update never restores an optimizer")


@dataclass
class Recorded:
    """The gradients of an update, whose turns they were in, and what was learned."""

    trunk: list[Tensor]
    actor: list[Tensor]
    critic: list[Tensor]
    log: list[str]
    learned: Learned


def record(trainer: Trainer, experience: Experience, activations: Activations, **ppo: Any) -> Recorded:
    """An update that moves nothing."""
    models, log, given = trainer.models, list[str](), trainer.learner.trunk
    assert given is not None and models.trunk is not None
    optimizers = [
        Recording(name, module, log)
        for name, module in (("actor", models.actor), ("critic", models.critic), ("trunk", models.trunk))
    ]
    actor, critic, trunk = optimizers
    learner = Learner(models.actor, models.critic, actor, critic, replace(given, optimizer=trunk))
    changed = trainer.config.ppo.model_copy(update=ppo)
    learned = update(learner, experience, activations, changed, temperature=1.0, seed=1)
    return Recorded(trunk.gradients, actor.gradients, critic.gradients, log, learned)


def disturbed(experience: Experience) -> Experience:
    """As if the policy and the critic had moved since sampling: ratios and values are not those of the start."""
    generator = torch.Generator().manual_seed(3)
    noise = [0.3 * torch.randn(experience.log_probs.shape, generator=generator) for _ in range(2)]
    return replace(experience, log_probs=experience.log_probs + noise[0], values=experience.values + noise[1])


class Composed:
    """The same roles as one plain transformers model: before the first step their layers are the base's."""

    def __init__(self, trainer: Trainer) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(trainer.config.model.path, dtype=torch.float32).eval()
        self.trainer = trainer
        layout = layout_of(self.model)
        body = getattr(self.model, layout.body)
        lower = getattr(body, layout.layers)[: trainer.models.base.trunk.num_layers]
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
        float(cosines.square().mean()), rel=1e-4
    )
    assert penalties[-1] < 0.5 * penalties[0]


def moved(trainer: Trainer, experience: Experience, activations: Activations) -> dict[str, Tensor]:
    """The trunk and the actor after an update."""
    update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=1)
    assert trainer.models.trunk is not None
    return weights_of(trainer.models.trunk) | weights_of(trainer.models.actor)


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


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_reference_and_reward_keep_the_trunk_of_step_0(tmp_path: Path, compute: str) -> None:
    """FAULTS A1, A2: before the first step ratio 1 and KL 0 to the bit; after some, not a bit of theirs has moved."""
    tree = settings(tmp_path, merged(by_function("pays_by_hash", kl_estimator="full"), {"trunk": TRAINED}))
    tree = by_model(merged(tree, {"precision": {"compute": compute}}), tmp_path / "reward")
    trainer = make_trainer(make_config(tree))
    give_value_head(trainer.models)
    report = trainer.check()
    assert report.kl_gap_max == 0.0 and report.ratio_gap_max <= (0.0 if compute == "float32" else 0.3)
    models = trainer.models
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    frozen, (scored, _) = models.frozen_checksum(), trainer._score(rollout, activations)
    assert models.trunk is not None
    trunk = checksum([models.trunk])
    rows = [trainer.step() for _ in range(2)]
    assert models.frozen_checksum() == frozen and checksum([models.trunk]) != trunk
    again, _ = trainer._score(rollout, activations)
    assert torch.equal(again.ref_log_probs, scored.ref_log_probs) and torch.equal(again.scores, scored.scores)
    assert not torch.equal(again.values, scored.values)
    assert 0 < rows[0]["trunk_drift"] < rows[1]["trunk_drift"] < 0.1
    assert rows[1]["trunk_learning_rate"] == 0.5 * rows[1]["actor_learning_rate"]


def test_while_the_critic_warms_up_the_trunk_does_not_move(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, more={"critic": {"warmup_rollouts": 1}})
    first, second = trainer.step(), trainer.step()
    assert first["trunk_drift"] == 0.0 < second["trunk_drift"] and "trunk_grad_norm" not in first
    assert first["trunk_backward_passes"] == 0 < second["trunk_backward_passes"]


def test_a_step_that_target_kl_drops_is_dropped_for_the_trunk_too(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, target_kl=0.0)
    row = trainer.step()
    assert row["early_stopped"] == 1 and row["trunk_drift"] == 0.0 and row["critic_optimizer_steps"] == 1
    assert trainer.models.trunk is not None and trainer.learner.trunk is not None
    assert all(p.grad is None for p in trainer.models.trunk.parameters()) and trainer.learner.trunk.gradients.bytes == 0


@pytest.mark.parametrize("broken_part", ["actor", "trunk"])
def test_a_pass_that_runs_out_of_memory_is_done_again(tmp_path: Path, broken_part: str) -> None:
    """In the second mini-batch: the update is bit for bit that of a run that takes fewer rows from there on."""
    ppo = {"micro_batch_size": 4, "num_epochs": 1}
    broken, smaller = (trainer_for(tmp_path, {"balance": "grad_norm"}, **ppo) for _ in range(2))
    experience, activations = make_experience(broken)
    calls = itertools.count()
    part = broken.models.trunk if broken_part == "trunk" else broken.models.actor.branch
    assert part is not None

    def fail(gradient: Tensor) -> None:
        raise MemoryError

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if next(calls) >= 1 and len(output) > 2:
            output.register_hook(fail)

    part.register_forward_hook(hook)
    ours = moved(broken, experience, activations)
    assert broken.learner.trunk is not None and broken.learner.trunk.gradients.bytes == 0

    plain = smaller.models.actor.branch.forward
    seen = itertools.count()

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        next(seen)
        return plain(*args, **kwargs)

    smaller.models.actor.branch.forward = noted  # pyright: ignore[reportAttributeAccessIssue]
    sizes = BatchSizes.of(smaller.config.ppo)
    real = sizes.actor.fitting
    turns = itertools.count()

    def from_the_second(*args: Any) -> Any:
        sizes.actor.size = 4 if next(turns) == 0 else 2
        return real(*args)

    sizes.actor.fitting = from_the_second  # pyright: ignore[reportAttributeAccessIssue]
    update(smaller.learner, experience, activations, smaller.config.ppo, temperature=1.0, seed=1, sizes=sizes)
    assert next(seen) == 3, "one pass over 4 rows, two over 2"
    assert smaller.models.trunk is not None
    theirs = weights_of(smaller.models.trunk) | weights_of(smaller.models.actor)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(name: str) -> Tree:
        changes = {"output": str(tmp_path / name), "trunk": TRAINED | {"decoupling": 0.1}, "checkpoint": {"every": 2}}
        return settings(tmp_path, merged(by_function("pays_and_interrupts", steps=4, schedule="linear"), changes))

    interrupt_at(0, "SIGINT")
    run(tree("undisturbed"))
    interrupt_at(15, "SIGINT")  # calls are micro-batches: 1 in pre-flight, 4 before, 4 a step
    with pytest.raises(Interrupted, match="stopped after step 3 of 4"):
        run(tree("stopped"))
    interrupt_at(0, "SIGINT")
    monkeypatch.delenv("INTERRUPT_AT_CALL")
    run(tree("stopped"))
    expected, found = outcome(tmp_path / "undisturbed"), outcome(tmp_path / "stopped")
    assert "trunk_optimizer" in "".join(expected) and any(name.startswith("actor/trunk.") for name in expected)
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize(("family", "own"), [("llama", 1), ("gpt2", 0)])
def test_what_is_paid_for_becomes_likely_and_is_exported(tmp_path: Path, family: str, own: int) -> None:
    """A known answer; and the exported folder's logits are those of the trained trunk with the actor above it."""
    ppo = {
        "steps": 12, "rollout_batch_size": 32, "mini_batch_size": 16, "micro_batch_size": 16,
        "learning_rate": 1e-2, "kl_coef": 0.01,
    }  # fmt: skip
    trunk = {"train": True, "branch_layers": own, "lr_scale": 0.3, "balance": "grad_norm"}
    changes = merged(by_function("pays_for_a", **ppo), {"critic": {"learning_rate": 5e-3}, "trunk": trunk})
    changes = merged(changes, {"sampling": {"extra_eos_token_ids": None}, "checkpoint": {"every": 12}})
    tree = settings(tmp_path, changes, family=family)
    summary = run(tree)
    assert summary["after"]["score_mean"] > 2 * summary["before"]["score_mean"] > 0
    assert summary["before"]["kl_per_sequence"] == 0.0 < summary["after"]["kl_per_sequence"]

    config, folder = make_config(tree), RunFolder(tmp_path / "run")
    base = load_base(config)
    assert load_reference(config, base, folder).trunk is None, "the reference reads the trunk as it was loaded"
    actor = load_actor(config, base, folder, best=False)
    out = export_actor(str(folder.root), str(tmp_path / "out"), dtype="float32", best=False)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    original = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 9, 33, 60, 12], [7, 8, 90, 41, 3]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        expected = actor.head.logits(actor.through(Activations(ids, mask))[mask], torch.float32)
        torch.testing.assert_close(exported(input_ids=ids).logits[mask], expected, rtol=1e-4, atol=1e-4)
    layout = layout_of(exported)
    lowest = f"{layout.body}.{layout.layers}.0."
    stored = load_file(folder.model("ppo") / "model.safetensors")
    for name, tensor in exported.state_dict().items():
        if name.startswith(lowest) and tensor.ndim > 1:
            key = "trunk.body." + name.removeprefix(f"{layout.body}.")
            assert torch.equal(tensor, stored[key]) and not torch.equal(tensor, original.state_dict()[name])


def test_who_holds_what(tmp_path: Path) -> None:
    """The trained trunk is a copy of the layers; the frozen one shares its embedding and is there once, too."""
    models = trainer_for(tmp_path).models
    base, trunk = models.base.trunk, models.trunk
    assert base is not None and trunk is not None
    assert models.actor.trunk is models.critic.trunk is trunk and models.reference.trunk is base
    shared = {id(p) for p in base.parameters()} & {id(p) for p in trunk.parameters()}
    assert shared == {id(p) for p in trunk.parameters() if not p.requires_grad} and len(shared) == 1
    assert all(p.dtype == torch.float32 for p in trunk.parameters() if p.requires_grad)
    for role in (models.actor, models.critic, models.reference):
        assert not {id(p) for p in role.branch.parameters()} & {id(p) for p in trunk.parameters()}
    sizes = {name: sum(p.numel() for p in parameters) for name, parameters in models.shared_parameters().items()}
    layers = sum(p.numel() for layer in base.layers for p in layer.parameters())
    assert sizes["trained trunk"] == layers and not math.isnan(sizes["trunk"])


def test_a_run_needs_a_trunk_of_its_own_only_where_it_is_trained(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(settings(tmp_path, by_function("pays_by_hash", steps=1))))
    [row] = steps_of(trainer)
    assert trainer.models.trunk is None and trainer.learner.trunk is None
    assert not [name for name in row if name.startswith("trunk_") and "grad" in name]
    assert isinstance(trainer_for(tmp_path / "other").learner.trunk, TrunkLearner)
