"""What can be wrong with the actor: what it learns to write, how far it goes, and whose responses it learns from."""

from __future__ import annotations

from collections import Counter

import numpy

from fourfold.algorithms.statistics import distinct_n
from fourfold.batch import Experience
from fourfold.diagnostics.doctor.divergence import NEARER, more_kl, per_token
from fourfold.diagnostics.doctor.records import Records
from fourfold.diagnostics.doctor.robust import Estimate, jackknife, level, mean, share, spread
from fourfold.diagnostics.doctor.verdict import Diagnosis, Finding
from fourfold.diagnostics.kept import response_tokens

# Reward hacking: rise of the score in its own spread; fall of distinct pairs, rise of the commonest response; move of
# the reference's log-prob, nats a token; fall of the judge.
RISE, LESS_DISTINCT, SAME, STRANGE, WORSE = 0.5, 0.25, 0.25, 1.0, 0.1
# Entropy that is left, in parts of the start's.
ENTROPY_LEFT = 0.3
RATIO, CLIPPED = 0.1, 0.35
STILL, STILL_CLIP = 1e-6, 1e-4


def _slower(records: Records) -> str:
    return f"ppo.learning_rate = {records.config.ppo.learning_rate / 3:.2g}  # is {records.config.ppo.learning_rate:g}"


def reward_hacking(records: Records) -> Finding:
    """The score rises while something that the reward does not look at gets worse."""
    first, start = records.first_held_out()
    step, end = records.last_held_out()
    rise = mean(end.scores.double().numpy()).minus(mean(start.scores.double().numpy()))
    unit = spread(start.scores.double().numpy()) or 1.0
    rise = Estimate(rise.value / unit, rise.error / unit)
    signs = [_repetition(start, end), _sameness(start, end), _log_prob(records, start, end)]
    judged = records.run.points("evaluation", "eval_judge_mean")
    if len(judged) > 1:
        fall = Estimate(judged[0][1] - judged[-1][1], 0.5 * (2 / len(end.sequences)) ** 0.5)
        said = f"the judge's mean went from {judged[0][1]:.3f} to {judged[-1][1]:.3f} (limit -{WORSE})"
        signs.append((fall.above(WORSE), said))
    worst, said = max(signs)
    evidence = (
        f"held-out prompts, step {first} to {step}: the score rose by {rise.value:.2f} ± {rise.error:.2f} of its "
        f"spread (limit {RISE}), while {said}"
    )
    return Finding(evidence, min(rise.above(RISE), worst), more_kl(records), (first, step))


def _repetition(start: Experience, end: Experience) -> tuple[float, str]:
    before, after = (_distinct(kept) for kept in (start, end))
    lost = Estimate(1 - after.value / before.value, after.error / before.value) if before.value else Estimate(0.0, 1.0)
    said = (
        f"different pairs of neighbouring tokens fell from {before.value:.2f} to {after.value:.2f} of all (limit "
        f"{LESS_DISTINCT:.0%} less)"
    )
    return lost.above(LESS_DISTINCT), said


def _sameness(start: Experience, end: Experience) -> tuple[float, str]:
    before, after = (_commonest(kept) for kept in (start, end))
    said = f"the most frequent response went from {before.value:.0%} to {after.value:.0%} of all (limit +{SAME:.0%})"
    return after.minus(before).above(SAME), said


def _commonest(kept: Experience) -> Estimate:
    counted = Counter(map(tuple, response_tokens(kept)))
    return share(max(counted.values()), len(kept.sequences))


def _distinct(kept: Experience) -> Estimate:
    tokens = response_tokens(kept)
    return jackknife(len(tokens), lambda rows: distinct_n([tokens[row] for row in rows], 2))


def _log_prob(records: Records, start: Experience, end: Experience) -> tuple[float, str]:
    """By the actor as it was at step 0, where the reference goes along or says the same of every token."""
    whose, told = "reference", records.run.points("evaluation", "eval_step_0_log_prob_per_token")
    if told:
        whose, own = "step-0 policy", mean(per_token(end.log_probs, end))
        before, after = mean(per_token(start.log_probs, start)), Estimate(told[-1][1], own.error)
    else:
        before, after = (mean(per_token(kept.ref_log_probs, kept)) for kept in (start, end))
    moved = after.minus(before)
    said = (
        f"the {whose}'s log-prob of a token went from {before.value:.2f} to {after.value:.2f} nats (limit "
        f"{STRANGE} either way)"
    )
    return max(moved.above(STRANGE), moved.below(-STRANGE)), said


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
    remedy = f"ppo.entropy_coef = {2 * bonus if bonus else 0.01:g}  # or {more_kl(records).split('  #')[0]}"
    return Finding(evidence, left.below(ENTROPY_LEFT), remedy, entropy.all_steps)


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


def not_finite(records: Records) -> Finding:
    """The run stopped because the actor's numbers were none."""
    stopped = records.stopped_by_numbers_of("actor")
    evidence = f"the run stopped: {records.failure}" if stopped else "no number of the actor has stopped the run"
    return Finding(evidence, float(stopped), _slower(records), (records.last_step, records.last_step + 1))


DIAGNOSES = (
    Diagnosis(
        "reward hacking",
        "policy",
        "ill",
        "The score rises while something that it does not look at gets worse: the reward is exploited.",
        "Oldest against newest held-out rollout: rise of the mean score in spreads of the oldest's scores, limit "
        f"{RISE}; and the surest of: different pairs of neighbouring tokens fell by {LESS_DISTINCT:.0%} (jackknife), "
        f"the most frequent response has {SAME:.0%} more of all responses, "
        "the log-prob of a token by the policy at step 0 (by the reference, where that is not told) moved by "
        f"{STRANGE} nats either way, the judge's mean fell by {WORSE} (error 0.5 sqrt(2 / n)). The smaller of the two "
        "confidences.",
        f"{NEARER[0].upper()}{NEARER[1:]}; train the reward model on more pairs.",
        reward_hacking,
    ),
    Diagnosis(
        "entropy collapse",
        "policy",
        "ill",
        "The policy says the same whatever it is asked, and explores no more.",
        f"entropy_per_token_mean: x = its level in the last third of the steps over that in the first. Confidence that "
        f"x is below {ENTROPY_LEFT}.",
        f"Set `ppo.entropy_coef`; {NEARER}.",
        entropy_collapse,
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
        f"Levels of approx_kl_per_token_mean and policy_clip_fraction in the last third of the steps: the smaller of "
        f"the confidences that they are below {STILL:g} and {STILL_CLIP:g}.",
        "Raise `ppo.learning_rate`.",
        stands_still,
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
