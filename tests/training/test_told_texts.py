"""Texts behind the weights that they suggest: what is learned of them, and that they make a policy heed weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fourfold.config import ConfigError
from fourfold.data.told_weights import ToldText, ToldWeights, given_tokens
from fourfold.errors import RunFailed
from fourfold.models.loading import load_base
from fourfold.models.storage import load_role
from fourfold.training.folder import RunFolder
from fourfold.training.inputs import encode_inputs, read_records
from fourfold.training.supervised import fill_cache, mean_nll, nll_sum
from fourfold.training.texts import TextCache
from fourfold.training.told_texts import tell_texts
from tiny import tiny_classifier
from training.runs import SHARINGS, Tree, by_function, make_config, merged, run, settings
from training.test_combined_runs import by_parts
from training.test_conflicting_rewards import parts_of

TOLD = [ToldText([5, 9, 33, 60, 2], 3), ToldText([8, 90, 41, 12, 66, 30, 1], 1), ToldText([7, 12, 9], 2)]


@torch.no_grad()
@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_loss_leaves_out_what_is_given(tmp_path: Path, sharing: str) -> None:
    """Beside transformers' own with these labels ignored; texts in one batch are told by tokens of other lengths."""
    config = make_config(settings(tmp_path, SHARINGS[sharing]))
    base = load_base(config)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    expected, count = 0.0, 0
    for text in TOLD:
        ids = torch.tensor([list(text)])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < text.told, -100)
        learned = len(text) - text.told
        expected += float(model(input_ids=ids, labels=labels).loss) * learned
        count += learned
    cache = TextCache(base)
    fill_cache(cache, TOLD, "test")
    total, tokens = nll_sum(base.policy, *cache.activations(TOLD), TOLD)
    assert tokens == count == 2 + 6 + 1
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert mean_nll(base.policy, cache, TOLD, 2) == pytest.approx(expected / count, rel=1e-5)


def told_tree(folder: Path, texts: list[str], changes: Tree, parts: Tree | None = None) -> Tree:
    (folder / "told.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = {"path": str(folder / "told.jsonl")}
    tree: Tree = {
        "stages": ["sft", "ppo"],
        "data": {"texts": given, "texts_test": given, "max_text_tokens": 40},
        "reward": {"weights": "sampled"},
        "sft": {"tell_weights": True, "max_texts": 0},
        "critic": {"init": "base"},
    }
    return settings(folder, merged(merged(by_parts(parts or parts_of(a=1.0, e=1.0)), tree), changes))


def pays_for_i(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(response.count("i")) for response in responses]


def test_a_policy_heeds_weights_by_the_texts_alone(tmp_path: Path) -> None:
    """Texts of the letter a and texts of the letter i: behind weights for one of them, that one is expected."""
    texts = ["a", "i", "aaa", "iii", "aa", "ii"]
    sft = {"num_epochs": 60, "batch_size": 6, "micro_batch_size": 6, "learning_rate": 1e-2, "schedule": "linear"}
    parts = parts_of(a=1.0) | {"i": {"source": "function", "function": "training.test_told_texts:pays_for_i"}}
    changes = {"stages": ["sft"], "sft": sft, "checkpoint": {"stage_every": 100}}
    tree = told_tree(tmp_path, texts, changes, parts)
    run(tree)
    config = make_config(tree)
    base = load_base(config)
    policy = base.new_policy()
    from fourfold.models.assembly import record_for

    load_role(tmp_path / "run" / "sft" / "model", policy, record_for(config, "policy"))
    told = ToldWeights.of(config, base.tokenizer)
    assert told is not None

    def nll(text: str, weights: str) -> float:
        rows = [told.tell_text(base.tokenizer(text)["input_ids"], told.parse(weights))]
        cache = TextCache(base)
        fill_cache(cache, rows, "test")
        return mean_nll(policy, cache, rows, 1)

    for letter, other in ("ai", "ia"):
        assert nll(3 * letter, f"{letter}=1") < nll(3 * letter, f"{other}=1") - 0.5


def inputs_of(tree: Tree) -> tuple[Any, Any, list[str]]:
    """Base, told inputs and what was said, as the run begins or goes on."""
    config, said = make_config(tree), []
    base = load_base(config)
    inputs = encode_inputs(config, base, read_records(config), said.append)
    return base, tell_texts(config, base, inputs, RunFolder(Path(config.output)), said.append), said


def written(base: Any, texts: Any) -> list[str]:
    return [base.tokenizer.decode(list(text), skip_special_tokens=True) for text in texts]


def test_each_text_has_the_weights_of_its_own_scores(tmp_path: Path) -> None:
    """Parts are asked for the text without its EOS; both data sets are told, and a line says so."""
    base, inputs, said = inputs_of(told_tree(tmp_path, ["aa", "ee", "aa"], {}))
    for texts in (inputs.texts, inputs.texts_test):
        # The tokenizer knows no brackets.
        assert written(base, texts) == ["a0.9 e0.1\naa", "a0.0 e1.0\nee", "a0.9 e0.1\naa"]
        assert [text[-1] for text in texts] == [inputs.texts[0][-1]] * 3
        assert all(given_tokens(text) > 5 for text in texts)
    (line,) = [line for line in said if line.startswith("data.texts: 3 texts are told")]
    assert "the largest is 0.9 on average; first row: '[a=0.9 e=0.1]'" in line


def test_held_out_texts_stand_beside_those_that_are_learned(tmp_path: Path) -> None:
    """One held-out text alone would have nothing to stand out from."""
    tree = told_tree(tmp_path, ["aa", "ee", "aa"], {})
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "ee"}) + "\n")
    tree = merged(tree, {"data": {"texts_test": {"path": str(tmp_path / "one.jsonl")}}})
    base, inputs, _ = inputs_of(tree)
    assert written(base, inputs.texts_test) == ["a0.0 e1.0\nee"]


