"""Types of the roles: which can stand beside which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fourfold.config.checks.service import roles_of_the_base

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

FLOATS = ("float32", "bfloat16", "float16")


def precision(config: RunConfig) -> Iterator[str]:
    """Of what depends on the compute type again when 'auto' is resolved."""
    given, mode = config.precision, config.sharing.mode
    shared = {"frozen": given.frozen} if mode != "none" else {}
    if mode == "adapters":
        # They stand on the shared base: what is held narrowly for all cannot be wider for one.
        shared |= {role: getattr(given, role) for role in roles_of_the_base(config)}
    for name, held in shared.items():
        if held in FLOATS and held != given.compute and given.compute not in ("auto", "float32"):
            yield (
                f"precision.{name}: given {held!r}, but with sharing.mode = {mode!r} and precision.compute = "
                f"{given.compute!r} what is shared is held in {given.compute}, and another type would save nothing; "
                f"allowed: 'auto', {given.compute!r}"
            )
        if name != "frozen" and held not in ("auto", *FLOATS):
            yield (
                f"precision.{name}: given {held!r}, but sharing.mode = 'adapters' holds one base for all roles, as "
                "precision.frozen says; leave it out"
            )
    if given.critic_differs and given.compute != "auto" and config.critic.of_the_run:
        yield from _critic(config)
    if given.compute == "float16":
        yield from _beside_float16(config)


def _critic(config: RunConfig) -> Iterator[str]:
    """Where it multiplies by weights that others multiply by too, it does so in their type."""
    mode = config.sharing.mode
    if mode == "adapters" or (mode == "trunk" and config.trunk.train):
        because = "trunk.train = true" if mode == "trunk" else "sharing.mode = 'adapters'"
        yield (
            f"precision.critic: given {config.precision.critic!r}, but with {because} the critic's passes go through "
            f"weights that the actor's go through, in precision.compute = {config.precision.compute!r}; leave "
            "precision.critic out"
        )


def _beside_float16(config: RunConfig) -> Iterator[str]:
    if config.memory.optimizer_in_backward:
        yield (
            "memory.optimizer_in_backward: true beside precision.compute = 'float16', which steps only when no "
            "gradient of the whole backward pass has overflowed; set it to false, or precision.compute = 'bfloat16'"
        )
    if config.memory.optimizer_residency == "offload":
        yield (
            "memory.optimizer_residency: 'offload' beside precision.compute = 'float16', whose loss scale is taken off "
            "gradients that are on the device; set it to 'park', or precision.compute = 'bfloat16'"
        )


def precision_warnings(config: RunConfig) -> Iterator[str]:
    """What is allowed and has a price that the user should know of before anything is loaded."""
    if "ppo" not in config.stages or not config.reference_differs:
        return
    given = ""
    if config.precision.reference_differs:
        given = f"precision.reference = {config.precision.reference!r}"
    elif config.reference.engine != "torch":
        given = f"reference.engine = {config.reference.engine!r}"
    if given:
        yield (
            f"{given}, and the actor computes in {config.precision.compute}: every KL between them is biased; "
            "pre-flight measures by how much"
        )
    else:
        yield (
            f"reference.residency = {config.reference.residency!r}: where the kernels there round otherwise than the "
            "actor's, every KL between them is biased; pre-flight measures by how much"
        )
