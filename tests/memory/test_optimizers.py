"""AdamW by several makers: the same numbers go in, states have the types and bytes they should, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.backends.local import LocalOptimizer
from fourfold.config.schema import MemorySection, OptimizerSection
from fourfold.memory.optimizers import WRAPPED, make_adamw
from fourfold.training.checkpoint import CheckpointStore, flatten_optimizer, restore_optimizer

PARK = MemorySection(optimizer_residency="park")
KINDS = ("adamw", "adamw_8bit")


class Net(nn.Module):
    """Two matrices that are large enough for 8 bits, a small one, vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(80, 96)
        self.two = nn.Linear(96, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).tanh()).tanh())


def loss_of(net: Net, step: int) -> Tensor:
    x = torch.randn(16, 80, generator=torch.Generator().manual_seed(step))
    return (net(x).squeeze(-1) - x.sum(dim=1)).square().mean()


def optimizer(net: nn.Module, *, memory: MemorySection | None = None, folder: Path | None = None, **given: Any):
    settings = OptimizerSection(**{"learning_rate": 1e-2, "weight_decay": 0.1, **given})
    return LocalOptimizer("actor", net, settings, total_steps=20, memory=memory, folder=folder)


def train(net: Net, adam: LocalOptimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        adam.backward(loss_of(net, step))
        norms.append(adam.step())
    return norms


def flat(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def moved(kind: str, steps: int) -> tuple[Tensor, Tensor]:
    net = Net()
    before = flat(net)
    train(net, optimizer(net, optimizer=kind), range(steps))
    return before, flat(net)


def test_eight_bits_hold_two_bytes_a_parameter_and_stay_near() -> None:
    """Row 64: codes of one byte each, and a float32 scale for every 256 of them."""
    net = Net()
    adam = optimizer(net, optimizer="adamw_8bit")
    entries = list(adam.state_dict()["optimizer"]["state"].values())
    sizes = {e[WRAPPED]["state1"].numel(): {name: t.dtype for name, t in e[WRAPPED].items()} for e in entries}
    codes = {"state1": torch.uint8, "state2": torch.uint8}
    scales = dict.fromkeys(("absmax1", "absmax2", "qmap1", "qmap2"), torch.float32)
    assert sizes[80 * 96] == sizes[96 * 64] == codes | scales
    assert sizes[64] == {"state1": torch.float32, "state2": torch.float32}, "fewer than 4,096 numbers"
    large = 80 * 96 + 96 * 64
    assert large * 2 < adam.states.resident_bytes() < large * 2.04 + (96 + 64 + 64 + 1) * 8 + 4 * 512 * 2 + 64
    (before, exact), (_, rounded) = moved("adamw", 10), moved("adamw_8bit", 10)
    gap = float((exact - rounded).norm() / (exact - before).norm())
    assert 0 < gap < 0.05, gap


@pytest.mark.parametrize("kind", KINDS)
def test_every_maker_gets_the_same_numbers(kind: Any) -> None:
    """FAULTS G10: rate, betas, epsilon and decay; norms and biases are not decayed, whatever a maker's default is."""
    net = Net()
    given = OptimizerSection(optimizer=kind, learning_rate=0.03, betas=(0.8, 0.7), eps=1e-5, weight_decay=0.25)
    adam = make_adamw(list(net.parameters()), given)
    found = [(g["lr"], tuple(g["betas"]), g["eps"], g["weight_decay"]) for g in adam.param_groups]
    assert found == [(0.03, (0.8, 0.7), 1e-5, 0.25), (0.03, (0.8, 0.7), 1e-5, 0.0)]
    assert [[p.ndim for p in g["params"]] for g in adam.param_groups] == [[2, 2, 2], [1, 1, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_decay_alone_moves_matrices_by_rate_times_decay(kind: str) -> None:
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    adam = optimizer(net, optimizer=kind, learning_rate=0.1, weight_decay=0.5)
    adam.backward(sum((0.0 * p.sum() for p in net.parameters()), torch.zeros(())))
    adam.step()
    for name, p in net.named_parameters():
        assert torch.allclose(p, before[name] * (0.95 if p.ndim == 2 else 1.0)), name


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_zeros_stay_finite(kind: str) -> None:
    """FAULTS G9: a block of zeros has no largest number to be scaled by."""
    net = Net()
    adam = optimizer(net, optimizer=kind, weight_decay=0.0)
    before = flat(net)
    for _ in range(2):
        adam.backward(sum((0.0 * p.sum() for p in net.parameters()), torch.zeros(())))
        adam.step()
    assert torch.equal(flat(net), before)


def test_eight_bit_codes_are_a_monotone_map_with_zero_and_one() -> None:
    """FAULTS G9: 256 numbers; what a library's next version makes of them is noticed here."""
    net = Net()
    adam = optimizer(net, optimizer="adamw_8bit")
    state = next(iter(adam.state_dict()["optimizer"]["state"].values()))[WRAPPED]
    for name, lowest in (("qmap1", -1.0), ("qmap2", 0.0)):
        numbers = state[name]
        assert len(numbers) == 256 and bool((numbers.diff() >= 0).all())
        assert 0.0 in numbers and numbers.max() == 1.0 and float(numbers.min()) == pytest.approx(lowest, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("park", [False, True])
def test_a_checkpoint_brings_states_back_in_their_own_types(tmp_path: Path, kind: str, park: bool) -> None:
    """FAULTS K7: types, bytes, and every step after the resume; parked and kept states load into each other."""
    held: dict[str, Any] = {"memory": PARK, "folder": tmp_path / "away"} if park else {}
    net = Net()
    adam = optimizer(net, optimizer=kind, **held)
    train(net, adam, range(3))
    saved = adam.state_dict()
    tensors, record = flatten_optimizer(saved["optimizer"])
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(3, {"optimizer": tensors}, {"optimizer": record})
    middle = {name: t.clone() for name, t in net.state_dict().items()}
    train(net, adam, range(3, 6))

    resumed = Net()
    resumed.load_state_dict(middle)
    again = optimizer(resumed, optimizer=kind, **({} if park else {"memory": PARK, "folder": tmp_path / "other"}))
    checkpoint = store.latest()
    assert checkpoint is not None
    found = checkpoint.tensors("optimizer")
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}
    again.load_state_dict(
        {"optimizer": restore_optimizer(found, checkpoint.state["optimizer"]), "steps_done": saved["steps_done"]}
    )
    for step in range(3, 6):
        train(resumed, again, range(step, step + 1))
    assert torch.equal(flat(resumed), flat(net))


def test_states_of_another_optimizer_are_refused() -> None:
    one, other = optimizer(Net(), optimizer="adamw"), optimizer(Net(), optimizer="adamw_8bit")
    with pytest.raises(ValueError, match=r"holds \['exp_avg', 'exp_avg_sq', 'step'\].*another `optimizer`"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="belongs to another model"):
        optimizer(nn.Linear(3, 3)).load_state_dict(one.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_parked_states_are_in_memory_for_one_parameter_in_the_step_only(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS J2: bytes of the states by phase, counted at their storages; the weights are those without parking."""
    plain, parked = Net(), Net()
    kept = optimizer(plain, optimizer=kind)
    adam = optimizer(parked, optimizer=kind, memory=PARK, folder=tmp_path)
    small = 6 * 4 * 4 + 4 * 1024  # one number for each tensor that is away, Adam's step counts, the shared 8-bit maps
    largest = max(p.numel() for p in parked.parameters()) * (8 if kind == "adamw" else 2.04)
    in_step: list[int] = []
    step = type(adam._optimizer).step

    def watched(self: Any, *args: Any) -> Any:
        if self is adam._optimizer:
            in_step.append(adam.states.resident_bytes())
        return step(self, *args)

    monkeypatch.setattr(type(adam._optimizer), "step", watched)
    assert kept.states.resident_bytes() > largest + small
    for index in range(3):
        assert adam.states.resident_bytes() < small
        adam.backward(loss_of(parked, index))
        assert adam.states.resident_bytes() < small, "not in the backward pass"
        adam.step()
        train(plain, kept, range(index, index + 1))
    assert adam.states.resident_bytes() < small
    assert len(in_step) == 3 * 6 and largest <= max(in_step) < largest + small
    assert torch.equal(flat(parked), flat(plain))


@pytest.mark.parametrize("memory", [MemorySection(optimizer_in_backward=True), PARK], ids=["kept", "parked"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_backward_are_the_same_and_gradients_go_at_once(tmp_path: Path, kind: str, memory: Any) -> None:
    memory = memory.model_copy(update={"optimizer_in_backward": True})
    plain, early = Net(), Net()
    given: dict[str, Any] = {"optimizer": kind, "max_grad_norm": 0.0, "schedule": "linear"}
    kept, adam = optimizer(plain, **given), optimizer(early, memory=memory, folder=tmp_path, **given)
    most: list[int] = []

    def count(_: Tensor) -> None:
        most.append(sum(p.grad is not None for p in early.parameters()))

    # After the optimizer's own hook of each parameter.
    for p in early.parameters():
        p.register_post_accumulate_grad_hook(count)
    for step in range(3):
        assert train(early, adam, range(step, step + 1)) == pytest.approx(train(plain, kept, range(step, step + 1)))
        assert adam.learning_rate == kept.learning_rate
    assert max(most) == 0 and len(most) == 3 * 6
    assert torch.equal(flat(early), flat(plain))


def test_without_a_clip_gradients_stay_as_they_are() -> None:
    """max_grad_norm = 0 is no clip, not a clip to 0."""
    net = Net()
    adam = optimizer(net, max_grad_norm=0.0, betas=(0.0, 0.5))
    norms = train(net, adam, range(1))
    moments = [e["exp_avg"].flatten() for e in adam.state_dict()["optimizer"]["state"].values()]
    assert float(torch.cat(moments).norm()) == pytest.approx(norms[0], rel=1e-5) and norms[0] > 1.0


def test_a_finished_stage_does_not_keep_its_states_alive() -> None:
    """The hooks of steps in backward lie on the weights, which live on."""
    import gc
    import weakref

    net = Net()
    adam = optimizer(net, memory=MemorySection(optimizer_in_backward=True), max_grad_norm=0.0)
    train(net, adam, range(1))
    gone = weakref.ref(adam.states)
    gc.disable()
    try:
        del adam
        assert gone() is None
    finally:
        gc.enable()
    loss_of(net, 0).backward()  # the hooks that are left do nothing


@pytest.mark.parametrize("kind", ["paged_adamw", "paged_adamw_8bit"])
def test_paged_states_on_a_cpu_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind}' needs a CUDA device; on a CPU try 'adamw_8bit'"):
        optimizer(Net(), optimizer=kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["paged_adamw", "paged_adamw_8bit"])
def test_paged_states_resume_paged(kind: str) -> None:
    def made() -> tuple[Net, LocalOptimizer]:
        net = Net().cuda()
        return net, optimizer(net, optimizer=kind)

    def go(net: Net, adam: LocalOptimizer) -> None:
        adam.backward(net(torch.ones(4, 80, device="cuda")).square().mean())
        adam.step()

    net, adam = made()
    go(net, adam)
    again, other = made()
    again.load_state_dict(net.state_dict())
    other.load_state_dict(adam.state_dict())
    for _ in range(2):
        go(net, adam)
        go(again, other)
    assert torch.equal(flat(net), flat(again))
