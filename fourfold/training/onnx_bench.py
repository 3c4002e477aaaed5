"""What ONNX Runtime makes of a run's reward model, for `fourfold bench quantization`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fourfold.config.schema import RunConfig
from fourfold.models.classifier import TorchClassifier
from fourfold.models.external import External
from fourfold.models.loading import Base
from fourfold.models.onnx import run_by_onnx
from fourfold.models.own_critic import VALUE_SHIFT
from fourfold.models.roles import Activations, Scorer
from fourfold.models.text_reader import TextReader
from fourfold.models.whole import classifier_of, whole_model


@dataclass(frozen=True)
class Engine:
    """A reward model in ONNX Runtime."""

    external: External
    shift: float  # from the classifier's logit to the scorer's number

    @property
    def bytes(self) -> int:
        """Of its files."""
        assert self.external.outside_torch is not None
        return self.external.outside_torch.bytes

    @torch.no_grad()
    def scores(self, ids: Activations) -> list[float]:
        """The score of every row."""
        rows = [{"input_ids": row[mask].tolist(), "attention_mask": [1] * int(mask.sum())} for row, mask in _rows(ids)]
        return (self.external.scores(rows) + self.shift).tolist()


@contextlib.contextmanager
def run_by_onnx_runtime(
    kind: str, config: RunConfig, base: Base, scorer: Scorer, last: Collection[int]
) -> Iterator[Engine]:
    """Within, `scorer` with all that is below it, as a classifier that ONNX Runtime runs; `last` are texts' last ids.

    ValueError where the package is missing, or its scores are beyond the engine's bound on a probe.
    """
    model, tokenizer = whole_model(config, base, scorer)
    # A classifier looks for the last id that is no padding, so padding must be an id that no text ends with.
    pad_id = next(token for token in range(model.config.vocab_size) if token not in last)
    classifier = classifier_of(model, scorer, pad_id).eval()
    padding = {"input_ids": pad_id, "attention_mask": 0}
    external = External(TorchClassifier(classifier), TextReader(tokenizer, "", tuple(padding), padding, 0), [1.0])
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-") as cache:
        run_by_onnx(external, Path(cache), kind, base.budget)
        yield Engine(external, float(getattr(classifier.config, VALUE_SHIFT)))


def _rows(ids: Activations) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(ids.inputs.cpu(), ids.mask.cpu(), strict=True)
