"""Scores of texts by any service that speaks the JSON of docs/rewards.md; `fourfold serve` is one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from fourfold.config.schema import PartSection
from fourfold.errors import RunFailed
from fourfold.scoring.service import wire
from fourfold.scoring.service.client import Refused, Service, Unanswered
from fourfold.scoring.service.wire import BadMessage

log = logging.getLogger(__name__)

# Bytes that the answer to a request may have: a number a row, and whatever else a service says.
ANSWER_BYTES, ANSWER_BYTES_A_ROW = 2**16, 2**10
# Statuses that are about the rows of a request; others are about how it was asked, so that the next would get them too.
ABOUT_ROWS = (400, 413, 422)


class ServiceScores:
    """Asks about at most `max_rows` rows at a time; rows of a request that fails have no score, or the run stops."""

    def __init__(self, part: PartSection, key: str, environment: Mapping[str, str] = os.environ) -> None:
        self._service = Service(
            part, environment, key=key, answer_bytes=ANSWER_BYTES + ANSWER_BYTES_A_ROW * part.max_rows
        )
        self._part, self._key = part, key

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float | None]:
        """One number a row, None where the service has none, or none of it came under on_failure = "drop"."""
        found: list[float | None] = []
        for start in range(0, len(responses), self._part.max_rows):
            piece = slice(start, start + self._part.max_rows)
            found += self._ask(prompts[piece], responses[piece])
        return found

    def _ask(self, prompts: list[str], responses: list[str]) -> list[float | None]:
        try:
            answer = self._service.ask("", {"prompts": prompts, "responses": responses})
            return wire.scores_or_none(answer.get("scores"), len(responses))
        except BadMessage as error:
            raise self._failure(
                f"the service at {self._service.url} gave an answer that cannot be used: {error}"
            ) from error
        except (Refused, Unanswered) as error:
            passes = isinstance(error, Unanswered) or error.status in ABOUT_ROWS
            if self._part.on_failure == "stop" or not passes:
                raise self._failure(str(error)) from error
            log.warning("%s: %s; its %d responses are left out", self._key, error, len(responses))
            return [None] * len(responses)

    def _failure(self, said: str) -> RunFailed:
        return RunFailed(f"score: {self._key}: {said}", blamed=self._key)
