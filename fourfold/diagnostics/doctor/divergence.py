"""How far the actor is from the reference and from what has drawn its responses, and whether these numbers are true."""

from __future__ import annotations

import contextlib

import numpy
import torch

from fourfold.batch import Experience
from fourfold.config import RunConfig
from fourfold.config.schema import ReferenceSection
from fourfold.diagnostics.doctor.records import CannotJudge, Records
from fourfold.diagnostics.doctor.remedies import first_taken
from fourfold.diagnostics.doctor.robust import Estimate, Numbers, level, mean, ratio_of_sums
from fourfold.diagnostics.doctor.verdict import Diagnosis, Finding
from fourfold.diagnostics.kept import sums

# KL of a response, nats, and of a token.
KL_SEQUENCE, KL_TOKEN, ANY_TOKEN = 15.0, 0.5, 1.0
OVER_TARGET = 2.0
# KL below 0, nats a token.
NEGATIVE = 0.01
STEP_0 = "kl_step_0_per_sequence_mean"
# Of responses that the limit cuts: share, its rise, and log p(actor) - log p(reference), nats a token.
CUT, MORE_CUT, DRIFT = 0.2, 0.1, 0.05
# Surprise of the sampled tokens against the entropy of the policy, nats a token.
SURPRISE = 0.15
# KL of a token before the first step, nats: beyond every bound of pre-flight.
AT_START = 0.02


# What `more_kl` proposes, in words.
NEARER = (
    "raise `ppo.kl_coef`, or under the adaptive controller lower `ppo.kl_target`; beside another `reference.prior` "
    "take 'step_0', or a slower one (`reference.copy_every`, `reference.decay`)"
)


def more_kl(records: Records) -> str:
    """Nearer to the reference: what the controller aims at, or without one the coefficient, which is else a start."""
    given = records.config.reference
    if given.kind in ("moving", "uniform"):
        return first_taken(
            records.config,
            f"reference.prior = 'step_0'  # is {given.kind!r}, which holds no policy to its start",
            f"reference.copy_every = {4 * given.copy_every}  # or reference.prior = 'step_0', without this key"
            * bool(given.copy_every),
            f"reference.decay = {1 - (1 - given.decay) / 4:g}  # or reference.prior = 'step_0', without this key",
        )
    coef, target = records.config.ppo.kl_coef, records.config.ppo.kl_target
    if records.config.ppo.kl_controller == "adaptive":
        return f"ppo.kl_target = {target / 2:g}  # is {target:g}"
    return f"ppo.kl_coef = {2 * coef if coef else 0.05:g}  # is {coef:g}"


def per_token(numbers: torch.Tensor, kept: Experience) -> Numbers:
    """Mean over the tokens of each response."""
    return (sums(numbers, kept.response_mask) / kept.lengths).double().numpy()


def kl_runaway(records: Records) -> Finding:
    """The actor leaves the reference further behind than any reward pays for."""
    ppo = records.config.ppo
    whole, token = records.series("kl_k3_per_sequence_mean"), records.series("kl_per_token_mean")
    whole = max((whole, records.series("kl_per_sequence_mean")), key=lambda series: series.end.value)
    with contextlib.suppress(CannotJudge):  # of a prior that is far from the start, or goes along, the KL says little
        whole = records.series(STEP_0)
    limit = KL_SEQUENCE
    if ppo.kl_controller == "adaptive":
        limit = OVER_TARGET * ppo.kl_target
    per_token = Estimate(token.end.value, token.end.error)
    if whole.name != "kl_per_sequence_mean":
        lengths = records.series("response_length_mean")
        per_token = level(whole.values[-whole.third :] / lengths.values[-whole.third :])
    far = max(min(whole.end.above(limit), per_token.above(KL_TOKEN)), per_token.above(ANY_TOKEN))
    confidence = min(far, whole.end.minus(whole.start).above(0.0))
    evidence = (
        f"KL to the {'start' if whole.name == STEP_0 else 'reference'} {whole.start.value:.3g} -> "
        f"{whole.end.value:.3g} nats a response (limit {limit:g}), {per_token.value:.2g} a token (limit {KL_TOKEN}, "
        f"by itself {ANY_TOKEN:g}), from the first to the last third of the steps; kl_coef "
        f"{records.rows[-1]['kl_coef']:g}"
    )
    remedy = more_kl(records)
    if ppo.kl_controller == "adaptive" and remedy.startswith("ppo.kl_target"):
        remedy = f"ppo.kl_horizon = {max(1, ppo.kl_horizon // 4)}  # the controller lags behind; is {ppo.kl_horizon}"
    return Finding(evidence, confidence, remedy, whole.all_steps)


