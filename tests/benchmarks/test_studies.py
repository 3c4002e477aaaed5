"""A study's report as a result, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import result_of, study_table
from fourfold.config.loading import CONFIG


def finished(folder: Path, status: str = "done") -> Path:
    finals: dict[str, list[dict[str, float]]] = {
        "a": [{"score": 1.0}, {"score": 3.0}],
        "b": [{"score": 2.0, "kl": 5.0}] * 2,
    }
    variants: dict[str, Any] = {
        name: {
            "about": f"what {name} is",
            "runs": [{"seed": s, "status": status, "final": f} for s, f in enumerate(some)],
        }
        for name, some in finals.items()
    }
    measures = [{"name": n, "title": f"the {n}", "unit": "u"} for n in ("score", "kl", "never")]
    report = {"study": "prior", "steps": 4, "seeds": [0, 1], "measures": measures, "variants": variants}
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps(report))
    for name in finals:
        (folder / name / "seed-0").mkdir(parents=True)
        (folder / name / "seed-0" / CONFIG).write_text(f"output = {name!r}")
    return folder


def test_a_row_for_each_measure_and_a_column_for_each_variant(tmp_path: Path) -> None:
    result = result_of(finished(tmp_path / "study"))
    assert result.name == "study-prior" and result.config["settings"]["b"] == "output = 'b'"
    assert {figure.name: figure.value for figure in result.figures} == {"a: score": 2.0, "b: score": 2.0, "b: kl": 5.0}
    assert study_table(result) == [
        "| measure | a | b |",
        "|---|---|---|",
        "| the score (u) | 2.00 (1.00 - 3.00) | 2.00 |",
        "| the kl (u) | - | 5.00 |",
        "",
        "* 4 steps, seeds 0, 1.",
        "* a: what a is.",
        "* b: what b is.",
    ]


def test_what_has_not_finished_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not every run of the study has finished"):
        result_of(finished(tmp_path / "study", "failed"))
    with pytest.raises(ValueError, match=r"has no study\.json; give the folder"):
        result_of(tmp_path)
