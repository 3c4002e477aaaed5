"""Roles with a model of their own in whole runs: a reward model of another family, a reference of another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fourfold.diagnostics.tables import role_rows
from fourfold.errors import RunFailed
from fourfold.memory.quantization import QuantizedLinear
from fourfold.models.external import External
from fourfold.models.onnx import OnnxClassifier
from fourfold.models.quantized import PROBE
from fourfold.models.reference import OwnPolicy
from fourfold.models.residency import HOST, HostResidency, RoleResidency, place
from fourfold.models.roles import checksum
from fourfold.training import preflight
from fourfold.training.ppo import describe_roles
from fourfold.training.trainer import Trainer
from tiny import tiny_classifier, tiny_directory
from training.runs import (
    SEPARATE,
    SHARINGS,
    Tree,
    by_function,
    make_config,
    make_trainer,
    merged,
    outcome,
    run,
    settings,
    steps_of,
)


def scored_by(folder: Path, family: str = "bert", **reward: Any) -> Tree:
    """A tiny run of ppo, scored by a classifier of another family."""
    model = folder / f"classifier-{family}"
    if not model.is_dir():
        tiny_classifier(model, family, seed=2)
    given = {"source": "model", "model": str(model), "function": None, **reward}
    return settings(folder, merged(by_function("pays_by_hash", steps=2), {"reward": given}))


def referring_to(folder: Path, model: Path | str, **changes: Any) -> Tree:
    tree = settings(folder, by_function("pays_by_hash", steps=1))
    return merged(merged(tree, {"reference": {"model": str(model), "log_step_0": False}}), changes)


# --- the reward model -------------------------------------------------------------------------------------------------


def test_a_whole_run_with_a_reward_model_of_another_family(tmp_path: Path) -> None:
    """From sft to ppo, the stage reward having nothing to train; in two commands as in one."""
    texts = settings(tmp_path)["data"]["texts"]
    tree = merged(scored_by(tmp_path), {"stages": ["sft", "reward", "ppo"], "data": {"texts": texts}})
    summary = run(tree)
    assert summary["stages"]["reward"] == {"source": "model"} and "pair_accuracy" not in summary
    whole = outcome(tmp_path / "run")
    again = merged(tree, {"output": str(tmp_path / "again")})
    run(merged(again, {"stages": ["sft"]}))
    run(again)
    assert outcome(tmp_path / "again")["rows"] == whole["rows"]
    row = whole["rows"][0]
    assert row["reward_forward_passes"] == 1.0 and row["reward_score_flops"] > 0
    assert row["reward_forward_tokens"] > row["reference_forward_tokens"], "its own tokens: letters"


@pytest.mark.parametrize("residency", ["park", "stream"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_away_from_its_phase_a_reward_model_scores_the_same_bits(tmp_path: Path, family: str, residency: str) -> None:
    kept, away = (
        make_trainer(make_config(scored_by(tmp_path, family, **given))) for given in ({}, {"residency": residency})
    )
    reward = away.models.reward
    assert isinstance(reward, External) and isinstance(reward.residency, RoleResidency)
    own = away.models.own_parameters(reward)
    assert len(own) == len(list(reward.parameters())), "nobody shares its tensors"
    assert away.models.frozen_checksums() == kept.models.frozen_checksums()
    for expected, row in zip(steps_of(kept), steps_of(away), strict=True):
        assert sum(p.untyped_storage().nbytes() for p in own) <= 4 * len(own)
        assert row["reward_moved_bytes"] >= sum(p.numel() * 4 for p in own)
        for name in ("score_mean", "score_std", "actor_grad_norm", "reward_forward_tokens"):
            assert row[name] == expected[name]
    assert residency == "park" or reward.residency.peak_layers == 2
    assert "on disk" in describe_roles(away) or "from disk" in describe_roles(away)


@pytest.mark.parametrize("combined", [False, True])
def test_what_a_reward_model_is_asked_is_looked_at_before_any_stage(tmp_path: Path, combined: bool) -> None:
    """Without reading its weights, before sft has trained for hours, and before the folder is bound to the settings."""
    tree = scored_by(tmp_path, label={"GOOD": 1.0})
    given, key = tree["reward"], "reward"
    (Path(given["model"]) / "model.safetensors").unlink()
    if combined:
        one = {name: given[name] for name in ("source", "model", "label")}
        tree["reward"], key = {"source": "combined", "parts": {"one": one}}, "reward.parts.one: reward"
    texts = settings(tmp_path)["data"]["texts"]
    tree = merged(tree, {"stages": ["sft", "ppo"], "data": {"texts": texts}})
    with pytest.raises(ValueError, match=rf"^{key}.label: given 'GOOD'; .*labels of .*: 'SCORE'"):
        run(tree)
    assert not (tmp_path / "run").exists()


def test_a_damaged_reward_model_ends_nothing_silently(tmp_path: Path) -> None:
    """The frozen checksum covers it: a weight that moves is noticed at the next checkpoint."""
    trainer = make_trainer(make_config(scored_by(tmp_path)))
    before = trainer.models.frozen_checksums()
    assert isinstance(trainer.models.reward, External)
    with torch.no_grad():
        next(trainer.models.reward.parameters()).add_(1e-3)
    assert trainer.models.frozen_checksums() != before


def test_a_run_scored_by_onnx_runtime(tmp_path: Path) -> None:
    """The same scores as torch's but for rounding; the table of roles says who holds what."""
    exact = steps_of(make_trainer(make_config(scored_by(tmp_path))))
    tree = merged(scored_by(tmp_path, engine="onnx"), {"output": str(tmp_path / "onnx")})
    trainer = make_trainer(make_config(tree))
    reward = trainer.models.reward
    assert isinstance(reward, External) and isinstance(reward.classifier, OnnxClassifier)
    [line] = [line for line in describe_roles(trainer).splitlines() if line.strip().startswith("reward")]
    assert "cpu, onnxruntime" in line and "float32" in line
    rows = steps_of(trainer)
    assert rows[0]["score_mean"] == pytest.approx(exact[0]["score_mean"], rel=1e-4)
    assert rows[0]["score_std"] == pytest.approx(exact[0]["score_std"], rel=1e-3)
    assert rows[0]["reward_forward_tokens"] == exact[0]["reward_forward_tokens"]
    assert "reward_pass_seconds" not in exact[0]
    for row in rows:
        assert 0 < row["reward_pass_seconds"] == row["offloaded_pass_seconds"] <= row["score_seconds"]
        assert row["reward_moved_bytes"] == 0
        assert row["offloaded_per_generate_ratio"] == row["offloaded_pass_seconds"] / row["generate_seconds"]
    seconds = sum(row["reward_pass_seconds"] for row in rows)
    said = trainer.accountant.hiding.condition(generate_seconds=1e9)
    assert said.startswith(f"offload: scoring by reward (cpu, onnxruntime) took {seconds:.1f} s, sampling 1000000000.0")
    assert "it could be hidden behind the next batch's sampling" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_reward_model_on_the_cpu_below_a_gpu_says_whether_sampling_could_hide_it(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(merged(scored_by(tmp_path, device="cpu"), {"system": {"device": "cuda"}})))
    row = trainer.step()
    assert 0 < row["reward_pass_seconds"] <= row["score_seconds"]
    said = trainer.accountant.hiding.condition(generate_seconds=1e9)
    assert said.startswith("offload: scoring by reward (cpu, computes there) took ")


