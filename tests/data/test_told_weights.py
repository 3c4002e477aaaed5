"""Weights that prompts are told of: drawn with the mean of the settings, written, and read back from the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.batch import Rollout
from fourfold.config.schema import RunConfig
from fourfold.data.told_weights import PARTS_OF_ONE, ToldWeights, given_tokens
from tiny import BOS, PAD, tiny_tokenizer

EQUAL = {"safety": 1.0, "brevity": 1.0}
THREE = {"safety": 2.0, "brevity": 1.0, "calm": 1.0}


def settings_with(reward: dict[str, Any]) -> RunConfig:
    tree = {"model": {"path": "m"}, "stages": ["ppo"], "critic": {"init": "actor"}, "data": {"prompts": {"path": "p"}}}
    return RunConfig.model_validate({"output": "unused", "reward": reward, **tree})


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tiny_tokenizer(pad_is_eos=False, bos=request.param)


@given(st.integers(0, 2**63 - 1), st.floats(0.01, 100.0))
def test_drawn_weights_are_tenths_that_add_up_to_one(seed: int, concentration: float) -> None:
    told = ToldWeights(None, THREE, concentration)
    tenths = told.draw(seed)
    assert sum(tenths) == PARTS_OF_ONE and min(tenths) >= 0 and len(tenths) == 3
    assert told.draw(seed) == tenths


@pytest.mark.parametrize("concentration", [0.3, 1.0, 10.0])
def test_their_mean_is_that_of_the_settings_and_their_spread_that_of_dirichlet(concentration: float) -> None:
    """Variance m (1 - m) / (a + 1) with a the sum of the parameters, up to rounding to tenths."""
    parts = {name: {"source": "function", "function": "a:b", "weight": weight} for name, weight in THREE.items()}
    reward = {"source": "combined", "parts": parts, "weights": "sampled", "weights_concentration": concentration}
    told = ToldWeights.of(settings_with(reward), None)
    assert told is not None
    drawn = torch.tensor([told.draw(seed) for seed in range(4000)], dtype=torch.float64) / PARTS_OF_ONE
    for k, mean in enumerate((0.5, 0.25, 0.25)):
        assert drawn[:, k].mean().item() == pytest.approx(mean, abs=0.02)
        expected = mean * (1 - mean) / (3 * concentration + 1)
        assert drawn[:, k].var().item() == pytest.approx(expected, rel=0.15)


def test_a_concentration_that_underflows_gives_all_to_one_part() -> None:
    told = ToldWeights(None, EQUAL, 1e-6)
    drawn = {told.draw(seed) for seed in range(50)}
    assert drawn == {(10, 0), (0, 10)}


@given(prompts=st.lists(st.lists(st.integers(4, 150), min_size=0, max_size=5), min_size=1, max_size=4), data=st.data())
def test_what_is_told_is_read_again(tokenizer: Any, prompts: list[list[int]], data: st.DataObject) -> None:
    """In padded batches, behind a BOS where there is one; the prompt's own tokens stay as they are."""
    told = ToldWeights(tokenizer, THREE)
    if tokenizer.bos_token_id is not None:
        prompts = [[BOS, *prompt] for prompt in prompts]
    every = [told.draw(data.draw(st.integers(0, 1000))) for _ in prompts]
    rows = [told.tell(prompt, tenths) for prompt, tenths in zip(prompts, every, strict=True)]
    for row, prompt in zip(rows, prompts, strict=True):
        start = int(tokenizer.bos_token_id is not None)
        assert row[:start] == prompt[:start] and row[len(row) - len(prompt) + start :] == prompt[start:]
    rollout = Rollout.of_tokens(rows, [[7, 8]] * len(rows), PAD)
    expected = 4.0 * torch.tensor(every) / PARTS_OF_ONE  # the weights of the settings add up to 4
    torch.testing.assert_close(told.read(rollout), expected)
    untold = told.untold(rollout)
    for row, prompt in enumerate(prompts):
        kept = untold.sequences[row, : untold.prompt_length][untold.prompt_mask[row]]
        assert kept.tolist() == prompt
    assert torch.equal(untold.response_mask, rollout.response_mask)


scores_of_texts = st.lists(st.tuples(*[st.floats(-100, 100)] * 3), min_size=1, max_size=6)


@given(scores=scores_of_texts, factor=st.sampled_from([0.5, 4.0]), offset=st.sampled_from([-8.0, 0.0, 64.0]))
def test_suggested_weights_are_tenths_and_know_no_unit(
    scores: list[tuple[float, ...]], factor: float, offset: float
) -> None:
    """By hand: shares as in the formula, rounded by the largest rests; a part in other units suggests the same."""
    told = ToldWeights(None, THREE)
    scores = [tuple(round(score) for score in row) for row in scores]
    found = told.suggested(scores)
    assert all(sum(tenths) == PARTS_OF_ONE and min(tenths) >= 0 for tenths in found)
    table = torch.tensor(scores, dtype=torch.float64)
    spread = table.std(dim=0, correction=0)
    z = torch.where(spread > 0, (table - table.mean(dim=0)) / spread.clamp_min(1e-300), 0.0)
    shares = torch.softmax(torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log() + 2 * z, dim=1)
    assert bool(((torch.tensor(found) / PARTS_OF_ONE - shares).abs() < 0.1 + 1e-9).all())
    changed = [(row[0], factor * row[1] + offset, row[2]) for row in scores]
    again = torch.tensor(told.suggested(changed))
    # Rounding of a share that lies between two tenths may go the other way.
    assert int((again - torch.tensor(found)).abs().max()) <= 1


