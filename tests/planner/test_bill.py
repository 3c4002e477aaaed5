import pytest

from fourfold.planner.bill import Footprint, Item, Moment

GENERATE, CRITIC, ACTOR = Moment("generate", "actor"), Moment("learn", "critic"), Moment("learn", "actor")


def a_bill() -> Footprint:
    always = frozenset({GENERATE, CRITIC, ACTOR})
    return Footprint(
        (
            Item("actor", "weights", 100, always),
            Item("critic", "weights", 90, always),
            Item("critic", "gradients", 90, frozenset({CRITIC})),
            Item("actor", "gradients", 100, frozenset({ACTOR})),
            Item("actor", "optimizer", 200, always, tier="host"),
            Item("run", "KV cache", 7, frozenset({GENERATE})),
        )
    )


def test_a_moment_holds_what_is_there_then() -> None:
    bill = a_bill()
    assert bill.held(GENERATE) == 197
    assert bill.held(CRITIC) == 280
    assert bill.held(ACTOR, "host") == 200


def test_the_peak_is_the_fullest_moment() -> None:
    bill = a_bill()
    assert bill.peak() == (ACTOR, 290)
    assert bill.peak("generate") == (GENERATE, 197)
    assert bill.peak(tier="host")[1] == 200


def test_moments_come_in_the_order_of_a_run() -> None:
    assert a_bill().moments == (GENERATE, CRITIC, ACTOR)


def test_sums_by_kind_add_up_to_what_is_held() -> None:
    bill = a_bill()
    sums = bill.by(lambda item: item.kind, ACTOR)
    assert sums == {"weights": 190, "gradients": 100}
    assert sum(sums.values()) == bill.held(ACTOR)


def test_an_item_of_an_unknown_holder_is_refused() -> None:
    with pytest.raises(AssertionError):
        Item("teacher", "weights", 1, frozenset({GENERATE}))
