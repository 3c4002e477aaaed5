"""What can be wrong with the actor: what it learns to write, how far it goes, and whose responses it learns from."""

from __future__ import annotations

import numpy
import torch

from fourfold.algorithms.statistics import distinct_n
from fourfold.batch import Experience
from fourfold.diagnostics.doctor.records import CannotJudge, Records
from fourfold.diagnostics.doctor.robust import Estimate, jackknife, level, mean, spread
from fourfold.diagnostics.doctor.verdict import Diagnosis, Finding
from fourfold.diagnostics.kept import response_tokens, sums

# Reward hacking: rise of the score in its own spread; fall of distinct pairs and of the judge; move of the reference's
# log-prob, nats a token.
RISE, LESS_DISTINCT, STRANGE, WORSE = 0.5, 0.25, 1.0, 0.1
# Entropy that is left, in parts of the start's.
ENTROPY_LEFT = 0.3
# KL of a response, nats, and of a token.
KL_SEQUENCE, KL_TOKEN = 15.0, 0.5
OVER_TARGET = 2.0
# KL below 0, nats a token.
NEGATIVE = 0.01
# Surprise of the sampled tokens against the entropy of the policy, nats a token.
SURPRISE = 0.1
# KL of a token before the first step, nats: beyond every bound of pre-flight.
AT_START = 0.02
RATIO, CLIPPED = 0.1, 0.35
STILL, STILL_CLIP = 1e-6, 1e-4


def _more_kl(records: Records) -> str:
    coef = records.config.ppo.kl_coef
    return f"ppo.kl_coef = {2 * coef if coef else 0.05:g}  # is {coef:g}"


def _slower(records: Records) -> str:
    return f"ppo.learning_rate = {records.config.ppo.learning_rate / 3:.2g}  # is {records.config.ppo.learning_rate:g}"


def reward_hacking(records: Records) -> Finding:
    """The score rises while something that the reward does not look at gets worse."""
    first, start = records.first_held_out()
    step, end = records.last_held_out()
    rise = mean(end.scores.double().numpy()).minus(mean(start.scores.double().numpy()))
    unit = spread(start.scores.double().numpy()) or 1.0
    rise = Estimate(rise.value / unit, rise.error / unit)
    signs = [_repetition(start, end), _log_prob(start, end)]
    judged = records.evaluation("eval_judge_mean")
    if len(judged) > 1:
        fall = Estimate(judged[0][1] - judged[-1][1], 0.5 * (2 / len(end.sequences)) ** 0.5)
        said = f"the judge's mean went from {judged[0][1]:.3f} to {judged[-1][1]:.3f} (limit -{WORSE})"
        signs.append((fall.above(WORSE), said))
    worst, said = max(signs)
    evidence = (
        f"held-out prompts, step {first} to {step}: the score rose by {rise.value:.2f} ± {rise.error:.2f} of its spread "
        f"(limit {RISE}), while {said}"
    )
    return Finding(evidence, min(rise.above(RISE), worst), _more_kl(records), (first, step))


def _repetition(start: Experience, end: Experience) -> tuple[float, str]:
    before, after = (_distinct(kept) for kept in (start, end))
    lost = Estimate(1 - after.value / before.value, after.error / before.value) if before.value else Estimate(0.0, 1.0)
    said = (
        f"different pairs of neighbouring tokens fell from {before.value:.2f} to {after.value:.2f} of all (limit "
        f"{LESS_DISTINCT:.0%} less)"
    )
    return lost.above(LESS_DISTINCT), said


def _distinct(kept: Experience) -> Estimate:
    tokens = response_tokens(kept)
    return jackknife(len(tokens), lambda rows: distinct_n([tokens[row] for row in rows], 2))


def _log_prob(start: Experience, end: Experience) -> tuple[float, str]:
    before, after = (mean(_per_token(kept.ref_log_probs, kept)) for kept in (start, end))
    moved = after.minus(before)
    said = (
        f"the reference's log-prob of a token went from {before.value:.2f} to {after.value:.2f} nats (limit "
        f"{STRANGE} either way)"
    )
    return max(moved.above(STRANGE), moved.below(-STRANGE)), said


def _per_token(numbers: torch.Tensor, kept: Experience) -> numpy.ndarray:
    """Mean over the tokens of each response."""
    return (sums(numbers, kept.response_mask) / kept.lengths).double().numpy()


