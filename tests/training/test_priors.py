"""What the KL is taken to: each prior in every sharing mode, guarded, resumed, and measured beside the step 0."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fourfold.errors import Interrupted, RunFailed
from fourfold.models.priors import MovingReference
from fourfold.models.residency import place
from fourfold.models.storage import own_tensors
from fourfold.tensor_files import read
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.trainer import Trainer
from tiny import VOCABULARY
from tiny_roles import oracle_log_probs
from training.runs import (
    INTERRUPT,
    SHARINGS,
    Tree,
    by_function,
    deterministic,
    interrupt_at,
    make_config,
    make_trainer,
    merged,
    outcome,
    run,
    settings,
    steps_of,
)
from training.served import at_service, hosted_roles, listening

EMA: Tree = {"reference": {"prior": "moving", "decay": 0.7}}
COPY: Tree = {"reference": {"prior": "moving", "copy_every": 2}}
RULES = {"average": EMA, "copy": COPY}


def tree_of(folder: Path, sharing: str, *changes: Tree, function: str = "pays_by_hash", **ppo: Any) -> Tree:
    """The stage ppo alone, with large steps, so that what moves is seen to."""
    tree = merged(by_function(function, **{"learning_rate": 5e-3, "steps": 4} | ppo), SHARINGS[sharing])
    for change in changes:
        tree = merged(tree, change)
    return settings(folder, tree)


def trainer_of(folder: Path, sharing: str, *changes: Tree, **ppo: Any) -> Trainer:
    return make_trainer(make_config(tree_of(folder, sharing, *changes, **ppo)))


def own(trainer: Trainer, role: str) -> dict[str, torch.Tensor]:
    """Copies of a role's own tensors, wherever they lie."""
    shares = trainer.models.base.shares_head
    found = own_tensors(getattr(trainer.models, role), shares_head=shares)
    return {name: read(tensor).clone() for name, tensor in found.items()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_moving_reference_follows_the_actor_by_its_rule(tmp_path: Path, sharing: str, rule: str) -> None:
    """By hand in float64, from the actor's weights after every step; what is shared stays as it was."""
    trainer = trainer_of(tmp_path, sharing, RULES[rule])
    shared = {name: [p.clone() for p in held] for name, held in trainer.models.shared_parameters().items()}
    expected = {name: tensor.double() for name, tensor in own(trainer, "actor").items()}
    for step in range(1, 5):
        row = trainer.step()
        assert (row["kl_per_token_mean"] == pytest.approx(0, abs=1e-6)) == (step == 1 or (rule == "copy" and step == 3))
        actor = own(trainer, "actor")
        for name, tensor in actor.items():
            if rule == "average":
                expected[name] = 0.7 * expected[name] + 0.3 * tensor.double()
            elif step % 2 == 0:
                expected[name] = tensor.double()
        found = own(trainer, "reference")
        assert found.keys() == expected.keys() and found
        for name, tensor in found.items():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-7)
        if rule == "copy" and step % 2 == 0:
            assert all(torch.equal(tensor, actor[name]) for name, tensor in found.items())
    for name, held in trainer.models.shared_parameters().items():
        assert all(torch.equal(p, before) for p, before in zip(held, shared[name], strict=True))


def test_while_the_critic_warms_up_nothing_moves(tmp_path: Path) -> None:
    """An average of equal numbers is that number, to the bit."""
    trainer = trainer_of(tmp_path, "trunk", EMA, {"critic": {"warmup_rollouts": 2}})
    before = own(trainer, "reference")
    trainer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in own(trainer, "reference").items())


