"""Whole tiny runs that are paid by several parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config import ConfigError
from fourfold.diagnostics.tables import role_rows
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.models.classifier import TorchClassifier
from fourfold.models.roles import Scorer
from fourfold.planner.request import architectures_of
from fourfold.scoring.external import ExternalReward
from fourfold.scoring.rules import count_of
from fourfold.scoring.sources import texts_of
from fourfold.training.trainer import Trainer
from tiny import tiny_classifier
from training.runs import Tree, by_function, by_model, make_config, make_trainer, merged, run, settings, steps_of
from training.served import at_service, hosted_roles, listening

PARTS: Tree = {
    "letters": {"source": "function", "function": "training.runs:pays_for_a", "weight": 0.5},
    "hash": {"source": "function", "function": "training.runs:pays_by_hash", "weight": 2.0},
}


def by_parts(parts: Tree = PARTS, **ppo: int) -> Tree:
    """Only the stage ppo, paid by these parts."""
    combined = {"source": "combined", "function": None, "parts": parts}
    return merged(by_function("pays_by_hash", **ppo), {"reward": combined})


def test_rows_and_evaluations_have_mean_and_spread_of_every_part(tmp_path: Path) -> None:
    """The mean of a sum is the sum of the means; a run of one source has no such metrics."""
    tree = settings(tmp_path, by_parts(steps=2))
    summary = run(tree)
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "ppo_step"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    assert len(steps) == 2 and evaluations
    for prefix, found in (("", steps), ("eval_", evaluations)):
        for row in found:
            means = [row[f"{prefix}score_mean/{name}"] for name in ("letters", "hash")]
            assert row[f"{prefix}score_mean"] == pytest.approx(0.5 * means[0] + 2.0 * means[1], abs=1e-5)
            assert row[f"{prefix}score_std/hash"] > 0
    assert {"score_mean/letters", "score_std/hash"} <= summary["after"].keys()


def test_one_part_of_weight_one_is_the_source_alone(tmp_path: Path) -> None:
    one = {"hash": {"source": "function", "function": "training.runs:pays_by_hash"}}
    combined, alone = (
        steps_of(make_trainer(make_config(settings(tmp_path / name, changes))))
        for name, changes in (("one", by_parts(one)), ("alone", by_function("pays_by_hash")))
    )
    for ours, theirs in zip(combined, alone, strict=True):
        assert not [name for name in theirs if "/" in name]
        assert ours["score_mean/hash"] == ours["score_mean"]
        for name in ("score_mean", "score_shaped_mean", "actor_grad_norm", "critic_grad_norm", "return_std"):
            assert ours[name] == theirs[name], name


BREVITY: Tree = {
    "source": "rules",
    "weight": 0.5,
    "rules": {"short": {"kind": "excess", "unit": "characters", "longest": 3, "score": -0.1}},
}
LIKED, TONE, OTHER = "liked", "tone", "other"


def by_models(folder: Path, **changes: Any) -> Tree:
    """Paid by a reward model of the base, two classifiers of other families, and rules."""
    tree = by_model(settings(folder, by_function("pays_by_hash", steps=2)), folder / "scorer")
    parts: Tree = {LIKED: {"source": "trained", "checkpoint": tree["reward"]["checkpoint"]}, "brevity": BREVITY}
    for seed, (name, family) in enumerate(((TONE, "bert"), (OTHER, "llama"))):
        model = tiny_classifier(folder / name, family, labels=("BAD", "GOOD"), seed=seed)
        parts[name] = {"source": "model", "model": str(model), "label": {"GOOD": 1.0}, "weight": -1.0}
    combined = {"source": "combined", "checkpoint": None, "parts": parts}
    return merged(merged(tree, {"reward": combined, "critic": {"init": "reward"}}), changes)


def scored_parts(trainer: Trainer) -> tuple[Any, Any]:
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    scored, valid = trainer._score(rollout, activations)
    assert bool(valid.all())
    return scored, activations


def test_each_model_says_in_its_part_what_it_says_alone(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(by_models(tmp_path)))
    models, names = trainer.models, trainer.config.reward.dimensions
    scored, activations = scored_parts(trainer)
    column = {name: scored.score_parts[:, number] for number, name in enumerate(names)}
    assert isinstance(models.reward, Scorer)
    torch.testing.assert_close(column[LIKED], models.reward.scores(activations), rtol=0, atol=1e-5)
    prompts, responses = texts_of(scored, models.base.tokenizer)
    for name in (TONE, OTHER):
        alone = ExternalReward(models.classifiers[f"reward.parts.{name}"]).of_texts(prompts, responses)
        torch.testing.assert_close(column[name], alone, rtol=0, atol=1e-5)
    assert column["brevity"].tolist() == pytest.approx(
        [-0.1 * max(count_of(text, "characters") - 3, 0) for text in responses]
    )
    total = column[LIKED] + 0.5 * column["brevity"] - column[TONE] - column[OTHER]
    torch.testing.assert_close(scored.scores, total, rtol=0, atol=1e-5)


def test_all_reward_models_are_frozen_shown_and_counted(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(by_models(tmp_path)))
    keys = {f"reward.parts.{name}" for name in (TONE, OTHER)}
    before = trainer.models.frozen_checksums()
    assert keys | {"reward", "reference", "trunk"} == before.keys()
    assert keys | {"reward"} <= {row.model for row in role_rows(trainer.models)}
    rows = steps_of(trainer)
    assert trainer.models.frozen_checksums() == before
    of_one = by_model(settings(tmp_path / "one", by_function("pays_by_hash", steps=2)), tmp_path / "one" / "scorer")
    alone = make_trainer(make_config(of_one))
    [first, *_] = steps_of(alone)
    assert rows[0]["reward_forward_passes"] == 3 * first["reward_forward_passes"]
    assert rows[0]["reward_score_flops"] > first["reward_score_flops"]


@pytest.mark.parametrize("residency", ["park", "stream"])
def test_residency_is_that_of_all_reward_models_and_changes_no_score(tmp_path: Path, residency: str) -> None:
    kept, moved = (
        make_trainer(make_config(by_models(tmp_path, reward={"residency": how}, output=str(tmp_path / how))))
        for how in ("keep", residency)
    )
    expected, found = scored_parts(kept)[0], scored_parts(moved)[0]
    assert torch.equal(expected.score_parts, found.score_parts)
    rows = steps_of(moved)
    assert rows[0]["reward_moved_bytes"] > 0
    devices = {row.device for row in role_rows(moved.models) if row.model.startswith("reward")}
    assert len(devices) == 1 and devices != {"cpu"}, "the three are held alike"


def test_scoring_beside_sampling_gives_the_same_parts(tmp_path: Path) -> None:
    plain = make_trainer(make_config(by_models(tmp_path)))
    ahead = {"overlap_scoring": True, "batch_size": 2}
    beside = make_trainer(make_config(by_models(tmp_path, sampling=ahead, output=str(tmp_path / "beside"))))
    expected, found = scored_parts(plain)[0], scored_parts(beside)[0]
    torch.testing.assert_close(found.score_parts, expected.score_parts, rtol=0, atol=1e-5)


def test_the_stage_reward_trains_the_model_of_a_part(tmp_path: Path) -> None:
    """All three stages; the critic starts from that model; the standardised score is the part's."""
    combined: Tree = {"source": "combined", "parts": {LIKED: {"source": "trained"}, "brevity": BREVITY}}
    tree = settings(tmp_path, {"reward": combined, "ppo": {"steps": 1}})
    summary = run(tree)
    assert 0 <= summary["stages"]["reward"]["pair_accuracy"] <= 1
    after = summary["after"]
    assert after["score_mean"] == pytest.approx(after["score_mean/liked"] + 0.5 * after["score_mean/brevity"], abs=1e-5)
    again = merged(tree, {"output": str(tmp_path / "plain"), "reward": {"source": "train", "parts": None}})
    run(again)
    stored = [tmp_path / name / "reward" / "model" for name in ("run", "plain")]
    weights = [sorted(folder.glob("*.safetensors"))[0].read_bytes() for folder in stored]
    assert weights[0] == weights[1], "what else pays is no matter to the stage reward"


