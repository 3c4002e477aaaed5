"""The page of a run: what is on it of finished, running, interrupted and failed runs; nothing that is not escaped."""

from __future__ import annotations

import json
import re
import shutil
import socket
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diagnostics.page_checks import colours, contrast, drawings, parsed, style_of
from diagnostics.shown_run import GOOD, HOSTILE, ILL, STEPS, Unsaid, change_json, copy_of, make_run, said, set_state
from fourfold.diagnostics.metrics import METRICS, Band
from fourfold.diagnostics.predicted import memory_of, time_of
from fourfold.diagnostics.report import Asked, write_report
from fourfold.diagnostics.report_page import Contents, missing, report_page
from fourfold.diagnostics.report_page.charts import GROUPS
from fourfold.diagnostics.report_page.curves import HEIGHT, Curve, Line, axes_of, curve
from fourfold.diagnostics.run_record import MOST_POINTS, read_run, thinned
from training.runs import merged, run, settings

BOTH = said(ILL, GOOD)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("shown"))


def page_of(folder: Path, doctor: Any = BOTH, **changes: Any) -> str:
    record = replace(read_run(folder), **changes)
    return report_page(Contents(record, doctor, "none here", memory_of(record), time_of(record)), now=0.0)


def text_of(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S))


def test_a_finished_run_has_every_part(whole: Path, tmp_path: Path) -> None:
    contents = write_report(whole, tmp_path / "page.html", Asked(samples=3))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    tags = parsed(page)
    for part in (*(group.key for group in GROUPS), "samples", "xray", "time", "memory", "metrics", "settings"):
        assert tags.ids[part] == 1, part
        assert f'href="#{part}"' in page
    assert set(tags.ids.values()) == {1}
    assert "Finished" in page and f"{STEPS} steps of ppo" in page
    assert not isinstance(contents.xray, str)
    for _, name, value in tags.attributes:
        if name in ("aria-labelledby", "for"):
            assert value and set(value.split()) <= tags.ids.keys()
    assert not [each for each in missing(contents) if not each.startswith(("doctor", "planned time"))]


def test_the_page_needs_nothing_else(whole: Path, tmp_path: Path) -> None:
    write_report(whole, tmp_path / "page.html", Asked(samples=3))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    tags = parsed(page)
    assert not {"link", "img", "iframe", "image", "use", "object", "video", "form"} & tags.tags.keys()
    assert {value[0] for _, name, value in tags.attributes if name in ("src", "href", "xlink:href") and value} == {"#"}
    without = page.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody looks up
    assert "://" not in without and "@import" not in page and "url(" not in page
    assert "default-src 'none'" in page
    assert len(page.encode()) < 400_000


@pytest.mark.parametrize(
    ("state", "said", "shown"),
    [
        ("running", "", ("Running", "stage ppo: is at work")),
        ("interrupted", "stopped after step 4 of 9", ("Interrupted", "stage ppo: was stopped; the same command")),
        ("failed", "step 5: reward: not finite", ("Failed", "step 5: reward: not finite", "stage ppo: failed")),
    ],
)
def test_a_run_that_has_not_finished_says_how_it_stands(
    whole: Path, tmp_path: Path, state: str, said: str, shown: tuple[str, ...]
) -> None:
    def harm(folder: Path) -> None:
        set_state(folder, state, said)
        (folder / "ppo" / "after.json").unlink()

    text = text_of(page_of(copy_of(whole, tmp_path / "run", harm)))
    assert all(each in text for each in shown)
    assert "samples before and after: they are written before the first and after the last step" in text


