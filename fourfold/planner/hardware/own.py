"""Hardware of one's own in a TOML file; docs/planner.md shows one.

Units stand in the names: GiB is 2^30 bytes, GB and TFLOP are 10^9 and 10^12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fourfold.config.loading import ConfigError, read_toml
from fourfold.planner.hardware.finding import device_named
from fourfold.planner.hardware.machine import GB, GIB, Cluster, Device, Node
from fourfold.planner.hardware.nodes import MACHINES

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Some = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DeviceTable(_Table):
    """A device: like a known one but for what is given, or all of it."""

    like: str | None = None
    name: str | None = None
    kind: Literal["cuda", "rocm", "cpu"] | None = None
    memory_gib: Positive | None = None
    bandwidth_gb_s: Positive | None = None
    pcie_gb_s: Some | None = None
    tflops: Mapping[Literal["float32", "bfloat16", "float16", "int8"], Positive] | None = None


class NodeTable(_Table):
    """A node; what is not given is as in the node that the device is `like`, for as many devices."""

    devices: Count = 1
    link_gb_s: Some | None = None
    link_name: str | None = None
    host_memory_gib: Positive | None = None
    disk_gb: Some | None = None
    disk_gb_s: Some | None = None


class HardwareTable(_Table):
    """The whole file."""

    nodes: Count = 1
    network_gb_s: Some | None = None
    network_name: str | None = None
    device: DeviceTable
    node: NodeTable = NodeTable()


def read_own(file: Path) -> Cluster:
    """The cluster of a TOML file; a `ConfigError` lists everything that is wrong with it."""
    if not file.is_file():
        raise ConfigError(str(file), ["no such file; docs/planner.md shows one"])
    tree = read_toml(file)
    try:
        table = HardwareTable.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(str(file), [_problem(details) for details in error.errors(include_url=False)]) from None
    problems = _missing(table)
    if problems:
        raise ConfigError(str(file), problems)
    return _cluster(table, str(file))


def _problem(details: Any) -> str:
    key = ".".join(str(part) for part in details["loc"])
    tables = {"": HardwareTable, "device": DeviceTable, "node": NodeTable}
    if details["type"] == "extra_forbidden":
        table = key.rpartition(".")[0]
        known = tables.get(table)
        return f"{key}: unknown key; allowed here: {', '.join(known.model_fields) if known else 'nothing'}"
    if details["type"] == "missing":
        return f"{key}: not given, and there is no default; allowed: {', '.join(DeviceTable.model_fields)}"
    return f"{key}: given {details['input']!r}; {details['msg']}"


def _missing(table: HardwareTable) -> list[str]:
    """What is needed beside what is given."""
    device, node = table.device, table.node
    if device.like is not None:
        return []
    problems = [
        f"device.{name}: not given; needed where device.like is not given"
        for name in ("name", "kind", "memory_gib", "bandwidth_gb_s", "tflops")
        if getattr(device, name) is None
    ]
    if device.tflops is not None and "float32" not in device.tflops:
        problems.append("device.tflops: float32 is not given; every device multiplies it")
    if device.kind in ("cuda", "rocm") and device.pcie_gb_s is None:
        problems.append("device.pcie_gb_s: not given; needed for a GPU")
    if device.kind in ("cuda", "rocm") and node.host_memory_gib is None:
        problems.append("node.host_memory_gib: not given; needed where device.like is not given")
    if node.devices > 1 and node.link_gb_s is None:
        problems.append("node.link_gb_s: not given; needed where there are several devices")
    if table.nodes > 1 and table.network_gb_s is None:
        problems.append("network_gb_s: not given; needed where there are several nodes")
    return problems


def _cluster(table: HardwareTable, source: str) -> Cluster:
    given, node = table.device, table.node
    if given.like is not None:
        name = device_named(given.like, given.like)
        machine = MACHINES[name]
        base = machine.cluster(name, min(node.devices, machine.devices), table.nodes)
    else:
        device = Device(given.name or "", given.kind or "cpu", 0, 0.0, {})
        base = Cluster(Node(device), table.nodes)
    device = _device(base.device, given, source)
    host = device.memory if device.kind == "cpu" else _bytes(node.host_memory_gib, GIB, base.node.host_memory)
    return replace(
        base,
        node=Node(
            device=device,
            devices=node.devices,
            link=_rate(node.link_gb_s, base.node.link),
            link_name=base.node.link_name if node.link_name is None else node.link_name,
            host_memory=host,
            disk=_bytes(node.disk_gb, GB, base.node.disk),
            disk_bandwidth=_rate(node.disk_gb_s, base.node.disk_bandwidth),
        ),
        network=_rate(table.network_gb_s, base.network),
        network_name=base.network_name if table.network_name is None else table.network_name,
    )


def _device(base: Device, given: DeviceTable, source: str) -> Device:
    flops = None if given.tflops is None else {str(name): rate * 1e12 for name, rate in given.tflops.items()}
    return Device(
        name=given.name or base.name,
        kind=given.kind or base.kind,
        memory=_bytes(given.memory_gib, GIB, base.memory),
        bandwidth=_rate(given.bandwidth_gb_s, base.bandwidth),
        flops=base.flops if flops is None else flops,
        pcie=_rate(given.pcie_gb_s, base.pcie),
        source=f"{source}, and for the rest {base.source}" if base.source else source,
    )


def _bytes(given: float | None, unit: int, otherwise: int) -> int:
    return otherwise if given is None else round(given * unit)


def _rate(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given * GB