@pytest.mark.parametrize(
    "given", [{"template": "so {response}"}, {"max_tokens": 4}, {"device": "cpu"}, {"engine": "onnx"}], ids=str
)
def test_a_classifier_of_a_part_is_the_same_as_alone(tmp_path: Path, given: Tree) -> None:
    """Every key of [reward] that describes one does the same in a part."""
    model = {"source": "model", "model": str(tiny_classifier(tmp_path / "judge", seed=3)), **given}
    alone = merged(by_function("pays_by_hash", steps=1), {"reward": {**model, "function": None}})
    parts = by_parts({TONE: model}, steps=1)
    rows = []
    for name, changes in (("alone", alone), ("part", parts)):
        changes = merged(changes, {"output": str(tmp_path / name)})
        rows.append(steps_of(make_trainer(make_config(settings(tmp_path, changes))))[0])
    for name in ("score_mean", "score_std", "reward_forward_tokens", "critic_grad_norm"):
        assert rows[0].get(name) == rows[1].get(name), name
    assert rows[1]["score_mean/tone"] == rows[0]["score_mean"]


def test_what_is_wrong_with_a_classifier_of_a_part_is_told_of_that_part(tmp_path: Path) -> None:
    judge = tiny_classifier(tmp_path / "judge", labels=("BAD", "GOOD"))
    parts = {TONE: {"source": "model", "model": str(judge), "label": {"GOD": 1.0}}}
    with pytest.raises(ValueError, match=r"reward\.parts\.tone: reward\.label: given 'GOD'; did you mean 'GOOD'"):
        make_trainer(make_config(settings(tmp_path, by_parts(parts))))


