import pytest

from fourfold.planner.layout import Layout


def test_devices_are_the_product_and_experts_ride_on_data() -> None:
    assert Layout(data=4, tensor=2, expert=4).devices == 8
    assert Layout().devices == 1


def test_it_says_what_it_is() -> None:
    assert str(Layout(data=2, tensor=8, zero=1)) == "DP 2 x TP 8 x ZeRO-1"
    assert str(Layout()) == "one device"


@pytest.mark.parametrize("wrong", [{"data": 0}, {"zero": 4}, {"data": 4, "expert": 3}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="try"):
        Layout(**wrong)  # type: ignore[arg-type]
