"""Memory levers that exclude other settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def memory(config: RunConfig) -> Iterator[str]:
    attention = config.memory.attention
    if attention in ("flash_attention_2", "flex_attention") and config.system.device == "cpu":
        yield (
            f"memory.attention: given {attention!r} beside system.device = 'cpu', which cannot train with it; "
            "allowed there: 'auto', 'eager', 'sdpa'"
        )
    elif attention == "flash_attention_2" and config.precision.compute == "float32":
        yield (
            "memory.attention: 'flash_attention_2' computes in bfloat16 only, and precision.compute = 'float32'; set "
            "precision.compute = 'bfloat16', or memory.attention = 'sdpa'"
        )
