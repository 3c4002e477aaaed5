"""The table of what fewer bits cost, out of a report."""

from __future__ import annotations

from benchmarks.quantization import COLUMNS, MEASURED, figures, quantization_table, result_of
from fourfold.training.quantization_bench import Line, Report

REPORT = Report(
    model="m", held="bfloat16", texts=3, tokens=1210, pairs=5,
    lines=(
        Line("as held", reference_bytes=2**20, reward_bytes=2**21, pair_accuracy=0.8, speed=1.0),
        Line("nf4", 2**19, 2**20, 0.25, 0.5, 0.125, 0.0625, 0.9375, 0.6, 0.5, note="log-probs beyond 0.5"),
        Line("onnx", reward_bytes=2**22, score_gap=0.001, score_rank_correlation=1.0, pair_accuracy=0.8, speed=2.0),
        Line("gguf", note="cannot run here: no package"),
    ),
)  # fmt: skip


def test_every_number_that_was_measured_is_a_figure() -> None:
    """Those of the type Line, all of them; nothing stands for what could not be measured."""
    assert MEASURED.keys() == set(Line.__dataclass_fields__) - {"kind", "note"}
    found = {figure.name: figure.value for figure in figures(REPORT)}
    assert found["nf4: reference_bytes"] == 0.5 and found["nf4: pair_accuracy"] == 0.6
    assert not [name for name in found if name.startswith("gguf")] and len(found) == 4 + len(MEASURED) + 5


def test_a_row_for_each_kind_and_what_was_noted() -> None:
    head, _, held, nf4, onnx, gguf, *below = quantization_table(result_of(REPORT, "reviews", threads=1))
    assert head.count("|") == held.count("|") == len(COLUMNS) + 2
    assert held == "| as held | 1.0 | 2.0 | - | - | - | - | - | 80.0% | 1.00 |"
    assert nf4 == "| nf4 | 0.5 | 1.0 | +0.2500 | 0.5000 | 0.1250 | 0.0625 | 0.9375 | 60.0% | 0.50 |"
    assert onnx.startswith("| onnx | - | 4.0 | - |") and gguf == "| gguf" + " | -" * len(COLUMNS) + " |"
    assert below[1] == "* 3 texts of 1,210 tokens, 5 pairs; as held: bfloat16; 1 thread."
    assert below[2:] == ["* nf4: log-probs beyond 0.5.", "* gguf: cannot run here: no package."]


def test_speed_is_a_comparison() -> None:
    against = {figure.name: figure.against for figure in figures(REPORT)}
    assert against["nf4: speed"] == "as held" and against["nf4: kl_bias"] is None
