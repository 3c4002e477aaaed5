"""Which type a run computes in."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(setting: str, compute: torch.dtype) -> torch.dtype:
    """The type of a setting whose 'auto' is the type that trained roles compute in."""
    return compute if setting == "auto" else DTYPES[setting]


def resolve_compute(setting: str, device: torch.device) -> str:
    """The name of a type for a setting that may be 'auto': then 'bfloat16' or 'float32'.

    bfloat16 saves time only where the hardware multiplies it: a CPU without such instructions widens the numbers for
    every product (algorithms/products.py), so that there it saves memory alone.
    """
    if setting != "auto":
        return setting
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has AVX512-BF16 or AMX."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
