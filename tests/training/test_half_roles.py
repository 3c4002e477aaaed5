"""Frozen roles in another type than the actor computes in: what they compute, and the bias that it brings to KL."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.cli.errors import FAILED
from fourfold.cli.main import main
from fourfold.config import ConfigError
from fourfold.errors import RunFailed
from fourfold.models.adapters import is_adapter
from fourfold.models.roles import Activations
from fourfold.training.pipeline import run_stages
from fourfold.training.preflight import ReferenceBias
from fourfold.training.results import export_actor
from fourfold.training.trainer import Trainer
from tiny_roles import oracle_log_probs
from training.runs import (
    SHARINGS,
    Tree,
    by_function,
    by_model,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    run,
    settings,
    write_config,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tree_for(folder: Path, sharing: str = "trunk", family: str = "llama", **precision: Any) -> Tree:
    tree = merged(by_function("pays_by_hash", steps=1, micro_batch_size=4), SHARINGS[sharing])
    return settings(folder, merged(tree, {"precision": precision}), family=family)


def trainer_for(folder: Path, sharing: str = "trunk", family: str = "llama", **precision: Any) -> Trainer:
    return make_trainer(make_config(tree_for(folder, sharing, family, **precision)))


def rollout_of(trainer: Trainer) -> tuple[Rollout, Activations]:
    return trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)


def rounded_model(folder: Path, family: str, dtype: torch.dtype) -> Any:
    """The library's own model with the matrices of its decoder layers rounded."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    body = model.transformer.h if family == "gpt2" else model.model.layers
    for p in (p for layer in body for p in layer.parameters() if p.ndim >= 2):
        p.data = p.data.to(dtype).float()
    return model


@pytest.mark.parametrize(("role", "dtype"), [("reference", "bfloat16"), ("reward", "float16")])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_frozen_role_computes_as_a_model_rounded_to_its_type(
    tmp_path: Path, sharing: str, role: str, dtype: str
) -> None:
    """precision.reference, precision.reward: as near to the role in float32 as rounding leaves it; the actor is the
    same to the bit as beside no such role."""
    tree = by_model(tree_for(tmp_path, sharing), tmp_path / "stored")
    plain, half = (make_trainer(make_config(merged(tree, {"precision": p}))) for p in ({}, {role: dtype}))
    rollout, activations = rollout_of(plain)
    rough, fine = getattr(half.models, role), getattr(plain.models, role)
    assert rough.branch.compute_dtype == DTYPES[dtype] and fine.branch.compute_dtype == torch.float32
    own = {id(p) for p in half.models.own_parameters(rough)}
    held = {p.dtype for name, p in rough.branch.named_parameters() if id(p) in own and p.ndim >= 2}
    assert held == {DTYPES[dtype]}

    def answer(model: Any) -> Tensor:
        with torch.no_grad():
            if role == "reward":
                return model.scores(activations)
            return model.log_probs(activations, rollout, 1.0)[0][rollout.response_mask]

    eps = torch.finfo(DTYPES[dtype]).eps
    gap = (answer(rough) - answer(fine)).abs()
    assert 0 < float(gap.max()) < 40 * eps, "some products' rounding"
    with torch.no_grad():
        a, b = (t.models.actor.log_probs(activations, rollout, 1.0)[0] for t in (plain, half))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("compute", "critic"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float16", "bfloat16")],
)
@pytest.mark.parametrize("sharing", ["trunk", "none"])
def test_the_critic_computes_in_its_own_type(tmp_path: Path, sharing: str, compute: str, critic: str) -> None:
    """precision.critic: separate models say the bits of a run in that type, over a trunk but for its rounding; the
    masters stay float32, and the actor says the same bits as beside no such critic."""
    scale: dict[str, Any] = {"loss_scale": 64.0} if compute == "float16" else {}
    plain = trainer_for(tmp_path, sharing, compute=compute, **scale)
    mixed = trainer_for(tmp_path, sharing, compute=compute, critic=critic, **scale)
    whole = trainer_for(tmp_path, sharing, compute=critic)
    for trainer in (plain, mixed, whole):
        give_value_head(trainer.models)
    rollout, activations = rollout_of(plain)
    values = []
    for trainer in (plain, mixed, whole):
        with torch.no_grad():
            values.append(trainer.models.critic.values(activations, rollout))
    assert not torch.equal(values[0], values[1])
    if sharing == "none":
        assert torch.equal(values[1], values[2])
    coarser = max(torch.finfo(DTYPES[name]).eps for name in (compute, critic))
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=20 * coarser * float(values[0].abs().max()))
    with torch.no_grad():
        a, b = (t.models.actor.log_probs(activations, rollout, 1.0)[0] for t in (plain, mixed))
    assert torch.equal(a, b)
    assert {p.dtype for p in mixed.models.critic.parameters() if p.requires_grad} == {torch.float32}
    mixed.check()
    row = mixed.step()
    assert 0 < row["critic_grad_norm"] < math.inf and row["critic_optimizer_steps"] == row["actor_optimizer_steps"] > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("sharing", ["adapters", "adapters over a trunk", "trunk"])
