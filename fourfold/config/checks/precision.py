"""Types of the roles: which can stand beside which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

HALF = ("bfloat16", "float16")


def precision(config: RunConfig) -> Iterator[str]:
    """Of what depends on the compute type again when 'auto' is resolved."""
    given, mode = config.precision, config.sharing.mode
    shared = {"frozen": given.frozen} if mode != "none" else {}
    if mode == "adapters":
        # They stand on the shared base: what is held narrowly for all cannot be wider for one.
        shared |= {"reference": given.reference, "reward": given.reward}
    for name, held in shared.items():
        if held in ("auto", given.compute) or given.compute == "auto":
            continue
        if given.compute != "float32":
            yield (
                f"precision.{name}: given {held!r}, but with sharing.mode = {mode!r} and precision.compute = "
                f"{given.compute!r} what is shared is held in {given.compute}, and another type would save nothing; "
                f"allowed: 'auto', {given.compute!r}"
            )
    if given.compute == "float16" and config.memory.optimizer_in_backward:
        yield (
            "memory.optimizer_in_backward: true beside precision.compute = 'float16', which steps only when no "
            "gradient of the whole backward pass has overflowed; set it to false, or precision.compute = 'bfloat16'"
        )


def precision_warnings(config: RunConfig) -> Iterator[str]:
    """What is allowed and has a price that the user should know of before anything is loaded."""
    given = config.precision
    if "ppo" in config.stages and given.reference_differs:
        yield (
            f"precision.reference = {given.reference!r}, and the actor computes in {given.compute}: every KL between "
            "them is biased; pre-flight measures by how much"
        )