def kl_negative(records: Records) -> Finding:
    """log p(actor) - log p(reference) of the actor's own samples is below 0 on average, which KL cannot be."""
    k1, lengths = records.series("kl_k1_per_sequence_mean"), records.series("response_length_mean")
    per_token = level(k1.values[-k1.third :] / lengths.values[-k1.third :])
    causes = [(name, finding) for name, finding in _causes(records) if finding.confidence >= 0.5]
    said = "; ".join(f"{name}: {finding.evidence}" for name, finding in causes) or "none of the known causes is seen"
    evidence = (
        f"mean of log p(actor) - log p(reference) {per_token.value:+.3g} ± {per_token.error:.1g} nats a token in steps "
        f"{k1.end_steps[0]} to {k1.end_steps[1]} (limit -{NEGATIVE}); {said}"
    )
    plain = "reference.model = ''  # the actor as it was at step 0" if records.config.reference.model else ""
    remedy = causes[0][1].remedy if causes else first_taken(records.config, plain)
    return Finding(evidence, per_token.below(-NEGATIVE), remedy, k1.end_steps)


def _causes(records: Records) -> list[tuple[str, Finding]]:
    found = []
    for name, judge in (
        ("sampling options", sampling_mismatch),
        ("wrong reference", _distance_at_the_start),
        ("precision gap", precision_gap),
    ):
        try:
            found.append((name, judge(records)))
        except CannotJudge:
            continue
    return sorted(found, key=lambda each: -each[1].confidence)


def sampling_mismatch(records: Records) -> Finding:
    """Responses were not drawn from the policy that is trained: their -log p is not its entropy."""
    name = "entropy_first_epoch_per_token_mean"
    entropy = {int(row["step"]): row[name] for row in records.rows if name in row}
    steps = [step for step in records.training.steps() if step in entropy]
    if not steps:
        raise CannotJudge("no training rollout of a step in which the actor learned is kept; see evaluation.every")
    gaps, lengths = [], []
    for step in steps:
        kept = records.kept(records.training, step)
        gaps.append(sums(-kept.log_probs - entropy[step], kept.response_mask).double().numpy())
        lengths.append(kept.lengths.double().numpy())
    gap = ratio_of_sums(numpy.concatenate(gaps), numpy.concatenate(lengths))
    row = next(row for row in records.rows if row["step"] == steps[-1])
    evidence = (
        f"steps {', '.join(map(str, steps))}: -log p of the tokens drawn is {gap.value:+.3f} ± {gap.error:.3f} nats "
        f"from the policy's entropy (limit {SURPRISE}; entropy {entropy[steps[-1]]:.3g}, sampler_gap_mean "
        f"{row['sampler_gap_mean']:.2g})"
    )
    sampling = records.config.sampling
    remedy = "sampling.engine = 'local'  # draws from what is trained, with sampling.weights = 'as_trained'"
    if sampling.differs and records.config.importance == "none":
        remedy = "ppo.importance = 'token'  # weighs tokens by the ratio of the two distributions"
    elif not sampling.differs:
        remedy = ""  # the settings ask for nothing but the policy that is trained
    return Finding(evidence, max(gap.above(SURPRISE), gap.below(-SURPRISE)), remedy, (steps[0], steps[-1]))


def wrong_reference(records: Records) -> Finding:
    """The reference is to be the actor as it starts, and is not: KL is not 0 before anything was learned."""
    given = records.config.reference
    if not given.starts_as_the_actor:
        raise CannotJudge(f"reference.{_named(given)} names another policy than the actor at step 0, as was asked for")
    if records.blamed == "reference":
        return Finding(f"the run stopped: {records.failure}", 1.0, _held_here(records.config), (0, 0))
    return _distance_at_the_start(records)


def _named(reference: ReferenceSection) -> str:
    """The setting that says which policy the reference is."""
    key = reference.kind if reference.kind in ("model", "checkpoint") else "prior"
    return f"{key} = {getattr(reference, key)!r}"


