"""Roles that a service computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def roles_at_a_service(config: RunConfig) -> list[str]:
    """Names of the roles whose weights a service holds."""
    return [role for role in roles_of_a_service(config) if getattr(config, role).residency == "service"]


def roles_of_a_service(config: RunConfig) -> list[str]:
    """Names of the frozen roles that a `fourfold serve` can hold, of the run's own model or of one of their own."""
    still = config.reference.kind not in ("uniform", "moving")
    can = {
        "reference": still and config.reference.engine == "torch",
        "reward": config.reward.of_the_base or config.reward.source == "model",
    }
    return [role for role, held in can.items() if held]


def roles_of_the_base(config: RunConfig) -> list[str]:
    """Names of the frozen roles that torch makes of the run's own model."""
    by_torch = config.reference.kind not in ("model", "uniform") and config.reference.engine == "torch"
    made = {"reference": by_torch, "reward": config.reward.of_the_base}
    return [role for role, of_the_base in made.items() if of_the_base]


def reference_at_llama_cpp(config: RunConfig) -> bool:
    """Whether llama.cpp's own server is the reference."""
    return config.reference.engine != "torch" and config.reference.residency == "service"


def service(config: RunConfig) -> Iterator[str]:
    roles, llama_server = roles_at_a_service(config), reference_at_llama_cpp(config)
    if not (roles or llama_server):
        return
    given = config.service
    if problem := problem_of_url(given.url):
        because = " and ".join(f"{role}.residency" for role in roles or ["reference"])
        what = "llama-server" if llama_server else "`fourfold serve`"
        yield (
            f"service.url: {problem}, but {because} = 'service' needs the address of a {what}, such as "
            "'http://127.0.0.1:8777'"
        )
    if llama_server:
        yield from _llama_server(config)
    elif given.max_rows < config.ppo.micro_batch_size:
        yield (
            f"service.max_rows: given {given.max_rows}, fewer than the ppo.micro_batch_size = "
            f"{config.ppo.micro_batch_size} rows of one pass; allowed: at least that many"
        )
    for role in roles if config.reward.of_the_base else set(roles) - {"reward"}:
        if (held := getattr(config.precision, role)) != "auto":
            yield (
                f"precision.{role}: given {held!r} beside {role}.residency = 'service', whose numbers must be this "
                f"run's own; leave precision.{role} out"
            )
    if "reference" in roles and config.ppo.kl_estimator == "full":
        yield (
            "reference.residency: 'service' sends one number a token, and ppo.kl_estimator = 'full' needs the "
            "reference's whole distribution; try residency = 'park', or another estimator"
        )


def _llama_server(config: RunConfig) -> Iterator[str]:
    if config.sampling.temperature != 1.0:
        yield (
            f"sampling.temperature: given {config.sampling.temperature:g} beside reference.engine = 'llama_cpp' and "
            "reference.residency = 'service': a llama-server gives probabilities of temperature 1 only; set it to 1.0, "
            "or reference.residency = 'keep'"
        )
    if config.reward.residency == "service":
        yield (
            "reward.residency: given 'service', but service.url is the llama-server of the reference, which holds no "
            "reward model; allowed: 'keep', 'park' or 'stream'"
        )
    if config.reference.engine != "llama_cpp":
        yield (
            f"reference.engine: given {config.reference.engine!r} beside reference.residency = 'service': the server's "
            "file has its own types; set engine to 'llama_cpp'"
        )


def problem_of_url(url: str, key: str = "service") -> str:
    """What is wrong with it; empty where nothing is."""
    if not url:
        return "not given"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        return f"given {url!r}, which is no http:// or https:// address"
    if parts.username is not None or parts.query or parts.fragment:
        return f"given {url!r} with a user, a query or a fragment (a token stands in {key}.token_env's variable)"
    return ""
