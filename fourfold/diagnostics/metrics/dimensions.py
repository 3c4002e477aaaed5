"""Metrics of a reward of several parts, and of a critic that has a value for each of them."""

from __future__ import annotations

from fourfold.diagnostics.metrics.metric import Band, Metric
from fourfold.diagnostics.metrics.rollout import LEARNED_TOKENS
from fourfold.diagnostics.metrics.update import CRITIC_TOKENS

# NAME is a part of the reward or 'penalties'.
DIMENSIONS = (
    Metric(
        "score_correlation/NAME",
        "correlation",
        "Pearson's correlation of the raw scores of two parts of the reward, which NAME gives as 'one:other'",
        "responses with a valid score",
        "any; the critic's body is shared, so what two parts have in common is learned once",
        "near 1: one of the two parts is enough; near -1: they pull against each other, and their weights in "
        "`reward.parts` decide",
        promised=False,
    ),
    Metric(
        "explained_variance/NAME",
        "share",
        "explained_variance of the values and returns of dimension NAME alone",
        LEARNED_TOKENS,
        "rises above 0.3; 1 is perfect",
        "far below the others': its loss is drowned; set `critic.loss_balance` or its `critic.loss_weights`",
        promised=False,
        band=Band(low=0.3),
    ),
    Metric(
        "advantage_std/NAME",
        "advantage",
        "standard deviation of the advantages of dimension NAME times its weight, before whitening",
        f"{LEARNED_TOKENS}, less 1",
        "of the size that the weights intend",
        "one far above the others: it alone steers; change weights in `reward.parts`, or set `ppo.whiten_dimensions`",
        promised=False,
    ),
    Metric(
        "value_loss_per_token/NAME",
        "return squared",
        "sum over tokens of half the (clipped) squared error of the value of dimension NAME",
        CRITIC_TOKENS,
        "falls",
        "grows: as for value_loss_per_token",
        promised=False,
    ),
    Metric(
        "value_clip_fraction/NAME",
        "share",
        "tokens at which the clipped branch of the value loss of dimension NAME was the larger one",
        CRITIC_TOKENS,
        "below 0.3",
        "larger: its returns are wide against its clip range; give it one in `critic.value_clip_eps`",
        promised=False,
        band=Band(high=0.3),
    ),
    Metric(
        "value_loss_weight/NAME",
        "factor",
        "sum over tokens of the loss of dimension NAME times what it counts",
        "sum over tokens of that loss",
        "1 under `critic.loss_balance` = 'fixed'; else between a tenth and ten times the mean",
        "at an end of that range for long: the dimensions differ too much; set `ppo.reward_normalization`",
        promised=False,
    ),
    Metric(
        "value_loss_share/NAME",
        "share",
        "sum over tokens of the loss of dimension NAME times what it counts",
        "the same sum over all dimensions",
        "no dimension near 1",
        "near 1: that dimension rules what the body learns; set `critic.loss_balance`",
        promised=False,
    ),
)

STEERING = (
    Metric(
        "eval_steering/NAME",
        "correlation",
        "Pearson's correlation of the weight that a prompt was told of part NAME with that part's raw score",
        "held-out responses",
        "rises above 0 under `reward.weights` = 'sampled'",
        "near 0: the policy does not heed the weights; more `ppo.steps`, a smaller `reward.weights_concentration`",
        promised=False,
    ),
)
