"""Levers are measured as they are declared, and the table shows what was measured."""

from __future__ import annotations

import base64
import math
import struct
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.fourfold_worker import settings
from benchmarks.levers import MORE, PLAIN, SUBJECTS, Subject, difference, figures, result
from benchmarks.levers_table import levers_table
from benchmarks.peer_trl import Side, parse_arguments
from benchmarks.worker import PHASES, WorkerReport
from fourfold.config.schema import RunConfig
from fourfold.planner.levers import LEVERS

EXACT = Subject("parking", {"reference.residency": "park"})
BOUNDED = Subject("rounding", {"ppo.micro_batch_size": 1}, "bounded")
OTHER = Subject("adapters", {"sharing.mode": "adapters"}, "other parameters")


def config_of(side: Side, folder: Path) -> RunConfig:
    """What the worker makes of the side's arguments."""
    arguments = list(side.arguments)
    shape = {"model": "m", "prompts": "p", "dtype": "float32", "threads": 1, "seed": 0, "sharing": arguments[1]}
    sizes = {"new_tokens": 24, "batch": 16, "epochs": 4, "updates": 4}
    return settings(Namespace(**shape, **sizes, set=arguments[3::2]), folder)


def report(move: list[float], peak: float = 1000.0, weights: str = "same") -> WorkerReport:
    return WorkerReport(
        what="a side",
        dtype="float32",
        trainable_parameters={"actor": 10},
        seconds_per_update=[99.0, peak / 100],
        response_tokens_per_update=[96, 96],
        peak_rss_mib=peak,
        phase_peak_mib={phase: peak - i for i, phase in enumerate(PHASES)},
        phases=dict.fromkeys(PHASES, 1.0),
        resident_mib={"base": 300.0, "actor": 200.0},
        weights=weights,
        moved=base64.b64encode(struct.pack(f"<{len(move)}f", *move)).decode(),
        versions={"torch": "2.13.0"},
        threads=1,
    )


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_lever_is_switched_on_beside_a_baseline_without_it(tmp_path: Path, subject: Subject) -> None:
    having, without = (config_of(side, tmp_path) for side in (subject.having, subject.without))
    tree, plain = having.model_dump(), without.model_dump()
    differing = {f"{section}.{key}" for section, table in tree.items() if isinstance(table, dict)
                 for key in table if table[key] != (plain[section] or {}).get(key)}  # fmt: skip
    assert differing & subject.settings.keys()
    assert having.ppo.mini_batch_size == 16  # the work is the same


def test_every_lever_is_measured_or_says_why_not() -> None:
    assert [each.name for each in SUBJECTS] == [
        *(each.name for each in LEVERS if not each.not_benchmarked),
        *(each.name for each in MORE),
    ]
    assert len({side.name for each in SUBJECTS for side in (each.having, each.without)}) < 2 * len(SUBJECTS)


def test_the_difference_of_two_moves_is_a_share_of_the_baselines() -> None:
    assert difference([3.0, 4.0], [3.0, 4.0]) == 0
    assert difference([3.0, 4.0], [6.0, 8.0]) == 1
    assert math.isclose(difference([1.0, 1.0], [1.0, -1.0]), math.sqrt(2))


def test_an_exact_lever_is_held_to_its_promise_in_every_round() -> None:
    base, same, other = report([1.0]), report([1.0]), report([1.0], weights="other")
    reports = {PLAIN: [base, base, base], "parking": [same, other, same]}
    found = {figure.name: figure for figure in figures([EXACT], reports)}
    broken = found[f"parking / {PLAIN}: rounds with other weights"]
    assert broken.value == 1.0 and broken.met is False
    reports["parking"] = [same, same, same]
    kept = {figure.name: figure for figure in figures([EXACT], reports)}
    assert kept[f"parking / {PLAIN}: rounds with other weights"].met


def test_the_table_shows_each_lever_beside_its_baseline() -> None:
    reports = {
        PLAIN: [report([3.0, 4.0])],
        "parking": [report([3.0, 4.0], 800.0)],
        "rounding": [report([3.0, 4.5], 900.0, "other")],
        "adapters": [report([1.0], 500.0, "other")],
    }
    made = result([EXACT, BOUNDED, OTHER], reports, parse_arguments(["--rounds", "1"]))
    head, _, *rows = levers_table(made)
    assert head == (
        "| lever | seconds | peak MiB | in generate | in score | in learn | weights MiB | update | against |"
    )
    numbers = "10.0 -> 8.00 | 1,000 -> 800 | 1,000 -> 800 | 999 -> 799 | 998 -> 798 | 500 -> 500"
    assert rows[0] == f"| parking | {numbers} | 0 | {PLAIN} |"
    assert rows[1].endswith(f"| 0.10 | {PLAIN} |") and rows[2].endswith(f"| of other parameters | {PLAIN} |")
    reports["parking"] = [report([3.0, 4.0], weights="other")]
    broken = result([EXACT], reports, parse_arguments(["--rounds", "1"]))
    assert "NOT bit-equal" in levers_table(broken)[2]
