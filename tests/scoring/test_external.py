"""A reward model of another family over a rollout: decoded text, its own tokens, and what stops the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fourfold.errors import RunFailed
from fourfold.memory.budget import Budget
from fourfold.models.external import load_external
from fourfold.models.roles import Activations
from fourfold.scoring.external import ExternalReward
from models.test_external import config_for
from tiny import BOS, EOS, tiny_classifier, tiny_tokenizer
from tiny_roles import tiny_rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_classifier(tmp_path_factory.mktemp("reward") / "bert", seed=2)


def source(folder: Path, **reward: Any) -> ExternalReward:
    return ExternalReward(load_external(config_for(folder, **reward), Budget()), tiny_tokenizer(pad_is_eos=False))


def test_scores_are_those_of_the_decoded_texts_row_by_row(folder: Path) -> None:
    """The oracle decodes and calls the library on each text alone; special tokens of the actor are not read."""
    rollout = tiny_rollout([(3, 4), (1, 6), (5, 1)])
    rollout.sequences[0, 2] = BOS  # the first real token of a row
    rollout.sequences[1, 5 + 5] = EOS  # the last one
    actor, tokenizer = tiny_tokenizer(pad_is_eos=False), AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for ids, mask in zip(rollout.sequences, rollout.attention_mask, strict=True):
        text = actor.decode([int(i) for i in ids[mask] if i not in (BOS, EOS)])
        with torch.no_grad():
            expected.append(float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]))
    scores, valid = source(folder)(Activations(rollout.sequences, rollout.attention_mask), rollout)
    assert bool(valid.all()) and max(expected) - min(expected) > 0.05
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_what_is_cut_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward, rollout = source(folder, max_tokens=4), tiny_rollout([(3, 4), (1, 1)])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            reward(Activations(rollout.sequences, rollout.attention_mask), rollout)
    [said] = [record.getMessage() for record in caplog.records]
    assert "of 2 texts have more than the 4 tokens" in said and "lose their beginning" in said


def test_scores_that_are_not_finite_stop_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward, rollout = source(folder), tiny_rollout([(3, 4), (1, 1)])

    def logits(inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor([[1.0], [torch.inf]])

    monkeypatch.setattr(reward.external.classifier, "logits", logits)
    with pytest.raises(RunFailed, match="the reward model's scores of 1 of 2 responses are not finite; the last good"):
        reward(Activations(rollout.sequences, rollout.attention_mask), rollout)


def test_a_response_without_a_token_stops_the_run(tmp_path: Path) -> None:
    """The chat template writes something around it; a decoder's tokenizer that writes no BOS may leave nothing."""
    folder = tiny_classifier(tmp_path / "llama", "llama", seed=2)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer._tokenizer.post_processor = None
    tokenizer.save_pretrained(folder)
    rollout = tiny_rollout([(1, 1), (2, 3)])
    rollout.sequences[0] = EOS
    activations = Activations(rollout.sequences, rollout.attention_mask)
    with pytest.raises(RunFailed, match=r"1 of 2 responses have no token for the reward model; give a reward.template"):
        source(folder)(activations, rollout)
    assert bool(source(folder, template="chat")(activations, rollout)[1].all())
