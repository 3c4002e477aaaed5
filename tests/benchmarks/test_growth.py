"""How growth is read off seconds, on curves whose exponents are known."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import __main__ as whole
from benchmarks.growth import AXES, STAYS, exponent, figures, straightness
from benchmarks.peer_trl import parse_arguments
from benchmarks.worker import WorkerReport


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_that_power(power: float) -> None:
    sizes = [8.0, 24.0, 80.0]
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_a_straight_line_with_a_constant_part_is_straight_and_grows_less() -> None:
    sizes = [1.0, 3.0, 10.0]
    seconds = [2 + 0.5 * size for size in sizes]
    assert straightness(sizes, seconds) == pytest.approx(1.0) and exponent(sizes, seconds) < 1
    assert straightness(sizes, [size**2 for size in sizes]) < 1 < straightness(sizes, [size**0.5 for size in sizes])


def run(seconds: float, tokens: int, learn: float) -> WorkerReport:
    return WorkerReport(
        what="a library",
        dtype="float32",
        trainable_parameters={"actor": 1},
        seconds_per_update=[99.0, seconds],
        response_tokens_per_update=[tokens, tokens],
        peak_rss_mib=1.0,
        phases={"generate": seconds - learn - 0.1, "score": 0.1, "learn": learn},
        versions={"torch": "1"},
        threads=1,
    )


def test_tokens_are_those_that_were_drawn_with_their_prompts() -> None:
    """16 rows of 4 + 6 and of 4 + 96 tokens, ten times as many: in ten times the seconds the exponent is 1."""
    args = parse_arguments([])
    points = {8: [run(1.0, 16 * 6, 0.5)], 24: [run(3.0, 16 * 26, 1.5)], 80: [run(10.0, 16 * 96, 5.0)]}
    found = {figure.name: figure for figure in figures("tokens", points, args)}
    assert found["tokens 80: seconds an update"].value == 10.0
    assert found["tokens: exponent of the update"].value == pytest.approx(1.0)
    assert found["tokens: exponent of the update"].met
    assert found["tokens: exponent of the score"].value == pytest.approx(0.0)


def test_every_axis_is_a_decade_whose_micro_batches_divide() -> None:
    for option, (_, sizes) in AXES.items():
        assert sizes[-1] == 10 * sizes[0] and len(sizes) == 3
        shape = STAYS | {option: sizes[1]}
        args = parse_arguments([text for name, value in shape.items() for text in (f"--{name}", str(value))])
        assert args.micro_batch == 8


def test_every_measurement_is_a_program_that_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for module, *_ in whole.MEASUREMENTS.values():
        program = importlib.import_module(module)
        assert callable(program.main) and program.__doc__
    assert set(whole.USUAL) <= set(whole.MEASUREMENTS)
    with pytest.raises(SystemExit):
        whole.main(["nothing"])
    assert "nothing: no such measurement; allowed: peer" in capsys.readouterr().err
