"""Hardware by name: shipped devices, counts, what drivers call them, and what is refused."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.planner.hardware import find_hardware
from fourfold.planner.hardware.devices import CPUS, DEVICES, GPUS
from fourfold.planner.hardware.machine import GIB
from fourfold.planner.hardware.nodes import MACHINES


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_a_node_and_figures_that_go_together(name: str) -> None:
    device = find_hardware(name).device
    assert device == DEVICES[name] and device.source and name in MACHINES
    assert device.flops["float32"] <= min(device.flops.values())
    assert all(math.isfinite(rate) and rate > 1e12 for rate in device.flops.values())
    assert (device.pcie == 0) == (device.kind == "cpu")
    assert 8 * GIB < device.memory < 1024 * GIB
    # A byte a FLOP is far from any of them: the units would be mixed up.
    assert 5 < device.flops["float32"] / device.bandwidth < 500


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_no_more_memory_than_its_maker_calls_it(name: str) -> None:
    """By the name: A100-80GB has 80 GiB, of which the driver leaves at least 92 %."""
    called = {"h100": 80, "h100-pcie": 80, "h200": 141, "b200": 180, "a6000": 48, "l40s": 48, "4090": 24, "3090": 24}
    called |= {"mi300x": 192, "v100-16": 16, "v100-32": 32, "a100-40": 40, "a100-80": 80, "a100-80-pcie": 80}
    assert 0.92 * called[name] < GPUS[name].memory / GIB <= called[name]


def test_two_nodes_of_eight() -> None:
    cluster = find_hardware("2x8xh100")
    assert (cluster.nodes, cluster.node.devices, cluster.devices) == (2, 8, 16)
    assert cluster.node.link == 450e9 and "NVSwitch" in cluster.node.link_name
    assert cluster.network == 8 * 400e9 / 8 and cluster.network_name == "8 x NDR InfiniBand"
    assert cluster.node.host_memory == 2048 * GIB and cluster.notes == ()


def test_a_part_of_a_node_has_its_share_of_the_rest() -> None:
    cluster = find_hardware("2x4xa100-80")
    assert cluster.node.host_memory == 1024 * GIB
    assert cluster.network == 4 * 25e9
    assert "4 of 8 shares of 2,048 GiB" in cluster.notes[0]


def test_one_device_has_neither_link_nor_network() -> None:
    cluster = find_hardware("a100-80")
    assert (cluster.devices, cluster.node.link, cluster.network) == (1, 0.0, 0.0)


def test_cards_without_another_link_talk_over_pcie_and_say_what_is_assumed() -> None:
    cluster = find_hardware("8x4090")
    assert cluster.node.link == cluster.device.pcie == 31.5e9
    assert cluster.node.host_memory == 8 * 64 * GIB
    assert any("assumed" in note for note in cluster.notes)


def test_a_cpu_has_its_memory_as_the_host() -> None:
    for name in CPUS:
        cluster = find_hardware(name)
        assert cluster.node.host_memory == cluster.device.memory


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("A100 80GB", "a100-80"),
        ("a100-80g", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("rtx3090", "3090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("xeon-8480+", "xeon-8480"),
    ],
)
def test_names_that_people_and_drivers_use(given: str, name: str) -> None:
    assert find_hardware(given).device == DEVICES[name]
    assert find_hardware(f"1x1x{given}").device == DEVICES[name]


def test_a_name_that_leaves_the_memory_open_is_asked_for() -> None:
    with pytest.raises(ValueError, match="did you mean 'a100-40' or 'a100-80'"):
        find_hardware("4xa100")


@pytest.mark.parametrize("given", ["", "gpu", "h1000", "2x2x2xh100", "detected", "-1xh100"])
def test_other_names_are_refused_with_all_that_are_allowed(given: str) -> None:
    with pytest.raises(ValueError, match=r"not known.*allowed: one of v100-16.*TOML file.*\"detect\""):
        find_hardware(given)


def test_more_devices_than_a_node_holds_are_refused_with_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"DGX H100 holds 8 devices.*try '2x8xh100'"):
        find_hardware("16xh100")
    for given in ("9xh100", "0xh100", "0x8xh100", "2xepyc-9654"):
        with pytest.raises(ValueError, match=r"allowed: 1 to \d a node"):
            find_hardware(given)


def test_the_page_shows_the_figures() -> None:
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    found = {names: cells for names, *cells in rows if names.split(", ")[0] in GPUS}
    assert {name for names in found for name in names.split(", ")} == set(GPUS)
    for names, (memory, bandwidth, tera, devices, link, network) in found.items():
        of = names.split(", ")
        for number, name in enumerate(of):
            device, machine = GPUS[name], MACHINES[name]
            assert float(memory.split(", ")[number]) == round(device.memory / GIB, 2)
            shown = re.findall(r"\d[\d,]*\d", bandwidth)[number if name.startswith("a100-") and len(of) > 1 else 0]
            assert float(shown.replace(",", "")) == device.bandwidth / 1e9
            rates = [device.flops.get(dtype, 0) / 1e12 for dtype in ("float32", "bfloat16", "float16", "int8")]
            given = [0 if cell == "-" else float(cell.replace(",", "")) for cell in tera.split(", ")]
            assert given == pytest.approx(rates, rel=0.005)
            assert (int(devices), float(link) * 1e9) == (machine.devices, machine.link)
            assert network == f"{machine.ports} x {machine.network}"


def test_hardware_is_found_without_torch() -> None:
    code = (
        "import sys; from fourfold.planner.hardware import find_hardware; find_hardware('h100'); "
        "sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
