"""Rows moved to the first column: nothing real changes but rounding, and fewer columns are computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.batch import Rollout
from fourfold.models.flush_rows import FlushRows
from fourfold.models.heads import LanguageHead, ScalarHead
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.models.split import cut
from tiny import tiny_model

ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=5)


def mask_of(rows: list[tuple[int, int]]) -> tuple[Tensor, int]:
    """Prompts to the left of a column, responses from there on; and the column of the state before the response."""
    prompt = max(1, *(p for p, _ in rows))
    columns = torch.arange(prompt + max(r for _, r in rows))
    return torch.stack([(columns >= prompt - p) & (columns < prompt + r) for p, r in rows]), prompt - 1


@given(rows=ROWS, hidden=st.booleans(), with_state=st.booleans())
def test_what_is_moved_comes_back_where_it_was(rows: list[tuple[int, int]], hidden: bool, with_state: bool) -> None:
    mask, state = mask_of(rows)
    found = FlushRows.of(mask, state if with_state else None)
    needed = [max(p, 1 if with_state else 0) + r for p, r in rows]
    if found is None:
        assert max(needed) == mask.shape[1]
        return
    assert found.width == max(needed) < mask.shape[1]
    x = torch.randn(*mask.shape, 3)
    moved = found.flush(x if hidden else x[..., 0])
    assert moved.shape[:2] == (len(rows), found.width)
    kept = found.flush_mask(mask)
    assert torch.equal(kept.sum(dim=1), mask.sum(dim=1))
    for row in range(len(rows)):
        assert torch.equal(moved[row][kept[row]], (x if hidden else x[..., 0])[row][mask[row]])
    back = found.put_back(found.flush(x), mask.shape[1])
    there = mask.clone()
    if with_state:
        there[:, state] = True
    assert torch.equal(back, torch.where(there[..., None], x, 0.0))


@pytest.mark.parametrize("mask", [[[1, 0, 1, 0]], [[0, 1, 1, 0], [1, 0, 0, 1]], [[1, 1, 1]]])
def test_rows_with_gaps_and_rows_without_padding_stay(mask: list[list[int]]) -> None:
    assert FlushRows.of(torch.tensor(mask).bool()) is None


def rollout_of(rows: list[tuple[int, int]]) -> Rollout:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 60, (count,), generator=generator).tolist()

    return Rollout.of_tokens([ids(p) for p, _ in rows], [ids(r) for _, r in rows], pad_id=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_roles_say_the_same_of_rows_that_are_not_moved(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, values, last values and scores of ragged rows, one of them without a prompt; and their gradients."""
    model = tiny_model(family)
    actor = Policy(cut(model, 0, 4, compute_dtype=torch.float32), LanguageHead.of(model))
    head = ScalarHead(model.config.hidden_size)
    nn.init.normal_(head.linear.weight)
    critic = Scorer(actor.branch, head)
    rollout = rollout_of([(5, 1), (0, 4), (1, 6), (3, 2)])
    activations = Activations(rollout.sequences, rollout.attention_mask)
    widths: list[int] = []
    actor.branch.register_forward_pre_hook(lambda _, given: widths.append(given[1].shape[1]))

    def outputs() -> list[Tensor]:
        actor.zero_grad()
        log_probs, entropy = actor.log_probs(activations, rollout, 0.7, entropy="learn")
        values, last = critic.values_and_last(activations, rollout)
        scores = critic.scores(activations)
        (log_probs.sum() + entropy.sum() + values.square().sum() + last.sum() + scores.sum()).backward()
        gradients = [p.grad.clone() for p in actor.parameters() if p.grad is not None]
        return [log_probs, entropy, values, last, scores, *gradients]

    moved = outputs()
    assert widths == [6, 7, 7], "without the last token of each row, and with it"
    monkeypatch.setattr(FlushRows, "of", lambda mask, state=None: None)
    stayed = outputs()
    assert widths[3:] == [10, 11, 11] and len(moved) == len(stayed) > 10
    for a, b in zip(moved, stayed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
