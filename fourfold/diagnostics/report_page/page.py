"""The page of a run: how it stands, what it has learned, what is wrong, what it cost, and what is not there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from xml.etree.ElementTree import Element

from fourfold.config.template import toml_value
from fourfold.diagnostics.doctor import Examination, by_severity
from fourfold.diagnostics.numbers import change, short
from fourfold.diagnostics.pages.document import document, section, tile
from fourfold.diagnostics.pages.elements import Child, h
from fourfold.diagnostics.predicted import Prediction, Timing, measured_peaks
from fourfold.diagnostics.report_page.charts import GROUPS, charts_of, coded, curves_section
from fourfold.diagnostics.report_page.costs import memory_section, time_section
from fourfold.diagnostics.report_page.samples import samples_section
from fourfold.diagnostics.report_page.table import metrics_section
from fourfold.diagnostics.report_page.verdicts import doctor_section
from fourfold.diagnostics.report_page.xray import xray_section
from fourfold.diagnostics.run_record import RunRecord
from fourfold.diagnostics.xray import Xray
from fourfold.planner.units import seconds, size

BADGES = {
    "running": ("Running", "neutral"),
    "finished": ("Finished", "fits"),
    "interrupted": ("Interrupted", "waits"),
    "killed": ("Killed", "waits"),
    "failed": ("Failed", "lacks"),
    "unknown": ("Not finished", "waits"),
}


@dataclass(frozen=True)
class Contents:
    """What a page is made of; a text in place of an examination or of an x-ray says why there is none."""

    record: RunRecord
    doctor: Examination | str
    xray: Xray | str
    memory: Prediction
    time: Timing


def report_page(contents: Contents, now: float | None = None) -> str:
    """HTML of a run; `now` is when it is made, in seconds since 1970."""
    record, parts = contents.record, list(_parts(contents))
    links = [h("a", each.key, href=f"#{each.key}") for each in parts]  # the ids are the shortest names
    body = [
        _header(contents, time.time() if now is None else now),
        h("nav", links, aria_label="Parts of the page"),
        h("main", [section(*each) for each in parts]),
        h("footer", h("p", "Made by `fourfold report`. docs/report.md says what each part shows.")),
    ]
    return document(f"{record.name}: report", body, __name__.rpartition(".")[0])


def _header(contents: Contents, now: float) -> Element:
    record = contents.record
    said, style = BADGES[_state(record)]
    tiles = [tile(*each) for each in _tiles(contents)]
    return h(
        "header",
        h("p", "Fourfold report", class_="eyebrow"),
        h("h1", record.name),
        h("p", h("span", said, class_=f"badge {style}"), " ", _stands(record, now), class_="verdict"),
        h("pre", h("code", record.state.said), class_="error") if record.state.said and not record.finished else None,
        h("dl", tiles, class_="tiles") if tiles else None,
    )


def _state(record: RunRecord) -> str:
    return "finished" if record.finished and record.state.ended else record.state.state


def _stands(record: RunRecord, now: float) -> str:
    """How far it is, and since when."""
    steps = record.config.ppo.steps
    where = f"step {record.step:,} of {steps:,}" if record.step or record.stage == "ppo" else f"stage {record.stage}"
    if record.finished:
        where = f"{record.step:,} steps of ppo" if record.step else f"stages {', '.join(record.config.stages)}"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    if record.state.state == "running":
        return f"{where}; as of {made}."
    if record.state.at:
        return f"{where}; ended {time.strftime('%Y-%m-%d %H:%M', time.localtime(record.state.at))}."
    return f"{where}; looked at {made}."


def _tiles(contents: Contents) -> Iterator[tuple[str, str, str]]:
    record = contents.record
    for name, kind, metric, unit in (
        ("Score, held out", "evaluation", "eval_score_mean", ""),
        ("Judge, held out", "evaluation", "eval_judge_mean", ""),
        ("KL of a response", "evaluation", "eval_kl_per_sequence", " nats"),
    ):
        points = record.points(kind, metric)
        if len(points) > 1:
            first, last = points[0][1], points[-1][1]
            yield name, short(last) + unit, f"{change(last - first)} since step {points[0][0]}"
    if not record.evaluations and record.steps:
        yield "Score", short(record.steps[-1]["score_mean"]), f"step {record.step}, training"
    if record.steps:
        last = record.steps[-1]["step_seconds"]
        planned = sum(contents.time.seconds.get(phase, 0.0) for phase in ("generate", "score", "learn"))
        yield "One PPO step", seconds(last), f"planned {seconds(planned)}" if planned else "the last one"
    if peaks := measured_peaks(record.timeline):
        name = max(peaks, key=lambda each: peaks[each])
        most = max(contents.memory.peaks.values(), default=0)
        yield "Peak memory", size(peaks[name]), f"planned {size(most)}" if most else f"in {name}"
    if not isinstance(contents.doctor, str):
        yield "Doctor", *_of_doctor(contents.doctor)


def _of_doctor(found: Examination) -> tuple[str, str]:
    """How many verdicts are serious, and the first two; without any, whether that says anything."""
    worst = [each for each in by_severity(found.verdicts) if each.severity in ("ill", "warning")]
    if worst:
        return str(len(worst)), ", ".join(each.name for each in worst[:2])
    if found.too_early:
        return "too early", f"{len(found.unjudged)} not judged"
    left = f"; {len(found.unjudged)} not judged" if found.unjudged else ""
    return "healthy", f"nothing found{left}"


class _Part(NamedTuple):
    """A section: its id, its heading, what is in it."""

    key: str
    title: str
    content: Iterable[Child]


def _parts(contents: Contents) -> Iterator[_Part]:
    """The sections for which there is something."""
    record = contents.record
    if not isinstance(contents.doctor, str) and (contents.doctor.verdicts or contents.doctor.unjudged):
        yield _Part("doctor", "What the doctor says", doctor_section(contents.doctor))
    for group in GROUPS:
        if charts := charts_of(record, group):
            yield _Part(group.key, group.question, curves_section(group, charts))
    if record.before is not None:
        yield _Part("samples", "Before and after", samples_section(record, record.config.evaluation.samples))
    if not isinstance(contents.xray, str):
        yield _Part("xray", "Token x-ray", xray_section(contents.xray))
    if record.spent:
        yield _Part("time", "Where the seconds went", time_section(record, contents.time))
    if measured_peaks(record.timeline):
        yield _Part("memory", "Memory", memory_section(record, contents.memory))
    if record.steps or record.evaluations:
        yield _Part("metrics", "Every metric", metrics_section(record))
    yield _Part("settings", "Settings", _settings(record))
    if lacks := list(missing(contents)):
        yield _Part("missing", "What is not here", [h("ul", [h("li", coded(m)) for m in lacks], class_="dashes")])


def _settings(record: RunRecord) -> Iterator[Element]:
    """What differs from the defaults, to copy."""
    tree = record.config.model_dump(mode="json", exclude_defaults=True)
    lines = list(_lines(tree))
    yield h(
        "div",
        h("button", "Copy", type="button", hidden="", data_copies="settings-text"),
        h("pre", h("code", "\n".join(lines), id="settings-text"), tabindex=0),
        class_="settings",
    )


def _lines(tree: dict[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {toml_value(value)}"


def missing(contents: Contents) -> Iterator[str]:
    """What a reader could expect and does not find, with the reason."""
    record = contents.record
    yield from record.problems
    for stage in record.config.stages:
        if stage not in record.stages:
            yield f"stage {stage}: {_why_not(record, stage)}"
    if "ppo" not in record.config.stages:
        yield "curves, verdicts, samples and tokens: they are of the stage ppo, which is not among `stages`"
        return
    if not record.steps:
        yield "curves: no step of ppo has been logged"
    elif not record.evaluations:
        why = "`data.prompts_test` is not given" if record.config.data.prompts_test is None else "none has been made"
        yield f"curves of held-out prompts: {why}"
    if record.before is None or record.after is None:
        yield "samples before and after: they are written before the first and after the last step of ppo"
    if isinstance(contents.doctor, str):
        yield f"doctor: {contents.doctor}"
    if isinstance(contents.xray, str):
        yield f"token x-ray: {contents.xray}"
    if not contents.memory.peaks:
        yield f"planned memory: {contents.memory.said}"
    if not contents.time.seconds:
        yield f"planned time: {contents.time.said}"


def _why_not(record: RunRecord, stage: str) -> str:
    if stage != record.stage:
        return "has not begun"
    return {
        "running": "is at work",
        "interrupted": "was stopped; the same command goes on",
        "killed": "its process has gone without a word (killed, or the machine went down); the same command goes on",
        "failed": "failed, as said at the top; the last good checkpoint is kept",
    }.get(record.state.state, "has not finished")
