"""Verifiable tasks: questions that a program makes by a seed, and a verifier that scores an answer to each of them.

They are the procedural data sets of reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), an extra.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.config.schema import DatasetSection, PartSection
from fourfold.data.records import Message, PromptRecord


@dataclass(frozen=True)
class Task:
    """The questions of one seed; `dataset` scores answers to them."""

    dataset: Any
    entries: Sequence[dict[str, Any]]
    template: str
    answer_tag: str

    @property
    def records(self) -> list[PromptRecord]:
        """A prompt for each question, in the order of `entries`."""
        return [PromptRecord(self._prompt(entry["question"])) for entry in self.entries]

    def _prompt(self, question: str) -> str | tuple[Message, ...]:
        if self.template == "chat":
            return (Message("user", question),)
        return self.template.format(question=question)

    def score(self, response: str, entry: dict[str, Any]) -> float:
        """What the verifier says of a response, from 0 to 1; 0 where the answer's tag is wanted and missing."""
        return float(self.dataset.score_answer(answer=self.answer(response), entry=entry))

    def answer(self, response: str) -> str | None:
        """The answer in a response: what stands last in its tag, or all of it."""
        if not self.answer_tag:
            return response.strip()
        tag = re.escape(self.answer_tag)
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", response, flags=re.DOTALL)
        return found[-1].strip() if found else None


def load_task(part: PartSection, key: str) -> tuple[Task, Task]:
    """Questions to train on and held-out ones of a part; ValueError where the task or its settings are unknown.

    Held-out questions come from the next seed; one that is also asked in training is left out of them.
    """
    trained = _questions(part, key, part.seed)
    known = {entry["question"] for entry in trained.entries}
    held_out = _questions(part, key, part.seed + 1)
    fresh = [entry for entry in held_out.entries if entry["question"] not in known]
    return trained, Task(held_out.dataset, fresh, part.prompt_template, part.answer_tag)


def read_task_prompts(part: PartSection, key: str, section: DatasetSection, *, held_out: bool) -> list[PromptRecord]:
    """The questions of a task as the rows of a data set."""
    records = load_task(part, key)[held_out].records
    if not records:
        raise ValueError(
            f"{section.path}: every held-out question of {part.task!r} is also asked in training; make {key}.size "
            "smaller, choose task_settings with more questions, or give a file"
        )
    return records[: section.max_rows or None]


def _questions(part: PartSection, key: str, seed: int) -> Task:
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError(
            f"{key}.source = 'verifiable' needs the package reasoning-gym, which is not installed; try: "
            "pip install 'fourfold[reasoning-gym]'"
        ) from error
    known = sorted(reasoning_gym.factory.DATASETS)
    if part.task not in known:
        near = difflib.get_close_matches(part.task, known, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(known)}, such as {known[0]!r}"
        raise ValueError(f"{key}.task: reasoning-gym has no data set {part.task!r}; {hint}")
    try:
        dataset = reasoning_gym.create_dataset(part.task, size=part.size, seed=seed, **part.task_settings)
        entries = [dataset[number] for number in range(len(dataset))]
    except (TypeError, ValueError, AssertionError, AttributeError) as error:  # of its settings' own checks
        raise ValueError(
            f"{key}.task_settings: given {part.task_settings}, which {part.task!r} of reasoning-gym does not take "
            f"({type(error).__name__}: {error})"
        ) from error
    return Task(dataset, entries, part.prompt_template, part.answer_tag)