@given(scores=scores_of_texts)
def test_a_text_suggests_more_for_a_part_of_which_it_has_more(scores: list[tuple[float, ...]]) -> None:
    told = ToldWeights(None, THREE)
    order = sorted(range(len(scores)), key=lambda row: scores[row][1])
    only = [told.suggested([(0.0, score[1], 0.0) for score in scores])[row][1] for row in order]
    assert only == sorted(only)


def test_scores_that_are_all_alike_suggest_the_mean_weights() -> None:
    told = ToldWeights(None, THREE)
    assert told.suggested([(3.0, -1.0, 7.0)] * 3) == [told.mean] * 3 == [(5, 3, 2)] * 3


def test_weights_in_front_of_a_text_are_given_and_not_learned(tokenizer: Any) -> None:
    told = ToldWeights(tokenizer, EQUAL)
    text = tokenizer("joy")["input_ids"]
    found = told.tell_text(text, (3, 7))
    start = int(tokenizer.bos_token_id is not None)
    assert list(found) == told.tell(text, (3, 7)) and found[found.told :] == text[start:]
    assert given_tokens(found) == found.told > 1 == given_tokens(text)


def test_the_text_is_that_of_the_documents(tokenizer: Any) -> None:
    assert ToldWeights(tokenizer, EQUAL).text((8, 2)) == "[safety=0.8 brevity=0.2]\n"


@pytest.mark.parametrize("prompt", ["the film", " and so", "(a)"])
def test_whoever_writes_the_text_in_front_of_a_prompt_asks_for_the_same_tokens(tokenizer: Any, prompt: str) -> None:
    told = ToldWeights(tokenizer, EQUAL)
    ids = told.tell(tokenizer(prompt)["input_ids"], (8, 2))
    assert ids == tokenizer(told.text((8, 2)) + prompt)["input_ids"]


def test_a_chat_template_begins_behind_the_weights_where_its_first_token_is_called_bos() -> None:
    """As SmolLM2's <|im_start|>: no text has it but that of the template, whose header is not torn apart."""
    tokenizer = tiny_tokenizer(pad_is_eos=False)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(BOS)
    chat = f"{tokenizer.bos_token}user the film"
    assert tokenizer("the")["input_ids"][0] != BOS == tokenizer(chat)["input_ids"][0]
    told = ToldWeights(tokenizer, EQUAL)
    ids = told.tell(tokenizer(chat)["input_ids"], (8, 2))
    assert ids == tokenizer(told.text((8, 2)) + chat)["input_ids"]
    rollout = Rollout.of_tokens([ids], [[7, 8]], PAD)
    torch.testing.assert_close(told.read(rollout), torch.tensor([[1.6, 0.4]]))


def test_mean_weights_are_those_of_the_settings_in_tenths() -> None:
    assert ToldWeights(None, THREE).mean == (5, 3, 2)  # 2.5 each of the others: one has the tenth that is left
    assert ToldWeights(None, EQUAL).mean == (5, 5)


def test_typed_weights() -> None:
    told = ToldWeights(None, THREE)
    assert told.parse("safety=0.8,brevity=0.2") == (8, 2, 0)
    assert told.parse(" calm = 1 ") == (0, 0, 10)
    # The parts that are not named share the rest as 2 : 1 and 1 : 1; of equal rests the first has the tenth.
    assert told.parse("calm=0.1") == (6, 3, 1)
    assert told.parse("safety=0.8") == (8, 1, 1) and told.parse("safety=0.3") == (3, 4, 3)
    assert ToldWeights(None, EQUAL).parse("safety=0.8") == (8, 2)
    for wrong, reason in (
        ("safety=0.8,brevity=0.1,calm=0", "add up to 0.9; allowed: weights of all parts that add up to 1"),
        ("safety=0.8,brevity=0.3", "add up to 1.1; allowed: weights that add up to at most 1"),
        ("safety", "given 'safety'; allowed: .* as NAME=NUMBER"),
        ("safety=0.85,brevity=0.15", r"safety=0\.85; allowed: tenths"),
        ("safety=-0.1,brevity=1.1", "allowed: tenths from 0 to 1"),
        ("safety=x", "allowed: tenths"),
        ("speed=1", "each of safety, brevity, calm once"),
        ("safety=0.5,safety=0.5", "once"),
        ("0.5", "as NAME=NUMBER"),
    ):
        with pytest.raises(ValueError, match=f"--weights: .*{reason}"):
            told.parse(wrong)


def test_weights_take_room_of_the_prompt(tokenizer: Any) -> None:
    told = ToldWeights(tokenizer, EQUAL)
    longest = max(len(told.tell([], (k, 10 - k))) for k in range(11))
    assert told.room(longest + 5) == 5
    with pytest.raises(ValueError, match=rf"data.max_prompt_tokens: given {longest}.*take up to {longest}"):
        told.room(longest)


def test_a_tokenizer_that_cannot_write_them_is_refused() -> None:
    class Blind:
        bos_token_id = None

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[1, 2] for _ in texts]}

    with pytest.raises(ValueError, match=r"the tokenizer writes .* in the same tokens"):
        ToldWeights(Blind(), EQUAL).tell([5], (5, 5))
