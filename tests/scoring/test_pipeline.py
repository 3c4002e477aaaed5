"""The score phase: what reference, critic and reward say about a rollout, and which rows may be learned from."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fourfold.batch import Rollout, ScoredRollout
from fourfold.errors import RunFailed
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy, Scorer, copy_policy, freeze, scorer_on
from fourfold.scoring.combined import Reward
from fourfold.scoring.pipeline import learnable, score
from fourfold.scoring.sources import FunctionReward, ModelReward, texts_of
from tiny_roles import MODES, oracle_log_probs, random_prompts, tiny_base, tiny_rollout, tiny_sampler

LENGTHS = [(3, 4), (6, 1), (1, 5), (4, 2), (2, 5)]


class Scene:
    """A sampled rollout and four roles that all differ."""

    def __init__(self, path: Path, mode: str = "trunk", family: str = "llama", temperature: float = 0.8) -> None:
        self.path, self.temperature = path / "m", temperature
        self.base: Base = tiny_base(self.path, family, mode, sampling__extra_eos_token_ids=list(range(4, 36)))
        self.actor: Policy = copy_policy(self.base.policy, share_head=self.base.shares_head)
        shake(self.actor.branch, 1)
        self.reference = copy_policy(self.base.policy, share_head=self.base.shares_head)
        freeze(self.reference)
        self.critic, self.scorer = (shake(scorer_on(self.base.policy), seed) for seed in (2, 3))
        self.rollout, self.activations = tiny_sampler(self.base, self.actor, temperature=temperature).generate(
            random_prompts([3, 6, 1, 4, 2, 5]), policy_version=0
        )

    def score(self, estimator: str = "k1", size: int = 100, reward: Reward | None = None):
        return score(
            self.rollout,
            self.activations,
            actor=self.actor,
            reference=self.reference,
            critic=self.critic,
            reward=reward or ModelReward(self.scorer),
            temperature=self.temperature,
            kl_estimator=estimator,
            micro_batch_size=size,
        )


def shake(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return module


@pytest.fixture(params=MODES)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(tmp_path, request.param)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_every_role_says_what_its_whole_model_says(scene: Scene) -> None:
    """FAULTS B8, C9: the reference is tempered like the actor; nothing depends on the padding."""
    scored, valid = scene.score()
    model = AutoModelForCausalLM.from_pretrained(scene.path)
    mask = scored.response_mask
    expected = oracle_log_probs(model, scene.rollout, scene.temperature)
    torch.testing.assert_close(scored.ref_log_probs, expected, rtol=0, atol=1e-5)
    for row in range(len(mask)):
        real = scene.rollout.attention_mask[row]
        alone = Activations(scene.activations.inputs[row, real][None], torch.ones(1, int(real.sum()), dtype=torch.bool))
        for scorer, said in ((scene.critic, scored.last_values), (scene.scorer, scored.scores)):
            torch.testing.assert_close(said[row], scorer.scores(alone)[0].detach(), rtol=0, atol=1e-5)
    assert valid.all()
    assert not scored.values[~mask].any() and scored.values[mask].abs().min() > 0
    for field in fields(Rollout):
        assert torch.equal(getattr(scored, field.name), getattr(scene.rollout, field.name))
    assert not any(getattr(scored, field.name).requires_grad for field in fields(ScoredRollout))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "full"])
def test_micro_batches_change_nothing(scene: Scene, estimator: str) -> None:
    whole, valid = scene.score(estimator)
    for size in (1, 4, 6):
        parts, valid_too = scene.score(estimator, size)
        assert torch.equal(valid, valid_too)
        for name in ("ref_log_probs", "kl", "values", "last_values", "scores"):
            torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-5)


# --- KL ---------------------------------------------------------------------------------------------------------------

ESTIMATORS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
    "abs": lambda d: d.abs(),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_of_the_sampled_tokens(scene: Scene, estimator: str) -> None:
    """FAULTS C1: k3 and abs never negative, k1 free to be."""
    scored, _ = scene.score(estimator)
    mask = scored.response_mask
    d = (scored.log_probs - scored.ref_log_probs).double()
    torch.testing.assert_close(scored.kl[mask].double(), ESTIMATORS[estimator](d)[mask], rtol=1e-4, atol=1e-6)
    assert not scored.kl[~mask].any()
    assert (scored.kl.min() < 0) == (estimator == "k1")


@torch.no_grad()
def test_full_kl_is_the_sum_over_the_vocabulary(scene: Scene) -> None:
    """FAULTS C1: by brute force, sum p log(p / q) from each policy's own logits."""
    scored, _ = scene.score("full")
    mask = scored.response_mask
    log_p, log_q = (
        torch.log_softmax(
            policy.head.weight.double()
            @ policy.hidden_before(scene.activations, scene.rollout).double().T
            / scene.temperature,
            dim=0,
        )
        for policy in (scene.actor, scene.reference)
    )
    expected = (log_p.exp() * (log_p - log_q)).sum(dim=0)
    torch.testing.assert_close(scored.kl[mask].double(), expected, rtol=1e-4, atol=1e-6)
    assert scored.kl[mask].min() > 1e-4 and not scored.kl[~mask].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "full"])
def test_kl_of_a_policy_to_itself_is_0(scene: Scene, estimator: str) -> None:
    """FAULTS C1, C9: also at a temperature that is not 1."""
    scene.reference = copy.deepcopy(scene.actor)
    freeze(scene.reference)
    scored, _ = scene.score(estimator)
    assert scored.kl.abs().max() < 1e-6