def two_labels(folder: Path, *, alike: bool = True, **of_one: Any) -> Tree:
    """Parts that read the labels of one model with three, or of two files with the same weights."""
    places = [
        tiny_classifier(folder / "judge" / name, "llama", labels=("BAD", "GOOD", "MORE"), seed=3) for name in "ab"
    ]
    one: Tree = {"source": "model", "model": str(places[0]), "label": {"GOOD": 1.0}, "weight": 0.5}
    other: Tree = {"source": "model", "model": str(places[not alike]), "label": {"BAD": -1.0, "MORE": 2.0}}
    parts = {TONE: one, "letters": PARTS["letters"], OTHER: {**other, **of_one}}
    return settings(folder, by_parts(parts, steps=1))


def test_parts_that_read_labels_of_one_model_hold_and_pass_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bytes, by rows that go through it, and by the plan; every part's scores are those of a model of its own."""
    passed: list[int] = []
    logits = TorchClassifier.logits

    def counted(self: TorchClassifier, inputs: Any) -> torch.Tensor:
        passed.append(len(inputs["input_ids"]))
        return logits(self, inputs)

    monkeypatch.setattr(TorchClassifier, "logits", counted)
    found = {}
    for name, alike in (("one", True), ("two", False)):
        trainer = make_trainer(make_config(merged(two_labels(tmp_path, alike=alike), {"output": str(tmp_path / name)})))
        held = [row.bytes for row in role_rows(trainer.models) if row.model.startswith("reward")]
        passed.clear()
        scored, _ = scored_parts(trainer)
        rows = sum(passed)
        planned = architectures_of(trainer.config)[0].keys() - {"base"}
        found[name] = (held, rows, len(planned), scored.score_parts, trainer.step()["reward_forward_passes"])
    (one, rows, planned, scores, passes), (two, twice, both, expected, of_both) = found["one"], found["two"]
    assert one * 2 == two and len(one) == 1
    assert (rows, twice) == (8, 16) and (planned, both) == (1, 2) and (passes, of_both) == (1.0, 2.0)
    assert torch.equal(scores, expected) and not torch.equal(scores[:, 0], scores[:, 2])