CALLS: list[int] = []


def pays_by_mood(prompts: list[str], responses: list[str]) -> list[float]:
    """Another number at every call: what no part should do, and a service may."""
    assert prompts == [""] * len(responses)
    CALLS.append(len(responses))
    return [float(len(CALLS) * (index % 2)) for index in range(len(responses))]


def test_a_run_that_goes_on_tells_what_it_told_first(tmp_path: Path) -> None:
    """So do evaluations of a stage ppo after it; a run of ppo alone tells held-out texts nothing."""
    parts = parts_of(a=1.0) | {"mood": {"source": "function", "function": "training.test_told_texts:pays_by_mood"}}
    tree = told_tree(tmp_path, ["aa", "ee", "aaa", "e"], {"ppo": {"rollout_batch_size": 8}}, parts)
    ppo = merged(tree, {"stages": ["ppo"]})
    base, alone, _ = inputs_of(ppo)
    assert [given_tokens(text) for text in alone.texts_test] == [1] * 4
    calls: list[int] = importlib.import_module("training.test_told_texts").CALLS  # as the run imports it
    calls.clear()
    _, first, said = inputs_of(tree)
    assert calls == [4, 4] and any("are told" in line for line in said)
    _, again, said = inputs_of(tree)
    assert calls == [4, 4] and not any("are told" in line for line in said)
    _, after, _ = inputs_of(ppo)
    assert written(base, again.texts) == written(base, first.texts)
    assert written(base, after.texts_test) == written(base, first.texts_test) and not after.texts
    (tmp_path / "told.jsonl").write_text(json.dumps({"text": "aa"}) + "\n")
    with pytest.raises(ValueError, match=r"data\.texts: 1 texts, and sft/told\.json of this run says what 4 are told"):
        inputs_of(tree)


def none_for_e(prompts: list[str], responses: list[str]) -> list[float | None]:
    return [None if "e" in response else 1.0 * len(response) for response in responses]


def test_texts_without_a_score_are_left_out_and_counted_or_end_the_run(tmp_path: Path) -> None:
    """As responses are, by on_failure."""
    some = {"source": "function", "function": "training.test_told_texts:none_for_e"}
    parts = parts_of(a=1.0) | {"some": {**some, "on_failure": "drop"}}
    _, inputs, said = inputs_of(told_tree(tmp_path, ["aa", "ee", "aaa"], {}, parts))
    assert len(inputs.texts) == 2
    assert any("1 without a score of every part left out" in line for line in said)
    other = {"output": str(tmp_path / "other")}
    with pytest.raises(RunFailed, match=r"^sft: none of the 1 texts has a score of every part"):
        inputs_of(told_tree(tmp_path, ["e"], other, parts))
    with pytest.raises(RunFailed, match=r"^sft: reward\.parts\.some: 1 of 2 texts got no valid score") as caught:
        inputs_of(told_tree(tmp_path, ["aa", "e"], other, parts_of(a=1.0) | {"some": {**some, "on_failure": "stop"}}))
    assert caught.value.blamed == "reward.parts.some"
    assert not (tmp_path / "other" / "sft").exists()


def test_weights_take_their_room_from_the_texts(tmp_path: Path) -> None:
    """So that a text fits a model's positions with them."""
    long = {"data": {"max_text_tokens": 16, "truncation": "drop"}}
    _, inputs, said = inputs_of(told_tree(tmp_path, ["aa", "ee", "a b c d e f g h"], long))
    assert len(inputs.texts) == 2 and max(map(len, inputs.texts)) <= 16
    assert any("limit 3, truncation 'drop': 1 too long" in line for line in said), said
    with pytest.raises(ValueError, match=r"data\.max_text_tokens: given 9, of which the weights in front take up to"):
        inputs_of(told_tree(tmp_path, ["aa"], {"data": {"max_text_tokens": 9}}))


def test_texts_are_told_where_prompts_are_and_parts_can_read_them(tmp_path: Path) -> None:
    tree = told_tree(tmp_path, ["aa"], {})
    for change in ({"reward": {"weights": "fixed"}}, by_function("pays_by_hash")):
        with pytest.raises(ConfigError, match=r"sft\.tell_weights: given true, but prompts are told of no weights"):
            make_config(merged(tree, {**change, "stages": ["sft", "ppo"], "data": tree["data"]}))
    judge = {"source": "model", "model": str(tiny_classifier(tmp_path / "judge"))}
    with pytest.raises(ConfigError, match=r"reward\.parts\.judge cannot score the texts of the stage sft: models"):
        make_config(merged(tree, {"reward": {"parts": {"judge": judge}}}))
