"""The uniform prior against whole logits, and what a moving reference's marks notice."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.models import priors
from fourfold.models.priors import UniformPolicy, mark
from tiny import VOCABULARY
from tiny_roles import activations_of, tiny_base, tiny_rollout

BITS = st.integers(-(2**31), 2**31 - 1)


def tensor_of(bits: list[int]) -> torch.Tensor:
    """Float32 numbers of these bits."""
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


@given(st.lists(BITS, min_size=1, max_size=40), st.data())
def test_no_single_number_changes_without_its_mark(bits: list[int], data: st.DataObject) -> None:
    """Signs, NaN and denormals too: it is bits that are marked."""
    place, other = data.draw(st.integers(0, len(bits) - 1)), data.draw(BITS)
    changed = [*bits[:place], other, *bits[place + 1 :]]
    assert (mark(tensor_of(bits)) == mark(tensor_of(changed))) == (bits[place] == other)


@given(st.lists(BITS, min_size=2, max_size=40), st.data())
def test_numbers_that_change_places_are_noticed(bits: list[int], data: st.DataObject) -> None:
    """A plain sum would not see it; bits that differ by 2^31 and change places an even distance apart are lost."""
    one, two = (data.draw(st.integers(0, len(bits) - 1)) for _ in range(2))
    swapped = list(bits)
    swapped[one], swapped[two] = swapped[two], swapped[one]
    lost = (bits[one] - bits[two]) * 2 * (one - two) % 2**64 == 0
    assert (mark(tensor_of(bits)) == mark(tensor_of(swapped))) == lost


def test_a_mark_does_not_depend_on_how_much_is_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randn(7, 13, generator=torch.Generator().manual_seed(0))
    whole = mark(numbers)
    monkeypatch.setattr(priors, "_MARKED_AT_ONCE", 5)
    assert mark(numbers) == whole == mark(numbers.t().contiguous().t())


@torch.no_grad()
@pytest.mark.parametrize("mode", ["trunk", "none"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_uniform_prior_is_what_whole_logits_say(tmp_path: Path, mode: str, temperature: float) -> None:
    """log q = -log V, and KL(p, q) = sum p log(p V), by the definition over the whole vocabulary."""
    base = tiny_base(tmp_path / "model", "llama", mode)
    rollout = tiny_rollout([(3, 4), (5, 2), (1, 6)])
    activations, uniform = activations_of(base, rollout), UniformPolicy(VOCABULARY)
    assert not list(uniform.parameters())
    log_probs, _ = uniform.log_probs(activations, rollout, temperature)
    mask = rollout.response_mask
    assert log_probs.dtype == torch.float32 and bool((log_probs[~mask] == 0).all())
    assert log_probs[mask].tolist() == pytest.approx([-math.log(VOCABULARY)] * int(mask.sum()))
    logits = base.policy.head.logits(base.policy.hidden_before(activations, rollout), torch.float32).double()
    p = (logits / temperature).softmax(dim=-1)
    expected = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, (p * (p * VOCABULARY).log()).sum(-1))
    found = uniform.kl_from(base.policy, activations, rollout, temperature)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
