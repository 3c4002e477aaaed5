"""Levers are measured as they are declared, and the table shows what was measured."""

from __future__ import annotations

import base64
import itertools
import math
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fourfold_worker import settings
from benchmarks.lever_rows import PLAIN, conflict, difference, figures_of, merged
from benchmarks.levers import MORE, ON_CUDA, ONLY_ON_A_GPU, SUBJECTS, Subject, main, parse, placed, result
from benchmarks.levers_table import levers_table
from benchmarks.peer_trl import Side
from benchmarks.results import Figure, Result, read_results, write_result
from benchmarks.worker import PHASES, WorkerReport
from fourfold.config.schema import RunConfig
from fourfold.planner.levers import LEVERS

EXACT = Subject("parking", {"reference.residency": "park"})
BOUNDED = Subject("rounding", {"ppo.micro_batch_size": 1}, "bounded")
OTHER = Subject("adapters", {"sharing.mode": "adapters"}, "other parameters")


def config_of(side: Side, folder: Path) -> RunConfig:
    """What the worker makes of the side's arguments."""
    arguments = list(side.arguments)
    given = [value for key, value in itertools.pairwise(arguments) if key == "--set"]
    shape = {"model": "m", "prompts": "p", "dtype": "float32", "threads": 1, "seed": 0, "sharing": arguments[1]}
    sizes = {"new_tokens": 24, "batch": 16, "micro_batch": 16, "epochs": 4, "updates": 4}
    device = arguments[arguments.index("--device") + 1] if "--device" in arguments else "cpu"
    return settings(Namespace(**shape, **sizes, set=given, device=device), folder)


def report(
    move: list[float], peak: float = 1000.0, weights: str = "same", gap: float = 0.0, service: float = 0.0
) -> WorkerReport:
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
        log_prob_gap=gap,
        service_peak_mib=service,
        moved=base64.b64encode(struct.pack(f"<{len(move)}f", *move)).decode(),
        versions={"torch": "2.13.0"},
        threads=1,
    )


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_lever_is_switched_on_beside_a_baseline_without_it(tmp_path: Path, subject: Subject) -> None:
    sides = (placed(side, subject.only_on or "cpu", "float32") for side in (subject.having, subject.without))
    having, without = (config_of(side, tmp_path) for side in sides)
    tree, plain = having.model_dump(), without.model_dump()
    differing = {f"{section}.{key}" for section, table in tree.items() if isinstance(table, dict)
                 for key in table if table[key] != (plain[section] or {}).get(key)}  # fmt: skip
    assert differing & subject.settings.keys()
    assert having.ppo.mini_batch_size == 16  # the work is the same


def responses_of(side: Side) -> str:
    """The file with the responses that the side learns from."""
    return side.arguments[side.arguments.index("--responses") + 1]


def test_every_lever_is_measured_on_the_responses_of_its_baseline() -> None:
    declared = [each.name for each in LEVERS]
    assert [each.name for each in SUBJECTS] == [*declared, *(each.name for each in MORE)]
    assert {each.name for each in SUBJECTS if each.only_on} == {*ONLY_ON_A_GPU}
    assert len({side.name for each in SUBJECTS for side in (each.having, each.without)}) < 2 * len(SUBJECTS)
    for each in SUBJECTS:
        assert responses_of(each.having) == responses_of(each.without)
        assert ": " not in each.name  # a figure's name is a lever's up to there
    assert len({responses_of(each.without) for each in SUBJECTS}) == len({each.without.name for each in SUBJECTS})


def test_the_difference_of_two_moves_is_a_share_of_the_baselines() -> None:
    assert difference([3.0, 4.0], [3.0, 4.0]) == 0
    assert difference([3.0, 4.0], [6.0, 8.0]) == 1
    assert math.isclose(difference([1.0, 1.0], [1.0, -1.0]), math.sqrt(2))


