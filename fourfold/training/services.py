"""Roles at a service, at the start of ppo: the service is compared with the run, by what it says and by a probe."""

from __future__ import annotations

from pathlib import Path

import torch

from fourfold.batch import Rollout
from fourfold.config.schema import RunConfig
from fourfold.errors import RunFailed
from fourfold.models.assembly import record_for
from fourfold.models.identity import weights_in_folder, weights_of_role
from fourfold.models.llama_roles import EnginePolicy, form_of, torch_reference, verify_engine
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.scoring.service import wire
from fourfold.scoring.service.client import Service
from fourfold.scoring.service.hosted import Identity
from fourfold.scoring.service.llama_server import LlamaServer, ordinary_ids
from fourfold.scoring.service.roles import RemotePolicy, RemoteRole, ServiceReward
from fourfold.training.folder import RunFolder, reward_model
from fourfold.training.preflight import bounds_of

PROBE_LENGTHS = ((3, 4), (5, 2), (1, 1))  # (prompt, response) tokens


def reference_at_service(config: RunConfig, base: Base, form: Policy, actor: Policy) -> RemotePolicy:
    """The reference; `actor` is as it starts, so that its weights and numbers are the reference's."""
    remote = RemoteRole(Service(config.service), "reference", max_rows=config.service.max_rows)
    remote.require(Identity.of(base, record_for(config, "policy"), weights_of_role(base, actor)))
    probe, activations = _probe(base)
    temperature = config.sampling.temperature
    reference = RemotePolicy(form, remote)
    with torch.no_grad():
        here, there = (role.log_probs(activations, probe, temperature)[0] for role in (actor, reference))
    _require_close("reference", "log-probs", float((here - there).abs().max()), base)
    return reference


def reference_at_llama_server(config: RunConfig, base: Base, actor: Policy) -> EnginePolicy:
    """The reference at llama.cpp's own server, which has to hold what `actor` is now, or `reference.model`."""
    server = LlamaServer(config.service, ordinary_ids(base.tokenizer) - base.eos_ids)
    model = torch_reference(config, base, actor)
    verify_engine(server, model, base.tokenizer, server.url)
    reference = EnginePolicy(form_of(model), server, "its file's types")
    reference.residency = server
    return reference


def reward_at_service(config: RunConfig, base: Base, form: Scorer, critic: Scorer) -> ServiceReward:
    """The reward model; a critic that starts from it and computes alike has the same numbers, which are compared."""
    remote = RemoteRole(Service(config.service), "reward", max_rows=config.service.max_rows)
    record, stored = record_for(config, "scorer"), reward_model(config, RunFolder(Path(config.output).expanduser()))
    assert stored is not None, "a function is no model"
    remote.require(Identity.of(base, record, weights_in_folder(base, stored, record)))
    form.residency = remote
    reward = ServiceReward(remote)
    probe, activations = _probe(base)
    with torch.no_grad():
        there, _ = reward(activations, probe)
        if config.critic.init == "reward" and not config.precision.critic_differs:
            here = critic.scores(activations)
            gap = (here - there).abs() / here.abs().clamp(min=1.0)  # scores have a scale of their own
            _require_close("reward", "scores", float(gap.max()), base)
    return reward


@torch.no_grad()
def _probe(base: Base) -> tuple[Rollout, Activations]:
    """A few rows of arbitrary tokens, and what this run's roles would read of them."""
    ids = iter(range(sum(map(sum, PROBE_LENGTHS))))
    tokens = [
        [(next(ids) * 37 + 11) % base.policy.head.weight.shape[0] for _ in range(p + r)] for p, r in PROBE_LENGTHS
    ]
    rows = wire.Rows(
        [row[:p] for row, (p, _) in zip(tokens, PROBE_LENGTHS, strict=True)],
        [row[p:] for row, (p, _) in zip(tokens, PROBE_LENGTHS, strict=True)],
    )
    rollout = wire.rollout_of(rows, base.pad_id, next(base.policy.parameters()).device)
    mask = rollout.attention_mask
    inputs = rollout.sequences if base.trunk is None else base.trunk(rollout.sequences, mask)
    return rollout, Activations(inputs, mask)


def _require_close(role: str, what: str, gap: float, base: Base) -> None:
    bound = bounds_of(base.policy.branch, base.trunk).ratio[1]
    if not gap <= bound:
        raise RunFailed(
            f"load: the {role}'s {what} of a probe differ by {gap:.2e} between the service and this run (allowed "
            f"{bound:.0e}); likely: other versions of torch or transformers on the two sides"
        )
