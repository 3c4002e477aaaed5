"""Weights of the reward's parts that a prompt is told of: drawn, written in front of it, and read from it again.

A policy that was trained with many weights, each in the prompts of the responses that they paid for, can be asked for
any of them afterwards (Yang et al. 2024, "Rewards-in-Context"; Wang et al. 2024, "Conditional Language Policy").
Weights are tenths that add up to 1: few enough for each to be seen often.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.config.schema import RunConfig

PARTS_OF_ONE = 10
Tenths = tuple[int, ...]
# How much more weight a text suggests for a part by whose score it stands one standard deviation above the others: by
# e^2. Its best part then mostly has more than half of the weight, as in draws of a concentration below 1.
SHARPNESS = 2.0


class ToldText(list[int]):
    """Ids of a text, of which the first `told` say weights: they are given, and not learned."""

    def __init__(self, ids: Sequence[int], told: int) -> None:
        super().__init__(ids)
        self.told = told


def given_tokens(text: Sequence[int]) -> int:
    """Tokens at the start of a text that nobody has to say: what it is told, or its first token."""
    return text.told if isinstance(text, ToldText) else 1


class ToldWeights:
    """The weights of these parts, in the words of a tokenizer.

    `weights` are those of the settings: drawn ones have them as their mean, in parts of their sum.
    """

    def __init__(self, tokenizer: Any, weights: Mapping[str, float], concentration: float = 1.0) -> None:
        self.names = tuple(weights)
        self._tokenizer = tokenizer
        self._sum = sum(weights.values())
        # A Dirichlet distribution; with equal weights all of its parameters are the concentration.
        self._alphas = [concentration * len(weights) * weight / self._sum for weight in weights.values()]

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Any) -> ToldWeights | None:
        """Those of a run; None where its prompts are told of none."""
        reward = config.reward
        if reward.weights != "sampled":
            return None
        weights = {name: part.weight for name, part in reward.parts.items()}
        return cls(tokenizer, weights, reward.weights_concentration)

    def draw(self, seed: int) -> Tenths:
        """Weights from the Dirichlet distribution, rounded to tenths that add up to 1; a function of the seed alone."""
        generator = random.Random(seed)
        gammas = [generator.gammavariate(alpha, 1.0) for alpha in self._alphas]
        if not sum(gammas):  # all have underflowed, under a concentration so small that one part has all the weight
            gammas[generator.randrange(len(gammas))] = 1.0
        return _in_tenths(gammas)

    @property
    def mean(self) -> Tenths:
        """The weights of the settings, in parts of their sum."""
        return _in_tenths(self._alphas)

    def parse(self, given: str) -> Tenths:
        """Weights that somebody typed, such as 'safety=0.8'; what is left of 1 goes to the parts that are not named.

        They share it in proportion to their mean weights, in tenths, as drawn weights are.
        """
        found: dict[str, int] = {}
        for item in given.split(","):
            name, _, number = (text.strip() for text in item.partition("="))
            if name not in self.names or name in found or not number:
                raise ValueError(
                    f"--weights: given {item.strip()!r}; allowed: each of {', '.join(self.names)} once, as NAME=NUMBER"
                )
            found[name] = self._tenths_of(name, number)
        rest, others = PARTS_OF_ONE - sum(found.values()), [name for name in self.names if name not in found]
        if rest < 0 or (rest and not others):
            total = sum(found.values()) / PARTS_OF_ONE
            allowed = "weights of all parts that add up to 1" if not others else "weights that add up to at most 1"
            raise ValueError(f"--weights: given {given!r}, which add up to {total:g}; allowed: {allowed}")
        means = dict(zip(self.names, self._alphas, strict=True))
        shares = _in_tenths([means[name] for name in others], rest) if others else ()
        found |= dict(zip(others, shares, strict=True))
        return tuple(found[name] for name in self.names)

    @staticmethod
    def _tenths_of(name: str, number: str) -> int:
        try:
            tenths = float(number) * PARTS_OF_ONE
        except ValueError:
            tenths = -1.0
        if not (0 <= tenths <= PARTS_OF_ONE and abs(tenths - round(tenths)) < 1e-6):
            raise ValueError(
                f"--weights: given {name}={number}; allowed: tenths from 0 to 1, which the run was trained with; try "
                f"{name}=0.5"
            )
        return round(tenths)

    def text(self, tenths: Tenths) -> str:
        """What a prompt begins with.

        >>> ToldWeights(None, {"safety": 1.0, "brevity": 1.0}).text((8, 2))
        '[safety=0.8 brevity=0.2]\\n'
        """
        said = (f"{name}={tenth / PARTS_OF_ONE:.1f}" for name, tenth in zip(self.names, tenths, strict=True))
        return f"[{' '.join(said)}]\n"

    def tell(self, prompt: Sequence[int], tenths: Tenths) -> list[int]:
        """A prompt's ids with the weights in front of it, behind a BOS; its own ids stay what they are."""
        start = self._start(prompt)
        return [*prompt[:start], *self._ids[tenths], *prompt[start:]]

    def tell_text(self, text: Sequence[int], tenths: Tenths) -> ToldText:
        """A text's ids with the weights in front of it, as in front of a prompt."""
        return ToldText(self.tell(text, tenths), self._start(text) + len(self._ids[tenths]))

    def suggested(
        self, scores: Sequence[Sequence[float]], beside: Sequence[Sequence[float]] | None = None
    ) -> list[Tenths]:
        """Weights that suit each text by its scores [texts, parts], `beside` those of others (or of these themselves).

        Shares are the mean weights times exp(SHARPNESS z), z a score in standard deviations above the mean of its part;
        a part of which all others have the same score suggests nothing. Scores are finite as float32.

        >>> ToldWeights(None, {"safety": 1.0, "brevity": 1.0}).suggested([(1.0, 3.0), (0.0, 3.0)])
        [(9, 1), (1, 9)]
        """
        columns = []
        for column, others in zip(zip(*scores, strict=True), zip(*(beside or scores), strict=True), strict=True):
            mean, spread = statistics.fmean(others), statistics.pstdev(others)
            columns.append([(score - mean) / spread if spread else 0.0 for score in column])
        found = []
        for row in zip(*columns, strict=True):
            highest = max(row)  # shares do not change with it, and no exponential overflows
            raised = (math.exp(SHARPNESS * (z - highest)) for z in row)
            found.append(_in_tenths([alpha * factor for alpha, factor in zip(self._alphas, raised, strict=True)]))
        return found

    def read(self, rollout: Rollout) -> Float32[Tensor, "batch dimensions"]:
        """The weights that the prompts were told of, times the sum of the settings' weights."""
        rows = [tenths for tenths, _ in self._told(rollout)]
        shares = torch.tensor(rows, dtype=torch.float64) / PARTS_OF_ONE
        return (self._sum * shares).float().to(rollout.sequences.device)

    def untold(self, rollout: Rollout) -> Rollout:
        """The same rollout for a reader that shall not know the weights: they are no part of the prompts."""
        mask = rollout.prompt_mask.clone()
        for row, (_, columns) in enumerate(self._told(rollout)):
            mask[row, columns.to(mask.device)] = False
        return replace(rollout, prompt_mask=mask)

    def room(self, max_tokens: int, key: str = "data.max_prompt_tokens") -> int:
        """Tokens that prompts, or texts, of at most `max_tokens` have for themselves; `key` is their setting."""
        longest = max(map(len, self._ids.values()))
        if longest >= max_tokens:
            raise ValueError(
                f"{key}: given {max_tokens}, of which the weights in front take up to {longest} (reward.weights = "
                f"'sampled'); allowed: more than that; try {longest + max_tokens}"
            )
        return max_tokens - longest

    @cached_property
    def _ids(self) -> dict[Tenths, list[int]]:
        """All weights there are, and their tokens."""
        every = list(_sums_to(PARTS_OF_ONE, len(self.names)))
        texts = [self.text(tenths) for tenths in every]
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        ids = {tenths: list(row) for tenths, row in zip(every, encoded, strict=True)}
        if len({tuple(row) for row in encoded}) < len(every):
            raise ValueError(
                f"reward.weights: given 'sampled', but the tokenizer writes {texts[0]!r} and another text in the same "
                "tokens; allowed: a tokenizer that knows digits, brackets and the names of reward.parts"
            )
        return ids

    @cached_property
    def _by_ids(self) -> dict[tuple[int, ...], Tenths]:
        return {tuple(ids): tenths for tenths, ids in self._ids.items()}

    @cached_property
    def _lengths(self) -> list[int]:
        """Tokens that weights take, the longest first."""
        return sorted({len(ids) for ids in self._by_ids}, reverse=True)

    def _start(self, prompt: Sequence[int]) -> int:
        """1 where a prompt begins with a BOS of the tokenizer's own: not with the first token of a chat template."""
        return int(self._puts_bos and len(prompt) > 0 and prompt[0] == self._tokenizer.bos_token_id)

    @cached_property
    def _puts_bos(self) -> bool:
        return self._tokenizer("")["input_ids"][:1] == [self._tokenizer.bos_token_id]

    def _told(self, rollout: Rollout) -> Iterator[tuple[Tenths, Int64[Tensor, "told"]]]:
        """The weights of each row, and the columns that say them."""
        for sequence, mask in zip(rollout.sequences.tolist(), rollout.prompt_mask, strict=True):
            columns = mask.nonzero()[:, 0]
            prompt = [sequence[column] for column in columns.tolist()]
            start = self._start(prompt)
            known = (n for n in self._lengths if tuple(prompt[start : start + n]) in self._by_ids)
            length = next(known, 0)
            assert length, "every prompt of a run with sampled weights begins with them"
            yield self._by_ids[tuple(prompt[start : start + length])], columns[start : start + length]


def _in_tenths(sizes: Sequence[float], whole: int = PARTS_OF_ONE) -> Tenths:
    """Shares of a `whole` in tenths, rounded so that they add up to it: those with the largest rests are rounded up."""
    total = sum(sizes)
    shares = [whole * size / total for size in sizes]
    tenths = [int(share) for share in shares]
    largest_rests = sorted(range(len(shares)), key=lambda k: (tenths[k] - shares[k], k))
    for k in largest_rests[: whole - sum(tenths)]:
        tenths[k] += 1
    return tuple(tenths)


def _sums_to(total: int, parts: int) -> Iterator[Tenths]:
    """Every way to write `total` as a sum of so many whole numbers, in order."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _sums_to(total - first, parts - 1):
            yield (first, *rest)