def test_what_is_shared_is_held_in_its_type_and_all_roles_agree(tmp_path: Path, sharing: str, family: str) -> None:
    """A base held narrowly computes in float32: with the rounded weights it is the library's own model. KL is 0."""
    trainer = trainer_for(tmp_path, sharing, family, frozen="float16")
    models = trainer.models
    report = trainer.check()
    assert report.kl_gap_max == 0.0 and report.reference_bias is None and report.warning() is None
    shared = [p for each in models.shared_parameters().values() for p in each if p.ndim >= 2]
    assert {p.dtype for p in shared} == {torch.float16}
    rollout, activations = rollout_of(trainer)
    assert activations.inputs.dtype == (torch.int64 if sharing == "adapters" else torch.float16)
    if sharing == "adapters":
        assert all(p.dtype == torch.float32 for n, p in models.actor.named_parameters() if is_adapter(n))
        model = rounded_model(tmp_path, family, torch.float16)
        embedding = model.get_input_embeddings()
        embedding.weight.data = embedding.weight.half().float()
        model.get_output_embeddings().weight.data = model.get_output_embeddings().weight.half().float()
        if family == "gpt2":
            model.transformer.wpe.weight.data = model.transformer.wpe.weight.half().float()
        expected = oracle_log_probs(model, rollout)
        torch.testing.assert_close(rollout.log_probs, expected, rtol=0, atol=2e-5)
    row = trainer.step()
    assert row["actor_optimizer_steps"] > 0


