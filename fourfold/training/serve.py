"""`fourfold serve`: the frozen roles of a run, loaded as ppo loads them, behind HTTP until a signal comes."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path

from fourfold.config import RunConfig
from fourfold.config.checks import roles_of_a_service, roles_of_the_base
from fourfold.memory.attention import check_attention
from fourfold.memory.budget import Budget, keep_few_kernels
from fourfold.models.assembly import frozen_roles, record_for
from fourfold.models.identity import ModelIdentity, ReaderIdentity
from fourfold.models.loading import device_of, load_base
from fourfold.models.reference import load_reference_alone
from fourfold.models.text_rewards import external_reward
from fourfold.scoring.service.hosted import (
    Hosted,
    HostedReader,
    HostedReference,
    HostedReward,
    HostedRole,
    Identity,
    IdRows,
)
from fourfold.scoring.service.server import Limits, ScoringServer
from fourfold.training.folder import RunFolder, reward_model, sft_model
from fourfold.training.inputs import end_of_text
from fourfold.training.pipeline import Say, on_this_machine


def load_hosted(config: RunConfig, roles: Collection[str]) -> Hosted:
    """The roles of a run that has them: what its stages sft and reward have left, the base model, models of their own.

    The run's own model is loaded only where a role is made of it.
    """
    _require_held(config, roles)
    config = on_this_machine(config)
    held: dict[str, HostedRole] = {}
    if of_the_base := [role for role in roles if role in roles_of_the_base(config)]:
        held = _of_the_base(config, of_the_base)
    if others := [role for role in roles if role not in held]:
        keep_few_kernels()
        device = device_of(config)
        check_attention(config.memory.attention, device)
        budget = Budget.of_gib(config.memory.budget_gib, device)
        load = {"reference": _own_reference, "reward": _reader}
        held |= {role: load[role](config, budget) for role in others}
    return Hosted(
        {role: held[role] for role in roles}, model=config.model.path, micro_batch_size=config.ppo.micro_batch_size
    )


def _of_the_base(config: RunConfig, roles: Collection[str]) -> dict[str, HostedRole]:
    folder = RunFolder(Path(config.output).expanduser())
    reward = reward_model(config, folder) if "reward" in roles else None
    base = load_base(config)
    policy, scorer, weights = frozen_roles(config, base, sft_model(config, folder), reward, roles)
    ids, held = IdRows.of_base(base), dict[str, HostedRole]()
    if policy is not None:
        identity = Identity.of(base, record_for(config, "policy"), weights["reference"])
        held["reference"] = HostedReference(policy, ids, identity)
    if scorer is not None:
        identity = Identity.of(base, record_for(config, "scorer"), weights["reward"])
        held["reward"] = HostedReward(scorer, ids, identity, base.tokenizer, end_of_text(base))
    return held


def _own_reference(config: RunConfig, budget: Budget) -> HostedRole:
    found = load_reference_alone(config, budget)
    ids = IdRows.of_reference(found, budget)
    return HostedReference(found.policy, ids, ModelIdentity.of_reference(config))


def _reader(config: RunConfig, budget: Budget) -> HostedRole:
    return HostedReader(external_reward(config, budget), ReaderIdentity.of_reward(config), budget)


def roles_of(config: RunConfig) -> tuple[str, ...]:
    """Those that a run has and a service can hold."""
    return tuple(roles_of_a_service(config))


def _require_held(config: RunConfig, roles: Collection[str]) -> None:
    """Exactly what a run may leave to a service: ValueError where it has no such role, or holds it itself."""
    have = roles_of(config)
    given = config.reference
    here = f"reference.engine = {given.engine!r} holds the reference in the run's own process"
    if given.kind == "uniform":
        here = "reference.prior = 'uniform' has no weights"
    elif given.kind == "moving":
        here = "the weights of reference.prior = 'moving' follow the run's own actor"
    reasons = {
        "reference": here,
        "reward": f"reward.source = {config.reward.source!r} has no reward model",
    }
    if others := [role for role in roles if role not in have]:
        instead = f"give --roles {','.join(have)}" if have else "this run has no role that a service can hold"
        because = " and ".join(reasons[role] for role in others)
        raise ValueError(f"--roles {','.join(roles)}: {because}; {instead}, and let the run hold the rest itself")
    if not roles:
        raise ValueError(
            f"serve: {reasons['reference']} and {reasons['reward']}, so that there is no role that a service can hold; "
            "the run holds them itself"
        )


def serve(
    config: RunConfig, roles: Collection[str], host: str, port: int, token: str, limits: Limits, say: Say
) -> None:
    """Answer until SIGINT or SIGTERM; answers that were begun are sent."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        hosted = load_hosted(config, roles)
        server = ScoringServer(host, port, hosted, token=token, limits=limits)
        try:
            said = hosted.describe()
            for name, role in said["roles"].items():
                say(f"{name}: {role['parameters']:,} parameters, {role['bytes'] / 2**20:,.1f} MiB, {role['compute']}")
            guarded = "token wanted" if token else "no token: only this machine can ask"
            say(f"serving {' and '.join(hosted.roles)} of {said['model']} at {server.url} ({guarded})")
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            say("stopped")
        finally:
            server.server_close()
    finally:
        signal.signal(signal.SIGTERM, before)


def token_from(variable: str, file: str) -> str:
    """The token in an environment variable or in a file; empty where neither has one."""
    if not file:
        return os.environ.get(variable, "")
    path = Path(file).expanduser()
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"--token-file {file!r} cannot be read: {error.strerror}") from error
    if not token:
        raise ValueError(f"--token-file {file!r} is empty; write the token into it")
    return token