def test_kl_counts_the_last_token_and_no_padding(scene: Scene) -> None:
    """FAULTS B12: log-ratios made to be the token's index; padded places hold NaN and count nothing."""
    honest, _ = scene.score("k1")
    index = torch.arange(honest.kl.shape[1], dtype=torch.float32).expand(honest.kl.shape)
    crafted = torch.where(honest.response_mask, honest.ref_log_probs + index, torch.nan)
    scene.rollout = replace(scene.rollout, log_probs=crafted)
    scored, _ = scene.score("k1")
    lengths = honest.lengths.float()
    torch.testing.assert_close(scored.kl.sum(dim=1), lengths * (lengths - 1) / 2, rtol=0, atol=1e-4)


def test_an_unknown_estimator_is_refused(scene: Scene) -> None:
    with pytest.raises(ValueError, match=r"KL estimator 'k9': allowed are"):
        scene.score("k9")


# --- numbers that are not finite --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("role", "name"), [("reference", "ref_log_probs"), ("critic", "values"), ("actor", "kl")])
def test_a_role_that_is_not_finite_stops_the_run_by_name(tmp_path: Path, role: str, name: str, value: float) -> None:
    """FAULTS B10."""
    scene = Scene(tmp_path)
    if role == "actor":
        scene.rollout = replace(scene.rollout, log_probs=torch.full_like(scene.rollout.log_probs, value))
    else:
        module: Policy | Scorer = getattr(scene, role)
        next(iter(module.branch.parameters())).fill_(value)
    with pytest.raises(
        RunFailed, match=rf"^score: the {role}'s {name} are not finite; the last good checkpoint is kept"
    ):
        scene.score()


@torch.no_grad()
def test_a_last_value_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """It stands for the rest of a response that was cut, so it is learned from like the others."""
    scene = Scene(tmp_path)
    last = scene.rollout.prompt_length + scene.rollout.lengths[0] - 1
    scene.activations.inputs[0, last] = 1e30  # only the state after the last token sees it
    scene.critic.head.linear.weight.fill_(3e38)
    for parameter in scene.critic.branch.parameters():
        parameter.zero_()
    scene.critic.branch.body.norm = nn.Identity()
    scene.activations.inputs[0, :last] = 0.0
    scene.activations.inputs[1:] = 0.0
    with pytest.raises(RunFailed, match=r"^score: the critic's last_values are not finite"):
        scene.score(reward=FunctionReward(lambda _, r: [0.0] * len(r), scene.base.tokenizer, retries=0))


# --- which rows are learned from --------------------------------------------------------------------------------------


def scored_rows(truncated: list[bool], scores: list[float]) -> ScoredRollout:
    rollout = replace(tiny_rollout(LENGTHS[: len(scores)]), truncated=torch.tensor(truncated))
    zeros = torch.zeros_like(rollout.log_probs)
    carried = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
    said = {"ref_log_probs": zeros, "kl": zeros, "values": zeros, "last_values": zeros[:, 0]}
    total = torch.tensor(scores)
    return ScoredRollout(
        **carried, **said, scores=total, score_parts=total[:, None], score_weights=torch.ones_like(total[:, None])
    )


SCORED = scored_rows([False, True, False, True, False], [1.0, 2.0, 3.0, 4.0, 5.0])


def rows(valid: list[bool], truncation: str = "terminal", on_failure: str = "drop") -> list[int]:
    return learnable(SCORED, torch.tensor(valid), truncation=truncation, on_failure=on_failure).tolist()


@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
@pytest.mark.parametrize("on_failure", ["stop", "drop"])
def test_all_rows_with_a_valid_score_are_learned_from(truncation: str, on_failure: str) -> None:
    assert rows([True] * 5, truncation, on_failure) == [0, 1, 2, 3, 4]


def test_a_row_without_a_valid_score_is_left_out() -> None:
    """FAULTS M5."""
    assert rows([True, True, False, False, True]) == [0, 1, 4]


def test_or_the_run_stops_and_says_how_many() -> None:
    with pytest.raises(RunFailed, match=r'^score: 2 of 5 responses got no valid score .*reward.on_failure = "drop"'):
        rows([True, True, False, False, True], on_failure="stop")


def test_responses_cut_by_length_are_left_out_when_asked() -> None:
    assert rows([True] * 5, "drop") == [0, 2, 4]
    assert rows([True, True, False, True, True], "drop") == [0, 4]


@pytest.mark.parametrize(
    ("valid", "truncation"), [([False] * 5, "terminal"), ([False, True, False, True, False], "drop")]
)
def test_a_rollout_without_any_such_row_stops_the_run(valid: list[bool], truncation: str) -> None:
    failed = valid.count(False)
    with pytest.raises(
        RunFailed, match=rf"no response can be learned from: {failed} without a valid score, 2 cut by length"
    ):
        rows(valid, truncation)


@torch.no_grad()
def test_an_invalid_score_reaches_no_statistic(scene: Scene) -> None:
    """FAULTS M5: what is kept after one None is what the other rows would have been without it."""

    _, texts = texts_of(scene.rollout, scene.base.tokenizer)
    assert len(set(texts)) == len(texts) == 6

    def numbers(prompts: list[str], responses: list[str]) -> list[float | None]:
        rows = [texts.index(response) for response in responses]
        return [None if row == 1 else float(row) for row in rows]

    scored, valid = scene.score(reward=FunctionReward(numbers, scene.base.tokenizer, retries=0))
    kept: Tensor = learnable(scored, valid, truncation="terminal", on_failure="drop")
    assert scored.select(kept).scores.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0]
