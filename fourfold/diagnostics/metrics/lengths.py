"""Metrics of how long responses are, how they end, and what becomes of those that the limit cuts."""

from __future__ import annotations

from fourfold.diagnostics.metrics.metric import Band, Metric
from fourfold.diagnostics.metrics.rollout import SAMPLED

LENGTHS = (
    Metric(
        "response_length_mean",
        "tokens",
        "sum of response lengths, EOS included",
        SAMPLED,
        "stays near the start's",
        "runs to an end of the range: set `ppo.length_penalty` and `ppo.length_range`",
    ),
    Metric(
        "curriculum_new_tokens",
        "tokens",
        "longest response that the step could have (`curriculum.start_new_tokens`)",
        "none",
        "grows to `sampling.max_new_tokens`; eos_share stays up",
        "eos_share falls as it grows: responses fill whatever they are given; set `ppo.missing_eos_penalty`",
        promised=False,
    ),
    Metric(
        "curriculum_rollout_rows",
        "count",
        "responses of the step's rollout (`curriculum.start_rollout_batch_size`)",
        "none",
        "grows to `ppo.rollout_batch_size`",
        "explained_variance jumps about while it is small: start larger, or raise `critic.warmup_rollouts`",
        promised=False,
    ),
    Metric(
        "response_length_max",
        "tokens",
        "longest response",
        "none",
        "below the limit for most rollouts",
        "always at the limit: raise `sampling.max_new_tokens` or set `ppo.missing_eos_penalty`",
    ),
    Metric(
        "eos_share",
        "share",
        "responses that ended by an EOS id or a stop string",
        SAMPLED,
        "above 0.9 once trained",
        "low: set `ppo.missing_eos_penalty` or raise `sampling.max_new_tokens`",
        band=Band(low=0.9),
    ),
    Metric(
        "kl_k1_truncated_per_token_mean",
        "nats",
        "sum over tokens of log p(actor) - log p(reference), of the responses that the limit cut",
        "response tokens of those responses",
        "at most kl_k1_ended_per_token_mean",
        "above it while eos_share falls: the actor moves towards responses that never end; set "
        "`ppo.missing_eos_penalty`, raise `sampling.max_new_tokens`, or see `truncation drift` in docs/doctor.md",
        promised=False,
    ),
    Metric(
        "kl_k1_ended_per_token_mean",
        "nats",
        "the same sum of the responses that ended by themselves",
        "response tokens of those responses",
        "as kl_k1_per_sequence_mean, per token",
        "below kl_k1_truncated_per_token_mean while eos_share falls: see there",
        promised=False,
    ),
    Metric(
        "dropped_truncated_rows",
        "count",
        "those of dropped_rows that have a valid score and were cut by length under `ppo.truncation` = 'drop'",
        "none",
        "0 or few",
        "raise `sampling.max_new_tokens`, or choose another `ppo.truncation`",
    ),
)
