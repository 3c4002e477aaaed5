"""Memory runs out in every phase: the work is done again with half the rows, to the same bits, or the run says why."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.batch import Rollout
from fourfold.config.describe import all_settings
from fourfold.errors import RunFailed
from fourfold.memory.budget import Budget, OverBudget, give_back, ran_out, tensor_bytes
from fourfold.memory.meter import PhaseMeter
from fourfold.models.assembly import assemble
from fourfold.models.loading import load_base
from fourfold.models.roles import Activations
from fourfold.planner.advice import mib
from fourfold.scoring.combined import parts_of
from fourfold.training import reward_model, supervised, update
from fourfold.training.pipeline import prepare
from fourfold.training.ppo import build_trainer, reward_source
from fourfold.training.trainer import Trainer
from training.observed import Scene
from training.runs import (
    SEPARATE,
    by_function,
    give_value_head,
    make_config,
    make_experience,
    make_trainer,
    merged,
    run,
    settings,
    weights_of,
)

ERRORS: dict[str, Callable[[], Exception]] = {
    "budget": lambda: OverBudget("1.0 GiB are resident, memory.budget_gib = 0.9"),
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError,
}
LARGE = 2  # passes over more rows than this run out of memory


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


def trainer_for(scene: Scene, **changes: Any) -> Trainer:
    """Two mini-batches of 4 rows an epoch, each in one micro-batch; the critic's head is not zero."""
    ppo = {"rollout_batch_size": 8, "mini_batch_size": 4, "micro_batch_size": 4, "num_epochs": 2, "entropy_coef": 0.01}
    return scene.trainer(scene.config("ppo", {f"ppo.{key}": value for key, value in (ppo | changes).items()}))


def break_passes(module: nn.Module, error: Callable[[], Exception], *, first: int, backward: bool, grad: bool) -> None:
    """From call `first` on, passes of a part over more than LARGE rows raise, after forward or within backward."""
    calls = 0

    def fail(gradient: Tensor) -> None:
        raise error()

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal calls
        if torch.is_grad_enabled() != grad:
            return
        calls += 1
        if calls > first and len(output) > LARGE:
            if not backward:
                raise error()
            output.register_hook(fail)

    module.register_forward_hook(hook)


def without_measurements(row: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in row.items() if not k.endswith(("_seconds", "_bytes")) and k != "tokens_per_second"}


def settings_named(text: str) -> set[str]:
    return set(re.findall(r"\b((?:sharing|trunk|adapters|precision|memory|sampling|ppo|model)\.[a-z_]+)\b", text))


@pytest.mark.parametrize(
    ("kind", "role", "backward", "mini"),
    [
        ("budget", "critic", False, 0),
        ("cuda", "critic", True, 3),
        ("cpu", "actor", True, 0),
        ("python", "actor", False, 2),
    ],
)
def test_a_mini_batch_is_done_again_and_the_update_is_that_of_the_smaller_size(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, role: str,
    backward: bool, mini: int,
) -> None:  # fmt: skip
    broken = trainer_for(scene)
    break_passes(getattr(broken.models, role).branch, ERRORS[kind], first=mini, backward=backward, grad=True)
    with caplog.at_level(logging.WARNING):
        row = broken.step()
    assert getattr(broken.sizes, role).size == LARGE and row["micro_batch_size"] == LARGE
    other = "actor" if role == "critic" else "critic"
    assert getattr(broken.sizes, other).size == 4
    [message] = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert f"learn: memory ran out in the {role}'s pass over 4 rows" in message
    assert all(word in message for word in ("trunk ", "optimizer states ", "Would help most", "done again with 2"))
    assert settings_named(message) <= all_settings().keys()

    smaller = trainer_for(scene)
    name, count = f"_{role}_gradients", 0
    plain = getattr(update, name)

    def from_the_start(*args: Any) -> Any:
        nonlocal count
        if count == mini:
            getattr(smaller.sizes, role).size = LARGE
        count += 1
        return plain(*args)

    monkeypatch.setattr(update, name, from_the_start)
    expected = smaller.step()
    assert without_measurements(row) == without_measurements(expected)
    for one, two in zip(
        (broken.models.actor, broken.models.critic), (smaller.models.actor, smaller.models.critic), strict=True
    ):
        ours, theirs = weights_of(one), weights_of(two)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(p.grad is None for p in broken.models.actor.parameters())


