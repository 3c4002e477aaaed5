"""The comparison with TRL: what is asked of the workers and what is made of their answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_trl import SIDES, Side, command, figures, parse_arguments, peer_installations, result
from benchmarks.worker import WorkerReport, peak_rss_mib, read_report, run_worker, worker_parser


def report(seconds: list[float], memory: float = 1000.0, **changes: Any) -> dict[str, Any]:
    plain = {
        "what": "a library",
        "dtype": "float32",
        "trainable_parameters": {"actor": 10, "critic": 11},
        "seconds_per_update": seconds,
        "response_tokens_per_update": [96] * len(seconds),
        "peak_rss_mib": memory,
        "phases": {"generate": 1.0, "score": 2.0, "learn": 3.0},
        "versions": {"torch": "2.13.0"},
        "threads": 2,
    }
    return plain | changes


def runs(*seconds: float, memory: float = 1000.0) -> list[WorkerReport]:
    return [WorkerReport.model_validate(report([99.0, value], memory)) for value in seconds]


def test_the_first_update_is_not_counted() -> None:
    one = WorkerReport.model_validate(report([50.0, 4.0, 2.0, 3.0]))
    assert one.steady_seconds == 3.0


def test_figures_are_medians_and_ratios_of_medians_with_targets() -> None:
    sides = {"TRL float32": runs(10.0, 8.0, 12.0), "Fourfold trunk bfloat16": runs(1.0, 2.0, 1.0, memory=200.0)}
    found = {figure.name: figure for figure in figures(sides, batch=16)}
    assert found["TRL float32: seconds per update"].value == 10.0
    assert found["TRL float32: seconds per update"].spread == (8.0, 12.0)
    assert found["TRL float32: episodes per second"].value == 1.6
    assert found["Fourfold trunk bfloat16: score"].value == 2.0
    seconds = found["Fourfold trunk bfloat16 / TRL float32: seconds"]
    assert (seconds.value, seconds.spread, seconds.met) == (0.1, (1 / 12, 0.25), False)
    memory = found["Fourfold trunk bfloat16 / TRL float32: peak memory"]
    assert (memory.value, memory.target, memory.met) == (0.2, "<= 0.25", True)
    assert not any("TRL bfloat16" in name or "separate" in name for name in found)


def test_every_comparison_names_sides_that_exist() -> None:
    every = {side.name: runs(1.0) for side in SIDES}
    assert sum(figure.against is not None for figure in figures(every, batch=16)) == 10


def test_a_result_keeps_what_is_trained_and_every_update() -> None:
    made = result({"TRL float32": runs(10.0, 8.0)}, parse_arguments(["--rounds", "2"]))
    side = made.config["sides"]["TRL float32"]
    assert side["trainable_parameters"] == {"actor": 10, "critic": 11}
    assert side["seconds_per_update"] == [[99.0, 10.0], [99.0, 8.0]]
    assert made.name == "peer" and made.config["batch"] == 16


def test_a_shape_has_a_name_and_a_result_of_its_own() -> None:
    large = parse_arguments(["--shape", "64x64"])
    assert (large.batch, large.new_tokens, large.micro_batch) == (64, 64, 16)
    assert result({"TRL float32": runs(10.0, 8.0)}, large).name == "peer-64x64"
    usual = parse_arguments([])
    assert (usual.batch, usual.new_tokens, usual.micro_batch) == (16, 24, 16)
    assert parse_arguments(["--batch", "8"]).micro_batch == 8


def test_pieces_that_do_not_divide_a_batch_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--shape", "64x64", "--micro-batch", "24"])
    assert "--micro-batch 24: allowed are divisors of the batch of 64" in capsys.readouterr().err


def test_the_peers_torch_comes_from_the_index_that_is_given() -> None:
    [everything] = peer_installations(None)
    torch, rest = peer_installations("file:///wheels")
    assert rest == everything and everything[-2] == "-r" and "--index-url" not in everything
    assert torch[torch.index("--index-url") + 1] == "file:///wheels"
    # Its own dependencies need not be on that index.
    assert torch[-1] == "torch" and "--no-deps" in torch


def test_a_worker_understands_what_it_is_started_with() -> None:
    side = Side("Fourfold", "fourfold", "float32", ("--sharing", "none"))
    started = command(
        side, parse_arguments(["--batch", "8"]), interpreter=Path("x"), model="m", prompts=Path("p.jsonl")
    )
    parser = worker_parser("a worker")
    parser.add_argument("--sharing")
    args = parser.parse_args(started[3:])
    assert (args.batch, args.dtype, args.sharing, args.model, args.prompts) == (8, "float32", "none", "m", "p.jsonl")


def test_trl_worker_takes_the_same_arguments() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "trl_worker.py").read_text(encoding="utf-8")
    options = [option for action in worker_parser("")._actions for option in action.option_strings]
    assert [name for name in options if name.startswith("--") and f'"{name[2:]}"' not in text] == ["--help"]


@pytest.mark.parametrize("arguments", [["--updates", "1"], ["--rounds", "0"]])
def test_too_few_updates_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)


def test_the_last_line_of_a_worker_is_its_report() -> None:
    text = json.dumps(report([1.0, 2.0]))
    assert read_report(f"===training===\n{text}\n").seconds_per_update == [1.0, 2.0]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "printed nothing"),
        ("hello", "JSON"),
        (json.dumps(report([1.0])), "at least 2"),
        (json.dumps(report([1.0, 2.0], phases={"generate": 1.0, "other": 1.0})), "phases"),
        (json.dumps(report([1.0, float("inf")])), "finite"),
    ],
)
def test_an_output_that_is_no_report_is_refused(output: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_report(output)


def test_a_worker_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ended with 3"):
        run_worker([sys.executable, "-c", "import sys; sys.exit(3)"], environment={}, folder=tmp_path)


def test_the_peak_is_that_of_the_process_and_not_of_its_parent(tmp_path: Path) -> None:
    """A parent that once held much must not add to what its worker is said to need."""
    grown = bytearray(b"x" * (256 * 2**20))
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    program += "from benchmarks.worker import peak_rss_mib\nimport json\n"
    program += f"print(json.dumps({report([1.0, 2.0])!r} | {{'peak_rss_mib': peak_rss_mib()}}))"
    measured = run_worker([sys.executable, "-c", program], environment={}, folder=tmp_path)
    assert len(grown) / 2**20 == 256
    assert 5 < measured.peak_rss_mib < 200
    assert peak_rss_mib() > 256
