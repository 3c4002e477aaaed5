"""Roles with a model of their own at a service: the same numbers as held by the run, and nothing in their place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fourfold.errors import RunFailed
from fourfold.models.outside import Absent
from fourfold.scoring.service.client import Service
from fourfold.scoring.service.hosted import Hosted
from fourfold.training import serve
from fourfold.training.ppo import describe_roles
from tiny import tiny_classifier, tiny_directory
from training.runs import (
    Tree,
    by_function,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    settings,
    weights_of,
)
from training.served import at_service, hosted_roles, listening

BOTH = ("reference", "reward")
LABELS = ("BAD", "SO SO", "GOOD")


def with_own_models(folder: Path, **reward: Any) -> Tree:
    """A run over a trunk whose reference is deeper than its actor, and whose reward model reads letters."""
    larger = tiny_directory(folder / "larger", layers=3, seed=5)
    judge = tiny_classifier(folder / "judge", labels=LABELS, seed=3)
    of_texts = {"source": "model", "model": str(judge), "label": {"BAD": -1.0, "GOOD": 2.0}, "function": None, **reward}
    return settings(
        folder, merged(by_function("pays_by_hash"), {"reference": {"model": str(larger)}, "reward": of_texts})
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return with_own_models(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def hosted(tree: Tree) -> Hosted:
    """Both roles, without the run's own model: nothing of it may be loaded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(serve, "load_base")
        return hosted_roles(tree, *BOTH)


def outcome_of(tree: Tree) -> tuple[Any, list[dict[str, float]]]:
    """A trainer after its checks and one step, and the rows of both."""
    trainer = make_trainer(make_config(tree))
    give_value_head(trainer.models)
    trainer.check()
    return trainer, [trainer.evaluate().metrics, trainer.step()]


