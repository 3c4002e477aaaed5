"""The verifier of a task as a source of scores: the question is found by its prompt."""

from __future__ import annotations

from typing import Any

from fourfold.config.schema import PartSection
from fourfold.data.tasks import load_task
from fourfold.data.tokenize import encode_prompt
from fourfold.scoring.sources import text_of


class Verifier:
    """Scores answers to the questions of a task, those to train on and held-out ones."""

    def __init__(self, part: PartSection, key: str, tokenizer: Any) -> None:
        self._asked = {
            # As a source is given it: what the prompt's tokens decode to.
            text_of(encode_prompt(tokenizer, record), tokenizer): (task, entry)
            for task in load_task(part, key)
            for record, entry in zip(task.records, task.entries, strict=True)
        }

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float | None]:
        """From 0 to 1 for each answer; None where the prompt is no question of the task."""
        found: list[float | None] = []
        for prompt, response in zip(prompts, responses, strict=True):
            asked = self._asked.get(prompt)
            found.append(None if asked is None else asked[0].score(response, asked[1]))
        return found
