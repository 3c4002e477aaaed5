"""Tensors that are away: their bytes are really free, come back as they were, and no use of them goes unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fourfold.errors import RunFailed
from fourfold.memory.offload import Parked, Streamed, resident
from fourfold.memory.stores import ALIGNMENT, DiskStore, layout_of, store_below

CPU = torch.device("cpu")


def some_tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 5),
        nn.Parameter(torch.randn(7, 2).bfloat16(), requires_grad=False),
        torch.randn(()),
        torch.arange(300, dtype=torch.uint8).reshape(3, 100),
        torch.randn(4, 6).t(),  # not contiguous
    ]


def held_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def park(tensors: list[Tensor], folder: Path) -> Parked:
    return Parked(tensors, store_below(CPU, layout_of(tensors).size, folder))


def test_parked_tensors_leave_memory_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = some_tensors()
    before = [t.detach().clone() for t in tensors]
    parked = park([*tensors, tensors[0]], tmp_path)  # one that is named twice is one
    for _ in range(2):
        assert held_bytes(tensors) == sum(t.element_size() for t in tensors), "one number each"
        for t, b in zip(tensors, before, strict=True):
            assert (t.dtype, t.shape) == (b.dtype, b.shape)
            assert torch.equal(parked.read(t), b), "read alone, without bringing the others in"
        parked.fetch()
        for t, b in zip(tensors, before, strict=True):
            assert torch.equal(t.detach(), b)
            assert t.data_ptr() % 64 == 0
        parked.leave()


def test_the_store_aligns_every_tensor(tmp_path: Path) -> None:
    layout = layout_of(some_tensors())
    assert all(at % ALIGNMENT == 0 for at in layout.offsets) and layout.size == 6 * ALIGNMENT


def test_a_use_of_what_is_away_is_not_a_number(tmp_path: Path) -> None:
    """Rather than old or arbitrary numbers: what follows stops the run as not finite."""
    layer = nn.Linear(4, 4)
    parked = park(list(layer.parameters()), tmp_path)
    assert bool(layer(torch.ones(1, 4)).isnan().all())
    parked.fetch()
    assert bool(layer(torch.ones(1, 4)).isfinite().all())


def test_what_has_changed_is_written_back_and_what_is_overwritten_is_read(tmp_path: Path) -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(5)]
    parked = park(tensors, tmp_path)
    parked.fetch()
    tensors[0].fill_(1.0)
    parked.leave(changed=True)
    parked.overwrite(tensors[1], torch.full((5,), 2.0))
    parked.fetch()
    assert torch.equal(tensors[0], torch.ones(2, 3)) and torch.equal(tensors[1], torch.full((5,), 2.0))


def test_the_file_has_no_name_and_a_disk_that_is_too_small_is_named(tmp_path: Path) -> None:
    """Nothing is left behind, whatever ends the process."""
    parked = park(some_tensors(), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == [] and not parked.resident
    with pytest.raises(RunFailed, match=r'need 1,152,921,504,606,846,976 bytes in .*residency to "keep"'):
        DiskStore(1 << 60, tmp_path)


def test_memory_is_given_back_to_the_system(tmp_path: Path) -> None:
    """Counted by the kernel in a process of its own: 192 MiB, which torch must not hold on to."""
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from fourfold.memory.peaks import resident_bytes_reader\n"
        "from fourfold.memory.offload import Parked\n"
        "from fourfold.memory.stores import layout_of, store_below\n"
        "rss = resident_bytes_reader()\n"
        "tensors = [torch.ones(2**20 * 3) for _ in range(16)]\n"
        "first = rss()\n"
        "parked = Parked(tensors, store_below(torch.device('cpu'), layout_of(tensors).size, Path(sys.argv[1])))\n"
        "away = rss()\n"
        "parked.fetch()\n"
        "back = rss()\n"
        "parked.leave()\n"
        "print(first - away, back - away, rss() - away)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    freed, fetched, left = (int(n) / 2**20 for n in done.stdout.split())
    assert freed > 180 and 180 < fetched < 200 and left < 12


class Stack(nn.Module):
    """Linear layers one after the other; counts how many of them are in memory while each computes."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.seen: list[int] = []

    def forward(self, x: Tensor, fail_at: int = -1) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            self.seen.append(sum(bool(each.get_parameter("weight").stride()[0]) for each in self.layers))
            if index == fail_at:
                raise KeyboardInterrupt
        return x


def stream(model: Stack, folder: Path) -> Streamed:
    groups = [list(layer.parameters()) for layer in model.layers]
    store = store_below(CPU, sum(layout_of(group).size for group in groups), folder)
    parts, start = [], 0
    for group in groups:
        parts.append(Parked(group, store, start))
        start += parts[-1].size
    return Streamed(list(model.layers), parts, CPU)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
@torch.no_grad()
def test_a_stream_computes_the_same_with_two_layers_in_memory(tmp_path: Path, depth: int) -> None:
    model, x = Stack(depth), torch.randn(3, 16)
    expected = model(x)
    streamed = stream(model, tmp_path)
    for _ in range(2):  # closed and opened again
        streamed.open()
        for _ in range(3):  # several passes: after the last layer comes the first
            assert torch.equal(model(x), expected)
        streamed.close()
    assert streamed.peak_layers == min(depth, 2)
    assert max(model.seen[depth:]) <= 1, "a layer has left when the next begins; the other buffer is being filled"
    assert all(layer.get_parameter("weight").stride() == (0, 0) for layer in model.layers), (
        "closed, nothing is in memory"
    )
    layer_bytes = layout_of(list(model.layers[0].parameters())).size
    assert streamed.bytes_moved >= 6 * depth * layer_bytes


@torch.no_grad()
def test_a_pass_that_is_given_up_leaves_a_stream_usable(tmp_path: Path) -> None:
    model, x = Stack(5), torch.randn(3, 16)
    expected = model(x)
    streamed = stream(model, tmp_path)
    streamed.open()
    with pytest.raises(KeyboardInterrupt):
        model(x, fail_at=1)
    assert torch.equal(model(x), expected) and streamed.peak_layers == 2
    with pytest.raises(RuntimeError):  # a layer that raises is not left in memory
        model(torch.randn(3, 15))
    streamed.close()
    assert all(layer.get_parameter("weight").stride() == (0, 0) for layer in model.layers)


def test_what_is_simply_kept_is_resident() -> None:
    with resident(nn.Linear(2, 2)) as nothing:
        assert nothing is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@torch.no_grad()
def test_a_gpu_streams_from_pinned_host_memory(tmp_path: Path) -> None:
    device = torch.device("cuda")
    model, x = Stack(6, width=1024).to(device), torch.randn(64, 1024, device=device)
    expected = model(x)
    groups = [list(layer.parameters()) for layer in model.layers]
    store = store_below(device, sum(layout_of(group).size for group in groups), tmp_path)
    assert store.tier == "host"
    parts, start = [], 0
    for group in groups:
        parts.append(Parked(group, store, start))
        start += parts[-1].size
    torch.cuda.synchronize()
    away = torch.cuda.memory_allocated()
    streamed = Streamed(list(model.layers), parts, device)
    streamed.open()
    for _ in range(10):
        assert torch.equal(model(x), expected)
    held = torch.cuda.memory_allocated() - away
    streamed.close()
    assert held <= 2 * parts[0].size + 2 * x.numel() * 4 + 4096 and streamed.peak_layers == 2
