"""Stage 2, reward: a scorer trained on preference pairs with the Bradley-Terry loss (Ouyang et al. 2022, eq. 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fourfold.config.schema import RunConfig
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize, batch_size
from fourfold.models.assembly import record_for
from fourfold.models.loading import Base
from fourfold.models.roles import Scorer, make_trainable, scorer_on
from fourfold.models.storage import load_role, save_role
from fourfold.training.census import made_beside, stage_census
from fourfold.training.stage import Say, Stage, learn_from, say_what_is_trained, stage_optimizer, stage_size
from fourfold.training.supervised import Texts, fill_cache
from fourfold.training.texts import TextCache, draw, epoch_batches

# Texts that `reward.standardise` measures: the mean of 256 scores is known to 1/16 of their standard deviation.
STANDARDISE_TEXTS = 256

# (chosen, rejected): two whole texts, as token ids.
Pair = tuple[Sequence[int], Sequence[int]]


def pair_margins(scorer: Scorer, cache: TextCache, pairs: Sequence[Pair]) -> Tensor:
    """score(chosen) - score(rejected) for each pair; a text in several pairs is scored once."""
    texts = sorted({tuple(text) for pair in pairs for text in pair}, key=len)
    place = {text: i for i, text in enumerate(texts)}
    scores = scorer.scores(cache.activations(texts)[0])
    chosen, rejected = ([place[tuple(pair[side])] for pair in pairs] for side in (0, 1))
    return scores[chosen] - scores[rejected]


def bradley_terry_sum(margins: Tensor) -> Tensor:
    """Sum of -log sigmoid(margin): the negative log-likelihood of the preferences."""
    return -torch.nn.functional.logsigmoid(margins).sum()


@torch.no_grad()
def scores_of(scorer: Scorer, cache: TextCache, texts: Texts, rows_at_once: int | BatchSize) -> Tensor:
    """Scores of texts, in their order; one that is not finite stops the stage."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    scores = torch.zeros(len(texts))

    def put(piece: slice) -> None:
        rows = order[piece]
        scores[rows] = scorer.scores(cache.activations([texts[row] for row in rows])[0]).cpu()

    batch_size(rows_at_once, "reward", "reward model").through(len(order), put)
    if bad := int((~torch.isfinite(scores)).sum()):
        raise RunFailed(
            f"reward: the reward model's scores of {bad} of {len(scores)} texts are not finite; nothing was stored, "
            "the stage's last checkpoint is kept; its weights are damaged, or reward.learning_rate is too high"
        )
    return scores


def held_out_margins(
    scorer: Scorer, cache: TextCache, pairs: Sequence[Pair], rows_at_once: int | BatchSize
) -> list[float]:
    """Score of the chosen text less that of the rejected one, for every pair."""
    texts = sorted({tuple(text) for pair in pairs for text in pair})
    score = dict(zip(texts, scores_of(scorer, cache, texts, rows_at_once).tolist(), strict=True))
    return [score[tuple(a)] - score[tuple(b)] for a, b in pairs]


def pair_accuracy(margins: Sequence[float]) -> float:
    """Share of pairs whose chosen text has the higher score; a tie counts half."""
    return sum(1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins) / len(margins)


def pair_confidence(margins: Sequence[float], scale: float) -> float:
    """Mean of sigmoid(|margin| / scale): how sure the model is of its rankings, `scale` being what standardising made.

    A calibrated model ranks that share of the pairs as people do (Bradley and Terry 1952).
    """
    return sum(1 / (1 + math.exp(-abs(margin) / scale)) for margin in margins) / len(margins)


def train_reward(
    config: RunConfig,
    base: Base,
    cache: TextCache,
    pairs: Sequence[Pair],
    test: Sequence[Pair],
    texts: Texts,
    sft: Path | None,
    folder: Path,
    say: Say,
) -> dict[str, float]:
    """Train the reward model and store it in `folder`/model; returns the stage's metrics.

    `texts` are those that `reward.standardise` gives mean 0 and standard deviation 1; `sft` is the stored policy that
    `reward.init = "sft"` starts from.
    """
    settings, record = config.reward, record_for(config, "scorer")
    rows = draw(len(texts), STANDARDISE_TEXTS, seed=config.seed, name="standardise") if settings.standardise else []
    yardstick = [texts[row] for row in rows]
    if len(yardstick) == 1:
        raise ValueError(
            "reward.standardise: data.texts has 1 text, whose score has no spread; give more, or set it to false"
        )
    fill_cache(cache, [text for pair in [*pairs, *test] for text in pair] + yardstick, "reward: trunk activations")
    with made_beside(base, "reward model", config):
        scorer = _initial_scorer(config, base, sft)
        make_trainable(scorer, with_language_head=False, memory=config.memory)
    say_what_is_trained("reward", scorer, base, say)
    lengths = [max(len(a), len(b)) for a, b in pairs]
    batches = [
        batch
        for epoch in range(settings.num_epochs)
        for batch in epoch_batches(lengths, settings.batch_size, seed=config.seed, epoch=epoch)
    ]
    optimizer = stage_optimizer("reward model", scorer, settings, len(batches), config, base, folder)
    size = stage_size("reward", "reward model", settings.micro_batch_size, config, base)
    census = stage_census(config, base, "reward model", scorer, optimizer, lambda: cache.bytes)
    size.describe = census.describe

    def loss_sum(some: Sequence[Pair]) -> Tensor:
        return bradley_terry_sum(pair_margins(scorer, cache, some))

    def learn(step: int) -> float:
        batch = [pairs[row] for row in batches[step]]
        return learn_from(batch, loss_sum, len(batch), optimizer, size)

    every = config.checkpoint.stage_every
    stage = Stage("reward", folder, scorer, record, optimizer, len(batches), learn, every, size)
    stage.run()
    if yardstick:
        standardise(scorer, scores_of(scorer, cache, yardstick, size))
    metrics: dict[str, float] = {"pairs": len(pairs)}
    metrics |= stage.noted(settings.micro_batch_size)
    if test:
        margins = held_out_margins(scorer, cache, test, size)
        metrics["pair_accuracy"] = pair_accuracy(margins)
        metrics["pair_confidence"] = pair_confidence(margins, float(scorer.head.scale))
        metrics["test_pairs"] = len(test)
    save_role(folder / "model", scorer, record)
    return metrics


def _initial_scorer(config: RunConfig, base: Base, sft: Path | None) -> Scorer:
    if config.reward.init == "base" or sft is None:
        return base.new_scorer()
    policy = base.new_policy()
    load_role(sft, policy, record_for(config, "policy"))
    return scorer_on(policy)


@torch.no_grad()
def standardise(scorer: Scorer, scores: Tensor) -> None:
    """Set the head's scale and shift so that these scores get mean 0 and standard deviation 1."""
    assert len(scores) > 1, "one score has no deviation"
    deviation = float(scores.std())
    if not math.isfinite(deviation):
        raise RunFailed(
            f"reward: the reward model's scores of {len(scores)} texts have the standard deviation {deviation}; "
            "nothing was stored, the stage's last checkpoint is kept; try a lower reward.learning_rate"
        )
    if deviation == 0:
        raise ValueError("reward.standardise: all texts get the same score; the reward model has learned nothing")
    scale = 1.0 / deviation
    scorer.head.shift.copy_((scorer.head.shift - float(scores.mean())) * scale)
    scorer.head.scale.mul_(scale)
