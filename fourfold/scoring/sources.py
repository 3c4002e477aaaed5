"""Where scores come from: a reward model on the trunk, or a Python function on the texts.

A source never turns a failure into a number: rows that it cannot score come back as not valid.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.memory.offload import Residency, residency_of
from fourfold.models.roles import Activations, Scorer

log = logging.getLogger(__name__)

RewardFunction = Callable[[list[str], list[str]], Sequence[float | None]]


class RewardSource(Protocol):
    """Scores whole sequences."""

    def __call__(
        self, activations: Activations, rollout: Rollout
    ) -> tuple[Float32[Tensor, "batch"], Bool[Tensor, "batch"]]:
        """Scores and, for each row, whether its score is valid."""
        ...


class ModelReward:
    """The reward model: a scorer over the same activations as the other roles."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @property
    def residency(self) -> Residency | None:
        """How the reward model is held."""
        return residency_of(self.scorer)

    def __call__(self, activations: Activations, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The scorer's number at the last token of each row; one that is not finite stops the run.

        A model answers the same way every time, so asking it again or leaving the row out would hide the damage.
        """
        scores = self.scorer.scores(activations)
        valid = torch.isfinite(scores)
        if not bool(valid.all()):
            raise RunFailed(
                f"score: the reward model's scores of {int((~valid).sum())} of {len(valid)} responses are not finite; "
                "its weights are damaged; the last good checkpoint is kept; train the reward model again",
                blamed="reward model",
            )
        return scores, valid


class FunctionReward:
    """A Python function of prompts and responses; asked again when it raises, row by row valid or not.

    When it still raises after `retries`, or has no answer within `timeout_seconds` (0: however long it takes), the run
    stops, or its rows are not valid (`on_failure` = "drop"). `key` is the table of the settings that it stands in, for
    messages. A `whole` one is asked about all rows of a rollout at once.
    """

    reads_texts = True

    def __init__(
        self,
        function: RewardFunction,
        tokenizer: Any,
        *,
        retries: int,
        on_failure: str = "stop",
        key: str = "reward",
        timeout_seconds: float = 0.0,
        whole: bool = False,
    ) -> None:
        self._function = function
        self._key = key
        self._timeout_seconds = timeout_seconds
        self.whole = whole
        self._tokenizer = tokenizer
        self._retries = retries
        self._on_failure = on_failure

    @classmethod
    def named(
        cls,
        name: str,
        tokenizer: Any,
        *,
        retries: int,
        on_failure: str = "stop",
        key: str = "reward",
        timeout_seconds: float = 0.0,
    ) -> FunctionReward:
        """The function 'module:name'; `key` is the table of the settings that names it."""
        given: dict[str, Any] = {"on_failure": on_failure, "key": key, "timeout_seconds": timeout_seconds}
        return cls(import_function(name, key), tokenizer, retries=retries, **given)

    def __call__(self, activations: Activations, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The function's numbers; None, NaN and those that are infinite as float32 are not valid."""
        prompts, responses = texts_of(rollout, self._tokenizer)
        scores = torch.tensor(self.numbers(prompts, responses), dtype=torch.float32, device=rollout.sequences.device)
        valid = torch.isfinite(scores)
        return torch.where(valid, scores, 0.0), valid

    def numbers(self, prompts: list[str], responses: list[str]) -> list[float]:
        """The function's numbers, one a response; NaN for None."""
        return [_as_float(number) for number in self._ask(prompts, responses)]

    @property
    def _who(self) -> str:
        return "the reward function" if self._key == "reward" else f"the function of {self._key}"

    def _ask(self, prompts: list[str], responses: list[str]) -> list[float | None]:
        for attempt in range(self._retries + 1):
            try:
                numbers = self._call(prompts, responses)
            except RunFailed:  # of a service that has been asked again, or would refuse again
                raise
            except Exception as error:  # the function is the user's: anything may come out of it
                if attempt < self._retries:
                    continue
                said = f"{self._who} failed {attempt + 1} times, last with {type(error).__name__}: {error}"
                if self._on_failure == "stop":
                    raise self._failure(f"{said}; mend it, or raise {self._key}.retries") from error
                log.warning("%s; its %d responses are left out", said, len(responses))
                return [None] * len(responses)
            if len(numbers) != len(responses):
                raise self._failure(f"{self._who} returned {len(numbers)} numbers for {len(responses)} responses")
            for number in numbers:
                if number is not None and not hasattr(number, "__float__"):
                    raise self._failure(
                        f"{self._who} returned {number!r} ({type(number).__name__}); allowed: a number or None"
                    )
            return numbers
        raise AssertionError("unreachable: the loop returns or raises")

    def _failure(self, said: str) -> RunFailed:
        return RunFailed(f"score: {said}", blamed=self._key)

    def _call(self, prompts: list[str], responses: list[str]) -> list[float | None]:
        """What the function returns; TimeoutError where it has not in time.

        Nothing can stop a Python function from outside: one that is late goes on beside the run, and is not heard.
        """
        if not self._timeout_seconds:
            return list(self._function(prompts, responses))
        answer: Future[list[float | None]] = Future()

        @torch.no_grad()  # which holds for a thread alone
        def work() -> None:
            try:
                answer.set_result(list(self._function(prompts, responses)))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name=self._key, daemon=True).start()
        try:
            return answer.result(self._timeout_seconds)
        except TimeoutError:
            if answer.done():  # raised by the function itself
                raise
            raise TimeoutError(f"no answer within {self._key}.timeout_seconds = {self._timeout_seconds:g}") from None


def import_function(name: str, key: str = "reward") -> RewardFunction:
    """The function 'module:name', which the settings name in table `key`."""
    module, _, attribute = name.partition(":")
    try:
        function: RewardFunction = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's: anything may come out of it
        raise ValueError(
            f"{key}.function = {name!r} cannot be imported ({type(error).__name__}: {error}); allowed: 'module:name' "
            "of a function that Python finds; PYTHONPATH=. before the command lets it look in the current folder"
        ) from error
    if not callable(function):
        raise ValueError(f"{key}.function = {name!r} is a {type(function).__name__}; allowed: a function")
    return function


def _as_float(number: float | None) -> float:
    """NaN for None; an int beyond every float is infinite."""
    if number is None:
        return math.nan
    try:
        return float(number)
    except OverflowError:
        return math.inf


def texts_of(rollout: Rollout, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Prompts and responses as text, without special tokens."""
    prompts, responses = [], []
    for ids, prompt, response in zip(
        rollout.sequences.tolist(), rollout.prompt_mask.tolist(), rollout.response_mask.tolist(), strict=True
    ):
        mask = prompt + response
        kept = [token for token, real in zip(ids, mask, strict=True) if real]
        length = sum(prompt)
        prompts.append(text_of(kept[:length], tokenizer))
        responses.append(text_of(kept[length:], tokenizer))
    return prompts, responses


def text_of(ids: Sequence[int], tokenizer: Any) -> str:
    """What a reader of texts is given for them: special tokens are left out."""
    return tokenizer.decode(ids, skip_special_tokens=True)