def test_at_one_row_the_run_stops_and_says_what_is_resident_and_what_would_help(scene: Scene) -> None:
    trainer = trainer_for(scene, micro_batch_size=1)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            raise MemoryError

    trainer.models.actor.branch.register_forward_hook(hook)
    before = weights_of(trainer.models.actor)
    with pytest.raises(RunFailed) as caught:
        trainer.step()
    text = str(caught.value)
    assert "learn: memory ran out in the actor's pass over 1 row (MemoryError)" in text
    for what in ("trunk ", "actor ", "critic ", "optimizer states ", "last good checkpoint"):
        assert what in text
    assert settings_named(text) and settings_named(text) <= all_settings().keys()
    after = weights_of(trainer.models.actor)
    assert all(torch.equal(before[key], after[key]) for key in before), "no step was taken"
    assert all(p.grad is None for p in trainer.models.actor.parameters())


IN_BACKWARD = {"memory.optimizer_in_backward": True}


def break_backward(module: nn.Module) -> None:
    """The backward pass of a layer runs out of memory; what lies above it has had its own."""

    def fail(gradient: Tensor) -> None:
        raise MemoryError

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            (output if isinstance(output, Tensor) else output[0]).register_hook(fail)

    module.register_forward_hook(hook)


@pytest.mark.parametrize("role", ["critic", "actor"])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_pass_that_steps_is_not_done_again_and_the_run_says_why(
    scene: Scene, caplog: pytest.LogCaptureFixture, role: str, stepped: bool
) -> None:
    sizes = {"rollout_batch_size": 8, "mini_batch_size": 4, "micro_batch_size": 4, "max_grad_norm": 0.0}
    changes = IN_BACKWARD | {f"ppo.{key}": value for key, value in sizes.items()} | {"critic.max_grad_norm": 0.0}
    trainer = scene.trainer(scene.config("ppo", changes))
    branch = getattr(trainer.models, role).branch
    if stepped:
        break_backward(branch.layers[-2])
    else:
        break_passes(branch, MemoryError, first=0, backward=False, grad=True)
    before = weights_of(branch)
    with pytest.raises(RunFailed) as caught:
        trainer.step()
    text = str(caught.value)
    assert f"learn: memory ran out in the {role}'s pass over 4 rows (MemoryError)" in text
    assert all(word in text for word in ("trunk ", "actor ", "optimizer states ", "Would help most: "))
    assert "ppo.mini_batch_size = ppo.micro_batch_size = 2, in a new output folder" in text
    assert text.count("the last good checkpoint is kept") == 1
    assert "optimizer_in_backward = false" not in text, "that would need more"
    moved = sum(not torch.equal(before[name], tensor) for name, tensor in weights_of(branch).items())
    said = re.search(rf"(\d+) of the \d+ parameters of the {role} had been stepped .* cannot go on from here", text)
    assert bool(said) == bool(moved) == stepped
    assert getattr(trainer.sizes, role).size == 4 and "done again" not in caplog.text


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_nor_is_the_batch_of_a_supervised_stage_that_steps(scene: Scene, stage: str, monkeypatch: Any) -> None:
    module, name = (supervised, "nll_sum") if stage == "sft" else (reward_model, "pair_margins")
    plain = getattr(module, name)

    def fails(role: Any, *args: Any) -> Any:
        break_backward(role.branch.layers[-2])
        return plain(role, *args)

    monkeypatch.setattr(module, name, fails)
    changes = {f"{stage}.batch_size": 4, f"{stage}.micro_batch_size": 4, f"{stage}.max_grad_norm": 0.0}
    with pytest.raises(RunFailed) as caught:
        scene.supervised(scene.config(stage, IN_BACKWARD | changes))
    assert f"{stage}.batch_size = {stage}.micro_batch_size = 2, in a new output folder" in str(caught.value)
    assert "had been stepped when its backward pass was broken off" in str(caught.value)


def test_another_runtime_error_is_no_shortage(scene: Scene) -> None:
    assert not ran_out(RuntimeError("shapes cannot be multiplied"))
    trainer = trainer_for(scene)
    error = lambda: RuntimeError("shapes cannot be multiplied")  # noqa: E731
    break_passes(trainer.models.critic.branch, error, first=0, backward=False, grad=True)
    with pytest.raises(RuntimeError, match="shapes"):
        trainer.step()
    assert trainer.sizes.critic.size == 4