def test_a_run_that_has_just_begun_is_shown(whole: Path, tmp_path: Path) -> None:
    """The folder as it is when the model has been loaded: settings and a state."""

    def harm(folder: Path) -> None:
        set_state(folder, "running")
        shutil.rmtree(folder / "ppo")
        for path in folder.iterdir():
            if path.name not in ("config.toml", "state.json"):
                path.unlink()

    folder = copy_of(whole, tmp_path / "run", harm)
    contents = write_report(folder, tmp_path / "page.html", Asked())
    text = text_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "no step of ppo has been logged" in text and "no rollout has been kept yet" in text
    assert contents.memory.peaks, "the planner needs the settings alone"


def test_a_run_without_ppo_is_shown(tmp_path: Path) -> None:
    run(merged(settings(tmp_path), {"stages": ["sft"]}))
    contents = write_report(tmp_path / "run", tmp_path / "page.html", Asked())
    text = text_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "Finished" in text and "stages sft" in text and "Where the seconds went" in text
    [lacks] = missing(contents)
    assert "the stage ppo, which is not among" in lacks


def test_damaged_files_are_named_and_the_rest_is_shown(whole: Path, tmp_path: Path) -> None:
    def harm(folder: Path) -> None:
        (folder / "spent.json").write_text("{")
        log = folder / "ppo" / "metrics.jsonl"
        log.write_text(log.read_text() + '{"kind": "ppo_st')  # a row that is being written
        (folder / "memory.jsonl").write_text("garbage\n{}\n")
        for kept in (folder / "ppo" / "evaluations").iterdir():
            kept.write_bytes(kept.read_bytes()[:200])

    folder = copy_of(whole, tmp_path / "run", harm)
    contents = write_report(folder, tmp_path / "page.html", Asked())
    lacks = " ".join(missing(contents))
    assert "spent.json" in lacks and "memory.jsonl, line 1" in lacks and "not a readable Parquet file" in lacks
    assert contents.record.step == STEPS


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no config\.toml"):
        write_report(tmp_path, tmp_path / "page.html", Asked())
    assert list(tmp_path.iterdir()) == []


def test_what_models_write_and_users_name_is_text(whole: Path, tmp_path: Path) -> None:
    def harm(folder: Path) -> None:
        for name in ("before.json", "after.json"):
            texts = {"prompts": [HOSTILE] * 3, "responses": [f"{HOSTILE} {name}"] * 3}
            change_json(folder / "ppo" / name, lambda value, texts=texts: value.update(texts))
        set_state(folder, "failed", HOSTILE)

    plain = parsed(page_of(copy_of(whole, tmp_path / "plain", lambda folder: set_state(folder, "failed", "plainly"))))
    folder = copy_of(whole, tmp_path / "<b>&'\"", harm)
    page = page_of(folder, said(replace(ILL, name=HOSTILE, evidence=HOSTILE, remedy=HOSTILE), GOOD))
    tags = parsed(page)
    assert tags.tags["script"] == 1 and not {"img", "b>"} & tags.tags.keys()
    assert tags.tags.keys() == plain.tags.keys()
    assert page.encode("utf-8") and not re.search("[\x00\x1b\u202e\u200f\ud800-\udfff]", page)
    markup = "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt; &amp; \"q\" 'a' "
    escaped = markup + "\\u202eevil\\u200f \\x00\\x1b[2J \U0001f642 "
    assert page.count(escaped) >= 6


def test_verdicts_stand_with_the_worst_first(whole: Path) -> None:
    text = text_of(page_of(whole, said(GOOD, replace(ILL, severity="note", name="a note"), ILL)))
    assert text.index("entropy collapse") < text.index("a note") < text.index("1.00 in every step")
    assert "90% sure" in text and "steps 2 to 4" in text and "ppo.entropy_coef = 0.02" in text
    assert "doctor: not asked" in text_of(page_of(whole, "not asked"))