def _distance_at_the_start(records: Records) -> Finding:
    """How far the reference is from the actor before the first step, whichever policy it is to be."""
    first, kept = records.first_held_out()
    if first != 0:
        raise CannotJudge("no held-out rollout of step 0 is kept; give data.prompts_test")
    reference = records.config.reference
    if records.config.reference_differs and reference.starts_as_the_actor:
        raise CannotJudge("the reference computes otherwise than the actor: see precision gap")
    gap = (kept.log_probs - kept.ref_log_probs).abs()
    size = mean(per_token(torch.where(kept.response_mask, gap, 0.0), kept))
    evidence = (
        f"before the first step |log p(actor) - log p(reference)| is {size.value:.3g} ± {size.error:.1g} nats a token "
        f"(limit {AT_START}); reference.{_named(reference)}"
    )
    key = _named(reference).partition(" ")[0]
    default = "'step_0'" if key == "prior" else "''"
    remedy = first_taken(
        records.config, f"reference.{key} = {default}  # the reference is the actor as it is at step 0"
    )
    return Finding(evidence, size.above(AT_START), remedy, (0, 0))


def precision_gap(records: Records) -> Finding:
    """The reference computes in other numerics than the actor, and every KL is off by the mean difference."""
    bias = records.preflight.get("reference_bias")
    if bias is None:
        raise CannotJudge("pre-flight has measured no bias: actor and reference compute alike")
    found = Estimate(abs(bias["per_sequence_mean"]), bias["per_sequence_error"])
    kl = records.series("kl_k1_per_sequence_mean")
    limit = max(abs(kl.end.value) / 4, NEGATIVE)
    evidence = (
        f"the same weights differ by {bias['per_sequence_mean']:+.3g} ± {found.error:.1g} nats a response between "
        f"actor and reference, a KL of {kl.end.value:.3g} is told (limit: a quarter of it)"
    )
    config = records.config
    held = config.precision.reference
    if config.precision.reference_differs:
        why = f"rounds less than {held!r}; 'auto' does not round, and leave precision.max_reference_bias out then"
        finer = f"precision.reference = 'bfloat16'  # {why}" if held != "bfloat16" else ""
        remedy = first_taken(config, f"precision.reference = 'auto'  # is {held!r}", finer)
    else:
        remedy = _held_here(config)
    return Finding(evidence, found.above(limit), remedy, kl.end_steps)


def _held_here(config: RunConfig) -> str:
    """The setting that has the reference computed as the actor is; "" where it is already."""
    given = config.reference
    engine = "reference.engine = 'torch'  # computes as the actor does" if given.engine != "torch" else ""
    away = f"reference.residency = 'keep'  # is {given.residency!r}" if given.residency != "keep" else ""
    return first_taken(config, engine, away)


def truncation_drift(records: Records) -> Finding:
    """The actor moves towards responses that never end: more of them are cut, and it likes those better than before."""
    drift, ended = records.series("kl_k1_truncated_per_token_mean"), records.series("eos_share")
    cut = Estimate(1 - ended.end.value, ended.end.error)
    more = ended.start.minus(ended.end)
    said = ""
    with contextlib.suppress(CannotJudge):  # where hardly any response ends there is nothing to compare with
        others = records.series("kl_k1_ended_per_token_mean").end
        said = f", {others.value:+.3g} of those that ended"
    evidence = (
        f"the limit cuts {1 - ended.start.value:.0%} -> {cut.value:.0%} of the responses from the first to the last "
        f"third of the steps (limit {CUT:.0%}, {MORE_CUT:.0%} more), and log p(actor) - log p(reference) of those is "
        f"{drift.end.value:+.3g} ± {drift.end.error:.1g} nats a token (limit {DRIFT}){said}"
    )
    confidence = min(cut.above(CUT), more.above(MORE_CUT), drift.end.above(DRIFT))
    penalty, longest = records.config.ppo.missing_eos_penalty, records.config.sampling.max_new_tokens
    remedy = first_taken(
        records.config,
        f"ppo.missing_eos_penalty = {2 * penalty if penalty else 1:g}  # is {penalty:g}",
        f"sampling.max_new_tokens = {2 * longest}  # is {longest}",
    )
    return Finding(evidence, confidence, remedy, ended.all_steps)


def stale_data(records: Records) -> Finding:
    """Responses of an older policy than the one that learns from them."""
    step, kept = records.last_training()
    ages = step - 1 - kept.policy_version
    row = next(row for row in records.rows if row["step"] == step)
    evidence = (
        f"step {step} learned from responses of policies {int(kept.policy_version.min())} to "
        f"{int(kept.policy_version.max())}, up to {int(ages.max())} steps old (limit 0); sampler_kl_k3_per_token_mean "
        f"{row['sampler_kl_k3_per_token_mean']:.2g}"
    )
    remedy = "ppo.importance = 'token'  # or draw anew for every step"
    return Finding(evidence, float(int(ages.max()) > 0), remedy, (step, step))


