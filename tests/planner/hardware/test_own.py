"""Hardware of one's own in a TOML file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fourfold.config.loading import ConfigError
from fourfold.planner.hardware import find_hardware
from fourfold.planner.hardware.devices import DEVICES
from fourfold.planner.hardware.machine import GIB, Cluster

WHOLE = """
nodes = 2
network_gb_s = 12.5
network_name = "100 Gb/s Ethernet"
[device]
name = "Card"
kind = "cuda"
memory_gib = 31.5
bandwidth_gb_s = 1000
pcie_gb_s = 32
tflops = { float32 = 50, bfloat16 = 200.5 }
[node]
devices = 4
link_gb_s = 20
link_name = "PCIe 4.0"
host_memory_gib = 256
disk_gb = 2000
disk_gb_s = 5.5
"""


def read(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "hardware.toml"
    file.write_text(text)
    return find_hardware(str(file))


def test_every_key_acts(tmp_path: Path) -> None:
    cluster = read(tmp_path, WHOLE)
    device, node = cluster.device, cluster.node
    assert (device.name, device.kind, device.memory) == ("Card", "cuda", round(31.5 * GIB))
    assert (device.bandwidth, device.pcie) == (1e12, 32e9)
    assert device.flops == {"float32": 50e12, "bfloat16": 200.5e12}
    assert "hardware.toml" in device.source
    assert (node.devices, node.link, node.link_name) == (4, 20e9, "PCIe 4.0")
    assert (node.host_memory, node.disk, node.disk_bandwidth) == (256 * GIB, 2 * 10**12, 5.5e9)
    assert (cluster.nodes, cluster.network, cluster.network_name) == (2, 12.5e9, "100 Gb/s Ethernet")


def test_a_device_like_a_known_one(tmp_path: Path) -> None:
    cluster = read(
        tmp_path, '[device]\nlike = "A100 80GB"\nmemory_gib = 40\n[node]\ndevices = 2\nhost_memory_gib = 64\n'
    )
    assert cluster.device.memory == 40 * GIB
    assert cluster.device.flops == DEVICES["a100-80"].flops
    assert (cluster.node.link, cluster.node.host_memory) == (300e9, 64 * GIB)
    plain = read(tmp_path, 'nodes = 2\n[device]\nlike = "h100"\n[node]\ndevices = 8\n')
    known = find_hardware("2x8xh100")
    assert (plain.node.link, plain.network, plain.node.host_memory) == (450e9, known.network, known.node.host_memory)


def test_a_cpu_needs_no_link_to_the_host_whose_memory_it_has(tmp_path: Path) -> None:
    text = '[device]\nname = "Mine"\nkind = "cpu"\nmemory_gib = 30\nbandwidth_gb_s = 40\ntflops = { float32 = 0.5 }\n'
    cluster = read(tmp_path, text)
    assert cluster.node.host_memory == cluster.device.memory == 30 * GIB


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "device: not given"),
        (WHOLE.replace("devices = 4", "devices = 0"), "node.devices: given 0"),
        (WHOLE.replace("devices = 4", 'devices = "4"'), "node.devices: given '4'"),
        (WHOLE.replace("link_gb_s", "link_gbs"), "node.link_gbs: unknown key; allowed here: devices, link_gb_s"),
        (WHOLE.replace("nodes = 2", "node_count = 2"), "node_count: unknown key; allowed here: nodes"),
        (WHOLE.replace("memory_gib = 31.5", "memory_gib = -1"), "device.memory_gib: given -1"),
        (WHOLE.replace("memory_gib = 31.5", "memory_gib = inf"), "device.memory_gib: given inf"),
        (WHOLE.replace("bfloat16 = 200.5", "fp8 = 200.5"), "device.tflops.fp8"),
        (WHOLE.replace('"cuda"', '"tpu"'), "device.kind: given 'tpu'"),
        (WHOLE.replace("memory_gib = 31.5", ""), "device.memory_gib: not given; needed where"),
        (WHOLE.replace("float32 = 50, ", ""), "device.tflops: float32 is not given"),
        (WHOLE.replace("pcie_gb_s = 32", ""), "device.pcie_gb_s: not given"),
        (WHOLE.replace("link_gb_s = 20", ""), "node.link_gb_s: not given"),
        (WHOLE.replace("network_gb_s = 12.5", ""), "network_gb_s: not given"),
        (WHOLE.replace("host_memory_gib = 256", ""), "node.host_memory_gib: not given"),
        ('[device]\nlike = "a100"\n', "did you mean 'a100-40' or 'a100-80'"),
        ("nodes = [", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)


def test_the_file_that_the_page_shows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    cluster = read(tmp_path, text)
    assert (cluster.devices, cluster.device.memory, cluster.node.disk_bandwidth) == (8, 70 * GIB, 3e9)
    assert cluster.device.flops["bfloat16"] == 250e12 and cluster.network == 25e9


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        find_hardware(str(tmp_path / "none.toml"))
