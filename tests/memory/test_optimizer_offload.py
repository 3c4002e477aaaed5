"""Masters, moments and gradients below the device: the same updates, bit for bit, and what is resident meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.backends.local import LocalOptimizer
from fourfold.config.schema import MemorySection, OptimizerSection
from fourfold.memory.optimizer_offload import OffloadedStates
from fourfold.memory.tensors import LiveTensors
from fourfold.models.roles import Policy, Scorer, make_trainable
from fourfold.tensor_files import read
from fourfold.training.checkpoint import flatten_optimizer, restore_optimizer
from tiny_roles import activations_of, tiny_base, tiny_rollout
from training.runs import SEPARATE, by_function, make_config, make_trainer, merged, outcome, run, settings, weights_of

OFFLOAD = MemorySection(optimizer_residency="offload")
LENGTHS = [(3, 4), (1, 6), (2, 2), (4, 5)]


def trained_policy(folder: Path, family: str, mode: str = "none") -> tuple[Any, Policy]:
    """A base and its policy, ready to be trained in bfloat16."""
    base = tiny_base(folder / family, family, mode, precision__compute="bfloat16")
    make_trainable(base.policy, with_language_head=mode == "none")
    return base, base.policy


def optimizer(module: nn.Module, folder: Path, residency: Any, **given: Any) -> LocalOptimizer:
    memory = MemorySection(optimizer_residency=residency)
    chosen = OptimizerSection(**{"learning_rate": 1e-2, "weight_decay": 0.1, **given})
    return LocalOptimizer("actor", module, chosen, total_steps=20, memory=memory, folder=folder)


def passes(base: Any, policy: Policy, adam: LocalOptimizer, seed: int, parts: int = 2) -> None:
    """The gradients of one batch, in two micro-batches."""
    rollout = tiny_rollout(LENGTHS, seed=seed)
    inputs = activations_of(base, rollout)
    for rows in torch.arange(len(LENGTHS)).chunk(parts):
        log_probs, _ = policy.log_probs(inputs.select(rows), rollout.select(rows), 1.0)
        adam.backward(-log_probs.sum() / 7)


def after(folder: Path, residency: Any, family: str, mode: str = "none", **given: Any) -> tuple[dict, list[float]]:
    """Weights and norms after three steps of two micro-batches each."""
    base, policy = trained_policy(folder, family, mode)
    adam = optimizer(policy, folder / "below", residency, **given)
    norms = []
    for step in range(3):
        passes(base, policy, adam, step)
        norms.append(adam.step())
    return weights_of(policy), norms


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_tied_scaled_and_positional_embeddings_are_bit_equal(tmp_path: Path, family: str, max_norm: float) -> None:
    """A token that comes twice adds two rows up, a tied head another: in bfloat16 each sum would be rounded."""
    kept, norms = after(tmp_path, "keep", family, max_grad_norm=max_norm)
    away, same_norms = after(tmp_path, "offload", family, max_grad_norm=max_norm)
    assert norms == same_norms and max(norms) > 0.5
    assert kept.keys() == away.keys() and all(torch.equal(kept[name], away[name]) for name in kept)
    assert all(tensor.dtype == torch.float32 for tensor in away.values())


def test_the_device_holds_narrow_matrices_and_no_gradient_or_moment(tmp_path: Path) -> None:
    """Row 43, by bytes: 2 for each number of a matrix, 4 for vectors; gradients go while the backward pass goes on."""
    base, policy = trained_policy(tmp_path, "llama")
    trained = [p for p in policy.parameters() if p.requires_grad]
    adam = optimizer(policy, tmp_path / "below", "offload")
    assert {p.dtype for p in trained if p.ndim >= 2} == {torch.bfloat16}
    assert {p.dtype for p in trained if p.ndim < 2} == {torch.float32}
    small = 3 * 4 * len(trained)  # one number stands for each tensor that is away, and Adam's step counts
    assert adam.state_bytes() <= small
    most: list[int] = []
    for p in trained:  # after the optimizer's own hooks
        p.register_post_accumulate_grad_hook(lambda _: most.append(sum(q.grad is not None for q in trained)))
    passes(base, policy, adam, 0)
    assert len(most) == 2 * len(trained) and max(most) == 0
    assert adam.state_bytes() <= small
    adam.step()
    assert adam.state_bytes() <= small
    masters = weights_of(policy)
    for name, p in policy.named_parameters():
        assert torch.equal(p, masters[name].to(p.dtype)), name
    assert any(not torch.equal(masters[name].bfloat16().float(), masters[name]) for name in masters)


def test_the_buffer_of_the_sums_is_seen_where_live_tensors_are_counted(tmp_path: Path) -> None:
    """It is the most that is left of the gradients in memory: float32, as large as the largest parameter."""
    base, policy = trained_policy(tmp_path, "llama")
    adam = optimizer(policy, tmp_path / "below", "offload")
    largest = max(p.numel() for p in policy.parameters() if p.requires_grad)
    with LiveTensors() as live:
        before = live.bytes
        passes(base, policy, adam, 0)
        adam.states.clip([], 1.0)  # the last gradients have come down
        gc.collect()
        assert 4 * largest <= live.bytes - before < 4 * largest + 1024
        adam.discard()
        assert live.bytes - before < 1024


def test_gradients_that_are_dropped_leave_nothing(tmp_path: Path) -> None:
    """A pass that ran out of memory is taken again from its start; a step without gradients moves nothing."""
    base, policy = trained_policy(tmp_path, "llama")
    adam = optimizer(policy, tmp_path / "below", "offload")
    before = weights_of(policy)
    passes(base, policy, adam, 5)
    adam.discard()
    assert adam.step() == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(policy).items())
    passes(base, policy, adam, 0)
    norm = adam.step()
    fresh_base, fresh = trained_policy(tmp_path, "llama")
    other = optimizer(fresh, tmp_path / "other", "keep")
    passes(fresh_base, fresh, other, 0)
    assert other.step() == norm
    # The step that had no gradient was none for Adam's bias correction either.
    same = weights_of(fresh)
    assert all(torch.equal(same[name], tensor) for name, tensor in weights_of(policy).items())


def test_a_failure_on_the_way_down_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, policy = trained_policy(tmp_path, "llama")
    adam = optimizer(policy, tmp_path / "below", "offload")
    from fourfold.memory.stores import DiskStore

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskStore, "write", full)
    with pytest.raises(OSError, match="No space left"):
        passes(base, policy, adam, 0)
        adam.step()


def test_a_torch_that_would_round_gradients_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.memory.optimizer_offload.WIDE_GRADIENTS", "grad_dtype_of_old")
    _, policy = trained_policy(tmp_path, "llama")
    with pytest.raises(
        ValueError, match=r"'offload' needs torch\.Tensor\.grad_dtype_of_old.*update torch, or try 'park'"
    ):
        optimizer(policy, tmp_path / "below", "offload")


@pytest.mark.parametrize("residency", ["keep", "park"])
@pytest.mark.parametrize("first", [True, False])
def test_states_load_into_each_other(tmp_path: Path, residency: str, first: bool) -> None:
    """A run may be taken up again with another residency: steps go on as they would have."""
    one, other = ("offload", residency) if first else (residency, "offload")
    base, policy = trained_policy(tmp_path, "llama", "trunk")
    adam = optimizer(policy, tmp_path / "one", one)
    passes(base, policy, adam, 0)
    adam.step()
    from fourfold.models.storage import load_own_tensors, own_tensors

    stored = {name: read(tensor).clone() for name, tensor in own_tensors(policy, shares_head=True).items()}
    saved = adam.state_dict()
    tensors, record = flatten_optimizer(saved["optimizer"])
    copies = {name: read(tensor).clone() for name, tensor in tensors.items()}
    resumed_base, resumed = trained_policy(tmp_path, "llama", "trunk")
    again = optimizer(resumed, tmp_path / "other", other)
    load_own_tensors(resumed, stored, shares_head=True)
    again.load_state_dict({"optimizer": restore_optimizer(copies, record), "steps_done": saved["steps_done"]})
    for step in (1, 2):
        for each_base, each, its in ((base, policy, adam), (resumed_base, resumed, again)):
            passes(each_base, each, its, step)
            its.step()
    expected = weights_of(policy)
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights_of(resumed).items())


def test_a_whole_run_leaves_the_same_files(tmp_path: Path) -> None:
    """Stages sft, reward and ppo with evaluations: metrics, checkpoints and stored models, byte for byte."""
    found = {}
    for residency in ("keep", "offload"):
        tree = settings(
            tmp_path, {"output": str(tmp_path / residency), "precision": {"compute": "bfloat16"}, "ppo": {"steps": 2}}
        )
        run(merged(tree, {"memory": {"optimizer_residency": residency}}))
        found[residency] = outcome(tmp_path / residency)
    assert found["keep"].keys() == found["offload"].keys()
    assert [name for name in found["keep"] if found["keep"][name] != found["offload"][name]] == []


def test_the_table_of_roles_says_where_masters_are(tmp_path: Path) -> None:
    from fourfold.training.ppo import describe_roles

    changes = merged(by_function("pays_by_hash"), merged(SEPARATE, {"precision": {"compute": "bfloat16"}}))
    tree = settings(tmp_path, merged(changes, {"memory": {"optimizer_residency": "offload"}}))
    trainer = make_trainer(make_config(tree))
    assert isinstance(trainer.models.actor.masters, OffloadedStates)
    assert isinstance(trainer.models.critic, Scorer) and trainer.models.critic.masters is not None
    lines = {line.split()[0]: line for line in describe_roles(trainer).splitlines() if line.strip()}
    assert "cpu, masters on disk" in lines["actor"] and "bfloat16 + float32" in lines["actor"]
    assert "cpu, masters on disk" in lines["critic"] and "masters" not in lines["reference"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_steps_are_those_of_the_device_but_for_rounding(tmp_path: Path) -> None:
    """The same gradients, clipped and stepped on the host in float32: Adam's rounding is all that may differ."""
    found = {}
    for residency in ("keep", "offload"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)).cuda()
        adam = optimizer(net, tmp_path / residency, residency)
        for step in range(5):
            for part in range(2):
                x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + part)).cuda()
                adam.backward((net(x).squeeze(-1) - x.sum(dim=1)).square().mean())
            assert residency == "keep" or all(p.grad is None for p in net.parameters())
            adam.step()
        found[residency] = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert torch.allclose(found["keep"], found["offload"], rtol=1e-4, atol=1e-6)