@pytest.mark.parametrize("residency", ["park", "stream"])
@pytest.mark.parametrize("rule", RULES)
def test_where_it_lies_makes_no_difference(tmp_path: Path, residency: str, rule: str) -> None:
    """Kept, parked or streamed, it moves and says the same; in bfloat16, where it is float32 all the same."""
    runs = [
        trainer_of(tmp_path / where, "trunk", RULES[rule], {"reference": {"residency": where}}, kl_estimator="k3")
        for where in ("keep", residency)
    ]
    kept, moved = (steps_of(trainer) for trainer in runs)
    names = ("kl_per_token_mean", "kl_step_0_per_sequence_mean", "score_mean", "value_loss_per_token")
    assert [[row[name] for name in names] for row in kept] == [[row[name] for name in names] for row in moved]
    weights = [own(trainer, "reference") for trainer in runs]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert moved[-1]["reference_moved_bytes"] > 0


@pytest.mark.parametrize("sharing", SHARINGS)
def test_on_the_host_below_a_gpu_it_moves_there(tmp_path: Path, sharing: str) -> None:
    """Placed as it would be on a GPU's host: the copies that it has there move, and nothing that others hold."""
    kept, placed = (trainer_of(tmp_path / where, sharing, EMA) for where in ("kept", "placed"))
    models = placed.models
    place(models.reference, "cpu", models.own_parameters(models.reference), tmp_path)
    shares = models.base.shares_head
    models.moving = MovingReference(placed.config.reference, models.actor, models.reference, shares_head=shares)
    for trainer in (kept, placed):
        trainer.step()
        trainer.save(is_best=False)
    found, expected = own(placed, "reference"), own(kept, "reference")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert any(not torch.equal(tensor, own(placed, "actor")[name]) for name, tensor in found.items())


def test_in_half_precision_it_does_not_stand_still(tmp_path: Path) -> None:
    """A hundredth of a small step is lost in bfloat16; weights of float32 have it, and the KL starts at 0."""
    slow: Tree = {"reference": {"prior": "moving", "decay": 0.99}, "precision": {"compute": "bfloat16"}}
    trainer = trainer_of(tmp_path, "trunk", slow, learning_rate=1e-4)
    assert trainer.check().kl_gap_max == 0
    before = own(trainer, "reference")
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    trainer.step()
    after, actor = own(trainer, "reference"), own(trainer, "actor")
    for name, tensor in after.items():
        expected = 0.99 * before[name].double() + 0.01 * actor[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=3e-7, atol=1e-9)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("residency", ["keep", "park"])
@pytest.mark.parametrize("role", ["reference", "step_0"])
def test_any_other_move_is_noticed(tmp_path: Path, role: str, residency: str) -> None:
    """Of the reference at the next move and at the next save; of the policy of step 0 at the next save."""
    for where in ("move", "save"):
        trainer = trainer_of(tmp_path / where, "trunk", EMA, {"reference": {"residency": residency}})
        trainer.step()
        trainer.save(is_best=False)
        policy = getattr(trainer.models, role)
        part = next(iter(policy.branch.parameters()))
        with torch.no_grad():
            changed = (part if policy.residency is None else policy.residency.read(part)).clone()
            changed.view(-1)[0] += 1e-3
            part.copy_(changed) if policy.residency is None else policy.residency.write(part, changed)
        said = "weights of the reference have changed otherwise than by reference.prior = 'moving'"
        said = said if role == "reference" else "weights of trunk, reference or reward have changed"
        if where == "move" and role == "reference":
            with pytest.raises(RunFailed, match=said):
                trainer.step()
        elif where == "save":
            with pytest.raises(RunFailed, match=said):
                trainer.save(is_best=False)
            assert CheckpointStore(tmp_path / where / "run" / "ppo" / "checkpoints", keep_last=1).latest() is not None


