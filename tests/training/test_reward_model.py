"""The stage reward: Bradley-Terry by hand, scores at the last token, a scale that means something."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from fourfold.errors import RunFailed
from fourfold.models.assembly import record_for
from fourfold.models.loading import Base, load_base
from fourfold.models.roles import Scorer
from fourfold.models.storage import load_role
from fourfold.training.reward_model import (
    bradley_terry_sum,
    held_out_margins,
    pair_accuracy,
    pair_confidence,
    pair_margins,
    scores_of,
    standardise,
)
from fourfold.training.supervised import fill_cache
from fourfold.training.texts import TextCache
from training.runs import SHARINGS, make_config, merged, run, settings

TEXTS = [[5, 9, 33, 60, 1], [7, 12, 1], [8, 90, 41, 12, 66, 30, 1], [44, 1]]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[0]), (TEXTS[1], TEXTS[3]), (TEXTS[3], TEXTS[3])]


def scorer_for(folder: Path, sharing: str = "trunk") -> tuple[Base, Scorer, TextCache]:
    """A scorer with a random head, and the cache over the texts."""
    base = load_base(make_config(settings(folder, SHARINGS[sharing])))
    scorer = base.new_scorer()
    with torch.no_grad():
        scorer.head.linear.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    cache = TextCache(base)
    fill_cache(cache, TEXTS, "test")
    return base, scorer, cache


def test_loss_by_hand() -> None:
    """-log sigmoid(2) - log sigmoid(-1) = log(1 + e^-2) + log(1 + e); finite where e^-margin is not."""
    margins = torch.tensor([2.0, -1.0], requires_grad=True)
    loss = bradley_terry_sum(margins)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-2)) + math.log1p(math.exp(1)), rel=1e-6)
    loss.backward()
    assert margins.grad is not None
    expected = [1 / (1 + math.exp(-2)) - 1, 1 / (1 + math.exp(1)) - 1]
    torch.testing.assert_close(margins.grad, torch.tensor(expected))
    assert bradley_terry_sum(torch.tensor([-1000.0])).item() == 1000.0


@torch.no_grad()
@pytest.mark.parametrize("sharing", SHARINGS)
def test_scores_are_read_at_the_last_token_whatever_stands_beside(tmp_path: Path, sharing: str) -> None:
    """FAULTS A7, B7, B8: in training, in evaluation and alone without padding the score is the same to 1e-5."""
    base, scorer, cache = scorer_for(tmp_path, sharing)
    alone = []
    for text in TEXTS:
        ids = torch.tensor([text])
        mask = torch.ones_like(ids, dtype=torch.bool)
        below = ids if base.trunk is None else base.trunk(ids, mask)
        alone.append(float(scorer.branch(below, mask)[0, -1] @ scorer.head.linear.weight[0]))
    assert max(alone) - min(alone) > 0.01
    for batch_size in (1, 2, 4):
        assert scores_of(scorer, cache, TEXTS, batch_size).tolist() == pytest.approx(alone, abs=1e-5)
    margins = [alone[0] - alone[1], alone[2] - alone[0], alone[1] - alone[3], 0.0]
    assert pair_margins(scorer, cache, PAIRS).tolist() == pytest.approx(margins, abs=1e-5)
    wins = sum(margin > 0 for margin in margins[:3])
    assert pair_accuracy(held_out_margins(scorer, cache, PAIRS, 2)) == (wins + 0.5) / 4, "a tie counts half"


def test_the_confidence_of_a_model_that_draws_its_pairs_is_its_accuracy() -> None:
    """Of pairs that a Bradley-Terry model with these margins has chosen, it ranks that share right, on average."""
    margins = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 1.5
    chosen = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) < margins.sigmoid()
    signed = torch.where(chosen, margins, -margins).tolist()
    assert pair_confidence(signed, 1.0) == pytest.approx(pair_accuracy(signed), abs=0.01)
    assert pair_confidence([4 * margin for margin in signed], 4.0) == pytest.approx(pair_confidence(signed, 1.0))
    assert pair_confidence([0.0, 0.0], 1.0) == 0.5


@torch.no_grad()
def test_standardised_scores_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    """Also when it is done again; order is kept."""
    _, scorer, cache = scorer_for(tmp_path)
    before = scores_of(scorer, cache, TEXTS, 2)
    for _ in range(2):
        standardise(scorer, scores_of(scorer, cache, TEXTS, 2))
        after = scores_of(scorer, cache, TEXTS, 2)
        torch.testing.assert_close(after, (before - before.mean()) / before.std(), rtol=1e-4, atol=1e-5)
    scorer.head.linear.weight.zero_()
    with pytest.raises(ValueError, match="all texts get the same score"):
        standardise(scorer, scores_of(scorer, cache, TEXTS, 2))


@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_stop_the_stage_and_count_for_nothing(tmp_path: Path, value: float) -> None:
    """FAULTS B10: a NaN is neither a lost pair nor a score that all texts share."""
    _, scorer, cache = scorer_for(tmp_path)
    next(scorer.branch.parameters()).flatten()[0] = value
    message = "^reward: the reward model's scores of 4 of 4 texts are not finite; nothing was stored"
    with pytest.raises(RunFailed, match=message):
        scores_of(scorer, cache, TEXTS, 2)
    with pytest.raises(RunFailed, match=message):
        held_out_margins(scorer, cache, PAIRS, 2)
    with pytest.raises(RunFailed, match="scores of 2 texts have the standard deviation nan"):
        standardise(scorer, torch.tensor([1.0, value]))
    assert scorer.head.scale == 1.0 and scorer.head.shift == 0.0


def test_one_text_has_no_spread_to_standardise_by(tmp_path: Path) -> None:
    """It is said before the training, not after."""
    tree = settings(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"text": "the film is a quiet joy"}\n')
    changes = {
        "stages": ["reward"],
        "data": {"texts": {"path": str(tmp_path / "one.jsonl")}, "texts_test": None},
        "reward": {"init": "base"},
    }
    with pytest.raises(ValueError, match=r"data\.texts has 1 text, whose score has no spread"):
        run(merged(tree, changes))
    assert not (tmp_path / "run" / "reward" / "checkpoints").exists()


@torch.no_grad()
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_few_pairs_are_learned_and_the_stored_model_is_standardised(tmp_path: Path, sharing: str) -> None:
    """Held out are the pairs that are learned: all are ranked as they were given."""
    tree = settings(tmp_path)
    rows = [
        {"prompt": "the", "chosen": " joy", "rejected": " fog"},
        {"prompt": "a", "chosen": " quiet walk", "rejected": " hard plot"},
        {"prompt": "it", "chosen": " ends", "rejected": " stops every ten minutes"},
    ]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"path": str(tmp_path / "few.jsonl")}
    changes = {
        "stages": ["reward"],
        "data": {"pairs": few, "pairs_test": few},
        "reward": {"num_epochs": 20, "batch_size": 3, "micro_batch_size": 1, "init": "base"},
        "checkpoint": {"stage_every": 100},
    }
    config = make_config(merged(tree, merged(changes, SHARINGS[sharing])))
    with torch.enable_grad():
        metrics = run(merged(tree, merged(changes, SHARINGS[sharing])))["stages"]["reward"]
    assert 0.5 < metrics.pop("pair_confidence") < 1.0
    assert metrics == {"pairs": 3, "pair_accuracy": 1.0, "test_pairs": 3}

    base = load_base(config)
    scorer = base.new_scorer()
    load_role(tmp_path / "run" / "reward" / "model", scorer, record_for(config, "scorer"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "data" / "texts.jsonl").read_text().splitlines()]
    encoded = [[*base.tokenizer.encode(text)[:63], base.tokenizer.eos_token_id] for text in texts]
    cache = TextCache(base)
    fill_cache(cache, encoded, "test")
    scores = scores_of(scorer, cache, encoded, 7)
    assert float(scores.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(scores.std()) == pytest.approx(1.0, abs=1e-4)
