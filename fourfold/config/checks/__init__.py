"""Checks across settings: each returns every problem it finds as 'key: given; allowed; what to try'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.config.checks.critic import critic
from fourfold.config.checks.ignored import ignored, ignored_keys, is_given
from fourfold.config.checks.inputs import DATASETS, STAGE_ORDER, data, reward_source, stages
from fourfold.config.checks.memory import attention, in_backward, optimizer_states, overlap
from fourfold.config.checks.own_models import reference_engine, reward_model
from fourfold.config.checks.parts import TASK, reward_parts
from fourfold.config.checks.precision import precision
from fourfold.config.checks.prior import prior
from fourfold.config.checks.sampling import sampling
from fourfold.config.checks.service import (
    reference_at_llama_cpp,
    roles_at_a_service,
    roles_of_a_service,
    roles_of_the_base,
    service,
)
from fourfold.config.checks.training import batch_sizes, curriculum, lengths, optimizers, ppo, warm_ups
from fourfold.config.checks.trunk import trunk
from fourfold.config.checks.vector import sampled_weights, told_texts, values

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

__all__ = [
    "DATASETS",
    "STAGE_ORDER",
    "TASK",
    "ignored_keys",
    "is_given",
    "problems",
    "reference_at_llama_cpp",
    "roles_at_a_service",
    "roles_of_a_service",
    "roles_of_the_base",
]


def problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with settings which are each allowed alone."""
    return [
        *stages(config),
        *data(config),
        *batch_sizes(config),
        *optimizers(config),
        *reward_source(config),
        *reward_parts(config),
        *reward_model(config),
        *reference_engine(config),
        *prior(config),
        *ppo(config),
        *critic(config),
        *values(config),
        *sampled_weights(config),
        *told_texts(config),
        *warm_ups(config),
        *lengths(config),
        *curriculum(config),
        *optimizer_states(config),
        *in_backward(config),
        *attention(config),
        *precision(config),
        *trunk(config),
        *service(config),
        *overlap(config),
        *sampling(config),
        *ignored(config),
    ]