def test_an_exact_lever_is_held_to_its_promise_in_every_round() -> None:
    base, same, other = report([1.0]), report([1.0]), report([1.0], weights="other")

    def promise(runs: list[WorkerReport]) -> Figure:
        found = figures_of("parking", "exact", PLAIN, runs, [base, base, base])
        return {figure.name: figure for figure in found}["parking: rounds with other weights"]

    broken = promise([same, other, same])
    assert broken.value == 1.0 and broken.met is False
    assert promise([same, same, same]).met


def test_the_worst_round_of_a_bounded_lever_is_told() -> None:
    base = report([3.0, 4.0])
    mine = [report([3.0, 4.5], gap=0.2), report([3.0, 4.0], gap=0.3), report([3.0, 4.0])]
    found = {figure.name: figure for figure in figures_of("rounding", "bounded", PLAIN, mine, [base] * 3)}
    assert found["rounding: difference of the update"].value == 0.1
    assert found["rounding: difference of log-probs"].value == 0.3


REPORTS = {
    PLAIN: [report([3.0, 4.0])],
    "parking": [report([3.0, 4.0], 800.0, service=700.0)],
    "rounding": [report([3.0, 4.5], 900.0, "other", gap=0.25)],
    "adapters": [report([1.0], 500.0, "other")],
}


def measured(*subjects: Subject, date: str = "2026-01-31", **changes: list[WorkerReport]) -> Result:
    """The result of one round of two updates, of a day."""
    found = result(subjects, REPORTS | changes, parse(["--rounds", "1", "--updates", "2", "--dry"]))
    rows = {name: row | {"date": date} for name, row in found.config["levers"].items()}
    return found.model_copy(update={"date": date, "config": found.config | {"levers": rows}})


def test_the_table_shows_each_lever_beside_its_baseline() -> None:
    head, _, *rows = levers_table(measured(EXACT, BOUNDED, OTHER))
    assert head == (
        "| lever | seconds | peak MiB | in generate | in score | in learn | weights MiB | update | log p | against |"
    )
    numbers = "10.0 -> 8.00 | 1,000 -> 800 | 1,000 -> 800 | 999 -> 799 | 998 -> 798 | 500 -> 500"
    assert rows[0] == f"| parking | {numbers} | 0 | 0 | {PLAIN} |"
    assert rows[1].endswith(f"| 0.10 | 0.25 | {PLAIN} |")
    assert rows[2].endswith(f"| of other parameters | - | {PLAIN} |")
    assert rows[4].startswith(f"* {PLAIN}: a side.") and rows[5].startswith("* adapters: a side.")
    assert rows[6] == "* parking: the service itself takes 700 MiB at its peak."
    assert rows[7].startswith("* Not measured yet: trunk, ")
    assert rows[-1].startswith("2026-01-31, ") and rows[-1].endswith("torch 2.13.0; 1 x 2 updates.")
    broken = measured(EXACT, parking=[report([3.0, 4.0], weights="other")])
    assert "NOT bit-equal" in levers_table(broken)[2]


ORDER = ["adapters", "parking", "rounding"]


def test_rows_that_are_measured_anew_replace_their_like_and_leave_the_others() -> None:
    earlier = measured(EXACT, OTHER)
    again = measured(EXACT, BOUNDED, date="2026-02-01", parking=[report([3.0, 4.0], 600.0)])
    both = merged(earlier, again, ORDER)
    assert Result.model_validate_json(both.model_dump_json()) == both
    assert {name: row["date"] for name, row in both.config["levers"].items()} == {
        "adapters": "2026-01-31",
        "parking": "2026-02-01",
        "rounding": "2026-02-01",
    }
    values = {figure.name: figure.value for figure in both.figures}
    assert values["parking: peak memory with it"] == 600.0 and values["adapters: peak memory with it"] == 500.0
    assert "parking: peak memory of the service" not in values  # of the row that went
    lines = levers_table(both)
    assert lines[-2].startswith("* 2026-01-31, ") and lines[-2].endswith("; 1 x 2 updates: adapters.")
    assert lines[-1].startswith("* 2026-02-01, ") and lines[-1].endswith("; 1 x 2 updates: parking, rounding.")
    assert merged(None, again, ORDER) == again
    assert list(merged(earlier, again, ["rounding"]).config["levers"]) == ["rounding"]  # the others are no levers now


