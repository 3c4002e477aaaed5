"""Metrics of what normalisation, clipping and penalties did to scores."""

from __future__ import annotations

from fourfold.diagnostics.metrics.metric import Band, Metric
from fourfold.diagnostics.metrics.rollout import LEARNED

# What shaping did to the scores, each where it is switched on.
SHAPING = (
    *(
        metric
        for ending, whose in (
            ("", "every score"),
            ("/NAME", "every score of part NAME, below a critic of several values"),
        )
        for metric in (
            Metric(
                f"score_normalization_mean{ending}",
                "score",
                f"mean that was subtracted from {whose} (`ppo.reward_normalization`): of the rollout or running",
                "none",
                "rises with score_mean, with 'running' behind it",
                "with 'running' far behind score_mean: all scores look good, so advantages hang on the critic; take "
                "'batch'",
                promised=False,
            ),
            Metric(
                f"score_normalization_std{ending}",
                "score",
                f"standard deviation that {whose} was divided by",
                "none",
                "about score_std",
                "near 0: differences of no meaning are blown up; set `ppo.reward_normalization` = 'none'",
                promised=False,
            ),
        )
    ),
    Metric(
        "score_clipped_share",
        "share",
        "responses of which a score, after normalisation, was beyond +-`ppo.score_clip`",
        LEARNED,
        "below 0.05",
        "large: scores that differ become the same; raise `ppo.score_clip`",
        band=Band(high=0.05),
        promised=False,
    ),
    Metric(
        "missing_eos_penalty_mean",
        "score",
        "sum of `ppo.missing_eos_penalty` over responses that were cut by length",
        LEARNED,
        "falls to 0 as responses learn to end",
        "does not fall: raise `sampling.max_new_tokens` or the penalty; see eos_share",
        promised=False,
    ),
    Metric(
        "length_penalty_mean",
        "score",
        "sum of `ppo.length_penalty` x tokens outside `ppo.length_range`",
        LEARNED,
        "falls; small beside score_std",
        "above score_std: length alone is learned; lower `ppo.length_penalty` or widen `ppo.length_range`",
        promised=False,
    ),
    Metric(
        "length_penalised_share",
        "share",
        "responses with a length outside `ppo.length_range`",
        LEARNED,
        "falls",
        "as for length_penalty_mean",
        promised=False,
    ),
)
