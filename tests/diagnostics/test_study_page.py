"""The page of a study: every curve where its numbers are, every variant in the table, nothing from elsewhere."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from fourfold.diagnostics.study_page import study_page
from fourfold.diagnostics.study_page.page import Frame, mean_curve
from fourfold.diagnostics.tables import as_text, study_table

NAME = "<b>& co</b>"


def report(name: str = NAME, *, seeds: int = 2) -> dict[str, Any]:
    """A study with two variants, of which one failed once."""
    curve = [(0, 1.0), (4, -3.0), (8, 2.0)]
    runs = [{"seed": seed, "status": "done", "seconds": 2.0, "curves": {"score": curve}} for seed in range(seeds)]
    shifted = [{**run, "curves": {"score": [(x, y + run["seed"]) for x, y in curve]}} for run in runs]
    failed = {"seed": 1, "status": "failed", "error": "gone", "curves": {}}
    measures = [
        {"name": "score", "title": "the score", "unit": "points"},
        {"name": "judge", "title": "the judge", "unit": "1"},
    ]
    return {
        "study": "prior", "question": "Which?", "output": "x", "steps": 8, "seeds": [*range(seeds)],
        "measures": measures,
        "variants": {
            name: {"about": "with <script>", "runs": shifted, "mean": {"score": 2.5}, "std": {"score": 0.7}},
            "other": {"about": "another", "runs": [runs[0], failed], "mean": {"score": 2.0}, "std": {}},
        },
    }  # fmt: skip


def test_the_page_is_one_file_and_escapes_what_it_shows() -> None:
    page = study_page(report())
    assert not re.findall(r'(?:href|src)="', page) and "http" not in page.replace("http://www.w3.org", "").replace(
        "http-equiv", ""
    )
    assert "<b>&" not in page and "&lt;b&gt;&amp; co" in page and "with <script>" not in page
    assert "2.5 ± 0.7" in page and "1 of 2 failed" in page and "the judge" not in page, "nobody measured it"


def test_curves_are_drawn_where_their_numbers_are() -> None:
    """Of several seeds thin lines and their mean; higher numbers lie higher, and steps to the right."""
    page = study_page(report("one"))
    svg = ElementTree.fromstring(re.search(r'<svg class="chart".*?</svg>', page, re.S)[0])  # type: ignore[index]
    paths = [(each.get("class"), each.get("data-of"), each.get("d", "")) for each in svg.iter("path")]
    assert [(kind, name) for kind, name, _ in paths] == [("seed", "one")] * 2 + [("curve", "one"), ("curve", "other")]
    points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", paths[-1][2])[1:]]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2 and y1 > y0 > y2, "the y axis of a drawing points down"
    assert abs((x1 - x0) - (x2 - x1)) < 0.01 and abs((y1 - y0) / (y1 - y2) - 4 / 5) < 0.01
    assert len({each.get("stroke") for each in svg.iter("path")}) == 2


def test_a_frame_has_room_for_every_point() -> None:
    for values in ([0.0], [-1.0, 1.0], [3.01, 3.02], [0.0, 1e-9], [1e6, -2e7], [5.0, 5.0]):
        frame = Frame.around([[(step, value) for step, value in enumerate(values)]])
        assert frame.low <= min(values) + 1e-9 and max(values) <= frame.high + 1e-9 and frame.low < frame.high
        for value in values:
            assert frame.top - 1e-6 <= frame.y(value) <= frame.height - frame.bottom + 1e-6


def test_a_mean_is_of_steps_that_all_runs_have() -> None:
    assert mean_curve([[(0, 1.0), (2, 3.0)], [(0, 2.0), (1, 9.0), (2, 5.0)]]) == [(0, 1.5), (2, 4.0)]


def test_the_table_of_the_terminal() -> None:
    text = as_text(study_table(report()))
    assert "the score, points" in text and "2.5 ± 0.7" in text and "the judge" not in text
    assert NAME in text and "runs that failed" in text