def test_a_trunk_in_float16_is_exported_as_it_was_held(tmp_path: Path) -> None:
    """What the run's responses came from: shared weights as rounded, the actor's own in float32."""
    tree = tree_for(tmp_path, frozen="float16")
    run(tree)
    folder = export_actor(tree["output"], str(tmp_path / "out"), dtype="float32", best=False)
    exported, model = load_file(folder / "model.safetensors"), load_file(tmp_path / "llama" / "model.safetensors")
    lower, upper = "model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"
    assert torch.equal(exported[lower], model[lower].half().float()) and not torch.equal(exported[lower], model[lower])
    assert not torch.equal(exported[upper], exported[upper].half().float())


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(("compute", "reference"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_bias_is_what_kl_reads_at_equal_weights(tmp_path: Path, sharing: str, compute: str, reference: str) -> None:
    """Brute force: the same weights scored in both numerics, token by token, by k1 as it enters the reward."""
    if sharing.startswith("adapters") and compute == "bfloat16":
        with pytest.raises(ConfigError, match=r"precision\.reference: given 'float32', but with sharing\.mode"):
            make_config(tree_for(tmp_path, sharing, compute=compute, reference=reference))
        return
    trainer = trainer_for(tmp_path, sharing, compute=compute, reference=reference)
    rollout, activations = rollout_of(trainer)
    report, count = trainer.check(), len(rollout.sequences)
    total = absolute = largest = 0.0
    with torch.no_grad():
        for row in range(count):
            one, inputs = rollout.select(torch.tensor([row])), activations.select(torch.tensor([row]))
            actor, held = (
                role.log_probs(inputs, one, 1.0)[0][0, : int(one.lengths)]
                for role in (trainer.models.actor, trainer.models.reference)
            )
            for difference in (actor - held).tolist():
                total, absolute = total + difference, absolute + abs(difference)
                largest = max(largest, abs(difference))
    bias, tokens = report.reference_bias, int(rollout.response_mask.sum())
    # Other rows beside a row change the order of sums, in bfloat16 by up to a bit of each product.
    loose: dict[str, Any] = {"rel": 0.05, "abs": 5e-4}
    assert bias is not None and (bias.tokens, bias.sequences) == (tokens, count) and largest > 1e-4
    assert bias.per_token_mean == pytest.approx(total / tokens, **loose)
    assert bias.per_sequence_mean == pytest.approx(total / count, rel=loose["rel"], abs=6 * loose["abs"])
    assert bias.absolute_mean == pytest.approx(absolute / tokens, **loose)
    assert bias.absolute_max == pytest.approx(largest, rel=0.2)
    warning = report.warning()
    assert warning is not None and f"it is held in {reference}, and the actor computes in {compute}" in warning


def test_full_kl_is_biased_by_the_same_reference(tmp_path: Path) -> None:
    """Each side of the exact KL in its own type: not 0, and as small as the rounding."""
    for reference, positive in (("auto", False), ("bfloat16", True)):
        tree = merged(tree_for(tmp_path, reference=reference), {"ppo": {"kl_estimator": "full"}})
        row = make_trainer(make_config(tree)).step()
        assert (row["kl_per_token_mean"] > 0) == positive and row["kl_per_token_mean"] < 1e-3


def test_a_reference_beyond_the_bound_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """precision.max_reference_bias: exit code 3, with the number and what to do. 4 bits of random weights lie by more
    than the error of 256 responses; what lies within two standard errors of the bound is not refused."""
    many = {"ppo": {"rollout_batch_size": 256}}
    tree = merged(tree_for(tmp_path, "none", reference="nf4", max_reference_bias=1e-3), many)
    assert main(["run", str(write_config(tree, tmp_path / "run.toml"))]) == FAILED == 3
    said = capsys.readouterr().err
    assert "warning: precision.reference = 'nf4'" in said
    assert re.search(
        r"the reference in nf4 biases every KL by \+\S+ nats a token \(standard error \S+\), \+\S+ a seq", said
    )
    assert "precision.max_reference_bias: 0.001, and 2 standard errors)" in said and "leave out precision" in said

    def bias(bound: float) -> ReferenceBias:
        changed = merged(tree, {"precision": {"max_reference_bias": bound}})
        found = make_trainer(make_config(changed)).check().reference_bias
        assert found is not None
        return found

    found = bias(1.0)
    assert 2.5 * found.per_token_error < found.per_token_mean < found.absolute_mean
    assert bias(found.per_token_mean - 1.9 * found.per_token_error) == found
    with pytest.raises(RunFailed, match="biases every KL"):
        bias(found.per_token_mean - 2.1 * found.per_token_error)


def test_a_resumed_run_says_what_was_measured_when_it_began(tmp_path: Path) -> None:
    said: list[str] = []
    tree = merged(tree_for(tmp_path, reference="bfloat16"), {"ppo": {"steps": 2}})

    def one_step(trainer: Trainer) -> None:
        trainer.step()
        trainer.save(is_best=False)
        raise RunFailed("stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", one_step)
        with pytest.raises(RunFailed, match="stop"):
            run_stages(make_config(tree), said.append)
    [measured] = [line for line in said if line.startswith("warning: KL bias of the reference: ")]
    stored = json.loads((tmp_path / "run" / "ppo" / "preflight.json").read_text())
    said.clear()
    run_stages(make_config(tree), said.append)
    [again] = [line for line in said if line.startswith("warning: KL bias of the reference: ")]
    assert again == measured.replace(", measured on", ", measured when the run began on")
    kept = json.loads((tmp_path / "run" / "ppo" / "preflight.json").read_text())
    assert kept["reference_bias"] == stored["reference_bias"] and not kept["fresh"]


REFUSED = [
    ("none", {"frozen": "bfloat16"}, "precision.frozen: given, but sharing.mode = 'none' shares no frozen weights"),
    ("trunk", {"compute": "bfloat16", "frozen": "float32"}, "precision.frozen: given 'float32', but with sharing.mode"),
    (
        "trunk",
        {"compute": "float16", "frozen": "bfloat16"},
        "precision.frozen: given 'bfloat16', but with sharing.mode",
    ),
    ("adapters", {"compute": "bfloat16", "reward": "float16"}, "precision.reward: given"),
    ("adapters", {"critic": "bfloat16"}, "precision.critic: given 'bfloat16', but with sharing.mode = 'adapters'"),
    ("trained trunk", {"critic": "bfloat16"}, "precision.critic: given 'bfloat16', but with trunk.train = true"),
    ("trunk", {"loss_scale": 4.0}, "precision.loss_scale: given, but precision.compute = 'float32' scales no losses"),
    ("trunk", {"compute": "float16", "loss_scale": 0.5}, "precision.loss_scale: given 0.5"),
    ("trunk", {"reward": "bfloat16"}, "precision.reward: given, but reward.source = 'function'"),
    ("trunk", {"max_reference_bias": 0.1}, "precision.max_reference_bias: given, but precision.reference = 'auto'"),
    (
        "trunk",
        {"compute": "bfloat16", "reference": "bfloat16", "max_reference_bias": 0.1},
        "computes as the actor does",
    ),
]


@pytest.mark.parametrize(("sharing", "precision", "message"), REFUSED)
def test_types_without_effect_are_refused(
    tmp_path: Path, sharing: str, precision: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tree = tree_for(tmp_path, sharing.removeprefix("trained "), **{"compute": "float32", **precision})
        make_config(merged(tree, {"trunk": {"train": True}}) if sharing == "trained trunk" else tree)
    assert message in str(caught.value)


def test_auto_is_checked_when_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """precision.compute = "auto" on a machine that multiplies bfloat16 stands beside no trunk in float16."""
    from fourfold.training import pipeline

    config = make_config(tree_for(tmp_path, compute="auto", frozen="float16"))
    monkeypatch.setattr(pipeline, "resolve_compute", lambda setting, device: "bfloat16")
    with pytest.raises(ValueError, match=r"precision\.frozen: given 'float16'"):
        pipeline.prepare(config)
    monkeypatch.setattr(pipeline, "resolve_compute", lambda setting, device: "float32")
    assert pipeline.prepare(config).precision.compute == "float32"


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tree = tree_for(tmp_path, frozen="float16")
    path = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 7e4
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"a frozen weight of 7e\+04 is too large for float16 .*try 'bfloat16'"):
        make_trainer(make_config(tree))