DIAGNOSES = (
    Diagnosis(
        "KL runaway",
        "policy",
        "ill",
        "The actor leaves the reference further and further behind.",
        f"The larger of kl_per_sequence_mean and kl_k3_per_sequence_mean, or kl_step_0_per_sequence_mean, in the last "
        f"third of the steps: confidence of above {KL_SEQUENCE:g} nats ({OVER_TARGET:g} x `ppo.kl_target` under the "
        f"adaptive controller) and {KL_TOKEN} nats a token, or of above {ANY_TOKEN:g} nats a token; and of above the "
        "first third.",
        f"{NEARER[0].upper()}{NEARER[1:]}; shorten `ppo.kl_horizon` where the adaptive controller lags behind.",
        kl_runaway,
    ),
    Diagnosis(
        "KL negative",
        "policy",
        "ill",
        "log p(actor) - log p(reference) is negative on average over what the actor has drawn, which no KL is. Its "
        "cause is looked for among sampling mismatch, wrong reference and precision gap.",
        f"kl_k1_per_sequence_mean / response_length_mean in the last third of the steps: confidence that its level is "
        f"below -{NEGATIVE}.",
        "That of its cause.",
        kl_negative,
    ),
    Diagnosis(
        "sampling mismatch",
        "policy",
        "ill",
        "Responses were drawn from another distribution than the one that is trained: truncated sampling, another "
        "temperature, other weights.",
        "Kept training rollouts: x = sum over tokens of -log p less the row's entropy_first_epoch_per_token_mean, per "
        "token: 0 for a policy's own samples (the sum over a response is a martingale); its error counts responses (a "
        f"ratio of sums). Confidence that |x| is above {SURPRISE} nats.",
        "`sampling.engine` = 'local' with `sampling.weights` = 'as_trained', or `ppo.importance` = 'token'.",
        sampling_mismatch,
    ),
    Diagnosis(
        "wrong reference",
        "policy",
        "warning",
        "The reference is to be the actor as it starts and is not: the penalty pulls towards another model. A prior "
        "that was chosen (`reference.model`, `reference.checkpoint`, `reference.prior` = 'uniform') is not judged; as "
        "a cause of a negative KL its distance is looked at too.",
        "The run stopped over it in pre-flight: a fact, confidence 1. Else held-out rollout of step 0: mean over "
        "responses of the mean |log p(actor) - log p(reference)| of their tokens; confidence that it is above "
        f"{AT_START} nats. Not asked where the reference computes otherwise.",
        "Hold the reference here (`reference.residency`, `reference.engine`); where it is a cause of a negative KL, "
        "leave `reference.model`, `reference.checkpoint` and `reference.prior` out.",
        wrong_reference,
    ),
    Diagnosis(
        "precision gap",
        "policy",
        "warning",
        "Every KL is off by what the reference's numerics add.",
        "Pre-flight's bias of the same weights, nats a response, with its standard error over responses; confidence "
        f"that its size is above a quarter of the KL that is told in the last third of the steps (at least "
        f"{NEGATIVE}).",
        "`precision.reference` = 'auto', or one that rounds less; `reference.engine` = 'torch', "
        "`reference.residency` = 'keep'.",
        precision_gap,
    ),
    Diagnosis(
        "truncation drift",
        "policy",
        "warning",
        "The actor moves towards responses that never end: the limit cuts more and more of them, and they are what it "
        "has come to like better than the reference does.",
        f"Last third of the steps: the smallest of the confidences that 1 - eos_share is above {CUT:.0%}, that it has "
        f"risen by {MORE_CUT:.0%} since the first third, and that kl_k1_truncated_per_token_mean is above {DRIFT} "
        "nats.",
        "Set `ppo.missing_eos_penalty`, or raise `sampling.max_new_tokens`.",
        truncation_drift,
    ),
    Diagnosis(
        "stale data",
        "policy",
        "warning",
        "The actor learns from responses of an older policy.",
        "Newest training rollout: a response whose policy_version is not that of the step before: a fact, "
        "confidence 1.",
        "Draw anew for every step, or set `ppo.importance` = 'token'.",
        stale_data,
    ),
)
