"""Draws against a float64 sum over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.rollout.draw import draw_tokens


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 1100), st.integers(0, 2**32 - 1), st.floats(0.1, 30.0), st.floats(0.0, 0.9))
def test_the_token_is_the_one_that_the_distribution_function_gives(
    vocab: int, seed: int, spread: float, forbidden: float
) -> None:
    """Vocabularies below, at and above whole blocks, flat and steep, with forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(5, vocab, generator=generator)
    logits[torch.rand(5, vocab, generator=generator) < forbidden] = -torch.inf
    logits[:, seed % vocab] = 0.0
    uniforms = torch.rand(5, generator=generator, dtype=torch.float64)
    drawn = draw_tokens(logits, uniforms)
    assert drawn is not None
    tokens, log_probs = drawn
    truth = logits.double().log_softmax(dim=1)
    edges = truth.exp().cumsum(dim=1)
    for row, token in enumerate(tokens.tolist()):
        assert logits[row, token] > -torch.inf
        assert edges[row, token] - truth[row, token].exp() - 1e-6 <= uniforms[row] <= edges[row, token] + 1e-6
    torch.testing.assert_close(log_probs.double(), truth.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_never_draw_a_forbidden_token(uniform: float) -> None:
    for vocab, allowed in ((600, (0, 255)), (600, (256, 511)), (512, (3, 300)), (513, (511, 512)), (1, (0, 0))):
        logits = torch.full((1, vocab), -torch.inf)
        logits[0, list(allowed)] = torch.tensor([0.1, 0.3])
        drawn = draw_tokens(logits, torch.tensor([uniform], dtype=torch.float64))
        assert drawn is not None
        assert int(drawn[0]) == (allowed[0] if uniform == 0 else allowed[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_distribution_are_named(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 299] = bad
    assert draw_tokens(logits, torch.zeros(2, dtype=torch.float64)) is None
    assert draw_tokens(torch.full((1, 4), -torch.inf), torch.zeros(1, dtype=torch.float64)) is None


def test_frequencies_are_the_probabilities() -> None:
    """Chi-square over a flat-and-steep vocabulary of two blocks and a half."""
    vocab, draws = 640, 50_000
    logits = torch.linspace(-1.0, 1.0, vocab)
    generator = torch.Generator().manual_seed(3)
    drawn = draw_tokens(logits.expand(draws, vocab), torch.rand(draws, generator=generator, dtype=torch.float64))
    assert drawn is not None
    expected = draws * logits.double().softmax(0)
    statistic = ((torch.bincount(drawn[0], minlength=vocab) - expected) ** 2 / expected).sum().item()
    assert abs(statistic - (vocab - 1)) < 4 * (2 * (vocab - 1)) ** 0.5
