"""The one table of metrics: what a run logs, by kind of row; `docs/metrics.md` is made from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fourfold.diagnostics.metrics.costs import COSTS
from fourfold.diagnostics.metrics.critic import CRITIC
from fourfold.diagnostics.metrics.dimensions import DIMENSIONS, STEERING
from fourfold.diagnostics.metrics.lengths import LENGTHS
from fourfold.diagnostics.metrics.metric import Band, Metric
from fourfold.diagnostics.metrics.rollout import COUNTERS, EVALUATION, ROLLOUT
from fourfold.diagnostics.metrics.shaping import SHAPING
from fourfold.diagnostics.metrics.update import LOSS_SCALE, POLICY, TRUNK, VALUE

__all__ = ["METRICS", "Band", "Metric", "check_row", "metrics_markdown", "table_name"]

_SECTIONS: dict[str, dict[str, tuple[Metric, ...]]] = {
    "ppo_step": {
        "Counters": COUNTERS,
        "Rollout": ROLLOUT,
        "Lengths": LENGTHS,
        "Shaping of scores": SHAPING,
        "Policy": POLICY,
        "Value": VALUE,
        "Critic": CRITIC,
        "Dimensions": DIMENSIONS,
        "Trunk": TRUNK,
        "Loss scale": LOSS_SCALE,
        "Costs": COSTS,
    },
    "evaluation": {"Counters": COUNTERS, "Held-out prompts": EVALUATION, "Weights told": STEERING},
}
_ABOUT = {
    "ppo_step": "One row a PPO step.",
    "evaluation": "One row an evaluation on held-out prompts, with the counters of the step after which it was made.",
}

METRICS: dict[str, dict[str, Metric]] = {
    kind: {metric.name: metric for section in sections.values() for metric in section}
    for kind, sections in _SECTIONS.items()
}


def table_name(name: str) -> str:
    """The name of a metric in the table: what follows a '/' is the name of a part of the reward, written NAME there."""
    return name if "/" not in name else f"{name.partition('/')[0]}/NAME"


def check_row(row: Mapping[str, float], kind: str) -> None:
    """Assert that a row of this kind holds every promised metric and none that the table does not know."""
    assert kind in METRICS, f"rows of kind {kind!r} are not in the table of metrics; known: {', '.join(METRICS)}"
    table = METRICS[kind]
    unknown = sorted(name for name in row if table_name(name) not in table)
    missing = [name for name, metric in table.items() if metric.promised and name not in row]
    assert not unknown and not missing, f"{kind} row: unknown {unknown or 'none'}; missing {missing or 'none'}"


def metrics_markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `fourfold/diagnostics/metrics/`; change the table there.",
        "",
        "Rows are lines of `metrics.jsonl`, each with its `kind`. A metric is its formula divided by its denominator.",
        "Where nothing was measured there is no number: a row lacks the actor's losses, ratios and entropy as long as",
        "`critic.warmup_rollouts` last, its gradient norm when it took no step, the judge where none is configured.",
        "NAME stands for a part of a combined reward (`reward.parts`): such a metric is there once for each part. With",
        "`critic.heads` = 'vector' or 'multi' those of the critic are there for 'penalties' too.",
        "After a step in which float16 overflowed in every mini-batch it has neither losses nor norms.",
        "What is healthy is a rule of thumb for runs like the example; settings are named as in the configuration.",
    ]
    for kind, sections in _SECTIONS.items():
        lines += ["", f"## `{kind}`", "", _ABOUT[kind]]
        for title, metrics in sections.items():
            lines += ["", f"### {title}", "", *_markdown_table(metrics)]
    return "\n".join(lines) + "\n"


def _markdown_table(metrics: Iterable[Metric]) -> list[str]:
    rows = ["| metric | unit | formula | denominator | healthy | if not |", "|---|---|---|---|---|---|"]
    for m in metrics:
        name = f"`{m.name}`" if m.promised else f"`{m.name}` (not in every row)"
        cells = (name, m.unit, m.formula, m.denominator, m.healthy, m.remedy)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows
