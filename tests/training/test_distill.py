"""A smaller critic out of a reward model: what is measured of it, what it computes, and that a run takes it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fourfold.algorithms.statistics import spearman
from fourfold.cli.main import main
from fourfold.models.assembly import record_for
from fourfold.models.loading import load_base
from fourfold.models.own_critic import VALUE_SHIFT, OwnCritic
from fourfold.models.storage import load_role
from fourfold.training.distill import RECORD, Distilled, Wanted, distill
from fourfold.training.inputs import encode_inputs, read_records
from fourfold.training.texts import TextCache
from training.runs import (
    SHARINGS,
    Tree,
    by_function,
    make_config,
    make_trainer,
    merged,
    run,
    settings,
    steps_of,
    write_config,
)

QUICK: dict[str, Any] = {"epochs": 12, "learning_rate": 3e-4, "batch_size": 8}


def with_reward_model(folder: Path, sharing: str = "none", **changes: Any) -> Tree:
    """A run whose stage reward has finished."""
    tree = merged(settings(folder, SHARINGS[sharing]), {"stages": ["reward"], "reward": {"init": "base"}, **changes})
    run(tree)
    return tree


def quiet(line: str) -> None:
    """Says nothing."""


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_run_takes_the_critic_that_is_made_of_its_reward_model(tmp_path: Path, sharing: str) -> None:
    """Its values are what the library's classifier says, and rank held-out texts as the reward model does."""
    tree = with_reward_model(tmp_path, sharing)
    made = distill(tree["output"], str(tmp_path / "small"), Wanted(size=0.8, **QUICK), (), quiet)
    assert made.parameters_after <= 0.8 * made.parameters_before
    assert made.layers_before == 4 and 1 <= len(made.kept_layers) < 4
    assert made.distilled.everywhere > made.pruned.everywhere and made.distilled.everywhere > 0.8
    record = json.loads((tmp_path / "small" / RECORD).read_text())
    assert record["distilled"]["everywhere"] == made.distilled.everywhere
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert model.config.num_labels == 1 and len(tokenizer) == 160
    ppo = merged(
        settings(tmp_path, merged(by_function("pays_by_hash", steps=1), SHARINGS[sharing])),
        {"critic": {"init": None, "model": str(tmp_path / "small")}, "output": str(tmp_path / "ppo")},
    )
    trainer = make_trainer(make_config(ppo))
    critic = trainer.models.critic
    assert isinstance(critic, OwnCritic) and not trainer.models.new_value_head
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    with torch.no_grad():
        values, last = critic.values_and_last(activations, rollout)
        for row in range(len(values)):
            ids = rollout.sequences[row][rollout.attention_mask[row]]
            expected = model(input_ids=ids[None]).logits[0, 0] + getattr(model.config, VALUE_SHIFT)
            torch.testing.assert_close(last[row], expected, rtol=1e-4, atol=1e-5)
    steps_of(trainer)


def test_what_is_reported_is_what_the_two_models_say(tmp_path: Path) -> None:
    """Spearman's correlation and the accuracy on held-out pairs, from scores of each model alone."""
    tree = with_reward_model(tmp_path)
    made = distill(
        str(write_config(tree, tmp_path / "run.toml")), str(tmp_path / "small"), Wanted(layers=2, **QUICK), (), quiet
    )
    config = make_config(tree)
    base = load_base(config)
    scorer = base.new_scorer()
    load_role(tmp_path / "run" / "reward" / "model", scorer, record_for(config, "scorer"))
    read = config.model_copy(update={"stages": ("sft", "reward")})
    inputs = encode_inputs(read, base, read_records(read), quiet)
    texts = list(
        dict.fromkeys(tuple(t) for t in [*[x for pair in inputs.pairs_test for x in pair], *inputs.texts_test])
    )
    small: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    with torch.no_grad():
        whole = [float(scorer.scores(TextCache(base).activations([text])[0])) for text in texts]
        fewer = [float(small(input_ids=torch.tensor([text])).logits[0, 0]) for text in texts]
    assert made.held_out_texts == len(texts)
    assert made.distilled.at_the_end == pytest.approx(spearman(torch.tensor(fewer), torch.tensor(whole)), abs=0.02)
    for accuracy, scores in ((made.pair_accuracy_before, whole), (made.pair_accuracy_after, fewer)):
        by_text = dict(zip(texts, scores, strict=True))
        right = [math.copysign(0.5, by_text[tuple(a)] - by_text[tuple(b)]) + 0.5 for a, b in inputs.pairs_test]
        assert accuracy == pytest.approx(sum(right) / len(right))
    assert not set(texts) & {tuple(text) for text in inputs.texts}, "what is measured on is not learned from"


