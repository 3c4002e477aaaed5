"""Rewards made ill on purpose: saturated, failing, of length, or of a reward model that has learned a coin."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diagnostics.patients import by, by_parts, examined, found, patient, write_pairs
from fourfold.diagnostics.doctor import DIAGNOSES, examine, opinions
from fourfold.diagnostics.doctor.records import read_records
from fourfold.diagnostics.kept import training_files
from scoring.service.test_texts import answering, lengths, says
from training.runs import Tree, make_config

NOISE = {"critic underfit: variance", "critic plateau"}


def test_a_reward_that_15_of_16_responses_get_in_full_is_saturated(tmp_path: Path) -> None:
    found(examined(patient(tmp_path, "almost_all_right", learning_rate=1e-3)), "reward saturation", also=NOISE)


def test_a_clip_below_the_scores_saturates_too(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, score_clip=0.2)), "reward saturation", also=NOISE)
    assert verdicts["reward saturation"].remedy.startswith("ppo.score_clip = ")


@pytest.mark.parametrize("heads", ["scalar", "vector"])
def test_a_clip_of_normalised_scores_saturates_by_what_it_holds(tmp_path: Path, heads: str) -> None:
    """The scores that are kept are raw: a hundredth of the clip, which holds most of them in spreads."""
    parts = by_parts(known=by("healthy", weight=0.01), other=by("by_prompt", weight=0.001))
    changes: Tree = parts | {"critic": {"heads": heads}} if heads == "vector" else parts
    tree = patient(tmp_path, changes=changes, steps=6, score_clip=0.3, reward_normalization="batch")
    verdicts = {each.name: each for each in examined(tree).verdicts}
    saturated = verdicts["reward saturation"]
    assert "ppo.score_clip = 0.3 holds" in saturated.evidence and saturated.remedy.startswith("ppo.score_clip = 0.6")


def test_a_clip_far_above_normalised_scores_holds_none(tmp_path: Path) -> None:
    """The scores that are kept are raw, and all beyond the clip."""
    tree = patient(tmp_path, "far_out", steps=6, score_clip=5.0, reward_normalization="running")
    examination = examined(tree)
    assert not {"reward saturation", "reward outliers"} & {each.name for each in examination.verdicts}
    assert "reward saturation" not in {each.name for each in examination.unjudged}


def test_scores_that_are_none_are_counted(tmp_path: Path) -> None:
    examination = examined(patient(tmp_path, "none_for_some", {"reward": {"on_failure": "drop"}}))
    verdicts = found(examination, "failing scorer")
    assert "of 480 responses got no valid score" in verdicts["failing scorer"].evidence


def test_responses_of_a_growing_rollout_are_counted_as_they_were(tmp_path: Path) -> None:
    """4 steps from 32 rows on to 64, of 6."""
    curriculum: Tree = {"curriculum": {"steps": 4, "start_rollout_batch_size": 32}}
    tree = patient(tmp_path, "none_for_some", {"reward": {"on_failure": "drop"}, **curriculum}, steps=6,
                   rollout_batch_size=64)  # fmt: skip
    rows = [make_config(tree).rows_at(step) for step in range(6)]
    evidence = found(examined(tree), "failing scorer")["failing scorer"].evidence
    assert min(rows) == 32 < max(rows) == 64 and f"of {sum(rows)} responses got no valid score" in evidence


def test_scores_that_are_none_and_have_stopped_the_run(tmp_path: Path) -> None:
    verdicts = found(examined(patient(tmp_path, "none_for_some", {"reward": {"retries": 0}})), "failing scorer")
    assert "the run stopped" in verdicts["failing scorer"].evidence


def test_a_function_that_raises_is_a_failing_scorer(tmp_path: Path) -> None:
    found(examined(patient(tmp_path, "raises", {"reward": {"retries": 0}})), "failing scorer")


def test_a_part_that_raises_is_a_failing_scorer(tmp_path: Path) -> None:
    """The remedy is a setting of that part."""
    parts = by_parts(known=by("healthy"), gone=by("raises", retries=0))
    examination = examined(patient(tmp_path, changes=parts))
    verdict = found(examination, "failing scorer")["failing scorer"]
    assert "the function of reward.parts.gone failed 1 times, last with ConnectionError" in verdict.evidence
    assert verdict.remedy.startswith("reward.parts.gone.on_failure = 'drop'")
    assert examination.state.startswith("failed")


def test_a_service_that_goes_away_is_a_failing_scorer(tmp_path: Path) -> None:
    with answering(*[lengths] * 4, says(500, {"error": "out of order"})) as server:
        tone: Tree = {"source": "http", "url": server.url, "retries": 0, "on_failure": "stop"}
        examination = examined(patient(tmp_path, changes=by_parts(known=by("healthy"), tone=tone)))
    verdict = found(examination, "failing scorer")["failing scorer"]
    assert "out of order" in verdict.evidence and verdict.remedy.startswith("reward.parts.tone.on_failure = 'drop'")


def test_a_part_that_leaves_rows_out_is_counted_and_named(tmp_path: Path) -> None:
    """Not `reward.retries`, which nothing reads here."""
    parts = by_parts(known=by("healthy"), some=by("none_for_some", on_failure="drop", retries=1))
    verdict = found(examined(patient(tmp_path, changes=parts)), "failing scorer")["failing scorer"]
    assert "of 480 responses got no valid score" in verdict.evidence and "reward.parts.some" in verdict.evidence
    assert verdict.remedy.startswith("reward.parts.some.retries = 4 ")


def test_a_reward_of_length_is_named_unless_a_judge_likes_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    also = {"critic underfit: bias", "critic plateau", "critic underfit: variance"}
    verdicts = found(examined(patient(tmp_path, "length")), "reward length bias", also=also)
    assert "with the mean score of the prompt's other responses taken out" in verdicts["reward length bias"].evidence
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace('judge = "none"', 'judge = "vader"'))
    read: list[str] = []

    def letters(texts: list[str]) -> list[float]:
        read.extend(texts)
        responses = [re.split(r"(\w+) \1 \1", text)[-1] for text in texts]
        return [float(len(text)) for text in responses]

    monkeypatch.setattr(opinions, "make_judge", lambda name: letters)
    found(examine(tmp_path / "run"), also=also)
    assert len(set(read)) > 20 and any(" the the the" in text for text in read), "prompt and response"
    monkeypatch.setattr(opinions, "make_judge", lambda name: noise_of)
    verdicts = found(examine(tmp_path / "run"), "reward length bias", also=also)
    assert "other responses and the judge's verdict taken out" in verdicts["reward length bias"].evidence


def noise_of(texts: list[str]) -> list[float]:
    """A judge whose verdict has nothing to do with length."""
    return [zlib.crc32(text.encode()) / 2**32 for text in texts]


def test_what_is_good_and_long_by_the_prompt_is_no_length_bias(tmp_path: Path) -> None:
    """Scores that only the prompt decides, and lengths that follow it; the kept rollout is changed to be so."""
    examined(patient(tmp_path, steps=1))
    files = training_files(tmp_path / "run")
    kept = files.read(1)
    prompts = [str(prompt) for prompt in opinions.prompts_of(kept)]
    lengths = kept.lengths.double()
    means = {each: float(lengths[[p == each for p in prompts]].mean()) for each in prompts}
    drawn = torch.Generator().manual_seed(0)
    scores = torch.tensor([means[each] for each in prompts]) + 0.01 * torch.randn(len(prompts), generator=drawn)
    files.write(1, replace(kept, scores=scores))
    found = next(each for each in DIAGNOSES if each.name == "reward length bias").judge(read_records(tmp_path / "run"))
    plain, partial = (float(each) for each in re.findall(r"[+-]\d\.\d\d", found.evidence))
    assert plain > 0.6 > abs(partial) and found.confidence < 0.5


def test_a_reward_model_that_has_learned_a_coin_by_heart(tmp_path: Path) -> None:
    """FAULTS N9: the stage that is bad is named; 24 pairs twelve times over are known by heart."""
    reward = {"source": "train", "function": None, "init": "base", "standardise": False, "num_epochs": 12}
    changes: Tree = {
        "stages": ["reward", "ppo"],
        "reward": {**reward, "learning_rate": 1e-2, "batch_size": 8, "micro_batch_size": 8},
        "data": write_pairs(tmp_path / "pairs", held_out=200),
        "critic": {"init": "reward"},
    }
    examination = examined(patient(tmp_path, changes=changes, steps=1))
    also = {"critic overfit", "critic underfit: bias", "critic underfit: variance"}
    verdicts = found(examination, "reward model near chance", "reward miscalibration", also=also)
    assert "of 200 held-out pairs" in verdicts["reward model near chance"].evidence