def entropy_collapse(records: Records) -> Finding:
    """The policy says the same whatever it is asked."""
    entropy = records.series("entropy_per_token_mean")
    start, end = entropy.start, entropy.end
    left = Estimate(end.value / start.value, end.error / start.value) if start.value > 0 else Estimate(0.0, 0.0)
    evidence = (
        f"entropy of a token {start.value:.3g} -> {end.value:.3g} nats from the first to the last third of the steps: "
        f"{left.value:.0%} are left (limit {ENTROPY_LEFT:.0%})"
    )
    bonus = records.config.ppo.entropy_coef
    remedy = f"ppo.entropy_coef = {2 * bonus if bonus else 0.01:g}  # or {_more_kl(records).split('  #')[0]}"
    return Finding(evidence, left.below(ENTROPY_LEFT), remedy, entropy.all_steps)


def kl_runaway(records: Records) -> Finding:
    """The actor leaves the reference further behind than any reward pays for."""
    ppo = records.config.ppo
    whole, token = records.series("kl_k3_per_sequence_mean"), records.series("kl_per_token_mean")
    whole = max((whole, records.series("kl_per_sequence_mean")), key=lambda series: series.end.value)
    limit = KL_SEQUENCE
    if ppo.kl_controller == "adaptive":
        limit = OVER_TARGET * ppo.kl_target
    per_token = Estimate(token.end.value, token.end.error)
    if whole.name.startswith("kl_k3"):
        lengths = records.series("response_length_mean")
        per_token = level(whole.values[-whole.third :] / lengths.values[-whole.third :])
    confidence = min(whole.end.above(limit), per_token.above(KL_TOKEN), whole.end.minus(whole.start).above(0.0))
    evidence = (
        f"KL to the reference {whole.start.value:.3g} -> {whole.end.value:.3g} nats a response (limit {limit:g}), "
        f"{per_token.value:.2g} a token (limit {KL_TOKEN}), from the first to the last third of the steps; kl_coef "
        f"{records.rows[-1]['kl_coef']:g}"
    )
    remedy = _more_kl(records)
    if ppo.kl_controller == "adaptive":
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
    remedy = causes[0][1].remedy if causes else "reference.model = ''  # the actor as it was at step 0"
    return Finding(evidence, per_token.below(-NEGATIVE), remedy, k1.end_steps)


def _causes(records: Records) -> list[tuple[str, Finding]]:
    found = []
    for name, judge in (
        ("sampling options", sampling_mismatch),
        ("wrong reference", wrong_reference),
        ("precision gap", precision_gap),
    ):
        try:
            found.append((name, judge(records)))
        except CannotJudge:
            continue
    return sorted(found, key=lambda each: -each[1].confidence)


def sampling_mismatch(records: Records) -> Finding:
    """The responses were not drawn from the policy that is trained: -log p of what was drawn differs from its entropy."""
    step, kept = records.last_training()
    row = next(row for row in records.rows if row["step"] == step)
    if "entropy_per_token_mean" not in row:
        raise CannotJudge("the actor's entropy is logged in steps in which it learns")
    drawn = mean(_per_token(-kept.log_probs, kept))
    gap = Estimate(drawn.value - row["entropy_per_token_mean"], drawn.error)
    evidence = (
        f"step {step}: tokens were drawn with -log p = {drawn.value:.3f} ± {drawn.error:.3f} nats on average, the "
        f"policy's entropy is {row['entropy_per_token_mean']:.3f} (limit {SURPRISE} apart); sampler_gap_mean "
        f"{row['sampler_gap_mean']:.2g}"
    )
    sampling = records.config.sampling
    remedy = "sampling.engine = 'local'  # draws from what is trained, with sampling.weights = 'as_trained'"
    if sampling.differs and records.config.importance == "none":
        remedy = "ppo.importance = 'token'  # weighs tokens by the ratio of the two distributions"
    return Finding(evidence, max(gap.above(SURPRISE), gap.below(-SURPRISE)), remedy, (step, step))


def wrong_reference(records: Records) -> Finding:
    """The reference is not the actor as it starts: KL is not 0 before anything was learned."""
    first, kept = records.first_held_out()
    if first != 0:
        raise CannotJudge("no held-out rollout of step 0 is kept; give data.prompts_test")
    gap = (kept.log_probs - kept.ref_log_probs).abs()
    size = mean(_per_token(torch.where(kept.response_mask, gap, 0.0), kept))
    evidence = (
        f"before the first step |log p(actor) - log p(reference)| is {size.value:.3g} ± {size.error:.1g} nats a token "
        f"(limit {AT_START})"
    )
    confidence = size.above(AT_START)
    if records.config.reference_differs:
        confidence = 0.0
        evidence += "; the reference computes otherwise, see precision gap"
    remedy = "reference.model = ''  # the reference is the actor as it is at step 0"
    return Finding(evidence, confidence, remedy, (0, 0))


