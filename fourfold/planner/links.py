"""What bytes cross and how fast: the links of a device to its host, its node, other nodes and the disk.

Devices are numbered so that tensor-parallel ones lie side by side, then those of one context, of data, of a pipeline:
what talks most is nearest (Narayanan et al. 2021, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from fourfold.planner.bill import Phase
from fourfold.planner.hardware.machine import Cluster, Link
from fourfold.planner.layout import Layout
from fourfold.planner.scene import Scene
from fourfold.planner.work import Flow

# Seconds of work by phase and role.
Busy = Mapping[tuple[Phase, str], float]
Axis = Literal["tensor", "context", "data", "expert", "pipeline"]
# What transfers reach of a link's rate: an all-reduce of eight A100 233 of the 300 GB/s that each sends by NVLink
# (NVIDIA/nccl-tests, issue 175), and copies between a GPU and host memory 25 of the 31.5 GB/s of PCIe 4.0 x16, as the
# authors of BaM measured them (ZaidQureshi/bam, issue 54).
REACHED = 0.8
# Where nobody has said how fast they are: 10 Gbit/s Ethernet, an SSD, PCIe 3.0 x16.
UNKNOWN = {"between nodes": 1.25e9, "disk": 1e9, "pcie": 15.75e9}
# From the call of a collective to its first byte, once for each of its steps around the ring.
LATENCY = 10e-6
# Gradients are sent when so many bytes are there (Li et al. 2020, "PyTorch Distributed", section 4.2: 25 MB).
BUCKET = 25 * 2**20


class Road(NamedTuple):
    """A link and the bytes/s that one device gets of it."""

    link: Link
    rate: float

    def flow(
        self, what: str, source: str, target: str, phase: Phase, size: float, messages: float = 0.0, hops: int = 1
    ) -> Flow:
        """`size` bytes in so many messages, each over `hops` devices one after the other."""
        return Flow(what, source, target, phase, size, self.link, size / self.rate + messages * hops * LATENCY)


def span(layout: Layout, axis: Axis) -> int:
    """Devices from the first of a group to its last, both included."""
    inner = {
        "tensor": layout.tensor,
        "context": layout.tensor * layout.context,
        "expert": layout.tensor * layout.context * layout.expert,
        "data": layout.tensor * layout.context * layout.data,
        "pipeline": layout.devices,
    }
    return inner[axis]


def road(cluster: Cluster, layout: Layout, axis: Axis) -> Road:
    """What a device's traffic with the others of its group goes over: the slowest link of the ring.

    A ring over nodes enters and leaves each of them once, and the rings of a node share its network; to-all traffic
    of experts, and a pipeline's, leaves from all devices at once.
    """
    node = cluster.node
    inside = node.link or node.device.pcie or UNKNOWN["pcie"]
    if span(layout, axis) <= node.devices:
        return Road("inside the node", REACHED * inside)
    rings = node.devices if axis in ("expert", "pipeline") else max(span(layout, axis) // getattr(layout, axis), 1)
    network = (cluster.network or UNKNOWN["between nodes"]) / min(rings, node.devices)
    return Road("between nodes", REACHED * min(inside, network))


def below(scene: Scene) -> Road:
    """To where parked and offloaded bytes lie: host memory below a GPU, the disk below a CPU."""
    node = scene.cluster.node
    if scene.on_cpu:
        return Road("disk", node.disk_bandwidth or UNKNOWN["disk"])
    return Road("pcie", (1.0 if node.device.measured else REACHED) * (node.device.pcie or UNKNOWN["pcie"]))


def to_a_service(scene: Scene) -> Road:
    """To a service, which may be on another machine."""
    return Road("between nodes", REACHED * (scene.cluster.network or UNKNOWN["between nodes"]))


def buckets(size: float) -> int:
    """Messages of gradients."""
    return math.ceil(size / BUCKET)


def behind(flow: Flow, seconds: float) -> list[Flow]:
    """The flow while work of `seconds` goes on: what fits behind it is hidden, and the rest is not."""
    if flow.seconds <= seconds:
        return [replace(flow, hidden=True)]
    share = seconds / flow.seconds
    hidden = replace(flow, bytes=share * flow.bytes, seconds=seconds, hidden=True)
    rest = replace(flow, bytes=(1 - share) * flow.bytes, seconds=flow.seconds - seconds)
    return [hidden, rest] if share else [rest]


class Cover:
    """The work that transfers hide behind; two on one link share it."""

    def __init__(self, busy: Busy) -> None:
        self._busy = busy
        self._left: dict[tuple[Phase, str, Link], float] = {}

    def behind(self, flow: Flow, role: str, share: float = 1.0) -> list[Flow]:
        """The flow while `role` works in its phase; `share` of that work is such that it can go on beside it."""
        whole = self._busy.get((flow.phase, role), 0.0)
        key = flow.phase, role, flow.link
        left = self._left.setdefault(key, whole)
        cover = min(left, share * whole)
        self._left[key] = left - min(cover, flow.seconds)
        return behind(flow, cover)
