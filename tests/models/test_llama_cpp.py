"""llama.cpp says of given ids what torch says; an engine that says something else is refused.

What needs the package is skipped without it: it has no wheel, and is built for minutes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from fourfold.models import gguf_files
from fourfold.models.gguf_files import Weights, write_gguf
from fourfold.models.llama_cpp import CELLS, PIECE_TOKENS, SEQUENCES, LlamaCpp, _groups, library
from fourfold.models.llama_roles import BOUND, KEY, probe_rows, torch_log_probs, verify_engine
from tiny import VOCABULARY, tiny_model, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


def some_rows(lengths: Sequence[int]) -> list[list[int]]:
    ids = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return [row.tolist() for row in ids.split(list(lengths))]


def engine_of(model: PreTrainedModel, file: Path, weights: Weights = "F16") -> LlamaCpp:
    write_gguf(model, file, weights)
    return LlamaCpp(file, KEY)


class InTorch:
    """The model in torch as an engine; `late` gives each token the number of the next one."""

    def __init__(self, model: PreTrainedModel, late: int = 0) -> None:
        self.model = model
        self.late = late

    def log_probs(self, rows: Sequence[Sequence[int]], starts: Sequence[int], temperature: float) -> Tensor:
        found = [torch_log_probs(self.model, row)[start - 1 :] for row, start in zip(rows, starts, strict=True)]
        return torch.cat([each.roll(self.late) for each in found])


def test_rows_that_fit_stand_beside_each_other() -> None:
    lengths = [200, 200, 200, CELLS + 100, 1, *[1] * (SEQUENCES + 1)]
    groups = list(_groups(lengths))
    assert [row for group in groups for row in group] == list(range(len(lengths)))
    assert groups[:3] == [range(0, 2), range(2, 3), range(3, 4)]
    assert all(len(group) <= SEQUENCES for group in groups) and list(_groups([])) == []


def test_an_engine_that_is_the_model_passes_and_a_wrong_one_is_refused() -> None:
    """Another model, and the same one with its tokens mixed up."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(pad_is_eos=False)
    changes, mask = verify_engine(InTorch(model), model, tokenizer, "x.gguf")
    assert not changes.any() and mask.sum(dim=1).tolist() == [len(row) - 1 for row in probe_rows(tokenizer)]
    for wrong in (InTorch(tiny_model("llama", seed=1)), InTorch(model, late=1)):
        with pytest.raises(ValueError, match=r"of \d+ tokens llama.cpp's log-probs are \S+ nats .* \(allowed 0.2\)"):
            verify_engine(wrong, model, tokenizer, "x.gguf")


def test_the_probe_has_passes_of_a_few_tokens_and_of_many() -> None:
    lengths = [len(row) for row in probe_rows(tiny_tokenizer(pad_is_eos=False))]
    assert min(lengths) < 64 < PIECE_TOKENS < sum(lengths)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"reference.engine: .* pip install 'fourfold\[llama-cpp\]', or leave .* out"):
        library(KEY)


@needs_llama_cpp
@pytest.mark.parametrize("family", gguf_files.ARCHITECTURES)
def test_log_probs_are_those_of_torch(tmp_path: Path, family: str) -> None:
    """Rows side by side, cut into pieces and alone; from a start on, at a temperature."""
    model = tiny_model(family)
    engine = engine_of(model, tmp_path / "tiny.gguf")
    rows = some_rows([100, 3, 90, 120, 2, 100, 77, 128, 90, 110])
    starts = [max(len(row) // 2, 1) for row in rows]
    with torch.no_grad():
        every = [model(torch.tensor([row])).logits[0, :-1].div(0.7).log_softmax(-1) for row in rows]
    expected = torch.cat(
        [
            each.gather(1, torch.tensor(row[1:])[:, None])[start - 1 :, 0]
            for each, row, start in zip(every, rows, starts, strict=True)
        ]
    )
    found = engine.log_probs(rows, starts, 0.7)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert float((found - expected).abs().mean()) < 0.005
    alone = torch.cat([engine.log_probs([row], [start], 0.7) for row, start in zip(rows, starts, strict=True)])
    torch.testing.assert_close(alone, found, rtol=0, atol=0.02)
    assert max(len(logits) for logits in engine.logits(rows, starts)) <= PIECE_TOKENS


@needs_llama_cpp
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_hidden_states_are_those_of_torch(tmp_path: Path, family: str) -> None:
    """After the final norm, of the last token of each row; log-probs come as before afterwards."""
    model = tiny_model(family)
    engine = engine_of(model, tmp_path / "tiny.gguf")
    rows = some_rows([5, 120, 64, 1, 128, 100, 90, 30])
    before = engine.log_probs(rows[:3], [1, 1, 1], 1.0)
    with torch.no_grad():
        expected = torch.stack([model.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows])
    torch.testing.assert_close(engine.hidden(rows), expected, rtol=0, atol=0.05)
    assert torch.equal(engine.log_probs(rows[:3], [1, 1, 1], 1.0), before)


@needs_llama_cpp
def test_eight_bits_are_within_the_bound_and_are_not_sixteen(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama", hidden=64), tiny_tokenizer(pad_is_eos=False)
    gaps = dict[str, float]()
    for weights in ("F16", "Q8_0"):
        changes, mask = verify_engine(engine_of(model, tmp_path / weights, weights), model, tokenizer, weights)
        gaps[weights] = float(changes[mask].abs().mean())
    assert 0 < 3 * gaps["F16"] < gaps["Q8_0"] < BOUND / 2


@needs_llama_cpp
def test_a_file_with_other_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys left as transformers has them, which loads and runs without a word."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(pad_is_eos=False)
    monkeypatch.setattr(gguf_files, "_interleaved", lambda name, tensor, config: tensor)
    with pytest.raises(ValueError, match=r"reference.engine: on a probe .* from torch's of the same model"):
        verify_engine(engine_of(model, tmp_path / "x.gguf"), model, tokenizer, "x.gguf")


@needs_llama_cpp
def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(ValueError, match=r"reference.engine: llama.cpp cannot read '.*text.gguf'"):
        LlamaCpp(tmp_path / "text.gguf", KEY)
