"""The checks before the first step pass when all is well, and name what is wrong when it is not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.batch import ScoredRollout
from fourfold.config import ConfigError, dump_toml
from fourfold.config.checks.precision import precision_warnings
from fourfold.errors import RunFailed
from fourfold.models.residency import place
from fourfold.scoring.combined import parts_of
from fourfold.training.preflight import BOUNDS, ReferenceBias
from fourfold.training.trainer import Trainer
from tiny import tiny_directory
from tiny_roles import tiny_rollout
from training.kernels import computed_within, onednn_multiplies_bfloat16, sums_in_two_parts, without_onednn
from training.runs import SHARINGS, by_function, make_config, make_trainer, merged, settings
from training.served import at_service, hosted_roles, listening


def trainer_for(folder: Path, family: str = "gpt2", sharing: str = "trunk", **changes: Any) -> Trainer:
    tree = merged(merged(by_function("pays_by_hash"), SHARINGS[sharing]), changes)
    return make_trainer(make_config(settings(folder, tree, family=family)))


@pytest.mark.parametrize("sharing", ["trunk", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_is_well_at_the_start(tmp_path: Path, family: str, sharing: str) -> None:
    """FAULTS A5: sampled one token at a time through caches, and again in one pass; KL to the reference is 0."""
    report = trainer_for(tmp_path, family, sharing, sampling={"temperature": 0.7}).check()
    assert report.fresh and report.kl_gap_max == 0.0
    assert report.ratio_gap_max < 1e-5 and report.sampler_gap_max < 1e-4
    assert "KL to reference 0.0e+00" in report.describe()


def test_dropout_is_noticed(tmp_path: Path) -> None:
    """FAULTS A13: a model whose dropout was left on gives another log-prob in every pass."""
    trainer = trainer_for(tmp_path)
    dropouts = [module for module in trainer.models.actor.modules() if isinstance(module, nn.Dropout)]
    assert dropouts and all(module.p == 0.0 for module in dropouts), "this model has dropout, and loading turned it off"
    for module in dropouts:
        module.p = 0.1
    with pytest.raises(RunFailed, match=r"pre-flight: ratio is not 1 before the first update.*likely: dropout"):
        trainer.check()


def move_reference(trainer: Trainer) -> None:
    with torch.no_grad():
        for parameter in trainer.models.reference.branch.parameters():
            parameter.add_(0.02)


def test_another_reference_is_noticed(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    move_reference(trainer)
    with pytest.raises(RunFailed, match="pre-flight: KL to the reference is not 0 at step 0: mean "):
        trainer.check()


@pytest.mark.parametrize("kernels", ["sums in two parts", "without oneDNN"])
@pytest.mark.parametrize("sharing", ["trunk", "none", "adapters"])
def test_a_reference_on_the_host_may_round_otherwise_and_the_bias_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str, kernels: str
) -> None:
    """The host stands for itself here; in bfloat16 its kernels put the KL beyond what the same ones are allowed."""
    if kernels == "without oneDNN" and not onednn_multiplies_bfloat16():
        pytest.skip("torch computes without oneDNN here anyway")
    tiny_directory(tmp_path / "llama", hidden=512 if kernels == "without oneDNN" else 32)
    changes = {"precision": {"compute": "bfloat16"}, "sampling": {"max_new_tokens": 12}}
    ppo = {"rollout_batch_size": 16, "mini_batch_size": 16, "micro_batch_size": 8}
    trainer = trainer_for(tmp_path, "llama", sharing, **changes, ppo=ppo)
    reference = trainer.models.reference
    place(reference, "cpu", trainer.models.own_parameters(reference), tmp_path)
    assert trainer.check().kl_gap_max == 0.0, "the same kernels say the same"
    within = sums_in_two_parts(monkeypatch) if kernels == "sums in two parts" else without_onednn
    computed_within(monkeypatch, reference, "log_probs", within)

    report = trainer.check()
    bias = report.reference_bias
    assert bias is not None and bias.sequences == 16, "a whole rollout, not one micro-batch"
    assert min(report.kl_gap_mean, bias.absolute_mean) > BOUNDS[torch.bfloat16].kl[0]
    assert 0 < abs(bias.per_token_mean) < bias.absolute_mean
    said = report.warning()
    assert said is not None and said.startswith(f"KL bias of the reference: {bias.per_token_mean:+.2e} nats a token")
    assert "held in bfloat16 and computed elsewhere (cpu, computes there), and the actor computes in bfloat16" in said
    again = replace(report, fresh=False, reference_bias=None).with_stored(report.as_dict())
    assert again.reference_bias == bias and "measured when the run began" in (again.warning() or "")
    kept = replace(again, reference_where="", reference_bias=None).with_stored(report.as_dict())
    assert kept.warning() is None, "taken up again where the actor computes"

    monkeypatch.setattr("fourfold.training.preflight.ERRORS_ALLOWED", 0.0)  # the mean is of 16 responses
    precision = trainer.config.precision.model_copy(update={"max_reference_bias": abs(bias.per_token_mean) / 2})
    trainer.config = trainer.config.model_copy(update={"precision": precision})
    with pytest.raises(RunFailed, match=r"computed elsewhere \(cpu, computes there\) biases every KL by") as caught:
        trainer.check()
    assert "leave out reference.residency, or allow more" in str(caught.value)


def test_a_service_on_another_kind_of_machine_may_round_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a trunk, where the same machine's is 0 to the bit."""
    changes = merged(by_function("pays_by_hash"), merged(SHARINGS["none"], {"precision": {"compute": "bfloat16"}}))
    tree = settings(tmp_path, changes)
    within = sums_in_two_parts(monkeypatch)
    found = []
    for hosted in (hosted_roles(tree, "reference"), hosted_roles(tree, "reference")):
        if found:
            computed_within(monkeypatch, hosted, "answer", within)
        with listening(hosted) as server:
            config = make_config(merged(at_service(tree, server.url, "reference"), BIAS_IS_BOUNDED))
            found.append(make_trainer(config).check())
            assert f"computed elsewhere (at {server.url})" in (found[-1].warning() or "")
    same, other = found
    assert same.kl_gap_max == 0.0 and same.reference_bias is not None and same.reference_bias.per_token_mean == 0.0
    assert other.kl_gap_mean > BOUNDS[torch.bfloat16].kl[0]


