"""From what a user calls hardware to a `Cluster`: "4xa100-80", "2x8xh100", a TOML file, "detect"."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from fourfold.planner.hardware.devices import DEVICES
from fourfold.planner.hardware.machine import Cluster
from fourfold.planner.hardware.nodes import MACHINES

DETECT = "detect"
_COUNTED = re.compile(r"^(?:(?:(\d+)x)?(\d+)x)?(.+)$")
# What people and drivers write around a name ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"), and 80g for 80.
_AROUND = re.compile(
    r"^(nvidia|amd|intel|geforce|tesla|instinct|rtx)-?|-(sxm\d?|oam|hbm\d\w?)(?=-|$)|(?<=\d)gb?(?=-|$)"
)
_SAME = {
    **{"h100-80": "h100", "h100-80-pcie": "h100-pcie", "h200-141": "h200", "b200-180": "b200", "mi300x-192": "mi300x"},
    **{"a6000-48": "a6000", "l40s-48": "l40s", "4090-24": "4090", "3090-24": "3090"},
    **{"xeon-8480+": "xeon-8480", "7950x": "ryzen-7950x", "ryzen-9-7950x": "ryzen-7950x"},
}


def find_hardware(text: str) -> Cluster:
    """The cluster that `text` stands for: [NODESx][DEVICESx]NAME, a TOML file, "detect" for this machine as measured.

    A ValueError names what is near and everything that is allowed.
    """
    if text == DETECT:
        from fourfold.planner.hardware.measured import read_measured

        return read_measured()
    if text.endswith(".toml"):
        from fourfold.planner.hardware.own import read_own

        return read_own(Path(text).expanduser())
    found = _COUNTED.match(text.strip().lower())
    if found is None:
        raise ValueError(_refusal(text, text))
    nodes, devices, rest = found.groups()
    name = device_named(rest, text)
    machine = MACHINES[name]
    count_nodes, count = int(nodes or 1), int(devices or 1)
    if not (1 <= count <= machine.devices and count_nodes >= 1):
        whole, left = divmod(count, machine.devices)
        fits = whole > 1 and not left and count_nodes == 1
        again = f"{whole}x{machine.devices}x{name}" if fits else f"1x{machine.devices}x{name}"
        raise ValueError(
            f"hardware {text!r}: a {machine.name} holds {machine.devices} devices; allowed: 1 to {machine.devices} a "
            f"node, and any number of nodes before them; try {again!r}, or a TOML file of your own"
        )
    return machine.cluster(name, count, count_nodes)


def device_named(given: str, text: str) -> str:
    """The key in DEVICES that a name stands for; `text` is the whole of what was written."""
    name = re.sub(r"[ _]+", "-", given.strip().lower())
    while (shorter := _AROUND.sub("", name)) != name:
        name = shorter
    name = _SAME.get(name, name)
    if name not in DEVICES:
        raise ValueError(_refusal(text, name))
    return name


def _refusal(text: str, name: str) -> str:
    kinds = [known for known in DEVICES if known.startswith(f"{name}-")]  # a100: of 40 or of 80 GB
    near = kinds or difflib.get_close_matches(name, DEVICES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return (
        f"hardware {text!r} is not known; {hint}allowed: one of {', '.join(DEVICES)}, with the number of devices "
        f'and of nodes before it ("4xa100-80", "2x8xh100"), a TOML file of your own (from {os.getcwd()}), or '
        f'"{DETECT}" for this machine'
    )