def precision_gap(records: Records) -> Finding:
    """The reference computes in other numerics than the actor, and every KL is off by the mean difference."""
    bias = records.preflight.get("reference_bias")
    if bias is None:
        raise CannotJudge("pre-flight has measured no bias: actor and reference compute alike")
    found = Estimate(abs(bias["per_sequence_mean"]), bias["per_sequence_error"])
    kl = records.series("kl_k1_per_sequence_mean")
    limit = max(abs(kl.end.value) / 4, NEGATIVE)
    evidence = (
        f"the same weights differ by {bias['per_sequence_mean']:+.3g} ± {found.error:.1g} nats a response between actor "
        f"and reference, a KL of {kl.end.value:.3g} is told (limit: a quarter of it)"
    )
    config = records.config
    remedy = f"precision.reference = 'auto'  # is {config.precision.reference!r}"
    if not config.precision.reference_differs:
        remedy = "reference.residency = 'keep'  # and reference.engine = 'torch'"
    return Finding(evidence, found.above(limit), remedy, kl.end_steps)


def ratio_off(records: Records) -> Finding:
    """exp(new - old log-prob) should be 1 on average over tokens that the old policy drew."""
    ratio = records.series("ratio_mean")
    off = level(numpy.abs(ratio.values[-ratio.third :] - 1))
    measured = records.preflight.get("ratio_gap_mean")
    before = "" if measured is None else f"; before the first step |log ratio| was {measured:.1e}"
    evidence = (
        f"|ratio_mean - 1| is {off.value:.3g} ± {off.error:.1g} in steps {ratio.end_steps[0]} to {ratio.end_steps[1]} "
        f"(limit {RATIO}){before}"
    )
    return Finding(evidence, off.above(RATIO), _slower(records), ratio.end_steps)


def clip_fraction(records: Records) -> Finding:
    """Most of what a rollout could teach is cut off."""
    clipped = records.series("policy_clip_fraction")
    kl = records.series("approx_kl_per_token_mean")
    evidence = (
        f"{clipped.end.value:.0%} of the tokens are clipped in steps {clipped.end_steps[0]} to {clipped.end_steps[1]} "
        f"(limit {CLIPPED:.0%}); KL(old, new) is {kl.end.value:.3g} nats a token"
    )
    epochs = records.config.ppo.num_epochs
    remedy = _slower(records) + (f"; or ppo.num_epochs = {epochs // 2}" if epochs > 1 else "")
    return Finding(evidence, clipped.end.above(CLIPPED), remedy, clipped.end_steps)


def stands_still(records: Records) -> Finding:
    """The actor does not move."""
    kl, clipped = records.series("approx_kl_per_token_mean"), records.series("policy_clip_fraction")
    evidence = (
        f"KL(old, new) is {kl.end.value:.2g} nats a token (limit {STILL:g}) and {clipped.end.value:.2g} of the tokens "
        f"are clipped in steps {kl.end_steps[0]} to {kl.end_steps[1]}"
    )
    rate = records.config.ppo.learning_rate
    remedy = f"ppo.learning_rate = {10 * rate if rate else 1e-5:g}  # is {rate:g}"
    return Finding(evidence, min(kl.end.below(STILL), clipped.end.below(STILL_CLIP)), remedy, kl.end_steps)


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


def not_finite(records: Records) -> Finding:
    """The run stopped because the actor's numbers were none."""
    failure = records.failure
    stopped = "finite" in failure and "actor" in failure
    evidence = f"the run stopped: {failure}" if stopped else "no number of the actor has stopped the run"
    return Finding(evidence, float(stopped), _slower(records), (records.last_step, records.last_step + 1))


