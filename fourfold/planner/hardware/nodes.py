"""Machines that devices are sold in: how many, how they are linked, what memory and network is beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.planner.hardware.devices import DEVICES, PCIE_4, PCIE_5
from fourfold.planner.hardware.machine import GB, GIB, Cluster, Node

# Bytes/s of one port, one way: 100, 200 and 400 Gb/s (InfiniBand Trade Association's road map).
NETWORKS: Mapping[str, float] = {"EDR": 12.5 * GB, "HDR": 25 * GB, "NDR": 50 * GB}


@dataclass(frozen=True, slots=True)
class Machine:
    """A whole node of a device. A job on some of its devices has their share of memory, disks and ports."""

    name: str
    devices: int
    link: float  # bytes/s a device can send, all its links together, one way
    link_name: str
    host_memory: int
    ports: int
    network: str  # in NETWORKS
    disk: int = 0
    assumed: str = ""  # which of these figures are not from its datasheet

    def cluster(self, device: str, devices: int, nodes: int) -> Cluster:
        """So many nodes with so many of its devices each."""
        part = devices / self.devices
        notes = [f"{self.name}: {self.assumed} assumed"] if self.assumed else []
        if devices < self.devices:
            of_all = f"{devices} of {self.devices} shares of {self.host_memory // GIB:,} GiB"
            notes.append(f"{self.name}: the devices have {of_all} of host memory, and as much of network and disks")
        node = Node(
            device=DEVICES[device],
            devices=devices,
            link=self.link if devices > 1 else 0.0,
            link_name=self.link_name if devices > 1 else "",
            host_memory=int(self.host_memory * part),
            disk=int(self.disk * part),
        )
        ports = max(round(self.ports * part), 1)
        alone = nodes == 1
        return Cluster(
            node=node,
            nodes=nodes,
            network=0.0 if alone else ports * NETWORKS[self.network],
            network_name="" if alone else f"{ports} x {self.network} InfiniBand",
            notes=tuple(notes),
        )


_UNKNOWN = "host memory and network are"


def _pcie(device: str, rate: float, generation: int) -> Machine:
    """A server of eight cards without another link; its host has twice their memory, rounded up, and one port."""
    per_device = 32 * GIB * -(-2 * DEVICES[device].memory // (32 * GIB))
    name = f"server of eight {DEVICES[device].name}"
    return Machine(name, 8, rate, f"PCIe {generation}.0", 8 * per_device, 1, "HDR", assumed=_UNKNOWN)


# NVIDIA's DGX data sheets; of each NVLink rate, which counts both ways, the half.
_DGX1 = Machine("DGX-1", 8, 150 * GB, "NVLink 2", 512 * GIB, 4, "EDR", disk=round(7.68e12))
_DGX_H100 = Machine("DGX H100", 8, 450 * GB, "NVLink 4, NVSwitch", 2048 * GIB, 8, "NDR", disk=round(30.72e12))
MACHINES: Mapping[str, Machine] = {
    "v100-16": _DGX1,
    "v100-32": _DGX1,
    "a100-40": Machine(
        *("DGX A100 320GB", 8, 300 * GB, "NVLink 3, NVSwitch", 1024 * GIB, 8, "HDR"), disk=round(15.36e12)
    ),
    "a100-80": Machine(
        *("DGX A100 640GB", 8, 300 * GB, "NVLink 3, NVSwitch", 2048 * GIB, 8, "HDR"), disk=round(30.72e12)
    ),
    "h100": _DGX_H100,
    "h100-pcie": _pcie("h100-pcie", PCIE_5, 5),
    "a100-80-pcie": _pcie("a100-80-pcie", PCIE_4, 4),
    "h200": Machine("DGX H200", 8, 450 * GB, "NVLink 4, NVSwitch", 2048 * GIB, 8, "NDR", disk=round(30.72e12)),
    "b200": Machine("DGX B200", 8, 900 * GB, "NVLink 5, NVSwitch", 2048 * GIB, 8, "NDR", disk=round(30.72e12)),
    # Seven links of 64 GB/s one way to the seven others (AMD Instinct MI300X platform datasheet).
    "mi300x": Machine(*("MI300X platform", 8, 448 * GB, "Infinity Fabric", 2048 * GIB, 8, "NDR"), assumed=_UNKNOWN),
    **{name: _pcie(name, PCIE_4, 4) for name in ("a6000", "l40s", "4090", "3090")},
    **{
        name: Machine(f"{device.name} server", 1, 0.0, "", device.memory, 1, "HDR", assumed=_UNKNOWN)
        for name, device in DEVICES.items()
        if device.kind == "cpu"
    },
}
