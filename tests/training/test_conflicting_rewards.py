"""Parts of a reward that cannot all be had: weights decide, fixed ones in training, drawn ones afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main
from fourfold.data.told_weights import ToldWeights
from fourfold.diagnostics.kept import held_out_files, training_files
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.models.loading import load_base
from fourfold.scoring.sources import texts_of
from fourfold.training.results import sample_beside_reference
from training.runs import SEPARATE, Tree, make_config, merged, run, settings
from training.test_combined_runs import by_parts


def parts_of(**weights: float) -> Tree:
    """Parts that functions of training.runs pay for, by their names."""
    return {
        name: {"source": "function", "function": f"training.runs:pays_for_{name}", "weight": weight}
        for name, weight in weights.items()
    }


def tree_of(folder: Path, parts: Tree, changes: Tree, **ppo: Any) -> Tree:
    sizes = {"mini_batch_size": 32, "micro_batch_size": 32, "learning_rate": 1e-2, "kl_coef": 0.01}
    changes = merged(by_parts(parts, **sizes | ppo), changes)
    critic = {"heads": "vector", "learning_rate": 5e-3}
    return settings(folder, merged(changes, {"critic": critic, "checkpoint": {"every": 100}}))


@pytest.mark.slow
def test_the_weight_decides_between_many_letters_a_and_few_letters(tmp_path: Path) -> None:
    """A response can end at any token that is no letter a: each letter is worth its a's, and costs its length."""
    ends = {"sampling": {"extra_eos_token_ids": [*range(4, 22), *range(23, 36)]}}
    found = {}
    for name, weights in (("letters", (1.0, 0.02)), ("shortness", (0.02, 1.0))):
        parts = parts_of(a=weights[0], shortness=weights[1])
        changes = merged(ends, {"output": str(tmp_path / name)})
        found[name] = run(tree_of(tmp_path, parts, changes, steps=35, rollout_batch_size=32))
    before = found["letters"]["before"]
    many, few = found["letters"]["after"], found["shortness"]["after"]
    assert before["score_mean/a"] < 1 and before["mean_length"] > 2.5
    assert many["score_mean/a"] > 3 and many["mean_length"] > before["mean_length"]
    assert few["score_mean/a"] < 0.5 and few["mean_length"] < before["mean_length"] - 1


@pytest.mark.slow
def test_weights_that_were_sampled_in_training_can_be_chosen_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run, asked for the letter a and for the letter e: the same actor and random numbers, other prompts."""
    changes = merged(
        SEPARATE,
        {
            "reward": {"weights": "sampled", "weights_concentration": 0.5},
            "sampling": {"extra_eos_token_ids": None, "max_new_tokens": 4},
        },
    )
    ppo = {"steps": 30, "rollout_batch_size": 64, "entropy_coef": 0.02}
    summary = run(tree_of(tmp_path, parts_of(a=1.0, e=1.0), changes, **ppo))
    for name in ("a", "e"):
        assert summary["after"][f"steering/{name}"] > 0.5 > summary["before"][f"steering/{name}"]

    def written(weights: str) -> dict[str, float]:
        given: dict[str, Any] = {"max_new_tokens": None, "temperature": None, "seed": 0, "best": False}
        rows = sample_beside_reference(str(tmp_path / "run"), prompts=[], chat=False, count=8, weights=weights, **given)
        return {letter: sum(actor.count(letter) for _, _, actor in rows) / len(rows) for letter in "ae"}

    for_a, for_e, between = written("a=1"), written("e=1"), written("")
    assert for_a["a"] > for_e["a"] + 2 and for_e["e"] > for_a["e"] + 2
    assert between == written("a=0.5,e=0.5")
    assert main(["sample", str(tmp_path / "run"), "--weights", "a=0.9", "--count", "1"]) == 0
    assert "prompts begin with [a=0.9 e=0.1]\n" in capsys.readouterr().err
    assert main(["sample", str(tmp_path / "run"), "--weights", "a=0.9,e=0.2", "--count", "1"]) == 2
    assert "add up to 1.1" in capsys.readouterr().err


def test_a_run_with_fixed_weights_cannot_be_asked_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tree_of(tmp_path, parts_of(a=1.0, e=1.0), {}, steps=1, rollout_batch_size=32))
    assert main(["sample", str(tmp_path / "run"), "--weights", "a=1"]) == 2
    assert "trained with the fixed weights of its reward" in capsys.readouterr().err


def test_prompts_are_told_of_the_weights_that_their_scores_are_weighed_by_and_functions_are_not(
    tmp_path: Path,
) -> None:
    """Of every kept rollout: the total by the weights in the prompt, and the function's prompts without them."""
    parts = parts_of(a=2.0, prompt=1.0)
    tree = tree_of(tmp_path, parts, {"reward": {"weights": "sampled"}}, steps=1, rollout_batch_size=32)
    run(tree)
    tokenizer = load_base(make_config(tree)).tokenizer
    told = ToldWeights.of(make_config(tree), tokenizer)
    assert told is not None
    for files in (held_out_files(tmp_path / "run"), training_files(tmp_path / "run")):
        kept = files.read(1)
        assert (kept.score_weights.sum(dim=1) - 3.0).abs().max() < 1e-6
        assert len({tuple(row) for row in kept.score_weights.tolist()}) > 2
        assert (told.read(kept) == kept.score_weights).all()
        assert ((kept.score_weights * kept.score_parts).sum(dim=1) - kept.scores).abs().max() < 1e-5
        plain, _ = texts_of(told.untold(kept), tokenizer)
        assert kept.score_parts[:, 1].tolist() == [float(len(text)) for text in plain]
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "evaluation")
    assert {"eval_steering/a", "eval_steering/prompt"} <= rows[0].keys()