def test_all_layers_say_what_the_reward_model_says(tmp_path: Path) -> None:
    """Nothing left out and nothing learned: ranks are the same, values too."""
    tree = with_reward_model(tmp_path)
    made = distill(tree["output"], str(tmp_path / "all"), Wanted(layers=4, epochs=0), (), quiet)
    assert made.kept_layers == [0, 1, 2, 3] and made.optimizer_steps == 0
    assert made.pruned == made.distilled
    assert made.pruned.at_the_end == pytest.approx(1.0, abs=1e-3) and made.pruned.explained == pytest.approx(
        1.0, abs=1e-6
    )
    assert made.pair_accuracy_before == made.pair_accuracy_after


def test_narrower_mlps_leave_room_for_more_layers(tmp_path: Path) -> None:
    tree = with_reward_model(tmp_path)
    wide, narrow = (
        distill(tree["output"], str(tmp_path / name), Wanted(size=0.6, mlp=mlp, epochs=1), (), quiet)
        for name, mlp in (("wide", 0), ("narrow", 16))
    )
    assert len(narrow.kept_layers) > len(wide.kept_layers) and narrow.mlp_width == 16 and wide.mlp_width == 64
    lowest = distill(tree["output"], str(tmp_path / "lowest"), Wanted(layers=2, epochs=0, lowest=True), (), quiet)
    assert lowest.kept_layers == [0, 1]


def test_the_same_seed_makes_the_same_critic(tmp_path: Path) -> None:
    tree = with_reward_model(tmp_path)
    made: list[Distilled] = [
        distill(tree["output"], str(tmp_path / name), Wanted(layers=2, epochs=1), (), quiet) for name in ("a", "b")
    ]
    assert made[0] == made[1]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_the_command_says_what_it_made_and_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = with_reward_model(tmp_path)
    out = str(tmp_path / "small")
    assert main(["distill", tree["output"], out, "--layers", "2", "--epochs", "1", "--max-texts", "20"]) == 0
    said = capsys.readouterr().out
    assert "layers" in said and "rank correlation" in said and f"critic.model = {out!r}" in said
    assert main(["distill", tree["output"], out]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    for arguments, message in (
        (["--size", "2"], "--size 2: allowed are shares above 0"),
        (["--size", "0.01"], "--size 0.01: embedding and norm alone are"),
        (["--size", "0.5", "--layers", "2"], "--size 0.5 beside --layers 2"),
        # Before anything is read of the data.
        (["--layers", "9", "--set", "data.texts.path=no.jsonl"], "--layers 9: the model has 4 layers; allowed: 1 to 4"),
        (["--mlp", "99", "--set", "data.texts.path=no.jsonl"], "--mlp 99: the model's MLPs have 64 neurons; allowed"),
        (["--epochs", "-1"], "--epochs -1: allowed are 0 or more"),
        (["--batch-size", "0"], "--batch-size 0: allowed are 1 or more"),
        (["--learning-rate", "0"], "--learning-rate 0: allowed are numbers above 0"),
    ):
        assert main(["distill", tree["output"], str(tmp_path / "other"), *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("in the way")
    assert main(["distill", tree["output"], str(tmp_path / "file" / "a" / "b"), "--layers", "9"]) == 2
    assert "file is a file, and no folder can be made below it" in capsys.readouterr().err
    apart = ["--layers", "2", "--learning-rate", "1e30", "--epochs", "2"]
    assert main(["distill", tree["output"], str(tmp_path / "other"), *apart]) == 3
    said = capsys.readouterr().err
    assert "distill: the loss is " in said and "nothing was written; try a lower --learning-rate" in said
    assert "checkpoint" not in said and not (tmp_path / "other").exists()


def test_a_run_without_a_reward_model_of_its_own_is_refused(tmp_path: Path) -> None:
    config = write_config(settings(tmp_path, by_function("pays_by_hash")), tmp_path / "ppo.toml")
    with pytest.raises(ValueError, match=r"reward.source = 'function' has no reward model of the run's own model"):
        distill(str(config), str(tmp_path / "out"), Wanted(), (), quiet)
    with pytest.raises(ValueError, match=r"is not the folder of a run"):
        distill(str(tmp_path), str(tmp_path / "out"), Wanted(), (), quiet)