DIAGNOSES = (
    Diagnosis(
        "reward hacking",
        "policy",
        "ill",
        "The score rises while something that it does not look at gets worse: the reward is exploited.",
        "Oldest against newest held-out rollout: rise of the mean score in spreads of the oldest's scores, limit "
        f"{RISE}; and the surest of: different pairs of neighbouring tokens fell by {LESS_DISTINCT:.0%} (jackknife), the "
        f"reference's log-prob of a token moved by {STRANGE} nats either way, the judge's mean fell by {WORSE} (error "
        "0.5 sqrt(2 / n)). The smaller of the two confidences.",
        "Raise `ppo.kl_coef`; train the reward model on more pairs.",
        reward_hacking,
    ),
    Diagnosis(
        "entropy collapse",
        "policy",
        "ill",
        "The policy says the same whatever it is asked, and explores no more.",
        f"entropy_per_token_mean: x = its level in the last third of the steps over that in the first. Confidence that x "
        f"is below {ENTROPY_LEFT}.",
        "Set `ppo.entropy_coef`, raise `ppo.kl_coef`.",
        entropy_collapse,
    ),
    Diagnosis(
        "KL runaway",
        "policy",
        "ill",
        "The actor leaves the reference further and further behind.",
        f"The larger of kl_per_sequence_mean and kl_k3_per_sequence_mean in the last third of the steps: the smallest "
        f"confidence of above {KL_SEQUENCE:g} nats ({OVER_TARGET:g} x `ppo.kl_target` under the adaptive controller), "
        f"above {KL_TOKEN} nats a token, and above the first third.",
        "Raise `ppo.kl_coef`, or shorten `ppo.kl_horizon` of the adaptive controller.",
        kl_runaway,
    ),
    Diagnosis(
        "KL negative",
        "policy",
        "ill",
        "log p(actor) - log p(reference) is negative on average over what the actor has drawn, which no KL is. Its cause "
        "is looked for among sampling mismatch, wrong reference and precision gap.",
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
        "Newest training rollout: x = mean over responses of the mean -log p of their tokens, less the row's "
        f"entropy_per_token_mean: 0 for a policy's own samples. Confidence that |x| is above {SURPRISE} nats.",
        "`sampling.engine` = 'local' with `sampling.weights` = 'as_trained', or `ppo.importance` = 'token'.",
        sampling_mismatch,
    ),
    Diagnosis(
        "wrong reference",
        "policy",
        "ill",
        "The reference is not the actor as it starts: the penalty pulls towards another model.",
        "Held-out rollout of step 0: mean over responses of the mean |log p(actor) - log p(reference)| of their tokens; "
        f"confidence that it is above {AT_START} nats. Not asked where the reference computes otherwise.",
        "Leave `reference.model` out, unless another prior is what you want.",
        wrong_reference,
    ),
    Diagnosis(
        "precision gap",
        "policy",
        "warning",
        "Every KL is off by what the reference's numerics add.",
        "Pre-flight's bias of the same weights, nats a response, with its standard error over responses; confidence that "
        f"its size is above a quarter of the KL that is told in the last third of the steps (at least {NEGATIVE}).",
        "`precision.reference` = 'auto'.",
        precision_gap,
    ),
    Diagnosis(
        "ratio not 1",
        "policy",
        "warning",
        "Probabilities of what the old policy drew have changed as a whole: the update goes too far, or compares with "
        "other numbers than it drew by.",
        f"Level of |ratio_mean - 1| in the last third of the steps; confidence that it is above {RATIO}.",
        "Lower `ppo.learning_rate`.",
        ratio_off,
    ),
    Diagnosis(
        "clip fraction high",
        "policy",
        "warning",
        "Most of what a rollout could teach is cut off, because the policy has moved too far within it.",
        f"Level of policy_clip_fraction in the last third of the steps; confidence that it is above {CLIPPED}.",
        "Lower `ppo.learning_rate` or `ppo.num_epochs`.",
        clip_fraction,
    ),
    Diagnosis(
        "actor stands still",
        "policy",
        "warning",
        "The actor does not move.",
        f"Levels of approx_kl_per_token_mean and policy_clip_fraction in the last third of the steps: the smaller of the "
        f"confidences that they are below {STILL:g} and {STILL_CLIP:g}.",
        "Raise `ppo.learning_rate`.",
        stands_still,
    ),
    Diagnosis(
        "stale data",
        "policy",
        "warning",
        "The actor learns from responses of an older policy.",
        "Newest training rollout: a response whose policy_version is not that of the step before: a fact, confidence 1.",
        "Draw anew for every step, or set `ppo.importance` = 'token'.",
        stale_data,
    ),
    Diagnosis(
        "actor NaN",
        "policy",
        "ill",
        "The run stopped because a number of the actor was not finite.",
        "The message that the run stopped with: a fact, confidence 1.",
        "Lower `ppo.learning_rate`.",
        not_finite,
    ),
)
