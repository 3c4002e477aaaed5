"""Roles at a service, at the start of ppo: the service is compared with the run, by what it says and by a probe."""

from __future__ import annotations

from pathlib import Path

import torch

from fourfold.batch import Rollout
from fourfold.config.schema import RunConfig
from fourfold.errors import RunFailed
from fourfold.models.assembly import record_for, start_of_reference
from fourfold.models.external import PADDING_TOLERANCE, QUANTIZED_BOUNDS, placed
from fourfold.models.identity import ModelIdentity, ReaderIdentity, weights_in_folder, weights_of_role
from fourfold.models.llama_roles import EnginePolicy, note_rounding, torch_reference, verify_engine
from fourfold.models.loading import Base
from fourfold.models.onnx import BOUNDS as ENGINE_BOUNDS
from fourfold.models.outside import Absent, Outside
from fourfold.models.reference import form_of
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.models.text_reader import PROBE as SENTENCES
from fourfold.scoring.service import wire
from fourfold.scoring.service.client import Service
from fourfold.scoring.service.hosted import Identity
from fourfold.scoring.service.llama_server import LlamaServer, ordinary_ids
from fourfold.scoring.service.roles import RemoteOwnPolicy, RemotePolicy, RemoteReader, RemoteRole, ServiceReward
from fourfold.training.folder import RunFolder, reward_model
from fourfold.training.preflight import bounds_of

PROBE_LENGTHS = ((3, 4), (5, 2), (1, 1))  # (prompt, response) tokens


def reference_at_service(config: RunConfig, base: Base, form: Policy, actor: Policy) -> RemotePolicy:
    """The reference; `actor` is as it starts, so that its weights and numbers are those of a reference of its own."""
    remote = RemoteRole(Service(config.service), "reference", max_rows=config.service.max_rows)
    if config.reference.model:
        remote.require(ModelIdentity.of_reference(config))
        rows = wire.rows_of(_probe(base)[0])
        _require_steady(remote, rows, bounds_of(form.branch).ratio[1], temperature=config.sampling.temperature)
        return RemoteOwnPolicy(form, remote)
    start = start_of_reference(config, base, actor)
    remote.require(Identity.of(base, record_for(config, "policy"), weights_of_role(base, start)))
    probe, activations = _probe(base)
    temperature = config.sampling.temperature
    reference = RemotePolicy(form, remote)
    with torch.no_grad():
        here, there = (role.log_probs(activations, probe, temperature)[0] for role in (start, reference))
    _require_close("reference", "log-probs", float((here - there).abs().max()), base)
    return reference


def reference_at_llama_server(config: RunConfig, base: Base, actor: Policy) -> EnginePolicy:
    """The reference at llama.cpp's own server, which has to hold what `actor` is now, or the policy that is named."""
    server = LlamaServer(config.service, ordinary_ids(base.tokenizer) - base.eos_ids)
    model = torch_reference(config, base, start_of_reference(config, base, actor))
    changes = verify_engine(server, model, base.tokenizer, server.url)
    reference = EnginePolicy(form_of(model), server, "its file's types")
    note_rounding(reference, config, changes)
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
        given = config.critic
        same = given.from_reward and given.heads == "scalar" and not (given.layers or given.ensemble > 1)
        if same and not config.precision.critic_differs:
            here = critic.scores(activations)
            gap = (here - there).abs() / here.abs().clamp(min=1.0)  # scores have a scale of their own
            _require_close("reward", "scores", float(gap.max()), base)
    return reward


def reader_at_service(config: RunConfig, base: Base) -> tuple[Absent, ServiceReward]:
    """A reward model of another family: its place among the roles, and what scores."""
    remote = RemoteReader(Service(config.service), base.tokenizer, max_rows=config.service.max_rows)
    theirs = remote.require(ReaderIdentity.of_reward(config))
    prompts, responses = ([_ids(base, text) for text in texts] for texts in zip(*SENTENCES, strict=True))
    _require_steady(remote, wire.Rows(prompts, responses), _of_a_batch(config))
    absent = Absent(remote, Outside(int(theirs["parameters"]), "-", remote.where, 0))
    return absent, ServiceReward(remote)


def _of_a_batch(config: RunConfig) -> float:
    """What the rows beside it may do to a score: rounding, in fewer bits as much as those may do.

    ONNX Runtime's INT8 has one scale for the activations of a whole batch.
    """
    if config.reward.engine != "torch":
        return ENGINE_BOUNDS[config.reward.engine]
    return max(PADDING_TOLERANCE[placed(config)[1]], QUANTIZED_BOUNDS.get(config.precision.reward, 0.0))


def _ids(base: Base, text: str) -> list[int]:
    return list(base.tokenizer(text, add_special_tokens=False)["input_ids"])


def _require_steady(remote: RemoteRole, rows: wire.Rows, bound: float, temperature: float = 1.0) -> None:
    """Whether each row gets the numbers that it gets alone: nothing here has weights to compare with."""
    together = remote.ask(rows, len(rows), temperature)
    alone = [remote.ask(rows[row : row + 1], 1, temperature)[0] for row in range(len(rows))]
    size = max(float(numbers.abs().max()) for numbers in alone)
    gap = max(float((one - other).abs().max()) for one, other in zip(together, alone, strict=True))
    if not gap <= bound * size:
        raise RunFailed(
            f"load: the {remote.role} at {remote.where.removeprefix('at ')} gives rows of a probe other numbers alone "
            f"than together, by up to {gap:.2e} of {size:.2e} (allowed {bound:.0e} of it); likely: another program "
            "answers there, or something between mixes the answers up"
        )


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