BIAS_IS_BOUNDED = {"precision": {"max_reference_bias": 0.04}}


@pytest.mark.parametrize("residency", ["cpu", "service"])
def test_settings_say_what_a_reference_elsewhere_costs(tmp_path: Path, residency: str) -> None:
    tree = settings(tmp_path, merged(by_function("pays_by_hash"), {"system": {"device": "cuda"}, **BIAS_IS_BOUNDED}))
    with pytest.raises(ConfigError, match=r"precision\.max_reference_bias: given, but precision\.reference = 'auto'"):
        make_config(tree)
    away = at_service(tree, "http://127.0.0.1:1", "reference") if residency == "service" else tree
    config = make_config(merged(away, {"reference": {"residency": residency}}))
    [said] = precision_warnings(config)
    assert f"reference.residency = '{residency}'" in said and "pre-flight measures by how much" in said
    assert "max_reference_bias = 0.04" in dump_toml(config)
    own = merged(tree, {"reference": {"model": "owner/other", "residency": "cpu"}, "precision": {"compute": "float32"}})
    own["precision"].pop("max_reference_bias")
    assert list(precision_warnings(make_config(own))) == [], "another model: its KL is not 0 in any case"


def test_another_reference_on_the_host_is_noticed(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    move_reference(trainer)
    reference = trainer.models.reference
    place(reference, "cpu", trainer.models.own_parameters(reference), tmp_path)
    with pytest.raises(RunFailed, match="pre-flight: "):
        trainer.check()


def test_a_resumed_run_has_rightly_left_its_reference(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    trainer.progress.step = 2
    move_reference(trainer)
    report = trainer.check()
    assert not report.fresh and report.kl_gap_mean > 1e-3
    assert "KL not checked (resumed)" in report.describe()


def test_a_sampler_with_another_temperature_is_noticed(tmp_path: Path) -> None:
    """FAULTS A10, H14: what the sampler reports must be log-probs of the tempered distribution that it sampled."""
    cold = trainer_for(tmp_path, sampling={"temperature": 0.7})
    warm = trainer_for(tmp_path, sampling={"temperature": 1.0}, output=str(tmp_path / "warm"))
    cold.sampler = warm.sampler
    with pytest.raises(RunFailed, match="pre-flight: ratio is not 1 before the first update"):
        cold.check()


def test_a_sampler_that_reports_raw_log_probs_is_noticed(tmp_path: Path) -> None:
    """FAULTS A10: log-probs divided by the temperature are not those of divided logits."""
    trainer = trainer_for(tmp_path, sampling={"temperature": 0.7})
    sampler = trainer.sampler

    class Raw:
        def generate(self, prompts: Any, *, policy_version: int) -> Any:
            rollout, activations = sampler.generate(prompts, policy_version=policy_version)
            return replace(rollout, sampler_log_probs=rollout.sampler_log_probs * 0.7), activations

    trainer.sampler = Raw()
    with pytest.raises(RunFailed, match="pre-flight: sampler and trainer disagree on log-probs"):
        trainer.check()


def test_another_precision_of_the_reference_is_refused(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    scored_in_float32 = trainer.models.reference.branch
    trainer.check()
    scored_in_float32.compute_dtype = torch.bfloat16
    with pytest.raises(RunFailed, match=r"actor runs in torch\.float32, reference in torch\.bfloat16"):
        trainer.check()


def test_a_new_value_head_starts_at_the_mean_score(tmp_path: Path) -> None:
    """So that the first advantages are centred; the random states are left as they were."""
    trainer = trainer_for(tmp_path)
    assert trainer.models.critic.head.linear.bias.item() == 0.0
    before = torch.get_rng_state()
    trainer.check()
    assert torch.equal(torch.get_rng_state(), before)
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    [part] = parts_of(trainer.reward)
    scores, _ = part.source(activations, rollout)
    assert trainer.models.critic.head.linear.bias.item() == pytest.approx(float(scores[:2].mean()), abs=1e-6)


def scored(gaps: list[list[float]]) -> ScoredRollout:
    """Responses whose tokens the actor gives so much more log-prob than the reference; NaN where there is no token."""
    rollout = tiny_rollout([(2, len(row)) for row in gaps])
    held = torch.full(rollout.response_mask.shape, torch.nan)
    held[rollout.response_mask] = -torch.tensor([gap for row in gaps for gap in row])
    zeros, per_row = torch.zeros_like(held), torch.zeros(len(gaps))
    given = {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}
    said = {"values": zeros, "last_values": per_row, "scores": per_row, "score_parts": per_row[:, None]}
    said["score_weights"] = torch.ones_like(said["score_parts"])
    return ScoredRollout(**given, ref_log_probs=held, kl=zeros, **said)


def test_the_bias_and_its_error_of_numbers_worked_out_by_hand() -> None:
    """S = (3, 0, 6), n = (1, 2, 3): m = 9 / 6; distances S - m n = (1.5, -3, 1.5), squares 13.5, times 3 / 2."""
    bias = ReferenceBias.measured(scored([[3.0], [1.0, -1.0], [1.0, 2.0, 3.0]]))
    assert (bias.per_token_mean, bias.per_sequence_mean) == (1.5, 3.0)
    assert (bias.tokens, bias.sequences, bias.absolute_max) == (6, 3, 3.0)
    assert bias.absolute_mean == pytest.approx(11 / 6)
    assert bias.per_token_error == pytest.approx(math.sqrt(13.5 * 3 / 2) / 6)
    assert bias.per_sequence_error == pytest.approx(3 / math.sqrt(3)), "standard deviation 3 of 3 sums"
    assert "+1.50e+00 nats a token (standard error 7.5e-01), +3.00e+00 a sequence (1.7e+00)" in str(bias)
    nearer = ReferenceBias.measured(scored([[3.0], [2.0, 2.0], [3.0, 3.0, 3.0]]))  # 2.667, error 0.347
    assert nearer.beyond(1.97) and not nearer.beyond(1.98)
    assert not ReferenceBias.measured(scored([[5.0, 5.0]])).beyond(0.1), "one response says nothing of others"
    assert ReferenceBias.measured(scored([[1.0], [math.nan]])).beyond(1e9)


def test_the_error_is_how_far_the_means_of_rollouts_lie_from_another() -> None:
    """Tokens of a response share half of their noise: counting tokens would make the error too small."""
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 2, 4, 8) * 8
    means, errors, naive = [], [], []
    for _ in range(400):
        rows = [0.2 + torch.randn(1, generator=generator) + torch.randn(n, generator=generator) for n in lengths]
        bias = ReferenceBias.measured(scored([row.tolist() for row in rows]))
        means.append(bias.per_token_mean)
        errors.append(bias.per_token_error)
        naive.append(float(torch.cat(rows).std()) / math.sqrt(sum(lengths)))
    spread = float(torch.tensor(means).std())
    assert sum(errors) / 400 == pytest.approx(spread, rel=0.1) and sum(naive) / 400 < 0.75 * spread
    assert sum(means) / 400 == pytest.approx(0.2, abs=4 * spread / 20)
