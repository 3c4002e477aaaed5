"""Scores of a model and of a Python function; a failure never becomes a number."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.models.heads import LanguageHead
from fourfold.models.roles import Activations, Policy, Scorer, scorer_on
from fourfold.models.split import cut
from fourfold.scoring.sources import FunctionReward, ModelReward, texts_of
from tiny import BOS, EOS, tiny_model, tiny_tokenizer
from tiny_roles import tiny_rollout

TOKENIZER = tiny_tokenizer(pad_is_eos=False)
PROMPTS = ["the plot", "a long, slow film is", "i"]
RESPONSES = [" is thin", " fun", " liked it"]


def rollout_of(prompts: list[str], responses: list[str], *, eos: bool = True) -> Rollout:
    """These texts as a rollout; every response ends with EOS, and padding is EOS too."""
    encoded = [
        (TOKENIZER(prompt).input_ids, TOKENIZER(response).input_ids + [EOS] * eos)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    rollout = tiny_rollout([(len(before), len(after)) for before, after in encoded], pad_id=EOS)
    for row, (before, after) in enumerate(encoded):
        rollout.sequences[row, rollout.attention_mask[row]] = torch.tensor(before + after)
    return rollout


ROLLOUT = rollout_of(PROMPTS, RESPONSES)
ACTIVATIONS = Activations(ROLLOUT.sequences, ROLLOUT.attention_mask)


def ask(function: Callable[[list[str], list[str]], Any], retries: int = 0, on_failure: str = "stop"):
    scores, valid = FunctionReward(function, TOKENIZER, retries=retries, on_failure=on_failure)(ACTIVATIONS, ROLLOUT)
    return scores, valid.tolist()


def failing(times: int, calls: list[int]) -> Callable[[list[str], list[str]], list[float]]:
    def function(prompts: list[str], responses: list[str]) -> list[float]:
        calls.append(len(responses))
        if len(calls) <= times:
            raise ConnectionError("the service is away")
        return [1.0] * len(responses)

    return function


def test_a_late_function_is_given_up_after_timeout_seconds() -> None:
    """Then it counts as a failure: asked again, and in the end stopped at or left out; one in time is heard."""
    go_on = threading.Event()

    def waits(prompts: list[str], responses: list[str]) -> list[float]:
        assert not torch.is_grad_enabled(), "as on the thread that scores"
        go_on.wait(20)
        return [1.0] * len(responses)

    given: dict[str, Any] = {"timeout_seconds": 0.05, "key": "reward.parts.slow"}
    late = r"failed 2 times, last with TimeoutError: no answer within reward\.parts\.slow\.timeout_seconds"
    try:
        with pytest.raises(RunFailed, match=late):
            FunctionReward(waits, TOKENIZER, retries=1, **given)(ACTIVATIONS, ROLLOUT)
        _, valid = FunctionReward(waits, TOKENIZER, retries=0, on_failure="drop", **given)(ACTIVATIONS, ROLLOUT)
        assert not valid.any()
    finally:
        go_on.set()
    scores, valid = FunctionReward(waits, TOKENIZER, retries=0, timeout_seconds=20.0)(ACTIVATIONS, ROLLOUT)
    assert valid.all() and scores.tolist() == [1.0] * 3


def test_what_a_function_with_a_time_limit_raises_is_its_own() -> None:
    def raises(prompts: list[str], responses: list[str]) -> list[float]:
        raise TimeoutError("of the function's own making")

    with pytest.raises(RunFailed, match="last with TimeoutError: of the function's own making"):
        FunctionReward(raises, TOKENIZER, retries=0, timeout_seconds=20.0)(ACTIVATIONS, ROLLOUT)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_a_function_gets_the_texts_without_padding_and_special_tokens() -> None:
    seen: list[tuple[list[str], list[str]]] = []

    def lengths(prompts: list[str], responses: list[str]) -> list[float]:
        seen.append((prompts, responses))
        return [float(len(response)) for response in responses]

    scores, valid = ask(lengths)
    assert seen == [(PROMPTS, RESPONSES)]
    assert scores.tolist() == [8.0, 4.0, 9.0] and scores.dtype == torch.float32
    assert valid == [True, True, True]


def test_texts_stop_where_the_masks_stop() -> None:
    """Masks decide, not ids: EOS inside a prompt, and a pad that looks like text."""
    rollout = rollout_of(["the plot", "fun"], [" is thin", " fun"], eos=False)
    rollout.sequences[~rollout.attention_mask] = TOKENIZER("film").input_ids[0]
    rollout.sequences[0, 0] = BOS
    prompts, responses = texts_of(rollout, TOKENIZER)
    assert prompts[1] == "fun" and responses == [" is thin", " fun"]
    assert "film" not in "".join(prompts + responses)


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf"), 1e39, -3.5e38, 10**400])
def test_a_row_without_a_finite_number_is_not_valid_and_the_others_are(bad: float | None) -> None:
    """FAULTS M5: scores are float32, which 1e39 does not fit; 10**400 fits no float at all."""
    scores, valid = ask(lambda _, responses: [1.5, bad, -2.0])
    assert valid == [True, False, True]
    assert scores[[0, 2]].tolist() == [1.5, -2.0]
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("number", [3.4e38, -3.4e38, 1e-50])
def test_what_float32_can_hold_is_a_score(number: float) -> None:
    """The largest numbers are finite, and what is too small for float32 is 0."""
    scores, valid = ask(lambda _, responses: [number] * 3)
    assert valid == [True] * 3 and scores.tolist() == [torch.tensor(number).item()] * 3


def test_numbers_may_come_as_any_sequence_of_numbers() -> None:
    import numpy as np

    for numbers in (np.array([1.0, 2.0, 3.0]), (1, 2, 3), torch.tensor([1.0, 2.0, 3.0]), iter([1.0, 2.0, 3.0])):
        scores, valid = ask(lambda _, responses, numbers=numbers: numbers)
        assert scores.tolist() == [1.0, 2.0, 3.0] and valid == [True] * 3


@pytest.mark.parametrize("numbers", [[], [1.0], [1.0] * 4])
def test_a_wrong_number_of_numbers_stops_the_run(numbers: list[float]) -> None:
    with pytest.raises(
        RunFailed, match=rf"^score: the reward function returned {len(numbers)} numbers for 3 responses"
    ):
        ask(lambda _, responses: numbers, retries=2)


@pytest.mark.parametrize("on_failure", ["stop", "drop"])
def test_what_is_no_number_at_all_stops_the_run(on_failure: str) -> None:
    """A text instead of a number is a mistake in the function, not a sample to leave out."""
    with pytest.raises(RunFailed, match=r"^score: the reward function returned 'good' \(str\)"):
        ask(lambda _, responses: [1.0, "good", 2.0], on_failure=on_failure)


# --- failures and retries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failures", "retries"), [(0, 0), (1, 1), (2, 2), (2, 5)])
def test_a_function_that_fails_is_asked_again(failures: int, retries: int) -> None:
    calls: list[int] = []
    scores, valid = ask(failing(failures, calls), retries=retries)
    assert scores.tolist() == [1.0] * 3 and valid == [True] * 3
    assert calls == [3] * (failures + 1)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_function_that_keeps_failing_stops_the_run(retries: int) -> None:
    calls: list[int] = []
    with pytest.raises(
        RunFailed,
        match=rf"^score: the reward function failed {retries + 1} times, last with ConnectionError: the service",
    ) as caught:
        ask(failing(99, calls), retries=retries)
    assert len(calls) == retries + 1
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_or_its_rows_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scores, valid = ask(failing(99, []), retries=1, on_failure="drop")
    assert valid == [False] * 3 and torch.isfinite(scores).all()
    (record,) = caplog.records
    assert (
        "failed 2 times, last with ConnectionError: the service is away; its 3 responses are left out"
        in record.getMessage()
    )


def test_an_interruption_is_no_failure_of_the_function() -> None:
    def interrupted(prompts: list[str], responses: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(interrupted, retries=3, on_failure="drop")


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_function_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tiny_rewards.py").write_text(
        "def length(prompts, responses):\n    return [len(r) for r in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = FunctionReward.named("my_tiny_rewards:length", TOKENIZER, retries=0)
    assert reward(ACTIVATIONS, ROLLOUT)[0].tolist() == [8.0, 4.0, 9.0]
    monkeypatch.delitem(sys.modules, "my_tiny_rewards")


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such_function", "math", "", ":f", "math:"])
def test_a_function_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"reward.function = '{name}' cannot be imported \(.*\); allowed: 'module:name'"
    ):
        FunctionReward.named(name, TOKENIZER, retries=0)


def test_a_name_that_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward.function = 'math:pi' is a float; allowed: a function"):
        FunctionReward.named("math:pi", TOKENIZER, retries=0)


# --- a model ----------------------------------------------------------------------------------------------------------


def test_a_models_score_that_is_not_finite_stops_the_run() -> None:
    """It would come again: a model that is damaged is named, its rows are not left out one by one."""
    model = tiny_model("llama")
    scorer: Scorer = scorer_on(Policy(cut(model, 2, 4, compute_dtype=torch.float32), LanguageHead.of(model)))
    scorer.head.linear.weight.data.fill_(1.0)
    inputs = torch.randn(*ROLLOUT.sequences.shape, 32, generator=torch.Generator().manual_seed(0))
    clean, valid = ModelReward(scorer)(Activations(inputs, ROLLOUT.attention_mask), ROLLOUT)
    assert valid.tolist() == [True] * 3 and len(set(clean.tolist())) == 3
    inputs[1] = torch.nan
    with pytest.raises(RunFailed, match=r"^score: the reward model's scores of 1 of 3 responses are not finite"):
        ModelReward(scorer)(Activations(inputs, ROLLOUT.attention_mask), ROLLOUT)
