"""The table of metrics is complete, names real settings, and refuses rows that do not fit it."""

from __future__ import annotations

import re

import pytest

from fourfold.config.schema import RunConfig, Section
from fourfold.diagnostics.metrics import METRICS, Band, Metric, check_row, metrics_markdown
from fourfold.memory.meter import PassCounter


def full_row(kind: str) -> dict[str, float]:
    return {name: 1.0 for name, metric in METRICS[kind].items() if metric.promised}


@pytest.mark.parametrize("kind", METRICS)
def test_a_row_with_all_promised_metrics_passes(kind: str) -> None:
    check_row(full_row(kind), kind)


@pytest.mark.parametrize("kind", METRICS)
def test_each_missing_metric_is_named(kind: str) -> None:
    """FAULTS N4: every row has all the promised keys."""
    for name in full_row(kind):
        row = full_row(kind)
        del row[name]
        with pytest.raises(AssertionError, match=rf"missing \['{name}'\]"):
            check_row(row, kind)


@pytest.mark.parametrize("kind", METRICS)
def test_an_unknown_metric_is_named(kind: str) -> None:
    with pytest.raises(AssertionError, match=r"unknown \['rewrad_mean'\]"):
        check_row({**full_row(kind), "rewrad_mean": 0.0}, kind)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(AssertionError, match="'sft'"):
        check_row({"step": 1}, "sft")


def test_the_judge_is_optional() -> None:
    check_row({**full_row("evaluation"), "eval_judge_mean": 0.5}, "evaluation")
    assert "eval_judge_mean" not in full_row("evaluation")


@pytest.mark.parametrize("kind", METRICS)
def test_every_row_says_where_it_stands(kind: str) -> None:
    """FAULTS N8: step, episodes, optimizer_steps and tokens are in each row."""
    assert {"step", "episodes", "optimizer_steps", "tokens"} <= full_row(kind).keys()


def test_diagnoses_of_a_failing_critic_are_logged() -> None:
    """FAULTS G11: explained variance, and mean and spread of returns and values."""
    names = {"explained_variance", "return_mean", "return_std", "value_mean", "value_std"}
    assert names <= full_row("ppo_step").keys()


def test_kl_is_logged_by_more_than_one_estimator() -> None:
    """FAULTS C1: k1 and k3 beside the KL that is penalised."""
    names = {"kl_per_sequence_mean", "kl_k1_per_sequence_mean", "kl_k3_per_sequence_mean"}
    assert names <= full_row("ppo_step").keys()


def test_skips_and_invalid_scores_are_counted() -> None:
    """FAULTS N6, M5: skipped mini-batches and invalid rewards are numbers in the log."""
    assert {"mini_batches_skipped", "early_stopped", "invalid_scores", "dropped_rows"} <= full_row("ppo_step").keys()


def test_the_pass_counter_gives_metrics_of_the_table() -> None:
    assert PassCounter().take(rows_per_pass=1).keys() <= METRICS["ppo_step"].keys()


def settings_named() -> set[str]:
    texts = [f"{m.formula} {m.healthy} {m.remedy}" for table in METRICS.values() for m in table.values()]
    return {name for text in texts for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", text)}


@pytest.mark.parametrize("name", sorted(settings_named()))
def test_every_setting_that_a_remedy_names_exists(name: str) -> None:
    """FAULTS J10: advice names options that the configuration has."""
    section, _, field = name.partition(".")
    table = RunConfig.model_fields[section].annotation
    assert isinstance(table, type) and issubclass(table, Section)
    assert field in table.model_fields, f"{name} is not a setting"


def test_every_metric_that_a_remedy_points_at_exists() -> None:
    names = {name for table in METRICS.values() for name in table}
    for table in METRICS.values():
        for metric in table.values():
            for target in re.findall(r"(?:as for|see) ([a-z0-9]+_[a-z0-9_]+)", f"{metric.healthy} {metric.remedy}"):
                assert target in names, f"{metric.name} points at {target}"


def test_every_metric_says_all_there_is_to_say() -> None:
    for table in METRICS.values():
        for m in table.values():
            assert all((m.name, m.unit, m.formula, m.denominator, m.healthy, m.remedy)), m.name


def test_markdown_has_one_line_a_metric_with_six_cells() -> None:
    lines = metrics_markdown().splitlines()
    for kind, table in METRICS.items():
        start = lines.index(f"## `{kind}`")
        for name in table:
            row = next(line for line in lines[start:] if line.startswith(f"| `{name}`"))
            assert len(re.split(r"(?<!\\)\|", row)) == 8, row


BANDS: dict[tuple[str, ...], tuple[Metric, Band | None]] = {
    (metric.name, *where): (metric, band)
    for table in METRICS.values()
    for metric in table.values()
    for where, band in (
        [((), metric.band)] if metric.band is None or isinstance(metric.band, Band)
        else [((key,), each) for key, each in metric.band.items()]
    )
}  # fmt: skip


@pytest.mark.parametrize("name", [key for key, (_, band) in BANDS.items() if band is not None], ids="-".join)
def test_the_numbers_of_a_band_are_those_of_the_words(name: tuple[str, ...]) -> None:
    metric, band = BANDS[name]
    assert band is not None
    bounds = [bound for bound in (band.low, band.high) if bound is not None]
    said = [float(number) for number in re.findall(r"(?<![a-z\d])\d+(?:\.\d+)?(?:e-?\d+)?", metric.healthy)]
    assert bounds and set(bounds) <= set(said), metric.healthy
    assert (band.low is None or band.high is None) or band.low < band.high
    if len(bounds) == 1 and bounds != [0]:
        assert ("below" in metric.healthy) == (band.low is None), metric.healthy
    assert band.of_start == ("of the start's" in metric.healthy)


def test_words_that_are_numbers_have_a_band() -> None:
    for metric, band in BANDS.values():
        if re.match(r"(rises )?(above|below) (about )?(?!0\b[^.])\d|[\d.]+ to [\d.]+$", metric.healthy):
            assert band is not None, f"{metric.name}: {metric.healthy}"


def test_a_band_of_the_start_follows_the_first_value() -> None:
    band = METRICS["evaluation"]["eval_distinct_2"].band_where("float32")
    assert band is not None and band == Band(low=0.85, of_start=True)
    assert band.seen_from(0.5) == Band(low=0.425) and not band.seen_from(0.5).holds(0.42)
    assert Band(0.1, 0.2).holds(0.1) and Band(0.1, 0.2).holds(0.2) and not Band(0.1, 0.2).holds(0.21)


def test_a_band_can_depend_on_the_type_of_products() -> None:
    gap = METRICS["ppo_step"]["sampler_gap_mean"]
    assert gap.band_where("float32") == Band(high=1e-4) and gap.band_where("bfloat16") == Band(high=0.05)
    assert gap.band_where("float16") is None
    assert METRICS["ppo_step"]["ratio_mean"].band_where("float16") == Band(0.98, 1.02)
