"""Runs over a trained trunk: who never sees it move, what a run carries on, and what comes out of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fourfold.diagnostics.tables import role_rows
from fourfold.errors import Interrupted
from fourfold.memory.budget import BatchSizes
from fourfold.models.loading import load_base
from fourfold.models.roles import Activations, checksum
from fourfold.models.split import layout_of
from fourfold.planner.advice import TRAINED_TRUNK
from fourfold.training.folder import RunFolder
from fourfold.training.learner import TrunkLearner
from fourfold.training.results import export_actor, load_actor, load_reference, sample_beside_reference
from fourfold.training.update import update
from tiny import FAMILIES
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
from training.trained_trunk import TRAINED, moved, trainer_for


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
    frozen, (scored, _) = models.frozen_checksums(), trainer._score(rollout, activations)
    assert models.trunk is not None
    trunk = checksum([models.trunk])
    rows = [trainer.step() for _ in range(2)]
    assert models.frozen_checksums() == frozen and checksum([models.trunk]) != trunk
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
    ppo: Tree = {"micro_batch_size": 4, "num_epochs": 1}
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
    [(_, before, after)] = sample_beside_reference(
        str(folder.root),
        prompts=["the film"],
        chat=False,
        count=1,
        max_new_tokens=8,
        temperature=None,
        seed=0,
        best=False,
    )
    assert after.count("a") > before.count("a")
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_share_all_its_layers(tmp_path: Path, family: str) -> None:
    """A branch without layers has no cache of its own; decoding gives what one pass over the finished rows does."""
    trainer = trainer_for(tmp_path, {"branch_layers": 0}, family=family)
    report = trainer.check()
    assert report.ratio_gap_max == report.kl_gap_max == 0.0 and report.sampler_gap_max < 1e-4
    assert {name for name, p in trainer.models.actor.named_parameters() if p.requires_grad} == {
        name for name in weights_of(trainer.models.actor) if "norm" in name or "ln_f" in name
    }


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
    assert sizes["trained trunk"] == layers


def test_a_run_needs_a_trunk_of_its_own_only_where_it_is_trained(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(settings(tmp_path, by_function("pays_by_hash", steps=1))))
    [row] = steps_of(trainer)
    assert trainer.models.trunk is None and trainer.learner.trunk is None
    assert not [name for name in row if name.startswith("trunk_") and "grad" in name]
    assert isinstance(trainer_for(tmp_path / "other").learner.trunk, TrunkLearner)


@pytest.mark.parametrize("trunk", [{}, {"alternate": 1}])
def test_what_a_run_plans_to_hold_is_what_it_holds(tmp_path: Path, trunk: Tree) -> None:
    """Weights by name, and the most gradients that are there at once: of the trunk two sets where they are measured."""
    trainer = trainer_for(tmp_path, trunk, num_epochs=1)
    models = trainer.models
    planned = models.base.room(trainer.config).planned
    held = {row.model: row.bytes for row in role_rows(models)}
    assert planned.weights[TRAINED_TRUNK] == held[TRAINED_TRUNK]
    roles = [models.actor.branch, models.critic]
    own = [4 * sum(p.numel() for p in role.parameters() if p.requires_grad) for role in roles]
    together = 2 * held[TRAINED_TRUNK] + sum(own)
    assert planned.gradients == pytest.approx(held[TRAINED_TRUNK] + own[0] if trunk else together, rel=0.02)
    most = 0

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal most
        most = max(most, trainer.census.held(0).gradients)

    models.actor.branch.register_forward_hook(look)
    experience, activations = make_experience(trainer)
    update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=0)
    assert 0.98 * (planned.gradients - (own[1] if not trunk else 0)) <= most <= 1.02 * planned.gradients
    assert trainer.census.held(0).trunk_layers == 2