@pytest.mark.parametrize("role", ["reference", "critic", "actor"])
def test_score_takes_fewer_rows_and_asks_the_reward_once_a_row(scene: Scene, role: str) -> None:
    ppo: dict[str, Any] = {"kl_estimator": "full"} if role == "actor" else {}
    trainer, smaller = trainer_for(scene, **ppo), trainer_for(scene, **ppo)
    smaller.sizes.score.size = LARGE
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    expected, _ = smaller._score(rollout, activations)
    asked: list[int] = []
    [part] = parts_of(trainer.reward)

    def counted(activations: Activations, rollout: Rollout) -> tuple[Tensor, Tensor]:
        asked.append(len(rollout.sequences))
        return part.source(activations, rollout)

    trainer.reward = counted
    break_passes(getattr(trainer.models, role).branch, MemoryError, first=0, backward=False, grad=False)
    scored, valid = trainer._score(rollout, activations)
    assert sum(asked) == len(rollout.sequences) and max(asked) == LARGE
    assert trainer.sizes.score.size == LARGE and bool(valid.all())
    # One role after the other: the reference was through, in larger passes, before the critic ran out.
    earlier = {"ref_log_probs", "kl"} if role == "critic" else set()
    for name in ("ref_log_probs", "values", "last_values", "scores", "kl"):
        ours, theirs = getattr(scored, name), getattr(expected, name)
        assert torch.allclose(ours, theirs, atol=1e-5) if name in earlier else torch.equal(ours, theirs), name


