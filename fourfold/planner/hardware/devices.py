"""Devices in numbers that their makers publish: dense products by the type of their inputs, memory, links.

Memory of a GPU is what its driver leaves to a program, as PyTorch gives it in public reports of memory that ran out
("has a total capacity of 79.15 GiB"); makers' own figures are up to 7 % larger. float32 is the rate without TF32, which
PyTorch does not use unless told to. PCIe is what 16 lanes carry one way: 15.75, 31.5 and 63 GB/s in generations 3 to 5.
Of cards for desktops the rate with sums in float32 is given, which PyTorch asks for; it is half of the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fourfold.planner.hardware.machine import GB, GIB, Device

PCIE_3, PCIE_4, PCIE_5 = 15.75 * GB, 31.5 * GB, 63.0 * GB
TERA = 1e12


def _gpu(
    name: str,
    gib: float,
    gb_s: float,
    pcie: float,
    tera: tuple[float, float, float, float],
    source: str,
    kind: Literal["cuda", "rocm"] = "cuda",
) -> Device:
    """`tera`: float32, bfloat16, float16, int8 in TFLOP/s; 0 is a type that it has no instructions for."""
    types = ("float32", "bfloat16", "float16", "int8")
    flops = {dtype: rate * TERA for dtype, rate in zip(types, tera, strict=True) if rate}
    return Device(name, kind, round(gib * GIB), gb_s * GB, flops, pcie, source)


_V100 = "NVIDIA V100 datasheet (SXM2)"
_A100 = "NVIDIA A100 datasheet (SXM)"
_H100 = "NVIDIA H100 datasheet (SXM; PCIe), half of the rates with sparsity"
_GA102 = "NVIDIA Ampere GA102 whitepaper, appendix A"

GPUS: Mapping[str, Device] = {
    "v100-16": _gpu("V100-16GB", 15.77, 900, PCIE_3, (15.7, 0, 125, 0), _V100),
    "v100-32": _gpu("V100-32GB", 31.74, 900, PCIE_3, (15.7, 0, 125, 0), _V100),
    "a100-40": _gpu("A100-40GB", 39.39, 1555, PCIE_4, (19.5, 312, 312, 624), _A100),
    "a100-80": _gpu("A100-80GB", 79.15, 2039, PCIE_4, (19.5, 312, 312, 624), _A100),
    "a100-80-pcie": _gpu("A100-80GB PCIe", 79.15, 1935, PCIE_4, (19.5, 312, 312, 624), "NVIDIA A100 datasheet (PCIe)"),
    "h100": _gpu("H100-80GB", 79.11, 3350, PCIE_5, (67, 989.4, 989.4, 1978.9), _H100),
    "h100-pcie": _gpu("H100-80GB PCIe", 79.11, 2000, PCIE_5, (51, 756.5, 756.5, 1513), _H100),
    "h200": _gpu("H200-141GB", 139.8, 4800, PCIE_5, (67, 989.4, 989.4, 1978.9), "NVIDIA H200 datasheet (SXM), halved"),
    "b200": _gpu("B200-180GB", 178.35, 8000, PCIE_5, (75, 2250, 2250, 4500), "NVIDIA HGX B200 and DGX B200 datasheets"),
    "a6000": _gpu("RTX A6000", 47.53, 768, PCIE_4, (38.7, 154.8, 154.8, 309.7), f"RTX A6000 datasheet; {_GA102}"),
    "l40s": _gpu("L40S", 44.40, 864, PCIE_4, (91.6, 362, 362, 733), "NVIDIA L40S datasheet"),
    "4090": _gpu("RTX 4090", 23.64, 1008, PCIE_4, (82.6, 165.2, 165.2, 660.6), "NVIDIA Ada whitepaper, appendix A"),
    "3090": _gpu("RTX 3090", 23.69, 936, PCIE_4, (35.6, 71, 71, 284), _GA102),
    "mi300x": _gpu(
        *("MI300X", 191.98, 5300, PCIE_5, (163.4, 1307.4, 1307.4, 2614.9), "AMD Instinct MI300X datasheet"), kind="rocm"
    ),
}


def _cpu(
    name: str, cores: int, ghz: float, per_cycle: Mapping[str, int], channels: int, mt_s: int, gib: int, source: str
) -> Device:
    """All cores at their base clock, with so many operations of a type a cycle and core; channels are 8 bytes wide."""
    flops = {dtype: cores * ghz * 1e9 * operations for dtype, operations in per_cycle.items()}
    return Device(name, "cpu", gib * GIB, channels * mt_s * 8e6, flops, source=f"{source}; {gib} GiB are assumed")


# Operations a cycle: Zen 3 and 4 have two 256-bit FMA units; Zen 4 has AVX512-BF16 and VNNI over them; Golden Cove two
# of 512 bits, and AMX tiles of 16 x 64 bytes (AMD's and Intel's optimisation manuals).
_ZEN4 = {"float32": 32, "bfloat16": 64, "int8": 128}
_AMX = {"float32": 64, "bfloat16": 1024, "float16": 128, "int8": 2048}
CPUS: Mapping[str, Device] = {
    "epyc-7763": _cpu("EPYC 7763", 64, 2.45, {"float32": 32}, 8, 3200, 512, "AMD EPYC 7003 datasheet"),
    "epyc-9654": _cpu("EPYC 9654", 96, 2.4, _ZEN4, 12, 4800, 768, "AMD EPYC 9004 datasheet"),
    "xeon-8480": _cpu("Xeon 8480+", 56, 2.0, _AMX, 8, 4800, 512, "Intel Xeon Platinum 8480+ product page"),
    "ryzen-7950x": _cpu("Ryzen 7950X", 16, 4.5, _ZEN4, 2, 5200, 64, "AMD Ryzen 9 7950X product page"),
}
DEVICES: Mapping[str, Device] = {**GPUS, **CPUS}