def test_health_is_told_only_where_something_was_judged(whole: Path) -> None:
    """With only two steps logged the doctor can call nothing healthy."""
    few = said(unjudged=(Unsaid("KL runaway", "6 steps are needed"), Unsaid("stale data", "6 steps are needed")))
    text = text_of(page_of(whole, few))
    assert "too early" in text and "2 not judged" in text and "KL runaway, stale data: 6 steps are needed" in text
    assert "nothing found" not in text
    text = text_of(page_of(whole, replace(few, verdicts=(GOOD,))))
    assert "nothing found; 2 not judged" in text and "too early" not in text
    assert "nothing found" in text_of(page_of(whole, said(GOOD)))
    assert "too early" in text_of(page_of(whole, replace(few, verdicts=(replace(ILL, severity="note"),))))


def test_a_page_of_a_run_of_few_steps_does_not_call_it_healthy(whole: Path, tmp_path: Path) -> None:
    contents = write_report(whole, tmp_path / "page.html", Asked(samples=0))
    assert not isinstance(contents.doctor, str) and not contents.doctor.verdicts and contents.doctor.unjudged
    assert "too early" in text_of((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_time_of_another_machine_is_not_planned(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    timing = time_of(read_run(whole))
    assert not timing.seconds and "another machine" in timing.said


def test_memory_is_measured_beside_what_the_run_has_predicted(whole: Path) -> None:
    record = read_run(whole)
    saved = json.loads((whole / "plan.json").read_text())["memory"]
    assert memory_of(record).peaks == {name: both["predicted_bytes"] for name, both in saved.items()}
    without = memory_of(replace(record, plan={}))
    assert "by the planner" in without.said and without.peaks.keys() == {*saved, "load"} | without.peaks.keys()
    for name, peak in without.peaks.items():
        if name in saved:
            assert peak == pytest.approx(saved[name]["predicted_bytes"], rel=0.05), "prompts are nearly the longest"


def points(values: list[float]) -> list[tuple[int, float]]:
    return list(enumerate(values))


def test_curves_are_where_their_values_are() -> None:
    values = [3.0, -1.0, 0.5, 2.0]
    made = curve(Curve("x", "X", "nats", [Line("training", points(values))], Band(high=1.0)))
    [picture] = [each for each in made.iter("svg")]
    places = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", _path(picture))]
    drops = {(a[1] - b[1]) / (y - x) for a, b, x, y in zip(places, places[1:], values, values[1:], strict=False)}
    assert max(drops) == pytest.approx(min(drops), rel=0.01), "in proportion"
    steps = [b[0] - a[0] for a, b in pairwise(places)]
    assert max(steps) == pytest.approx(min(steps), abs=0.11)
    band = next(each for each in made.iter("rect") if each.get("class") == "band")
    scale = next(iter(drops))
    assert float(band.get("y", 0)) == pytest.approx(places[0][1] + 2.0 * scale, abs=0.2), "its top is at 1"


def _path(picture: Any) -> str:
    return next(each for each in picture.iter("path") if "line-0" in each.get("class", "")).get("d", "")


@pytest.mark.parametrize(("last", "said"), [(0.9, "healthy"), (1.1, "outside")])
def test_the_last_value_is_held_to_the_band(last: float, said: str) -> None:
    made = curve(Curve("x", "X", "nats", [Line("training", points([5.0, last]))], Band(high=1.0)))
    mark = next(each for each in made.iter("span") if "mark" in each.get("class", ""))
    assert mark.text == said


def test_held_out_values_look_alike_in_all_pictures(whole: Path) -> None:
    pictures = drawings(re.sub(r'<svg class="spark".*?</svg>', "", page_of(whole)))
    for picture in pictures.values():
        for each in json.loads(picture.get("data-lines", "[]")):
            style = {"held out": "line-1", "training": "line-0"}.get(each["name"])
            if style:
                [x, y] = each["points"][-1][1], each["points"][-1][3]
                ends = [p.get("d", "").split()[-2:] for p in picture.iter() if p.get("class") == f"line {style}"]
                assert [[f"L{x:g}", f"{y:g}"]] == ends, each["name"]


def test_a_band_is_in_view_unless_the_curve_would_be_flat() -> None:
    near = axes_of([Line("a", points([0.0, 1.0]))], Band(high=2.0))
    assert near.high > 2.0
    far = axes_of([Line("a", points([0.0, 1.0]))], Band(high=100.0))
    assert far.high < 2.0
    flat = axes_of([Line("a", points([5.0, 5.0]))], None)
    assert flat.low < 5.0 < flat.high
    assert axes_of([Line("a", points([0.01, 9.0]))], None).low == 0.0, "what cannot be negative begins at 0"


def test_thinning_keeps_spikes_and_ends() -> None:
    values = [0.0] * 5000
    values[777], values[4321] = 9.0, -9.0
    kept = thinned(points(values))
    assert len(kept) <= MOST_POINTS and kept[0][0] == 0 and kept[-1][0] == 4999
    assert (777, 9.0) in kept and (4321, -9.0) in kept
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert thinned(points([1.0] * 10)) == points([1.0] * 10)


def test_a_long_run_makes_no_long_page(whole: Path) -> None:
    record = read_run(whole)
    steps = [{**record.steps[n % STEPS], "step": n + 1} for n in range(20_000)]
    page = page_of(whole, steps=steps)
    assert len(page.encode()) < 1_500_000
    assert "20,000" in page


def test_every_metric_of_the_charts_is_declared_and_drawn_once() -> None:
    names = [(kind, name) for group in GROUPS for chart in group.charts for kind, name, _ in chart.metrics]
    assert len(names) == len(set(names))
    for kind, name in names:
        assert name in METRICS[kind], name


def test_each_part_of_the_reward_has_its_curve(whole: Path) -> None:
    record = read_run(whole)
    parts = ("brief & kind", "formal")
    steps = [{**row, **{f"score_mean/{name}": n + 0.25 for n, name in enumerate(parts)}} for row in record.steps]
    page = page_of(whole, steps=steps)
    assert record.names("ppo_step", "score_mean/NAME") == [], "a reward of one source has no parts"
    text = text_of(page)
    assert "Score: brief &amp; kind" in text and "Score: formal" in text
    assert page.count("<code>score_mean/formal</code>") == 1, "in the table of all metrics"
    assert set(parsed(page).ids.values()) == {1}


def test_an_evaluation_begins_with_the_one_before_training(whole: Path) -> None:
    record = read_run(whole)
    before = json.loads((whole / "ppo" / "before.json").read_text())["metrics"]
    found = record.points("evaluation", "eval_distinct_2")
    assert found[0] == (0, before["distinct_2"]) and [step for step, _ in found] == [0, 2, STEPS]
    band = record.band("evaluation", "eval_distinct_2")
    assert band == Band(low=0.85 * before["distinct_2"])


def test_pictures_can_be_read_out(whole: Path) -> None:
    for name, picture in drawings(re.sub(r'<svg class="spark".*?</svg>', "", page_of(whole))).items():
        assert picture.attrib["role"] == "img" and picture.findtext("title"), name
        if name.startswith("curve-"):
            assert picture.findtext("desc") and float(picture.attrib["height"]) == HEIGHT


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_lines_can_be_seen(scheme: str) -> None:
    """WCAG 2.2: 4.5 for text (1.4.3), 3 for lines that mean something (1.4.11)."""
    known = colours(style_of("report_page"), scheme)
    for ground in ("above", "below", "paper", "card"):
        assert contrast(known["ink"], known[ground]) >= 4.5, ground
    assert contrast(known["waits"], known["waits-soft"]) >= 4.5
    for mark in ("good", "danger", "waits"):
        assert contrast(known[mark], known["card"]) >= 4.5, mark
    for line in ("line-0", "line-1", "line-2"):
        for ground in ("paper", "band"):
            assert contrast(known[line], known[ground]) >= 3, (line, ground)
    assert contrast(known["band-edge"], known["band"]) >= 2
