"""Metrics of what a step costs: seconds, bytes, passes and FLOPs."""

from __future__ import annotations

from fourfold.diagnostics.metrics.metric import Band, Metric
from fourfold.memory.meter import COUNTED_MODELS, COUNTED_PHASES, DIRECTIONS, WORKING

_TIMED = {
    "generate": "sampling the rollout",
    "score": "scoring it by reference, critic and reward",
    "learn": "all epochs of actor and critic",
    "save": "checkpoints written since the row before (0 when none was)",
}
_SLOW = {
    "generate": "lower `sampling.max_new_tokens`, raise `sampling.batch_size`",
    "score": "raise `ppo.micro_batch_size`",
    "learn": "lower `ppo.num_epochs` or `trunk.branch_layers`, raise `ppo.micro_batch_size`",
    "save": "raise `checkpoint.every`",
}
_LARGE = {
    "generate": "lower `sampling.batch_size`",
    "score": "lower `ppo.micro_batch_size`",
    "learn": "lower `ppo.micro_batch_size` or `trunk.branch_layers`; set `sharing.mode` = 'trunk'",
    "save": "none needed while below the peak of learn",
}
_HALVED = "memory ran out and it was halved: the log says where and which setting would help"
_ROWS_AT_ONCE = (
    Metric(
        "micro_batch_size",
        "rows",
        "rows that actor and critic take at once in learn, the smaller of the two",
        "none",
        "`ppo.micro_batch_size`",
        _HALVED,
    ),
    Metric(
        "score_micro_batch_size",
        "rows",
        "rows that a role scores at once, the actor in generate included",
        "none",
        "`ppo.micro_batch_size`",
        _HALVED,
    ),
    Metric(
        "sampling_batch_size",
        "rows",
        "rows that are sampled at once",
        "none",
        "`sampling.batch_size`, or the rollout where that is 0",
        _HALVED,
    ),
)
_EXPECTED_PASSES = {
    (
        "trunk",
        "forward",
    ): "1 under `sharing.mode` = 'trunk', else 0; under `trunk.train`, its frozen copy included, 4 + `ppo.num_epochs`, "
    "5 with a reward model (2 more for KL 'full')",
    (
        "trunk",
        "backward",
    ): "0: it is frozen; under `trunk.train` `ppo.num_epochs`, counted twice where its two gradients are taken apart",
    (
        "actor",
        "forward",
    ): "2 + `ppo.num_epochs`: one samples, one takes log-probs again, one an epoch (one more for KL 'full')",
    ("critic", "forward"): "1 + `ppo.num_epochs`: one scores, one an epoch",
    ("reference", "forward"): "1 (2 for KL 'full')",
    ("reward", "forward"): "1; 0 when the reward is a function",
    ("actor", "backward"): "`ppo.num_epochs`, fewer when early_stopped",
    ("critic", "backward"): "`ppo.num_epochs`, fewer when early_stopped",
}
_TRAINED = ("actor", "critic")
_NOT_TRAINED = {"trunk": "0: it is not trained, unless by `trunk.train`"}


def _time_and_memory() -> tuple[Metric, ...]:
    seconds = [
        Metric(f"{phase}_seconds", "s", f"wall-clock time of {what}", "none", "steady", f"grows: {_SLOW[phase]}")
        for phase, what in _TIMED.items()
    ]
    peaks = [
        Metric(
            f"{phase}_peak_bytes",
            "bytes",
            f"most memory held during {what}: resident memory of the process on CPU, torch's allocations on CUDA",
            "none",
            "steady; growth over many steps is a leak",
            f"too large: {_LARGE[phase]}",
        )
        for phase, what in _TIMED.items()
    ]
    roles = [
        Metric(
            f"{role}_{phase}_peak_bytes",
            "bytes",
            f"most memory held while the {role} worked in {phase}, counted as {phase}_peak_bytes",
            "none",
            "steady; where it is far above the other roles' of the phase, that role has the peak",
            f"too large: as for {phase}_peak_bytes",
            promised=False,
        )
        for phase, role in WORKING
    ]
    return (
        *seconds,
        Metric("step_seconds", "s", "wall-clock time of the whole step", "none", "steady", "see the phases"),
        *peaks,
        *roles,
        *_ROWS_AT_ONCE,
        Metric(
            "tokens_per_second",
            "tokens/s",
            "response tokens of the rollout",
            "step_seconds",
            "steady; falls as responses get shorter",
            "see the phases",
        ),
    )


