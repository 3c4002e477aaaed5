"""A reward of several parts: each asked for itself, a row's score is their weighted sum, or there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.algorithms.rewards import combine_scores
from fourfold.errors import RunFailed
from fourfold.models.roles import scorer_on
from fourfold.scoring.combined import Combined, RewardPart
from fourfold.scoring.sources import FunctionReward, ModelReward, texts_of
from scoring.test_pipeline import Scene, shake

Function = Callable[[list[str], list[str]], list[float | None]]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def length(_: list[str], responses: list[str]) -> list[float | None]:
    return [float(len(response)) for response in responses]


def vowels(_: list[str], responses: list[str]) -> list[float | None]:
    return [float(sum(letter in "aeiou" for letter in response)) for response in responses]


def part(scene: Scene, name: str, weight: float, function: Function, on_failure: str = "stop") -> RewardPart:
    source = FunctionReward(
        function, scene.base.tokenizer, retries=0, on_failure=on_failure, key=f"reward.parts.{name}"
    )
    return RewardPart(name, weight, source, "stop" if on_failure == "stop" else "drop")


@given(st.lists(st.tuples(*[st.floats(-100, 100)] * 3), min_size=1), st.tuples(*[st.floats(-10, 10)] * 3))
@settings(deadline=None)
def test_the_sum_is_that_of_every_row_by_hand(rows: list[tuple[float, ...]], weights: tuple[float, ...]) -> None:
    total = combine_scores(torch.tensor(rows), torch.tensor(weights).expand(len(rows), 3))
    by_hand = [sum(w * s for w, s in zip(weights, row, strict=True)) for row in rows]
    assert total.tolist() == pytest.approx(by_hand, rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_parts_are_raw_and_their_weighted_sum_is_the_score(scene: Scene, size: int) -> None:
    """A model and two functions, in micro-batches of any size; a part of weight 0 is measured all the same."""
    model = ModelReward(shake(scorer_on(scene.base.policy), 3))
    reward = Combined(
        (
            RewardPart("liked", 2.0, model, "stop"),
            part(scene, "brevity", -0.5, length),
            part(scene, "vowels", 0.0, vowels),
        )
    )
    scored, valid = scene.score(size=size, reward=reward)
    alone, _ = scene.score(reward=model)
    _, responses = texts_of(scored, scene.base.tokenizer)
    assert valid.all() and scored.score_parts.shape == (len(responses), 3)
    torch.testing.assert_close(scored.score_parts[:, 0], alone.scores, rtol=0, atol=1e-5)
    assert scored.score_parts[:, 1].tolist() == length([], responses)
    assert scored.score_parts[:, 2].tolist() == vowels([], responses)
    torch.testing.assert_close(scored.scores, 2 * alone.scores - 0.5 * scored.score_parts[:, 1], rtol=0, atol=1e-5)


def test_a_source_alone_is_its_only_part(scene: Scene) -> None:
    scored, _ = scene.score()
    assert torch.equal(scored.score_parts, scored.scores[:, None])


def test_a_row_without_one_part_is_not_valid_whatever_the_others_say(scene: Scene) -> None:
    def not_the_first(_: list[str], responses: list[str]) -> list[float | None]:
        return [None if response == first else 1.0 for response in responses]

    _, responses = texts_of(scene.rollout, scene.base.tokenizer)
    first = responses[0]
    parts = (part(scene, "brevity", 1.0, length), part(scene, "checked", 1.0, not_the_first, "drop"))
    scored, valid = scene.score(reward=Combined(parts))
    assert valid.tolist() == [response != first for response in responses] and not valid.all()
    assert scored.scores[valid].tolist() == [len(response) + 1.0 for response in responses if response != first]


def test_a_part_says_for_itself_whether_its_failure_stops_the_run(scene: Scene) -> None:
    def none(_: list[str], responses: list[str]) -> list[float | None]:
        return [None] * len(responses)

    for policy in ("drop", "stop"):
        parts = (part(scene, "brevity", 1.0, length), part(scene, "checked", 0.0, none, policy))
        if policy == "drop":
            assert not scene.score(reward=Combined(parts))[1].any()
            continue
        with pytest.raises(RunFailed, match=r"reward\.parts\.checked: 6 of 6 responses got no valid score.*on_failure"):
            scene.score(reward=Combined(parts))


def test_a_function_that_raises_is_named_by_its_table(scene: Scene) -> None:
    def broken(_: list[str], responses: list[str]) -> list[float | None]:
        raise ConnectionError("away")

    parts = (part(scene, "brevity", 1.0, length), part(scene, "checked", 1.0, broken))
    with pytest.raises(RunFailed, match=r"the function of reward\.parts\.checked failed .* raise reward\.parts\.chec"):
        scene.score(reward=Combined(parts))