@pytest.mark.parametrize(
    "changes", [{"reward": {"residency": "park"}}, {"sampling": {"overlap_scoring": True, "batch_size": 2}}], ids=str
)
def test_labels_of_one_model_are_read_alike_however_it_is_held(tmp_path: Path, changes: Tree) -> None:
    plain, other = (
        make_trainer(make_config(merged(two_labels(tmp_path), {**given, "output": str(tmp_path / name)})))
        for name, given in (("plain", {}), ("other", changes))
    )
    expected, found = scored_parts(plain)[0], scored_parts(other)[0]
    torch.testing.assert_close(found.score_parts, expected.score_parts, rtol=0, atol=1e-5)


def test_a_vector_critic_starts_as_the_reward_model_in_the_column_of_its_part(tmp_path: Path) -> None:
    """Wherever the part stands in the file."""
    tree = by_model(settings(tmp_path, by_function("pays_by_hash", steps=1)), tmp_path / "scorer")
    parts: Tree = {"brevity": BREVITY, LIKED: {"source": "trained", "checkpoint": tree["reward"]["checkpoint"]}}
    combined = {"source": "combined", "checkpoint": None, "parts": parts}
    trainer = make_trainer(
        make_config(merged(tree, {"reward": combined, "critic": {"init": "reward", "heads": "vector"}}))
    )
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    last = trainer.models.critic.values_and_last(activations, rollout)[1]
    assert isinstance(trainer.models.reward, Scorer)
    torch.testing.assert_close(last[:, 1], trainer.models.reward.scores(activations))
    assert bool((last[:, [0, 2]] == 0).all())


def test_parts_that_read_one_model_otherwise_have_one_each(tmp_path: Path) -> None:
    reward = make_config(two_labels(tmp_path, template="so {response}")).reward
    assert list(reward.held_classifiers) == [f"reward.parts.{name}" for name in (TONE, OTHER)]
    wrong = make_config(two_labels(tmp_path, label={"GOD": 1.0}))
    with pytest.raises(ValueError, match=r"^reward\.parts\.other\.label: given 'GOD'; did you mean 'GOOD'"):
        make_trainer(wrong)


def test_the_run_s_own_model_of_a_part_can_be_at_a_service(tmp_path: Path) -> None:
    """`reward.residency` = "service" is about the model that [reward] describes; rules stay with the run."""
    tree = by_model(settings(tmp_path, by_function("pays_by_hash", steps=1)), tmp_path / "scorer")
    parts: Tree = {LIKED: {"source": "trained", "checkpoint": tree["reward"]["checkpoint"]}, "brevity": BREVITY}
    tree = merged(tree, {"reward": {"source": "combined", "checkpoint": None, "parts": parts}})
    expected = scored_parts(make_trainer(make_config(tree)))[0]
    with listening(hosted_roles(tree, "reward")) as server:
        away = merged(at_service(tree, server.url, "reward"), {"output": str(tmp_path / "away")})
        trainer = make_trainer(make_config(away))
        found = scored_parts(trainer)[0]
        assert "reward" not in trainer.models.frozen_checksums()
    torch.testing.assert_close(found.score_parts, expected.score_parts, rtol=0, atol=1e-5)


def test_classifiers_of_parts_know_no_service(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"classifiers in reward\.parts \(tone and other\) do not know; .*'http' asks"
    ):
        make_config(at_service(by_models(tmp_path), "http://127.0.0.1:1", "reward"))


def test_the_best_checkpoint_is_chosen_by_a_part(tmp_path: Path) -> None:
    tree = settings(tmp_path, by_parts(steps=2))
    run(merged(tree, {"checkpoint": {"best_metric": "eval_score_mean/letters"}}))
    with pytest.raises(ValueError, match=r"given 'eval_score_mean/leters'; did you mean 'eval_score_mean/letters'"):
        run(merged(tree, {"checkpoint": {"best_metric": "eval_score_mean/leters"}, "output": str(tmp_path / "other")}))
