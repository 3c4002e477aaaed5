"""Heads with a number for each dimension, against as many heads with one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fourfold.models.assembly import set_new_head_bias
from fourfold.models.heads import MultiHead, ScalarHead, VectorHead
from fourfold.models.roles import Scorer, scorer_on
from models.test_assembly import Stages
from tiny_roles import activations_of, tiny_base, tiny_rollout

LENGTHS = [(3, 4), (5, 2), (1, 6)]


def random_vector(hidden: int, dimensions: int, width: int = 0) -> VectorHead:
    head = MultiHead(hidden, dimensions, width, seed=0) if width else VectorHead(hidden, dimensions)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*head.parameters(), head.scale, head.shift):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return head


def scalar_of(head: VectorHead, dimension: int) -> ScalarHead:
    """One dimension of a linear head as a head of its own."""
    alone = ScalarHead(head.linear.in_features)
    with torch.no_grad():
        alone.linear.weight.copy_(head.linear.weight[dimension : dimension + 1])
        alone.linear.bias.copy_(head.linear.bias[dimension : dimension + 1])
        alone.scale.copy_(head.scale[dimension])
        alone.shift.copy_(head.shift[dimension])
    return alone


def test_each_dimension_of_a_linear_head_is_a_scalar_head() -> None:
    head, hidden = random_vector(8, 3), torch.randn(2, 5, 8)
    assert head.shape == (3,) and ScalarHead(8).shape == ()
    for k in range(3):
        torch.testing.assert_close(head(hidden)[..., k], scalar_of(head, k)(hidden), atol=1e-5, rtol=1e-5)


def test_a_new_multi_head_says_what_a_linear_one_says_and_the_same_in_every_run() -> None:
    head, hidden = MultiHead(8, 3, 4, seed=7), torch.randn(2, 5, 8)
    with torch.no_grad():
        head.linear.weight.normal_()
    assert torch.equal(head(hidden), head.linear(hidden))
    assert torch.equal(MultiHead(8, 3, 4, seed=7).inner, head.inner)
    assert not torch.equal(MultiHead(8, 3, 4, seed=8).inner, head.inner)
    head(hidden).sum().backward()
    assert head.outer.grad is not None and head.outer.grad.abs().min() > 0, "a zero that nothing can move would be dead"


def test_the_layer_of_a_dimension_is_its_own() -> None:
    """Other units change that dimension alone; and what they add is the sum by hand."""
    head, hidden = random_vector(8, 3, width=4), torch.randn(5, 8)
    assert isinstance(head, MultiHead)
    before = head(hidden)
    by_hand = head.linear(hidden)[:, 1] + sum(
        head.outer[1, j] * torch.nn.functional.gelu(hidden @ head.inner[4 + j]) for j in range(4)
    )
    torch.testing.assert_close(before[:, 1], head.scale[1] * by_hand + head.shift[1], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        head.inner[4:8] += 1.0
    changed = (head(hidden) != before).any(dim=0)
    assert changed.tolist() == [False, True, False]


@pytest.mark.parametrize("width", [0, 4])
def test_values_of_every_dimension_are_read_where_those_of_one_are(tmp_path: Path, width: int) -> None:
    """The state before each token, 0 after the end, and the last state, with padding of any amount."""
    base = tiny_base(tmp_path / "llama")
    critic, rollout = scorer_on(base.policy), tiny_rollout(LENGTHS)
    head = random_vector(critic.branch.hidden_size, 2, width)
    activations = activations_of(base, rollout)
    values, last = Scorer(critic.branch, head).values_and_last(activations, rollout)
    mask = rollout.response_mask
    assert values.shape == (*mask.shape, 2) and last.shape == (len(mask), 2)
    assert values[~mask].abs().max().item() == 0.0
    torch.testing.assert_close(Scorer(critic.branch, head).values(activations, rollout), values)
    for k in range(2):
        one = random_vector(critic.branch.hidden_size, 2, width)

        class Alone(ScalarHead):
            def forward(self, hidden: torch.Tensor, k: int = k, one: VectorHead = one) -> torch.Tensor:
                return one(hidden)[..., k]

        alone, alone_last = Scorer(critic.branch, Alone(8)).values_and_last(activations, rollout)
        torch.testing.assert_close((values[..., k], last[..., k]), (alone, alone_last))


@pytest.mark.parametrize("heads", ["vector", "multi"])
def test_a_critic_from_the_reward_model_values_its_part_as_that_scores_it(tmp_path: Path, heads: str) -> None:
    """The part's dimension says what the reward model says, and keeps it when the new ones get the mean scores."""
    models = Stages(tmp_path, "trunk").assemble("reward", heads=heads)
    rollout = tiny_rollout(LENGTHS)
    assert isinstance(models.reward, Scorer) and isinstance(models.critic.head, VectorHead)
    activations = activations_of(models.base, rollout)
    scores = models.reward.scores(activations)
    torch.testing.assert_close(models.critic.values_and_last(activations, rollout)[1][:, 0], scores)
    set_new_head_bias(models.critic, torch.tensor([5.0, -0.25]))
    last = models.critic.values_and_last(activations, rollout)[1]
    torch.testing.assert_close(last[:, 0], scores)
    assert last[:, 1].tolist() == [-0.25] * len(LENGTHS)


def test_a_new_vector_head_starts_at_the_mean_of_each_dimension(tmp_path: Path) -> None:
    models = Stages(tmp_path, "trunk").assemble("actor", heads="vector")
    set_new_head_bias(models.critic, torch.tensor([0.75, -1.5]))
    rollout = tiny_rollout(LENGTHS)
    values = models.critic.values(activations_of(models.base, rollout), rollout)
    assert values[rollout.response_mask].tolist() == [[0.75, -1.5]] * int(rollout.response_mask.sum())
