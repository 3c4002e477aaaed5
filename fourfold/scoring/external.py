"""A reward model of another family as a source of scores: responses become text and tokens of its own again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.memory.offload import Residency, residency_of
from fourfold.models.external import External
from fourfold.models.roles import Activations
from fourfold.models.text_reader import Row
from fourfold.scoring.sources import texts_of

log = logging.getLogger(__name__)


class NothingToRead(RunFailed):
    """Texts of which the reward model's tokenizer makes no token."""


class ExternalReward:
    """Scores the texts that a rollout decodes to, without the actor's special tokens.

    The score phase hands over rows of like length, so there is little padding in the model's own tokens either. A
    service is given the texts and needs no tokenizer of an actor.
    """

    reads_texts = True

    def __init__(self, external: External, actor_tokenizer: Any = None) -> None:
        self.external = external
        self._actor_tokenizer = actor_tokenizer
        self._told = False

    @property
    def residency(self) -> Residency | None:
        """How the model is held."""
        return residency_of(self.external)

    def __call__(self, activations: Activations, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The model's numbers, a column for each of several readings; one that is not finite stops the run.

        It would come again and again.
        """
        rows = self._rows(*texts_of(rollout, self._actor_tokenizer))
        scores = self.external.readings(rows).to(rollout.sequences.device)
        valid = torch.isfinite(scores)
        if not bool(valid.all()):
            bad = int((~valid).any(dim=1).sum())
            raise RunFailed(
                f"score: the reward model's scores of {bad} of {len(valid)} responses are not finite; "
                "the last good checkpoint is kept; its weights are damaged, or precision.reward is too narrow for them",
                blamed="reward model",
            )
        return (scores, valid) if scores.shape[1] > 1 else (scores[:, 0], valid[:, 0])

    def of_texts(self, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
        """One number a row, finite or not."""
        return self.external.scores(self._rows(prompts, responses))

    def _rows(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Row]:
        rows, cut = self.external.reader.rows(prompts, responses)
        self._tell(cut, len(rows))
        if empty := sum(not row["input_ids"] for row in rows):
            raise NothingToRead(
                f"score: {empty} of {len(rows)} responses have no token for the reward model; give a reward.template "
                "that writes something around them"
            )
        return rows

    def _tell(self, cut: int, rows: int) -> None:
        if cut and not self._told:
            self._told = True
            log.warning(
                "score: %d of %d texts have more than the %d tokens of the reward model and lose their beginning (said "
                "once; reward.max_tokens)",
                cut,
                rows,
                self.external.reader.limit,
            )
