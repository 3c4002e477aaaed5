"""The credit report finds the trade-offs that are put into a rollout by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from fourfold.algorithms.rewards import RunningMoments
from fourfold.batch import Experience, ScoredRollout
from fourfold.diagnostics.credit import credit_of, token_advantages
from fourfold.training.experience import Shaping, estimate_advantages
from training.test_experience import ppo, scored

NAMES = ("kindness", "brevity", "penalties")
WORDS = {0: "<pad>", 4: "you", 5: "fool", 6: "please", 7: "."}


def decode(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def by_hand(advantages: dict[int, tuple[float, float, float]], responses: list[list[int]]) -> Experience:
    """Responses whose every token has the advantages of its word, whatever the weights: values are 0."""
    batch = scored([0.0] * len(responses), [len(each) for each in responses], [False] * len(responses))
    sequences, returns = batch.sequences.clone(), torch.zeros(*batch.response_mask.shape, 3)
    for row, response in enumerate(responses):
        for t, token in enumerate(response):
            sequences[row, 1 + t] = token
            returns[row, t] = torch.tensor(advantages[token])
    sequences[:, 0] = 7
    carried = {f.name: getattr(batch, f.name) for f in fields(ScoredRollout)}
    return Experience(
        **carried
        | {
            "sequences": sequences,
            "values": torch.zeros_like(returns),
            "last_values": torch.zeros(len(responses), 3),
            "score_parts": torch.zeros(len(responses), 2),
            "score_weights": torch.tensor([[1.0, 2.0]] * len(responses)),
        },
        rewards=torch.zeros_like(returns),
        advantages=torch.zeros_like(batch.kl),
        returns=returns,
    )


HELPS = {4: (0.0, 0.0, 0.0), 5: (-1.0, 0.5, 0.0), 6: (0.5, -0.25, 0.0), 7: (0.1, 0.1, -0.1)}


def test_trade_offs_name_who_gained_and_who_lost() -> None:
    """Weights count: brevity's advantages are doubled. "you" helps nobody and is no trade-off."""
    found = credit_of(by_hand(HELPS, [[4, 5, 6], [6, 6], [7]]), NAMES, decode)
    assert found.tokens == 6 and found.dimensions == NAMES
    told = {each.text: each for each in found.trade_offs}
    assert set(told) == {"fool", "please", "."}
    assert (told["fool"].helped, told["fool"].hurt, told["fool"].count) == ("brevity", "kindness", 1)
    assert (told["please"].helped, told["please"].hurt, told["please"].count) == ("kindness", "brevity", 3)
    assert told["please"].advantages == pytest.approx([0.5, -0.5, 0.0])
    assert (told["."].helped, told["."].hurt) == ("brevity", "penalties")
    # sqrt(count) x min(gain, loss): "fool" 1, "please" 0.5 sqrt(3), "." 0.1.
    assert [each.text for each in found.trade_offs] == ["fool", "please", "."]


def test_opposed_shares_and_correlations_are_over_all_tokens() -> None:
    found = credit_of(by_hand(HELPS, [[4, 5, 6], [6, 6], [7]]), NAMES, decode)
    assert found.opposed_shares[0][1] == pytest.approx(4 / 6)
    assert found.opposed_shares[1][2] == pytest.approx(1 / 6)
    assert found.correlations[0][1] < -0.9 and found.correlations[0][0] == 1.0
    x = torch.tensor([0.0, -1.0, 0.5, 0.5, 0.5, 0.1], dtype=torch.float64)
    assert found.deviations[0] == pytest.approx(x.std(unbiased=False).item())


def test_places_are_shown_with_the_text_around_them() -> None:
    """The prompt before, the rest of the response after; padding is nowhere."""
    found = credit_of(by_hand(HELPS, [[4, 5, 6], [6, 6], [7]]), NAMES, decode, top=2)
    first = found.places[0]
    assert (first.row, first.column, first.before, first.text, first.after) == (0, 1, ". you", "fool", "please")
    assert first.advantages == pytest.approx([-1.0, 1.0, 0.0])
    assert len(found.places) == 2 == len(found.trade_offs)
    assert found.as_dict()["places"][0]["hurt"] == "kindness"


def test_a_rollout_in_which_nothing_is_traded_has_no_trade_offs() -> None:
    agree = {token: (1.0, 0.5, 0.0) for token in HELPS}
    found = credit_of(by_hand(agree, [[4, 5], [6]]), NAMES, decode)
    assert found.trade_offs == [] == found.places
    assert found.opposed_shares == [[0.0] * 3] * 3


def test_advantages_of_tokens_add_up_to_those_that_are_learned_from() -> None:
    """Without whitening the actor's advantages are the sum over dimensions of what the report shows."""
    batch = by_hand(HELPS, [[4, 5, 6], [6, 6], [7]])
    carried = {f.name: getattr(batch, f.name) for f in fields(ScoredRollout)}
    random = torch.randn(batch.values.shape, generator=torch.Generator().manual_seed(0))
    scored_rollout = ScoredRollout(**carried | {"values": random})
    shaping = Shaping(0.1, RunningMoments(), (RunningMoments(),) * 2)
    experience = estimate_advantages(scored_rollout, ppo(gae_lambda=0.9), shaping)
    torch.testing.assert_close(token_advantages(experience).sum(dim=2), experience.advantages, atol=1e-5, rtol=1e-5)


def test_a_scalar_critic_is_refused() -> None:
    batch = by_hand(HELPS, [[4, 5]])
    flat = {name: getattr(batch, name)[..., 0] for name in ("values", "last_values", "rewards", "returns")}
    with pytest.raises(ValueError, match=r"critic\.heads = 'vector' or 'multi'"):
        credit_of(replace(batch, **flat), NAMES, decode)