@pytest.mark.parametrize("engine", ["torch", "onnx_int8"])
def test_a_run_learns_the_same_bits_without_their_weights(tree: Tree, hosted: Hosted, engine: str) -> None:
    """ONNX Runtime runs the reward model at the service as it does in a run."""
    if engine != "torch":
        tree = merged(tree, {"reward": {"engine": engine}})
        hosted = hosted_roles(tree, *BOTH)
    plain, expected = outcome_of(merged(tree, {"reference": {"log_step_0": False}}))  # as beside a service
    with listening(hosted) as server:
        away, found = outcome_of(at_service(tree, server.url, *BOTH))
    assert away.models.step_0 is None
    names = ("score_mean", "kl_per_sequence_mean", "actor_grad_norm", "critic_grad_norm", "reference_score_flops")
    for one, other in zip(expected, found, strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
    assert expected[1]["reference_score_flops"] > 0 and found[1]["reward_score_flops"] == 0
    for role in ("actor", "critic"):
        ours, theirs = (weights_of(getattr(each.models, role)) for each in (plain, away))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    models = away.models
    assert isinstance(models.reward, Absent) and not list(models.reward.parameters())
    # Over one number each, as what is away has nothing else.
    assert all(p.is_meta or p.untyped_storage().nbytes() <= 4 for p in models.reference.parameters())
    for role in BOTH:
        [line] = [line for line in describe_roles(away).splitlines() if line.strip().startswith(role)]
        [held] = [line for line in describe_roles(plain).splitlines() if line.strip().startswith(role)]
        assert f"at {server.url}" in line and line.rstrip().endswith(" 0.0")
        assert re.findall(r"[\d,]{3,}", line)[0] == re.findall(r"[\d,]{3,}", held)[0]
        assert found[1][f"{role}_moved_bytes"] > 0


def test_texts_are_scored_as_the_library_scores_them(tree: Tree, hosted: Hosted) -> None:
    """The oracle reads each text alone: no batch, no padding, no service."""
    texts = [("what is rain?", " water."), ("the sea", " is wide and blue."), ("a", " b")]
    place = tree["reward"]["model"]
    tokenizer = AutoTokenizer.from_pretrained(place)
    model: Any = AutoModelForSequenceClassification.from_pretrained(place).eval()
    with torch.no_grad():
        logits = [model(**tokenizer(p + r, return_tensors="pt")).logits[0] for p, r in texts]
    expected = [float(2 * each[2] - each[0]) for each in logits]
    message = {"prompts": [p for p, _ in texts], "responses": [r for _, r in texts], "micro_batch_size": 2}
    with listening(hosted) as server:
        service = Service(make_config(at_service(tree, server.url, *BOTH)).service)
        found = service.ask("/v1/scores", message)["scores"]
        said = service.describe()
        with pytest.raises(RunFailed, match=r"status 400: .*allowed are texts"):
            service.ask("/v1/scores", {"prompts": [[1]], "responses": [[2]]})
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert said["protocol"] == 1 and said["roles"]["reward"]["reads"] == "texts"
    assert said["roles"]["reference"]["reads"] == "ids" and said["token_ids"] > 0


def shaken(place: str, target: Path) -> str:
    """The same model with weights that are a little off."""
    target.mkdir()
    for file in Path(place).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = target / "model.safetensors"
    save_file({name: tensor + 1e-6 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    return str(target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": {"template": "pair"}}, "template is '' there, 'pair' here"),
        ({"reward": {"label": {"GOOD": 1.0}}}, "label is {'BAD': -1.0, 'GOOD': 2.0} there, {"),
        ({"reward": {"max_tokens": 32}}, "max_tokens is 0 there, 32 here"),
        ({"precision": {"reward": "int8"}}, "held is 'auto' there, 'int8' here"),
        ({"memory": {"attention": "eager"}}, "attention is 'auto' there, 'eager' here"),
    ],
)
def test_a_reward_model_that_is_asked_otherwise_is_refused(
    tree: Tree, hosted: Hosted, changes: Tree, said: str
) -> None:
    with listening(hosted) as server, pytest.raises(ValueError, match=re.escape(said)):
        make_trainer(make_config(at_service(merged(tree, changes), server.url, "reward")))


@pytest.mark.parametrize("role", BOTH)
def test_other_weights_are_refused(tree: Tree, hosted: Hosted, role: str, tmp_path: Path) -> None:
    other = merged(tree, {role: {"model": shaken(tree[role]["model"], tmp_path / "shaken")}})
    said = r"is not this run's: weights is '[0-9a-f]{32}' there, '[0-9a-f]{32}' here; start"
    with listening(hosted) as server, pytest.raises(ValueError, match=said):
        make_trainer(make_config(at_service(other, server.url, role)))


def test_a_role_of_the_runs_own_model_is_no_model_of_its_own(tree: Tree, hosted: Hosted) -> None:
    own = merged(tree, {"reference": None})
    with listening(hosted) as server, pytest.raises(ValueError, match="another kind of model than this run's"):
        make_trainer(make_config(at_service(own, server.url, "reference")))


@pytest.mark.parametrize("role", BOTH)
def test_answers_that_are_mixed_up_are_refused(tree: Tree, hosted: Hosted, role: str) -> None:
    """The right model, whose first two answers change places: with no weights here the probe sees it all the same."""

    class Mixed:
        roles, describe = hosted.roles, hosted.describe

        def answer(self, role: str, message: dict[str, Any], deadline: float) -> dict[str, Any]:
            [(name, said)] = hosted.answer(role, message, deadline).items()
            if len(said) > 1:
                lists = isinstance(said[0], list)
                said[0], said[1] = ([said[1][0], *said[0][1:]], said[1]) if lists else (said[1], said[0])
            return {name: said}

    with listening(Mixed()) as server, pytest.raises(RunFailed, match=f"load: the {role} at .* other numbers alone"):
        make_trainer(make_config(at_service(tree, server.url, role)))


def test_a_response_without_a_token_is_a_bad_request(tree: Tree, tmp_path: Path) -> None:
    """Asking again would not help, so it is no status that is asked again."""
    place = tiny_classifier(tmp_path / "llama", "llama", seed=2)
    tokenizer: Any = AutoTokenizer.from_pretrained(place)
    tokenizer._tokenizer.post_processor = None
    tokenizer.save_pretrained(place)
    other = merged(tree, {"reward": {"model": str(place), "label": None}})
    with listening(hosted_roles(other, "reward")) as server:
        service = Service(make_config(at_service(other, server.url, "reward")).service)
        with pytest.raises(RunFailed, match=r"refused /v1/scores with status 400: .* give a reward.template"):
            service.ask("/v1/scores", {"prompts": ["a", ""], "responses": ["b", ""]})