RESUMED: dict[str, tuple[str, Tree]] = {
    "average in the trunk": ("trunk", EMA),
    "copy of adapters, parked": ("adapters", merged(COPY, {"reference": {"residency": "park"}})),
    "average of a whole model": ("none", EMA),
    "uniform": ("trunk", {"reference": {"prior": "uniform"}}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing, changes = RESUMED[case]
    monkeypatch.setenv(INTERRUPT, "0:")

    def tree(name: str) -> Tree:
        output = {"output": str(tmp_path / name), "evaluation": {"every": 2}}
        return tree_of(tmp_path, sharing, changes, output, function="pays_and_interrupts")

    run(tree("undisturbed"))
    interrupt_at(15, "SIGTERM")  # calls are micro-batches: 1 in pre-flight, 4 before, 4 a step and an evaluation
    with pytest.raises(Interrupted, match="stopped after step"):
        run(tree("stopped"))
    run(tree("stopped"))
    found, expected = outcome(tmp_path / "stopped"), outcome(tmp_path / "undisturbed")
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert any(name.startswith("reference/") for name in expected) == (case != "uniform")
    rows = [row for row in expected["rows"] if row["kind"] == "ppo_step"]
    assert len(rows) == 4 and rows[-1]["kl_step_0_per_sequence_mean"] != 0


@pytest.mark.parametrize("estimator", ["k1", "full"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_uniform_reference_is_a_constant_and_holds_nothing(tmp_path: Path, sharing: str, estimator: str) -> None:
    alone: Tree = {"reference": {"prior": "uniform", "log_step_0": False}}
    trainer = trainer_of(tmp_path, sharing, alone, kl_estimator=estimator)
    assert trainer.models.own_parameters(trainer.models.reference) == [] and trainer.models.step_0 is None
    assert trainer.check().own_reference
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    scored, _ = trainer._score(rollout, activations)
    mask = rollout.response_mask
    assert scored.ref_log_probs[mask].tolist() == pytest.approx([-math.log(VOCABULARY)] * int(mask.sum()))
    if estimator == "k1":
        torch.testing.assert_close(scored.kl, torch.where(mask, scored.log_probs + math.log(VOCABULARY), 0.0))
    else:
        assert bool((scored.kl[mask] > 0).all()) and bool((scored.kl[mask] <= math.log(VOCABULARY)).all())
    row = trainer.step()
    assert row["reference_score_flops"] == row["reference_forward_passes"] == 0
    assert "kl_step_0_per_sequence_mean" not in row


@torch.no_grad()
def test_the_drift_is_the_distance_from_the_model_as_it_lies_on_disk(tmp_path: Path) -> None:
    """log p(actor) - log p(model), summed over responses, by the library's own model; at step 0 it is 0."""
    with torch.enable_grad():
        trainer = trainer_of(tmp_path, "trunk", EMA, steps=3)
        first, second, *_ = steps_of(trainer)
    assert first["kl_step_0_per_sequence_mean"] == pytest.approx(0, abs=1e-4) != second["kl_step_0_per_sequence_mean"]
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(7), policy_version=3)
    model = AutoModelForCausalLM.from_pretrained(trainer.config.model.path)
    expected = (rollout.log_probs - oracle_log_probs(model, rollout))[rollout.response_mask].sum() / len(
        rollout.sequences
    )
    found = trainer.prior.drift(rollout, activations)["kl_step_0_per_sequence_mean"]
    assert found == pytest.approx(float(expected), rel=1e-3) and abs(found) > 0.1


def test_evaluations_tell_the_drift_and_the_loss_on_held_out_texts(tmp_path: Path) -> None:
    """Before training both are known: no drift, and the loss that the library's own model has on the texts."""
    held_out = {"data": {"texts_test": {"path": str(tmp_path / "data" / "texts_test.jsonl")}}}
    tree = tree_of(tmp_path, "trunk", EMA, held_out, {"evaluation": {"max_texts": 3, "every": 2}})
    summary = run(tree)
    before = summary["before"]
    assert before["kl_step_0_per_sequence"] == pytest.approx(0, abs=1e-4)
    assert before["step_0_log_prob_per_token"] == pytest.approx(before["ref_log_prob_per_token"], abs=1e-5)
    texts = [json.loads(line)["text"] for line in (tmp_path / "data" / "texts_test.jsonl").read_text().splitlines()[:3]]
    assert before["text_nll_per_token"] == pytest.approx(library_nll(tree["model"]["path"], texts), rel=1e-4)
    rows = [row for row in deterministic(tmp_path / "run" / "ppo" / "metrics.jsonl") if row["kind"] == "evaluation"]
    assert len(rows) == 2 and len({row["eval_text_nll_per_token"] for row in rows}) == 2


def library_nll(path: str, texts: list[str]) -> float:
    """Nats a token but the first, EOS included, by transformers alone."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
        total -= float(log_probs.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    return total / count


def test_the_loss_on_texts_over_a_trained_trunk_is_that_of_its_own_trunk(tmp_path: Path) -> None:
    """FAULTS: a role that stands on a trained trunk is not read above the frozen one."""
    from fourfold.memory.budget import BatchSize
    from fourfold.training.held_out_texts import HeldOutTexts

    trainer = trainer_of(tmp_path, "trunk", {"trunk": {"train": True, "lr_scale": 5.0}})
    texts = HeldOutTexts(trainer.models.base, [[5, 6, 7, 8], [9, 10, 11]], BatchSize("evaluate", "actor", 1))
    before = texts.nll(trainer.models.actor)
    trunk = trainer.models.trunk
    assert trunk is not None
    with torch.no_grad():
        next(iter(trunk.layers[0].parameters())).add_(0.3)
    assert abs(texts.nll(trainer.models.actor) - before) > 1e-3


@pytest.mark.parametrize("sharing", ["trunk", "adapters"])
def test_another_checkpoint_is_the_reference(tmp_path: Path, sharing: str) -> None:
    """An older policy of the same base, here or at a service: KL is taken to it, that to the actor's start is 0."""
    sft = settings(tmp_path, merged(SHARINGS[sharing], {"stages": ["sft"], "output": str(tmp_path / "old")}))
    run(sft)
    older = tmp_path / "old" / "sft" / "model"
    tree = merged(tree_of(tmp_path, sharing), {"reference": {"checkpoint": str(older)}})
    trainer = make_trainer(make_config(tree))
    frozen, stored = own(trainer, "reference"), load_file(older / "model.safetensors")
    assert frozen.keys() == stored.keys()
    assert all(torch.equal(tensor.float(), stored[name].float()) for name, tensor in frozen.items())
    report = trainer.check()
    assert report.own_reference and report.kl_gap_mean > 1e-3
    with listening(hosted_roles(tree, "reference")) as server:
        away = make_trainer(make_config(at_service(tree, server.url, "reference")))
        rows = [trainer.step(), away.step()]
    assert away.models.step_0 is None and "kl_step_0_per_sequence_mean" not in rows[1]
    assert rows[0]["kl_step_0_per_sequence_mean"] == pytest.approx(0, abs=1e-4) != rows[0]["kl_per_sequence_mean"]
    assert rows[1]["kl_per_sequence_mean"] == pytest.approx(rows[0]["kl_per_sequence_mean"], rel=1e-4)
    trainer.save(is_best=False)


def test_a_moving_reference_lets_the_actor_go(tmp_path: Path) -> None:
    """There is no fixed anchor: the KL that is penalised stays small, while that to step 0 outgrows a run's that has
    one."""
    ppo: dict[str, Any] = {
        "steps": 12, "rollout_batch_size": 32, "mini_batch_size": 16, "micro_batch_size": 16, "kl_coef": 1.0,
    }  # fmt: skip
    fixed = steps_of(trainer_of(tmp_path / "fixed", "trunk", **ppo))
    moving = steps_of(
        trainer_of(tmp_path / "moving", "trunk", {"reference": {"prior": "moving", "copy_every": 1}}, **ppo)
    )
    penalised = [sum(row["kl_per_sequence_mean"] for row in rows[-4:]) / 4 for rows in (fixed, moving)]
    gone = sum(row["kl_step_0_per_sequence_mean"] for row in moving[-4:]) / 4
    assert penalised[1] < 0.2 * gone and gone > 2 * penalised[0]
