"""The studies: which variants of a run stand side by side, and the numbers that they are compared by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from fourfold.config.schema import RunConfig
from fourfold.training.checkpoint import FOLDER

Rows = Sequence[Mapping[str, Any]]
Points = list[tuple[int, float]]
Settings = Mapping[str, Any]  # by dotted key; None takes a key, or a whole table, out


@dataclass(frozen=True)
class Variant:
    """One of the runs of a study: what it changes, and what that is, for people."""

    name: str
    about: str
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A number of a run that is followed over its steps; the first of `metrics` that a row has is it, times `sign`."""

    name: str
    title: str
    unit: str
    kind: Literal["ppo_step", "evaluation"]
    metrics: tuple[str, ...]
    sign: float = 1.0

    def points(self, rows: Rows, before: Mapping[str, float]) -> Points:
        """(step, number) of every row that has it; an evaluation's begin `before` training, at step 0."""
        own = [row for row in rows if row["kind"] == self.kind]
        if self.kind == "evaluation":
            own = [{"step": 0, **{f"eval_{name}": value for name, value in before.items()}}, *own]
        found = ((int(row["step"]), next((row[name] for name in self.metrics if name in row), None)) for row in own)
        return [(step, self.sign * float(value)) for step, value in found if value is not None]

    def final(self, points: Points) -> float | None:
        """Of the last evaluation; of steps the mean of the last quarter, because single rollouts are noisy."""
        count = 1 if self.kind == "evaluation" else -(-len(points) // 4)
        return mean(value for _, value in points[-count:]) if points else None


SCORE = Measure("score", "score on held-out prompts", "raw score", "evaluation", ("eval_score_mean",))
JUDGE = Measure("judge", "the judge's verdict on them", "judge's unit", "evaluation", ("eval_judge_mean",))
DRIFT = Measure(
    "kl_step_0",
    "KL to the actor at step 0 (the sft model), held-out prompts",
    "nats a response",
    "evaluation",
    ("eval_kl_step_0_per_sequence", "eval_kl_per_sequence"),
)
PENALISED = Measure("kl", "KL that is penalised", "nats a response", "ppo_step", ("kl_per_sequence_mean",))
RESPONSES = Measure(
    "response_nll",
    "loss of held-out responses under the actor at step 0",
    "nats a token",
    "evaluation",
    ("eval_step_0_log_prob_per_token", "eval_ref_log_prob_per_token"),
    sign=-1.0,
)
TEXTS = Measure(
    "text_nll", "loss of the actor on held-out texts", "nats a token", "evaluation", ("eval_text_nll_per_token",)
)
DISTINCT = Measure("distinct_2", "different pairs of tokens", "share", "evaluation", ("eval_distinct_2",))
ENTROPY = Measure("entropy", "entropy of the actor", "nats a token", "ppo_step", ("entropy_per_token_mean",))
VALUE_LOSS = Measure("value_loss", "value loss", "squared reward", "ppo_step", ("value_loss_per_token",))
EXPLAINED = Measure("explained_variance", "explained variance of returns", "share", "ppo_step", ("explained_variance",))
SPEARMAN = Measure(
    "spearman", "rank correlation of values and returns", "-1 to 1", "ppo_step", ("value_return_spearman",)
)
HELD_OUT_EXPLAINED = Measure(
    "held_out_explained_variance",
    "explained variance of held-out returns",
    "share",
    "evaluation",
    ("eval_explained_variance",),
)
HELD_OUT_SPEARMAN = Measure(
    "held_out_spearman",
    "rank correlation of held-out values and returns",
    "-1 to 1",
    "evaluation",
    ("eval_value_return_spearman",),
)
FRESH = Measure(
    "value_error_fresh",
    "squared error / 2 on responses not learned from yet",
    "squared reward",
    "ppo_step",
    ("value_loss_fresh_per_token",),
)
LAST_PASS = Measure(
    "value_error_last_pass",
    "the same in the critic's last pass over them",
    "squared reward",
    "ppo_step",
    ("value_loss_last_pass_per_token",),
)
COSINE = Measure(
    "cosine", "cosine of the two gradients in the trunk", "-1 to 1", "ppo_step", ("trunk_gradient_cosine",)
)
SECONDS = Measure("step_seconds", "seconds of a step", "s", "ppo_step", ("step_seconds",))

POLICY = (SCORE, JUDGE, DRIFT, PENALISED, RESPONSES, TEXTS, DISTINCT)
CRITIC = (
    *(SCORE, JUDGE, DRIFT, VALUE_LOSS, FRESH, LAST_PASS),
    *(EXPLAINED, HELD_OUT_EXPLAINED, SPEARMAN, HELD_OUT_SPEARMAN, TEXTS),
)


@dataclass(frozen=True)
class Study:
    """A question, the variants of a configuration that answer it, and the measures that they are shown by.

    `variants` is given the settings and the folder of the stages that all variants share, where there is one.
    """

    name: str
    question: str
    measures: tuple[Measure, ...]
    variants: Callable[[RunConfig, Path | None], list[Variant]]


# What a variant of the prior must not take over from the settings. KL to different priors has different sizes: a
# controller would give each its own coefficient, so there is none.
_NO_PRIOR: Settings = dict.fromkeys(
    (
        *(f"reference.{name}" for name in ("prior", "decay", "copy_every", "checkpoint", "model", "log_step_0")),
        *(f"ppo.{name}" for name in ("kl_controller", "kl_target", "kl_horizon")),
    )
)


def _priors(config: RunConfig, stages: Path | None) -> list[Variant]:
    """The actor at step 0, no prior but uniform, two that move, and two that are older than the actor."""
    steps = config.ppo.steps
    decay, every = min(max(round(1 - 4 / steps, 2), 0.5), 0.99), max(steps // 6, 1)
    moving = {**_NO_PRIOR, "reference.prior": "moving"}
    found = [
        Variant("step-0", "the actor as it is at step 0, frozen", _NO_PRIOR),
        Variant("uniform", "every token alike", {**_NO_PRIOR, "reference.prior": "uniform"}),
        Variant("moving-average", f"the actor's average, decay {decay:g}", {**moving, "reference.decay": decay}),
        Variant("moving-copy", f"the actor every {every} steps", {**moving, "reference.copy_every": every}),
    ]
    if "sft" in config.stages or config.sft.checkpoint:
        base = {**_NO_PRIOR, "reference.model": config.model.path}
        found.append(Variant("base", "the model as it was before sft", base))
    if stages is not None and (older := _older(stages)) is not None:
        checkpoint = {**_NO_PRIOR, "reference.checkpoint": str(older)}
        found.append(Variant("older-sft", f"sft after {int(older.name[5:])} of its steps", checkpoint))
    return found


def _older(stages: Path) -> Path | None:
    """The first checkpoint that the stage sft has kept, if it is not its last."""
    folder = stages / "sft" / "checkpoints"
    kept = sorted(path for path in folder.iterdir() if FOLDER.fullmatch(path.name)) if folder.is_dir() else []
    return kept[0] if len(kept) > 1 else None


def _sharing(config: RunConfig, stages: Path | None) -> list[Variant]:
    """From four models of their own to one trunk that both train."""
    layers = config.trunk.branch_layers
    trunk: Settings = {"sharing.mode": "trunk", "adapters": None, "trunk": {"branch_layers": layers}}
    trained = {**trunk, "trunk": {"branch_layers": layers, "train": True}}
    stopped = {**trunk, "trunk": {"branch_layers": layers, "train": True, "critic_grad_scale": 0.0}}
    separate: Settings = {"sharing.mode": "none", "trunk": None, "adapters": None}
    return [
        Variant("separate", "four models of their own", {**separate, "precision.frozen": None}),
        Variant("frozen-trunk", f"one frozen trunk, {layers} layers a role", trunk),
        Variant("shared-trunk", f"one trunk that both train, {layers} layers a role", trained),
        Variant("actors-trunk", "the same, which the critic's gradient does not reach", stopped),
    ]


def _critic_init(config: RunConfig, stages: Path | None) -> list[Variant]:
    """Where the critic's weights are from; without a reward model of the base there are two places."""
    found = [
        Variant("reward", "the reward model, head and all", {"critic.init": "reward"}),
        Variant("actor", "the actor, a new head", {"critic.init": "actor"}),
        Variant("base", "the model before sft, a new head", {"critic.init": "base"}),
    ]
    return found if config.reward.of_the_base else found[1:]


def _ratio(config: RunConfig, stages: Path | None) -> list[Variant]:
    """How often the critic learns from what the actor learns from once."""
    return [
        Variant(f"{count}-to-1", f"{count} of the critic for one of the actor", {"critic.updates_per_actor": count})
        for count in (1, 2, 5)
    ]


STUDIES = {
    study.name: study
    for study in (
        Study("prior", "What does the KL have to be taken to?", (*POLICY, ENTROPY), _priors),
        Study("sharing", "What do actor and critic lose by sharing layers?", (*CRITIC, COSINE, SECONDS), _sharing),
        Study("critic-init", "What does a critic gain from the reward model's weights?", CRITIC, _critic_init),
        Study("ratio", "How often should the critic learn for each time that the actor does?", CRITIC, _ratio),
    )
}
