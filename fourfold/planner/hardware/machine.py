"""Devices, the nodes that hold them, and the links between them, in numbers that makers publish or that are measured.

Bytes are bytes, rates are per second, and products are dense (no structured sparsity). A share of a rate that real work
reaches is not among these: fourfold.planner.timing has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GIB = 2**30
GB = 10**9

Link = Literal["pcie", "inside the node", "between nodes", "disk"]


LAYER_STEP_HIDDEN = 576  # that of SmolLM2-135M


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the CPU of a machine that has none.

    `flops` are those of dense matrix products by the type of their inputs ("float32", "bfloat16", "float16", "int8");
    a type that is missing is not multiplied by the hardware. `few_rows` are those with the few rows of a decoding step,
    as pairs of rows and FLOP/s, reading the weights included; it is empty where that was not measured. `memory` is
    what a run can have of it: of a GPU what its maker calls its memory, of a CPU the host's. `layer_step` are seconds
    that a layer of `LAYER_STEP_HIDDEN` takes in a decoding step beside its products, by rows; empty as `few_rows` is.
    """

    name: str
    kind: Literal["cuda", "rocm", "cpu"]
    memory: int  # bytes
    bandwidth: float  # bytes/s of that memory
    flops: Mapping[str, float]  # FLOP/s
    pcie: float = 0.0  # bytes/s, one direction, to host memory; 0 on a CPU, whose memory that is
    source: str = ""  # where the figures are from
    layer_step: tuple[tuple[int, float], ...] = ()  # rows and seconds
    few_rows: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # rows and FLOP/s

    @property
    def measured(self) -> bool:
        """Whether the rates are what large products and copies reached here, and not what its maker says."""
        return self.source.startswith("measured")

    def flops_of_rows(self, dtype: str, rows: float) -> float | None:
        """FLOP/s of products with so many rows as measured, between and beyond what was measured by its seconds."""
        known = [(count, count / rate) for count, rate in self.few_rows.get(dtype, ())]
        if len(known) < 2:
            return None
        above = next((i for i, (count, _) in enumerate(known) if count >= rows), len(known) - 1)
        (low, before), (high, after) = known[max(above, 1) - 1 : max(above, 1) + 1]
        return rows / max(before + (after - before) * (rows - low) / (high - low), 0.5 * known[0][1])

    def seconds_of_layer_step(self, rows: float, hidden: int) -> float | None:
        """Beside the products of a layer, as measured: what every call takes, and what grows with rows and hidden."""
        if len(self.layer_step) < 2:
            return None
        (low, least), (high, most) = self.layer_step[0], self.layer_step[-1]
        return least + max(most - least, 0.0) * (rows - low) / (high - low) * hidden / LAYER_STEP_HIDDEN

    def multiplies(self, dtype: str) -> bool:
        """Whether it has instructions for products of this type."""
        return dtype in self.flops


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: equal devices, its memory and disk, and the link between its devices."""

    device: Device
    devices: int = 1
    link: float = 0.0  # bytes/s a device can send to the others of its node (NVLink, PCIe); 0 where it is alone
    link_name: str = ""
    host_memory: int = 0  # bytes
    disk: int = 0  # bytes; 0: not known, never a limit
    disk_bandwidth: float = 0.0  # bytes/s; 0: not known


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes and the network between them."""

    node: Node
    nodes: int = 1
    network: float = 0.0  # bytes/s a node can send to the others; 0 where it is alone
    network_name: str = ""
    notes: tuple[str, ...] = field(default=())  # what about these figures was assumed

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.node.devices

    @property
    def device(self) -> Device:
        """Any one: they are equal."""
        return self.node.device
