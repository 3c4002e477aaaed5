"""Which metrics are drawn, under which question of a reader, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from fourfold.diagnostics.metrics import METRICS, Metric, table_name
from fourfold.diagnostics.pages.elements import Child, h
from fourfold.diagnostics.report_page.curves import Curve, Line, curve
from fourfold.diagnostics.run_record import RunRecord

TRAINING, HELD_OUT = "ppo_step", "evaluation"
NAMES = {TRAINING: "training", HELD_OUT: "held out"}
NAME = "/NAME"  # of metrics that are there once for each part of the reward


@dataclass(frozen=True)
class Chart:
    """A picture: its title, and its metrics by kind of row, name and, where there are several of a kind, label."""

    title: str
    metrics: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Group:
    """Pictures that answer a question."""

    key: str
    question: str
    about: str
    charts: tuple[Chart, ...]


def _of(title: str, *metrics: str, labels: tuple[str, ...] = ()) -> Chart:
    """Metrics of one name by kind: "eval_..." are those of evaluations, all others of steps."""
    found = []
    for index, name in enumerate(metrics):
        kind = HELD_OUT if name.startswith("eval_") else TRAINING
        found.append((kind, name, labels[index] if labels else NAMES[kind]))
    return Chart(title, tuple(found))


GROUPS = (
    Group(
        "reward",
        "Does it learn what is rewarded?",
        "Scores of the reward, and what a judge that the reward does not know thinks of the same responses.",
        (
            _of("Score", "score_mean", "eval_score_mean"),
            _of("Judge", "eval_judge_mean"),
            _of("Reward learned from", "reward_per_sequence_mean", "score_shaped_mean",
                labels=("with KL penalty", "score alone")),
            _of("Spread of scores", "score_std"),
            _of("Score", "score_mean/NAME", "eval_score_mean/NAME"),
            _of("Heeds its weight", "eval_steering/NAME"),
            _of("Scores go together", "score_correlation/NAME"),
        ),
    ),
    Group(
        "distance",
        "Does it stay near the reference?",
        "How far the policy has moved from where it started, and whether its texts still look like texts.",
        (
            _of("KL of a response", "kl_per_sequence_mean", "eval_kl_per_sequence"),
            _of("KL to the actor at step 0", "kl_step_0_per_sequence_mean", "eval_kl_step_0_per_sequence"),
            _of("KL coefficient", "kl_coef"),
            _of("Log-prob by the reference", "eval_ref_log_prob_per_token"),
            _of("Log-prob by the actor at step 0", "eval_step_0_log_prob_per_token"),
            _of("Loss on held-out texts", "eval_text_nll_per_token"),
            _of("Different pairs of tokens", "eval_distinct_2"),
            _of("Length of a response", "response_length_mean", "eval_mean_length"),
            _of("Responses that come to an end", "eos_share", "eval_eos_share"),
        ),
    ),
    Group(
        "policy",
        "Are the steps of the policy sound?",
        "How much a step changes, and whether sampler and trainer agree on what was sampled.",
        (
            _of("Entropy of a token", "entropy_per_token_mean"),
            _of("KL of a step, a token", "approx_kl_per_token_mean"),
            _of("Ratio of new to old", "ratio_mean"),
            _of("Largest ratio", "ratio_max"),
            _of("Clipped tokens", "policy_clip_fraction"),
            _of("Gradient of the actor", "actor_grad_norm"),
            _of("Sampler and trainer apart", "sampler_gap_mean"),
        ),
    ),
    Group(
        "critic",
        "Does the critic know what comes?",
        "How well values foretell returns, on what it learns from and on what it never learns from.",
        (
            _of("Explained variance", "explained_variance", "eval_explained_variance"),
            _of("Rank correlation", "value_return_spearman", "eval_value_return_spearman"),
            _of("Bias of values", "value_bias", "eval_value_bias"),
            _of("Values and returns", "value_mean", "return_mean", labels=("value", "return")),
            _of("Explained variance", "explained_variance/NAME"),
            _of("Loss of values", "value_loss_per_token"),
            _of("Error on responses, before and in the last pass", "value_loss_fresh_per_token",
                "value_loss_last_pass_per_token", labels=("not learned from yet", "last pass")),
            _of("Clipped values", "value_clip_fraction"),
            _of("Gradient of the critic", "critic_grad_norm"),
            _of("Gradients in the trunk, cosine", "trunk_gradient_cosine"),
        ),
    ),
)  # fmt: skip


def charts_of(record: RunRecord, group: Group) -> list[Element]:
    """The pictures of a group for which the run has numbers; of metrics of parts of the reward one a part."""
    made = []
    for chart in group.charts:
        for part in _parts(record, chart):
            found = [(kind, name.replace(NAME, f"/{part}"), label) for kind, name, label in chart.metrics]
            lines = [
                Line(label, record.points(kind, name), _style(found, n)) for n, (kind, name, label) in enumerate(found)
            ]
            drawn = [each for each, line in zip(found, lines, strict=True) if line.points]
            if drawn:
                kind, name, _ = drawn[0]
                metric = METRICS[kind][table_name(name)]
                title = f"{chart.title}: {part}" if part else chart.title
                key = f"{group.key}-{len(made)}"
                made.append(curve(Curve(key, title, metric.unit, lines, record.band(kind, name), [_explained(metric)])))
    return made


def _style(metrics: Sequence[tuple[str, str, str]], index: int) -> int:
    """Held-out values look alike in all pictures; a second line of training has a style of its own."""
    if metrics[index][0] == HELD_OUT:
        return 1
    return 0 if index == 0 else 2


def _parts(record: RunRecord, chart: Chart) -> list[str]:
    """The parts of the reward that a chart has a picture of each; [""] for a chart of the whole."""
    if NAME not in chart.metrics[0][1]:
        return [""]
    names = [name for kind, metric, _ in chart.metrics for name in record.names(kind, metric)]
    return list(dict.fromkeys(name.partition("/")[2] for name in names))


def _explained(metric: Metric) -> Element:
    """What a metric is, what is healthy and what to do, as it is declared."""
    per = "" if metric.denominator == "none" else f", divided by {metric.denominator}"
    return h(
        "details",
        h("summary", h("code", metric.name)),
        h("p", _sentence(metric.formula + per)),
        h("p", h("b", "Healthy: "), coded(metric.healthy + ".")),
        h("p", h("b", "If not: "), coded(metric.remedy + ".")),
    )


def _sentence(said: str) -> list[Child]:
    return coded(said[0].upper() + said[1:] + ".")


def coded(said: str) -> list[Child]:
    """A text in which settings stand between backticks."""
    parts = said.split("`")
    return [h("code", part) if index % 2 else part for index, part in enumerate(parts) if part]


def curves_section(group: Group, charts: Sequence[Element]) -> Iterator[Element]:
    """What a group is about, and its pictures."""
    yield h("p", group.about, class_="muted")
    yield h("div", charts, class_="curves")
