"""Texts of the stage sft behind the weights that their own scores suggest, so that a policy heeds weights before PPO.

Yang et al. 2024, "Rewards-in-Context", section 3.1, put scores in front of texts; here it is weights, as in front of
the prompts of PPO: what a text is good at, beside the other texts, is what it was asked for. What the texts are told is
kept beside the stage's checkpoints: a stage that goes on, and evaluations after it, do not ask the parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from fourfold.config.schema import RunConfig
from fourfold.data.told_weights import PARTS_OF_ONE, Tenths, ToldWeights
from fourfold.diagnostics.progress import stage_progress
from fourfold.errors import RunFailed
from fourfold.models.loading import Base
from fourfold.scoring.combined import RewardPart
from fourfold.training.folder import RunFolder
from fourfold.training.inputs import Inputs
from fourfold.training.reward_sources import text_source
from fourfold.training.supervised import Texts

Say = Callable[[str], None]
Scores = Float32[Tensor, "texts parts"]
TOLD = "sft/told.json"
SETS = ("texts", "texts_test")


def tell_texts(config: RunConfig, base: Base, inputs: Inputs, folder: RunFolder, say: Say) -> Inputs:
    """The inputs with weights in front of the texts where the settings want that, as the stage sft was told them first.

    Without texts to learn from and without a stage sft that was told any, held-out ones are told of none either.
    """
    told = ToldWeights.of(config, base.tokenizer)
    if told is None or not config.sft.tell_weights:
        return inputs
    found = folder.read_json(TOLD)
    if found is None and inputs.texts:
        found = _told(config, base, told, inputs, say)
        folder.write_json(TOLD, found)
    if found is None:
        return inputs
    changes = {name: _with_weights(told, getattr(inputs, name), found[name], name) for name in SETS}
    return replace(inputs, **changes)


def _with_weights(told: ToldWeights, texts: Texts, about: dict[str, Any], name: str) -> Texts:
    """The texts that have weights, behind them; none where the set was not read."""
    if not texts:
        return texts
    if about["of"] != len(texts):
        raise ValueError(
            f"data.{name}: {len(texts):,} texts, and {TOLD} of this run says what {about['of']:,} are told; give the "
            "data that the run began with, or start again in a new output folder"
        )
    return [
        told.tell_text(texts[row], tuple(tenths)) for row, tenths in zip(about["rows"], about["tenths"], strict=True)
    ]


def _told(config: RunConfig, base: Base, told: ToldWeights, inputs: Inputs, say: Say) -> dict[str, dict[str, Any]]:
    """By data set: how many texts there were, the rows with a score of every part, and the weights of those.

    Held-out texts stand beside the learned ones, by whose scores they are told.
    """
    found: dict[str, dict[str, Any]] = {}
    scores: dict[str, Scores] = {name: _scores(config, base, getattr(inputs, name)) for name in SETS}
    beside = scores["texts"][torch.isfinite(scores["texts"]).all(dim=1)].tolist()
    if not beside:
        raise RunFailed(
            f"sft: none of the {len(inputs.texts):,} texts has a score of every part; look at reward.parts, or set "
            "sft.tell_weights = false"
        )
    for name, some in scores.items():
        rows = torch.isfinite(some).all(dim=1).nonzero()[:, 0].tolist()
        tenths = told.suggested([some[row].tolist() for row in rows], beside) if rows else []
        found[name] = {"of": len(some), "rows": rows, "tenths": tenths}
        if rows:
            say(_line(told, name, tenths, len(some) - len(rows)))
    return found


def _line(told: ToldWeights, name: str, tenths: Sequence[Tenths], without: int) -> str:
    most = sum(map(max, tenths)) / len(tenths) / PARTS_OF_ONE
    left_out = f"; {without:,} without a score of every part left out" if without else ""
    return (
        f"data.{name}: {len(tenths):,} texts are told weights by their own scores (sft.tell_weights); the largest is "
        f"{most:.1f} on average; first row: {told.text(tenths[0]).strip()!r}{left_out}"
    )


def _scores(config: RunConfig, base: Base, texts: Texts) -> Scores:
    """What each part says of each text: as of a response to an empty prompt, as many at a time as a rollout has."""
    written = [base.tokenizer.decode(list(text), skip_special_tokens=True) for text in texts]
    at_once = config.ppo.rollout_batch_size
    columns = []
    with stage_progress("sft: scores of texts", len(written) * len(config.reward.parts), unit="texts") as progress:
        for name, section in config.reward.parts.items():
            source, column = text_source(name, section, base.tokenizer), []
            for start in range(0, len(written), at_once):
                some = written[start : start + at_once]
                column += source.numbers([""] * len(some), some)
                progress.advance(len(some))
            columns.append(torch.tensor(column, dtype=torch.float32))
            part = RewardPart(name, section.weight, source, section.on_failure)
            part.require(torch.isfinite(columns[-1]), phase="sft", rows="texts")
    return torch.stack(columns, dim=1)
