"""What the critic has learned of a rollout, and what it knew of it before: how far it learns by heart."""

from __future__ import annotations

from fourfold.diagnostics.metrics.metric import Metric
from fourfold.diagnostics.metrics.update import CRITIC_TOKENS, LEARNED_TOKENS

CRITIC = (
    Metric(
        "value_loss_fresh_per_token",
        "return squared",
        "sum over tokens of half the squared error of the values by which the rollout was scored, before any of it was "
        "learned from",
        LEARNED_TOKENS,
        "falls with value_loss_last_pass_per_token",
        "rises while that falls: the critic learns responses by heart; lower `critic.updates_per_actor` or "
        "`ppo.num_epochs`, set `critic.dropout` or `critic.weight_decay`",
    ),
    Metric(
        "value_loss_last_pass_per_token",
        "return squared",
        "sum over tokens of half the squared error (never clipped) of the values of the critic's last pass over the "
        "rollout, while it learns",
        "response tokens of the mini-batches of that pass",
        "below value_loss_fresh_per_token, not by an order of magnitude",
        "as for value_loss_fresh_per_token",
        promised=False,
    ),
    Metric(
        "value_spread_per_token_mean",
        "return",
        "sum over tokens of the standard deviation of the values over the heads of `critic.ensemble`",
        CRITIC_TOKENS,
        "above 0, below return_std, and falling",
        "near return_std: the heads know little of these states; more `critic.pretrain_rollouts`",
        promised=False,
    ),
)