def test_generate_takes_fewer_rows_and_draws_the_same(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    broken, plain, smaller = trainer_for(scene), trainer_for(scene), trainer_for(scene)
    smaller.sizes.generate.size = LARGE
    break_passes(broken.models.actor.branch, MemoryError, first=1, backward=False, grad=False)
    found, activations = broken.sampler.generate(broken.prompts.batch(0), policy_version=0)
    whole, _ = plain.sampler.generate(plain.prompts.batch(0), policy_version=0)
    exact, cached = smaller.sampler.generate(smaller.prompts.batch(0), policy_version=0)
    assert torch.equal(found.sequences, whole.sequences) and torch.equal(found.response_mask, whole.response_mask)
    assert torch.equal(found.sampler_log_probs, exact.sampler_log_probs)
    assert torch.equal(activations.inputs, cached.inputs)
    assert broken.sizes.generate.size == LARGE
    assert "generate: memory ran out in the actor's pass over 8 rows" in caplog.text


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_supervised_stages_do_their_batch_again(
    scene: Scene, stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    smaller = scene.supervised(scene.config(stage, {f"{stage}.micro_batch_size": 2}))
    module, name = (supervised, "nll_sum") if stage == "sft" else (reward_model, "pair_margins")
    plain = getattr(module, name)
    broken: list[int] = []

    def fails(role: Any, *args: Any) -> Any:
        out = plain(role, *args)
        rows = len(args[-1])
        if torch.is_grad_enabled() and rows > LARGE:
            broken.append(rows)
            raise MemoryError
        return out

    monkeypatch.setattr(module, name, fails)
    outcome = scene.supervised(scene.config(stage, {f"{stage}.micro_batch_size": 4}))
    assert broken == [4], "halved once, for the rest of the stage"
    assert torch.equal(outcome.weights["role"], smaller.weights["role"])
    assert f"{stage}: memory ran out" in caplog.text


def test_the_reduced_size_is_saved_and_taken_up(tmp_path: Path) -> None:
    changes = by_function("pays_by_hash", mini_batch_size=4, micro_batch_size=4)
    config = make_config(settings(tmp_path, changes))
    trainer = make_trainer(config)
    break_passes(trainer.models.actor.branch, MemoryError, first=0, backward=False, grad=True)
    trainer.step()
    trainer.save(is_best=False)
    again = make_trainer(config)
    assert again.progress.step == 1
    assert again.sizes.state() == trainer.sizes.state() == {
        "generate": 0, "log_probs": 4, "score": 4, "ahead": 4, "actor": LARGE, "critic": 4,
    }  # fmt: skip
    assert again.step()["micro_batch_size"] == LARGE


def test_a_real_budget_gib_halves_and_the_update_is_bit_equal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is injected: resident memory passes the budget between layers, forward or backward."""
    wide = {"sampling": {"max_new_tokens": 80, "extra_eos_token_ids": []}, "memory": {"budget_gib": 64.0}}
    sizes = {"rollout_batch_size": 32, "mini_batch_size": 32, "micro_batch_size": 32, "num_epochs": 1}
    config = make_config(settings(tmp_path, merged(merged(by_function("pays_by_hash", **sizes), SEPARATE), wide)))
    trainer = make_trainer(config)
    give_value_head(trainer.models)
    experience, activations = make_experience(trainer)
    give_back()
    budget = trainer.models.base.budget
    budget.bytes = budget.resident() + (12 << 20)
    arguments: dict[str, Any] = {"temperature": 1.0, "seed": 0}
    ppo = trainer.config.ppo
    update.update(trainer.learner, experience, activations, ppo, sizes=trainer.sizes, **arguments)
    assert trainer.sizes.actor.size < 32 and trainer.sizes.critic.size < 32
    assert "GiB are resident, memory.budget_gib" in caplog.text
    halved = trainer.sizes.state()
    budget.bytes = 0

    smaller = make_trainer(config)
    give_value_head(smaller.models)
    smaller.sizes.restore(halved)
    update.update(smaller.learner, experience, activations, ppo, sizes=smaller.sizes, **arguments)
    for role in ("actor", "critic"):
        ours, theirs = weights_of(getattr(trainer.models, role)), weights_of(getattr(smaller.models, role))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_budget_that_the_model_does_not_fit_names_load(tmp_path: Path) -> None:
    """FAULTS J5: no advice about batch sizes, which do not matter while loading."""
    tree = settings(tmp_path, merged(by_function("pays_by_hash"), {"memory": {"budget_gib": 0.01}}))
    with pytest.raises(RunFailed, match="load: memory ran out while the base model was loaded") as caught:
        run(tree)
    assert "batch_size" not in str(caught.value)


@pytest.mark.parametrize("sharing", ["none", "trunk"])
def test_the_role_that_does_not_fit_is_named_with_bytes_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str
) -> None:
    changes = merged(by_function("pays_by_hash"), {"memory": {"budget_gib": 64.0}})
    config = prepare(make_config(settings(tmp_path, merged(changes, SEPARATE if sharing == "none" else {}))))
    base = load_base(config)
    monkeypatch.setattr(Budget, "resident", lambda self: 1 << 30)
    base.budget.bytes = (1 << 30) + 1000
    with pytest.raises(RunFailed) as caught:
        assemble(config, base, None, None)
    text = str(caught.value)
    assert "load: memory ran out while the reference was loaded (1.000 GiB are resident and" in text
    assert "are wanted, memory.budget_gib = 1.000" in text and "the run need about" in text
    assert "batch_size" not in text
    named = settings_named(text) - {"memory.budget_gib"}
    assert named and named <= all_settings().keys()
    assert "memory.optimizer_residency" in named, "Adam's moments are the most of what these tiny roles need"


def test_an_optimizer_that_does_not_fit_is_named_beside_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = merged(by_function("pays_by_hash"), {"memory": {"budget_gib": 64.0}})
    config = prepare(make_config(settings(tmp_path, merged(changes, SEPARATE))))
    models = assemble(config, load_base(config), None, None)
    monkeypatch.setattr(Budget, "resident", lambda self: 1 << 30)
    models.base.budget.bytes = (1 << 30) + 1000
    with pytest.raises(RunFailed) as caught:
        build_trainer(config, models, reward_source(config, models), [], [], tmp_path, PhaseMeter(torch.device("cpu")))
    text = str(caught.value)
    assert "load: memory ran out while the actor's optimizer was loaded" in text
    size = mib(tensor_bytes(models.actor.parameters()))
    assert f"actor {size}, reference {size}, critic" in text.partition("Loaded so far: ")[2]


def test_what_filled_the_memory_is_gone_before_the_second_try(scene: Scene) -> None:
    trainer = trainer_for(scene)
    broken: list[Any] = []

    class Token:
        """Dies with the graph whose hook holds it."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            assert not any(reference() for reference in broken), "the graph of the pass that ran out is still there"
            token = Token()
            output.register_hook(lambda gradient, token=token: None)
            if len(output) > LARGE:
                broken.append(weakref.ref(token))
                raise MemoryError

    trainer.models.critic.branch.register_forward_hook(hook)
    trainer.step()
    assert trainer.sizes.critic.size == LARGE and len(broken) == 1