# --- the reference ----------------------------------------------------------------------------------------------------


CUTS = SHARINGS | {"trained trunk": {"trunk": {"train": True}}}


@pytest.mark.parametrize("sharing", CUTS)
def test_the_actors_own_checkpoint_as_reference_has_no_kl(tmp_path: Path, sharing: str) -> None:
    """A whole model that reads ids, beside roles that read the trunk's activations or ids: the same log-probs."""
    tree = referring_to(tmp_path, "", **CUTS[sharing])
    plain = make_trainer(make_config(merged(tree, {"reference": None})))
    own = make_trainer(make_config(merged(tree, {"reference": {"model": tree["model"]["path"]}})))
    assert isinstance(own.models.reference, OwnPolicy) and not isinstance(plain.models.reference, OwnPolicy)
    report, _ = own.check(), plain.check()
    assert report.own_reference and report.kl_gap_max < 1e-5
    expected, row = plain.step(), own.step()
    for name in ("kl_per_sequence_mean", "actor_grad_norm", "score_mean"):
        assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    shared = {id(p) for p in own.models.actor.parameters()}
    assert not shared & {id(p) for p in own.models.reference.parameters()}


def log_prob_by_hand(folder: Path, trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's log-probs of a rollout by the phase's code, and by the library row by row without padding."""
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    found, _ = trainer.models.reference.log_probs(activations, rollout, 1.0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = torch.zeros_like(found)
    for row in range(len(found)):
        ids = rollout.sequences[row][rollout.attention_mask[row]]
        length = int(rollout.lengths[row])
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        chosen = log_probs[:-1].gather(1, ids[1:, None])[:, 0]
        expected[row, :length] = chosen[-length:]
    return found, expected


HELD = ("bfloat16", "float16", "int8", "int8_dynamic", "nf4")


@pytest.mark.parametrize("held", HELD)
def test_a_reference_of_its_own_is_held_as_any_other(tmp_path: Path, held: str) -> None:
    """The actor's own checkpoint, whole, beside four separate models: the numbers of the reference that is its copy."""
    tree = referring_to(tmp_path, "", **merged(SEPARATE, {"precision": {"reference": held, "max_reference_bias": 1.0}}))
    plain = make_trainer(make_config(merged(tree, {"reference": None})))
    tree = merged(tree, {"reference": {"model": tree["model"]["path"], "residency": "park"}})
    own = make_trainer(make_config(tree))
    said, expected = own.check(), plain.check()
    assert said.own_reference and said.kl_gap_mean == pytest.approx(expected.kl_gap_mean, rel=1e-3)
    sizes = [sum(p.numel() * p.element_size() for p in each.models.reference.parameters()) for each in (own, plain)]
    assert sizes[0] == sizes[1] < 0.6 * sum(4 * p.numel() for p in own.models.actor.parameters())
    row = own.step()
    assert row["kl_per_sequence_mean"] == pytest.approx(plain.step()["kl_per_sequence_mean"], rel=1e-3, abs=1e-5)
    assert row["reference_moved_bytes"] >= sizes[0]


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_a_reference_of_its_own_loses_is_measured_and_bounded(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On given sentences, against the library with the numbers that its codes stand for."""
    other = tiny_directory(tmp_path / "other", layers=3, hidden=48, seed=5)
    tree = referring_to(tmp_path, other, **merged(SHARINGS[sharing], {"precision": {"reference": "nf4"}}))
    with (
        monkeypatch.context() as patch,
        pytest.raises(RunFailed, match=r"the reference in nf4 biases every KL by .* 4 given"),
    ):
        patch.setattr(preflight, "ERRORS_ALLOWED", 0.0)
        make_trainer(make_config(merged(tree, {"precision": {"max_reference_bias": 1e-6}}))).check()
    trainer = make_trainer(make_config(merged(tree, {"precision": {"max_reference_bias": 5.0}})))
    report, reference = trainer.check(), trainer.models.reference
    exact: Any = AutoModelForCausalLM.from_pretrained(other).eval()
    held: Any = AutoModelForCausalLM.from_pretrained(other).eval()
    for name, layer in reference.branch.body.named_modules():
        if isinstance(layer, QuantizedLinear):
            with torch.no_grad():
                held.model.get_submodule(name).weight.copy_(layer.weight)
    gaps = []
    for text in PROBE:
        ids = torch.tensor(trainer.models.base.tokenizer(text)["input_ids"])
        with torch.no_grad():
            of = [m(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0] for m in (exact, held)]
        gaps.append(of[0] - of[1])
    bias, expected = report.reference_bias, torch.cat(gaps)
    assert bias is not None and bias.tokens == len(expected)
    assert bias.per_token_mean == pytest.approx(float(expected.mean()), rel=1e-3)
    assert bias.per_sequence_mean == pytest.approx(float(expected.sum()) / len(PROBE), rel=1e-3)
    warning = report.warning()
    assert warning is not None and "tokens of 4 given sentences: it is held in nf4" in warning


@pytest.mark.parametrize("residency", ["park", "stream"])
def test_a_reward_model_of_another_family_in_fewer_bits(tmp_path: Path, residency: str) -> None:
    """Parked and streamed in its few bits; the table of roles says what it holds."""
    held = merged(scored_by(tmp_path), {"precision": {"reward": "int8"}})
    kept = make_trainer(make_config(held))
    away = make_trainer(make_config(merged(held, {"reward": {"residency": residency}})))
    assert isinstance(away.models.reward, External) and "int8" in describe_roles(away)
    exact = make_trainer(make_config(scored_by(tmp_path)))
    sizes = [sum(row.bytes for row in role_rows(each.models) if row.model == "reward") for each in (kept, exact)]
    assert sizes[0] < 0.7 * sizes[1]
    rows, expected = away.step(), kept.step()
    assert rows["score_mean"] == expected["score_mean"]
    assert rows["score_mean"] == pytest.approx(exact.step()["score_mean"], abs=0.1)


BESIDE = {
    "trunk": SHARINGS["trunk"],
    "none": SHARINGS["none"],
    "trained trunk": {"trunk": {"train": True}},
    "quantised trunk": {"precision": {"frozen": "int8"}},
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_larger_reference_is_told_not_refused(tmp_path: Path, beside: str) -> None:
    other = tiny_directory(tmp_path / "other", "gpt2", layers=3, hidden=48, seed=5)
    trainer = make_trainer(make_config(referring_to(tmp_path, other, **BESIDE[beside])))
    report = trainer.check()
    assert report.own_reference and report.kl_gap_mean > 0.1
    assert "|log ratio| to the reference" in report.describe() and "another policy: not 0" in report.describe()
    found, expected = log_prob_by_hand(other, trainer)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    row = trainer.step()
    assert abs(row["kl_per_sequence_mean"]) > 0.1
    # 3 layers of 48, by hand: 4 h^2 + 8 h^2 a layer and the head; attention is the small rest.
    tokens, responses = row["reference_forward_tokens"], row["tokens"]
    assert row["reference_score_flops"] == pytest.approx(
        2 * (3 * 12 * 48 * 48) * tokens + 2 * 48 * 160 * responses, rel=0.1
    )


@pytest.mark.parametrize("residency", ["park", "stream"])
def test_a_reference_of_its_own_can_be_away(tmp_path: Path, residency: str) -> None:
    other = tiny_directory(tmp_path / "other", layers=3, seed=5)
    kept = make_trainer(make_config(referring_to(tmp_path, other, ppo={"kl_estimator": "full"})))
    tree = referring_to(tmp_path, other, ppo={"kl_estimator": "full"}, reference={"residency": residency})
    away = make_trainer(make_config(tree))
    expected, row = kept.step(), away.step()
    for name in ("kl_per_sequence_mean", "actor_grad_norm"):
        assert row[name] == expected[name]
    assert row["reference_moved_bytes"] >= sum(p.numel() * p.element_size() for p in kept.models.reference.parameters())


def test_on_the_host_a_reference_of_its_own_says_the_same(tmp_path: Path) -> None:
    """The host stands for itself here, as in tests/models/test_host_residency.py: all it reads has gone down to it."""
    other = tiny_directory(tmp_path / "other", layers=3, seed=5)
    models = (trainer := make_trainer(make_config(referring_to(tmp_path, other)))).models
    before = checksum([models.reference])
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    expected, _ = trainer._score(rollout, activations)
    own = models.own_parameters(models.reference)
    assert len(own) == len(list(models.reference.parameters()))
    place(models.reference, "cpu", own, tmp_path / "unused")
    assert isinstance(models.reference.residency, HostResidency)
    assert {p.device for p in models.reference.parameters()} == {HOST} and checksum([models.reference]) == before
    assert not {id(p) for p in own} & {id(p) for p in models.reference.parameters()}, "copies on the host"
    scored, _ = trainer._score(rollout, activations)
    assert torch.equal(scored.ref_log_probs, expected.ref_log_probs)
    assert models.reference.residency.take()["pass_seconds"] > 0


def test_a_reference_of_its_own_does_not_stand_on_the_trunk_as_it_was(tmp_path: Path) -> None:
    """Where the trunk is trained, another reference would; what the metrics say is what hooks see."""
    tree = referring_to(tmp_path, "", trunk={"train": True})
    tree["reference"]["model"] = tree["model"]["path"]
    models = (trainer := make_trainer(make_config(tree))).models
    assert models.base.trunk is not None and models.trunk is not None
    rows = {"frozen": 0, "trained": 0, "reference": 0}

    def count(name: str) -> Any:
        def hook(module: Any, args: Any, named: dict[str, Any], output: torch.Tensor) -> None:
            cache = named.get("cache")  # of the sampler, pass by pass
            rows[name] += len(output) if cache is None else int((cache.places.positions[:, 0] == 0).sum())

        return hook

    for name, part in (
        ("frozen", models.base.trunk),
        ("trained", models.trunk),
        ("reference", models.reference.branch),
    ):
        part.register_forward_hook(count(name), with_kwargs=True)
    row = trainer.step()
    assert (rows["frozen"], rows["reference"]) == (0, 8)
    assert row["reference_forward_passes"] * 8 == rows["reference"]
    assert row["trunk_forward_passes"] * 8 == rows["trained"]


def test_both_score_while_the_next_rows_are_sampled(tmp_path: Path) -> None:
    """Moved in for it, both of them, and counted as without the overlap."""
    other = tiny_directory(tmp_path / "other", layers=3, seed=5)
    away = {"reference": {"model": str(other), "residency": "stream"}, "sampling": {"batch_size": 4}}
    tree = merged(scored_by(tmp_path, residency="park"), away)
    plain = steps_of(make_trainer(make_config(tree)))
    overlapping = {"sampling": {"overlap_scoring": True}, "output": str(tmp_path / "overlapping")}
    found = steps_of(make_trainer(make_config(merged(tree, overlapping))))
    for expected, row in zip(plain, found, strict=True):
        for name in ("score_mean", "kl_per_sequence_mean", "actor_grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        for name in ("reference_score_flops", "reward_forward_tokens", "reward_score_flops"):
            assert row[name] == expected[name] > 0, name
        assert row["score_ahead_seconds"] > 0 and row["reward_moved_bytes"] > 0 < row["reference_moved_bytes"]


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    """KL compares probabilities of the same tokens."""
    classifier = tiny_classifier(tmp_path / "classifier", "llama")
    other = tiny_directory(tmp_path / "other", vocab_size=60)
    for file in classifier.glob("tokenizer*"):
        (other / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"reference.model: .* has another vocabulary .* is \d+ and none\), and a KL"):
        make_trainer(make_config(referring_to(tmp_path, other)))
    fewer = tiny_directory(tmp_path / "fewer", vocab_size=161)
    tree = referring_to(tmp_path, fewer)
    assert make_trainer(make_config(tree)).check().own_reference, "rows beyond the vocabulary fill the embedding up"
    with pytest.raises(ValueError, match=r"logits for 161 ids, the actor for 160; allowed with .* 'full': exactly"):
        make_trainer(make_config(merged(tree, {"ppo": {"kl_estimator": "full"}})))
    with pytest.raises(ValueError, match=r"logits for 160 ids, the actor for 161; allowed with .* 'k1': at least"):
        swapped = merged(referring_to(tmp_path, tree["model"]["path"]), {"model": {"path": str(fewer)}})
        make_trainer(make_config(swapped))


def test_what_cannot_be_loaded_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^reference.model = '.*empty' cannot be loaded"):
        make_trainer(make_config(referring_to(tmp_path, tmp_path / "empty", **SEPARATE)))