def test_a_row_that_was_measured_elsewhere_says_so() -> None:
    """Of results from before rows had hardware of their own, too."""
    earlier = measured(EXACT).model_copy(update={"hardware": "one machine"})
    earlier.config["levers"]["parking"].pop("hardware", None)
    both = merged(earlier, measured(BOUNDED).model_copy(update={"hardware": "another"}), ORDER)
    assert both.hardware == "another" and both.config["levers"]["parking"]["hardware"] == "one machine"
    assert any("one machine" in line and line.endswith(": parking.") for line in levers_table(both))


def test_a_result_that_continues_another_takes_its_place(tmp_path: Path) -> None:
    earlier, later = measured(EXACT), measured(BOUNDED, date="2026-02-01")
    write_result(earlier, tmp_path)
    both = merged(earlier, later, ORDER)
    write_result(both, tmp_path, instead_of=earlier)
    write_result(both, tmp_path, instead_of=both)
    assert read_results(tmp_path) == [both]


def test_rows_of_another_shape_are_refused_unless_all_are_measured() -> None:
    earlier = measured(EXACT, OTHER)
    shape = {key: earlier.config[key] for key in ("model", "batch")}
    assert conflict(earlier, shape, ["parking"]) == "" == conflict(None, shape, ["parking"])
    other = shape | {"batch": 8}
    assert "batch = 16, not 8; give the same" in conflict(earlier, other, ["parking"])
    assert conflict(earlier, other, ["parking", "adapters", "rounding"]) == ""


def test_a_conflict_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.levers.newest", lambda name: measured(EXACT, OTHER))
    with pytest.raises(SystemExit) as ended:
        main(["--lever", "micro-batches", "--batch", "8", "--model", str(tmp_path / "nothing")])
    assert ended.value.code == 2 and "batch = 16, not 8" in capsys.readouterr().err


def test_each_kind_of_device_measures_what_runs_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU has a result of its own, whose rows are of one type."""
    monkeypatch.setattr("benchmarks.levers.newest", lambda name: None)
    here = {each.name for each in parse(["--device", "cpu"]).subjects}
    there = {each.name for each in parse(["--device", "cuda", "--dtype", "bfloat16"]).subjects}
    assert not here & {*ONLY_ON_A_GPU} and here < there
    with pytest.raises(SystemExit):
        parse(["--lever", "paged_adamw"])
    assert "--lever 'paged_adamw' runs on another kind of device than --device cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--dtype", "bfloat16"])
    assert "--dtype bfloat16: rows of a CPU stand on float32" in capsys.readouterr().err
    assert main(["--lever", "park reference", "--model", "random:9b", "--dry"]) == 2
    assert "--model random:9b: allowed: random:smollm2-135m, " in capsys.readouterr().err
    side = placed(EXACT.having, "cuda", "bfloat16")
    assert side.dtype == "bfloat16" and side.arguments[-2:] == ("--device", "cuda")


def test_what_is_hidden_is_told_in_seconds_by_phase_and_a_gpu_lacks_no_lever() -> None:
    streaming = Subject("stream reference", {"reference.residency": "stream"})
    changes: dict[str, Any] = {"stream reference": [report([3.0, 4.0], 800.0)]}
    found = measured(streaming, **changes)
    text = "\n".join(levers_table(found))
    assert "* stream reference, seconds: generate 1.00 -> 1.00, score 1.00 -> 1.00, learn 1.00 -> 1.00." in text
    assert "Not measured without a GPU: flash attention" in text
    text = "\n".join(levers_table(found.model_copy(update={"name": ON_CUDA})))
    assert "without a GPU" not in text and "paged_adamw_8bit" in text
