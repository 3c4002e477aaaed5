"""The planner's head of a critic with several values has the numbers of the real one."""

from __future__ import annotations

import pytest

from fourfold.models.heads import MultiHead, VectorHead
from fourfold.planner.compute import forward_flops
from fourfold.planner.footprint import footprint
from fourfold.planner.footprint.roles import cast_of
from fourfold.planner.holding import own_parameters
from fourfold.planner.number_head import NumberHead
from planner.small_scenes import scene

HIDDEN = 16
SCALAR, VECTOR = ("critic.heads='scalar'",), ("critic.heads='vector'",)
MULTI = ("critic.heads='multi'", "critic.head_width=5")


@pytest.mark.parametrize("settings", [VECTOR, MULTI])
def test_its_numbers_are_those_of_the_module(settings: tuple[str, ...]) -> None:
    """One source: its score and the penalties."""
    real = VectorHead(HIDDEN, 2) if settings == VECTOR else MultiHead(HIDDEN, 2, 5, seed=0)
    head = NumberHead.of_critic(scene(*settings).config)
    assert head.numbers(HIDDEN) == sum(p.numel() for p in real.parameters())
    assert sorted(head.matrices(HIDDEN)) == sorted(p.numel() for p in real.parameters() if p.ndim > 1)
    assert head.products(HIDDEN) == head.numbers(HIDDEN) - 2, "a multiply-add for each weight, none for a bias"


@pytest.mark.parametrize("settings", [VECTOR, MULTI])
def test_weights_gradients_and_moments_grow_by_what_the_head_has_more(settings: tuple[str, ...]) -> None:
    plain, several = scene(*SCALAR), scene(*settings)
    more = NumberHead.of_critic(several.config).numbers(HIDDEN) - NumberHead().numbers(HIDDEN)
    assert more > 0
    critics = [cast_of(each).critic for each in (plain, several)]
    assert critics[1].own_bytes() - critics[0].own_bytes() == 4 * more
    assert critics[1].trained_numbers() - critics[0].trained_numbers() == more
    assert own_parameters(several, "critic") - own_parameters(plain, "critic") == more
    assert own_parameters(several, "reward") == own_parameters(plain, "reward")


@pytest.mark.parametrize("settings", [VECTOR, MULTI])
@pytest.mark.parametrize("mode", ["none", "trunk", "adapters"])
def test_a_bill_takes_every_sharing(settings: tuple[str, ...], mode: str) -> None:
    def most(*given: str) -> float:
        return footprint(scene(f"sharing.mode='{mode}'", *given)).peak()[1]

    assert most(*settings) > most(*SCALAR)


def test_flops_of_the_head_are_two_a_weight_and_token() -> None:
    a = scene().base
    sizes = {"layers": 0, "tokens": 10, "attended_tokens": 55, "head_tokens": 7}
    for head in (NumberHead(), NumberHead(3), NumberHead(3, 5)):
        assert forward_flops(a, head=head, **sizes) == 2 * 7 * head.products(HIDDEN)