# The state after a row's last token belongs to no action: trunk, reward and the critic's scores alone look at it.
_UNREAD = {
    ("actor", "forward"): ", without the last token of each row",
    ("actor", "backward"): ", without the last token of each row",
    ("reward", "forward"): ", in its own tokens under `reward.source` = 'model', of which a service tells none",
    ("reference", "forward"): ", without the last token of each row",
    ("critic", "forward"): ", in learn without the last token of each row",
    ("critic", "backward"): ", without the last token of each row",
}


def _work_of(model: str) -> tuple[Metric, ...]:
    passes, tokens = [], []
    for direction in DIRECTIONS:
        unread = _UNREAD.get((model, direction), "")
        healthy = _EXPECTED_PASSES.get((model, direction), "0: it is frozen")
        passes.append(
            Metric(
                f"{model}_{direction}_passes",
                "passes",
                f"rows that went {direction} through the {model}",
                "responses of the rollout",
                healthy,
                "another number: an epoch ended early, or rows were dropped",
            )
        )
        tokens.append(
            Metric(
                f"{model}_{direction}_tokens",
                "tokens",
                f"tokens of those rows, prompts included ({direction}{unread})",
                "none",
                "in proportion to the passes",
                "none needed",
            )
        )
    flops = [
        Metric(
            f"{model}_{phase}_flops",
            "FLOP",
            f"floating-point operations of the {model} in {phase}, forward and backward (two a multiply-add)",
            "none",
            "above 0 where it works"
            if phase != "learn" or model in _TRAINED
            else _NOT_TRAINED.get(model, "0: it is not trained"),
            "see the passes",
        )
        for phase in COUNTED_PHASES
    ]
    return (*passes, *tokens, *flops)


def _offload() -> tuple[Metric, ...]:
    """Of reference and reward, where they are not kept on the run's device: away, on the CPU, at another engine."""
    found = []
    for role in ("reference", "reward"):
        key = f"`{role}.residency`"
        found += [
            Metric(
                f"{role}_pass_seconds",
                "s",
                f"wall-clock time of the {role}'s pass in score, moving its weights included; at a service from "
                "request to answer, without waiting for other requests",
                "none",
                "near that of `keep`: reading is hidden behind computing",
                f"set {key} = 'keep', or 'park' instead of 'stream'",
                promised=False,
            ),
            Metric(
                f"{role}_moved_bytes",
                "bytes",
                f"weights of the {role} that were read from host memory or disk; at a service, requests and answers",
                "none",
                "its own weights once ('park') or once a micro-batch ('stream'); 'service': a few bytes a token",
                "raise `ppo.micro_batch_size`",
                promised=False,
            ),
        ]
    both = "reference_pass_seconds + reward_pass_seconds, of those that are not kept on the run's device"
    return (
        *found,
        Metric("offloaded_pass_seconds", "s", both, "none", "below generate_seconds", "see the ratio", promised=False),
        Metric(
            "offloaded_per_generate_ratio",
            "1",
            "offloaded_pass_seconds",
            "generate_seconds",
            "below 1: the scoring could be hidden behind the next batch's sampling (`sampling.overlap_scoring`)",
            "keep one of the roles on the device, or raise `ppo.micro_batch_size`",
            promised=False,
            band=Band(high=1),
        ),
    )


_OVERLAP = (
    Metric(
        "score_ahead_seconds",
        "s",
        "work of reference and reward on the thread beside sampling (`sampling.overlap_scoring`)",
        "none",
        "below generate_seconds",
        "see score_hidden_share",
        promised=False,
    ),
    Metric(
        "score_hidden_seconds",
        "s",
        "score_ahead_seconds less the time that the score phase waited for it",
        "none",
        "near score_ahead_seconds",
        "see score_hidden_share",
        promised=False,
    ),
    Metric(
        "score_hidden_share",
        "1",
        "score_hidden_seconds",
        "score_ahead_seconds",
        "near 1; what the last sampling batch leaves to do is waited for",
        "lower `sampling.batch_size`, or set `sampling.overlap_scoring` = false where step_seconds is no shorter",
        promised=False,
    ),
)

COSTS = (
    *_time_and_memory(),
    *_offload(),
    *_OVERLAP,
    *(metric for model in COUNTED_MODELS for metric in _work_of(model)),
)
