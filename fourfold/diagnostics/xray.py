"""The token x-ray: every number that a run has of single tokens, of responses that are worth a look.

Read from the rollouts that a run keeps (diagnostics/kept.py); the texts of tokens need the run's tokenizer, and no
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fourfold.batch import Experience
from fourfold.config import RunConfig
from fourfold.diagnostics.kept import KeptFiles, held_out_files, response_tokens, training_files
from fourfold.diagnostics.token_texts import TokenText, token_texts

Numbers = Mapping[str, Sequence[float]]  # of a response's tokens, by the key of a measure
MOST_TOKENS = 400  # of a response: beyond them a page would be slow to open


@dataclass(frozen=True)
class Measure:
    """A number of every token. How it is coloured: by its distance from 0, from the middle of all, or by surprise."""

    key: str
    name: str
    unit: str
    scale: Literal["signed", "spread", "surprise"] | None  # None: in the numbers, but no colour of its own


MEASURES = (
    Measure("kl", "KL", "nats", "signed"),
    Measure("log_probs", "log-prob", "nats", "surprise"),
    Measure("ref_log_probs", "log-prob of reference", "nats", None),
    Measure("values", "value", "", "spread"),
    Measure("advantages", "advantage", "", "signed"),
    Measure("rewards", "reward", "", "signed"),
    Measure("returns", "return", "", None),
)


@dataclass(frozen=True)
class Sample:
    """A response with its tokens; `left_out` of them are not shown."""

    row: int
    why: str
    prompt: str
    tokens: Sequence[TokenText]
    numbers: Numbers
    score: float
    parts: Mapping[str, float]
    length: int
    truncated: bool
    left_out: int


@dataclass(frozen=True)
class XrayStep:
    """The samples at a step; `steps` of an x-ray show the same prompts."""

    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Xray:
    """What is shown of which tokens."""

    source: Literal["held out", "training"]
    measures: Sequence[Measure]
    steps: Sequence[XrayStep]


def make_xray(root: Path, config: RunConfig, tokenizer: Any, count: int, *, training: bool = False) -> Xray:
    """The last kept rollout, and of held-out prompts the first one beside it; ValueError says why there is none."""
    held_out, learned = held_out_files(root), training_files(root)
    source: Literal["held out", "training"] = "training" if training or not held_out.steps() else "held out"
    files = learned if source == "training" else held_out
    if not (steps := files.steps()):
        raise ValueError(_nothing_kept(config))
    last = files.read(steps[-1])
    chosen = choose(last, count)
    shown = [_step(files, steps[-1], last, chosen, config, tokenizer)]
    if source == "held out" and len(steps) > 1:
        first = files.read(steps[0])
        same = _same_prompts(last, first, chosen)
        shown.insert(0, _step(files, steps[0], first, same, config, tokenizer))
    return Xray(source, MEASURES, shown)


def _nothing_kept(config: RunConfig) -> str:
    if not config.evaluation.keep_rollouts:
        return "evaluation.keep_rollouts = false: this run keeps no rollouts"
    if config.data.prompts_test is None:
        return "the run has no held-out prompts (data.prompts_test), and rollouts are kept with evaluations"
    return "no rollout has been kept yet: the first one is, before the first step of ppo"


def choose(batch: Experience, count: int) -> dict[int, str]:
    """Rows that are worth a look, with the reason: extremes first, then some from the lowest to the highest score."""
    mask = batch.response_mask
    off = (numbers_of(batch, "values") - numbers_of(batch, "returns")).abs()
    errors = torch.where(mask, off, 0.0).sum(dim=1) / batch.lengths
    found: dict[int, str] = {}
    for row, why in (
        (int(batch.scores.argmax()), "highest score"),
        (int(batch.scores.argmin()), "lowest score"),
        (int(torch.where(mask, batch.kl, 0.0).sum(dim=1).argmax()), "most KL"),
        (int(errors.argmax()), "values furthest off"),
        (int(batch.lengths.argmax()), "longest"),
    ):
        if len(found) < count:
            found.setdefault(row, why)
    order = [row for row in batch.scores.argsort(stable=True).tolist() if row not in found]
    missing = min(count - len(found), len(order))
    for n in range(missing):
        found[order[(2 * n + 1) * len(order) // (2 * missing)]] = "one of many"
    return found


def _same_prompts(one: Experience, other: Experience, rows: Mapping[int, str]) -> dict[int, str]:
    """The rows of another rollout with the same prompts: by the prompt's number, and which of its responses it is."""
    places = {key: row for row, key in enumerate(_occurrences(other))}
    keys = list(_occurrences(one))
    return {places[keys[row]]: why for row, why in rows.items() if keys[row] in places}


def _occurrences(batch: Experience) -> Iterator[tuple[int, int]]:
    seen: dict[int, int] = {}
    for prompt in batch.prompt_id.tolist():
        seen[prompt] = seen.get(prompt, -1) + 1
        yield prompt, seen[prompt]


def _step(
    files: KeptFiles, step: int, batch: Experience, rows: Mapping[int, str], config: RunConfig, tokenizer: Any
) -> XrayStep:
    numbers = {measure.key: numbers_of(batch, measure.key) for measure in MEASURES}
    ids = response_tokens(batch)
    samples = []
    for row, why in rows.items():
        shown = min(len(ids[row]), MOST_TOKENS)
        prompt = batch.sequences[row, : batch.prompt_length][batch.prompt_mask[row]].tolist()
        samples.append(
            Sample(
                row=row,
                why=why,
                prompt=tokenizer.decode(prompt, skip_special_tokens=False),
                tokens=token_texts(ids[row][:shown], tokenizer),
                numbers={key: values[row, :shown].tolist() for key, values in numbers.items()},
                score=float(batch.scores[row]),
                parts=_parts(batch, row, config),
                length=len(ids[row]),
                truncated=bool(batch.truncated[row]),
                left_out=len(ids[row]) - shown,
            )
        )
    return XrayStep(step, samples)


def _parts(batch: Experience, row: int, config: RunConfig) -> dict[str, float]:
    """The raw scores of the parts of the reward, where it has several."""
    names = config.reward.dimensions
    return dict(zip(names, batch.score_parts[row].tolist(), strict=True)) if len(names) > 1 else {}


def numbers_of(batch: Experience, key: str) -> Tensor:
    """A measure of every token, [batch, response]; of several dimensions as they are learned from, weighted."""
    numbers: Tensor = getattr(batch, key)
    return numbers if numbers.ndim == 2 else batch.total(numbers)
