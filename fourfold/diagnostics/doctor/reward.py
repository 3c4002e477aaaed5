"""What can be wrong with the reward: numbers that teach nothing, mislead, or are none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from fourfold.config import RunConfig
from fourfold.config.schema import PartSection
from fourfold.diagnostics.doctor.divergence import NEARER, more_kl
from fourfold.diagnostics.doctor.opinions import second_opinions
from fourfold.diagnostics.doctor.records import CannotJudge, Records
from fourfold.diagnostics.doctor.remedies import first_taken
from fourfold.diagnostics.doctor.robust import (
    Estimate,
    Numbers,
    correlation,
    fisher,
    partial_correlation,
    phi,
    ranks,
    share,
    spread,
)
from fourfold.diagnostics.doctor.verdict import Diagnosis, Finding

# Share of responses with the very same highest score, and of those that the clip holds.
SAME, CLIPPED = 0.75, 0.2
# Distance of a score from the median, in spreads.
FAR = 20.0
# Rank correlation of score and length.
LENGTH = 0.6
# Pairs ranked as people do; confidence of the reward model less that.
CHANCE, OVERCONFIDENT = 0.6, 0.1
FEWEST_PAIRS = 20


def saturation(records: Records) -> Finding:
    """Nearly all responses get the highest score there is: what is left to learn does not show."""
    step, kept = records.last_training()
    scores = kept.scores.double().numpy()
    clip, top = records.config.ppo.score_clip, float(scores.max())
    tolerance = 1e-6 * max(1.0, abs(top))
    at_top = share(int((scores >= top - tolerance).sum()), len(scores))
    held = _clipped(records, step, scores) if clip else Estimate(0.0, 0.0)
    evidence = f"step {step}: {at_top.value:.0%} of the responses have the highest score, {top:.3g} (limit {SAME:.0%})"
    remedy = f"{more_kl(records).split('  #')[0]}  # there is nothing more to gain; or take a reward that goes on"
    confidence = at_top.above(SAME)
    if clip and held.above(CLIPPED) > confidence:
        confidence = held.above(CLIPPED)
        evidence = f"step {step}: ppo.score_clip = {clip:g} holds {held.value:.0%} of the scores (limit {CLIPPED:.0%})"
        wider = 2 * clip if _normalised(records.config) else float(numpy.quantile(numpy.abs(scores), 0.99))
        remedy = f"ppo.score_clip = {wider:.2g}  # is {clip:g}"
    return Finding(evidence, confidence, remedy, (step, step))


def _normalised(config: RunConfig) -> bool:
    """Whether the clip holds numbers in spreads, or of each part by itself, rather than the scores that are kept."""
    return config.ppo.reward_normalization != "none" or config.critic.heads != "scalar"


def _clipped(records: Records, step: int, scores: Numbers) -> Estimate:
    """Share of a step's responses that the clip holds: what the step has noted, where scores are kept otherwise."""
    if _normalised(records.config):
        noted = records.series("score_clipped_share", 1)
        shares = dict(zip(noted.steps, noted.values, strict=True))
        if step not in shares:
            raise CannotJudge(f"step {step}, whose rollout is kept, has no row in ppo/metrics.jsonl")
        return share(round(float(shares[step]) * len(scores)), len(scores))
    return share(int((numpy.abs(scores) >= records.config.ppo.score_clip).sum()), len(scores))


def outliers(records: Records) -> Finding:
    """Single scores far from all others: a return of theirs moves the critic more than all the rest together."""
    found = list(records.kept_scores())
    if not found:
        raise CannotJudge("no rollout is kept, whose scores tell what is usual; see evaluation.keep_rollouts")
    scores = numpy.concatenate(found)
    centre, usual = float(numpy.median(scores)), spread(scores)
    if usual == 0:
        raise CannotJudge("all scores of the kept rollouts are alike")
    low, high = (records.series(f"score_raw_{end}", 1) for end in ("min", "max"))
    distances = numpy.maximum(numpy.abs(low.values - centre), numpy.abs(high.values - centre)) / usual
    at = int(distances.argmax())
    # A spread of n numbers is known to about 1 / sqrt(2 n) of itself.
    far = Estimate(float(distances[at]), float(distances[at]) / (2 * len(scores)) ** 0.5)
    evidence = (
        f"step {high.steps[at]}: scores from {low.values[at]:.4g} to {high.values[at]:.4g}; the median of the kept "
        f"rollouts is {centre:.3g}, the spread {usual:.3g}: {far.value:.3g} spreads away (limit {FAR:g}); beyond it in "
        f"{int((distances > FAR).sum())} of {len(distances)} steps"
    )
    clipped = records.config.ppo.score_clip
    in_spreads = records.config.ppo.reward_normalization != "none"  # which the clip is given in then
    remedy = f"ppo.score_clip = {5.0 if in_spreads else abs(centre) + 5 * usual:.2g}  # five spreads"
    if clipped and clipped < (FAR if in_spreads else centre + FAR * usual):
        return Finding(f"{evidence}; ppo.score_clip = {clipped:g} holds them", 0.0, remedy, high.all_steps)
    return Finding(evidence, far.above(FAR), remedy, (high.steps[at], high.steps[at]))


def failing_scorer(records: Records) -> Finding:
    """Responses without a valid score."""
    if (scorer := records.blamed).startswith("reward"):
        tables = {"reward": _scorers(records.config), "reward model": []}.get(scorer, [scorer])
        remedy = _of_scorers(records.config, tables)
        return Finding(f"the run stopped: {records.failure}", 1.0, remedy, (records.last_step, records.last_step + 1))
    invalid = records.series("invalid_scores", 1)
    count, total = int(invalid.values.sum()), sum(records.config.rows_at(step - 1) for step in invalid.steps)
    bad = [step for step, number in zip(invalid.steps, invalid.values, strict=True) if number]
    evidence = f"{count} of {total} responses got no valid score (limit 0), in {len(bad)} of {len(invalid.steps)} steps"
    dropping = _scorers(records.config)
    if bad and dropping != ["reward"]:
        evidence += f"; rows are left out by {' or '.join(dropping)} (on_failure = 'drop')"
    steps = (bad[0], bad[-1]) if bad else invalid.all_steps
    return Finding(evidence, float(count > 0), _of_scorers(records.config, dropping), steps)


def _scorers(config: RunConfig) -> list[str]:
    """Tables of the sources whose rows can be without a score: of a combination the parts that leave them out."""
    parts = config.reward.used_parts
    return (
        [f"reward.parts.{name}" for name, part in parts.items() if part.on_failure == "drop"] if parts else ["reward"]
    )


def _of_scorers(config: RunConfig, tables: Sequence[str]) -> str:
    """The first setting of these sources that is read and spares the run: rows left out, more attempts, more time."""
    remedies: list[str] = []
    for table in tables:
        source = config.reward if table == "reward" else config.reward.parts[table.removeprefix("reward.parts.")]
        if source.on_failure == "stop":
            remedies.append(f"{table}.on_failure = 'drop'  # after it is mended; retries ask it again")
        remedies.append(f"{table}.retries = {source.retries + 3}  # is {source.retries}; mend the scorer first")
        if isinstance(source, PartSection) and (limit := source.timeout_seconds):
            remedies.append(f"{table}.timeout_seconds = {2 * limit:g}  # is {limit:g}; mend the scorer first")
    return first_taken(config, *remedies)


def length_bias(records: Records) -> Finding:
    """The score follows the length of the response, beyond what other opinions of the response explain."""
    step, kept = records.last_training()
    scores, lengths = kept.scores.double().numpy(), kept.lengths.double().numpy()
    if lengths.std() == 0 or scores.std() == 0:
        raise CannotJudge("all responses of the kept rollout have one length, or one score")
    plain = correlation(ranks(scores), ranks(lengths))
    opinions = second_opinions(records, kept)
    r = partial_correlation(scores, lengths, *opinions.values()) if opinions else plain
    smaller = min(abs(r), abs(plain))  # what is no bias alone is not made one by taking something out
    found = fisher(smaller, len(scores), len(opinions))
    taken_out = f", {r:+.2f} with {' and '.join(opinions)} taken out" if opinions else ", no second opinion to take out"
    evidence = f"step {step}: score and length have the rank correlation {plain:+.2f}{taken_out} (limit {LENGTH})"
    shortest, longest = int(numpy.quantile(lengths, 0.25)), int(numpy.quantile(lengths, 0.75))
    free = f"ppo.length_range = [{shortest}, {longest}]"
    remedy = f"ppo.length_penalty = 0.1; {free}  # half of the responses are that long; or mend the reward"
    return Finding(evidence, found.above(fisher(LENGTH, len(scores)).value), remedy, (step, step))


def _pairs(records: Records) -> tuple[float, int]:
    stage = records.reward_stage
    if "pair_accuracy" not in stage:
        raise CannotJudge("no reward model was trained here with held-out pairs (data.pairs_test)")
    if (count := int(stage["test_pairs"])) < FEWEST_PAIRS:
        raise CannotJudge(f"{count} held-out pairs; {FEWEST_PAIRS} are needed")
    return float(stage["pair_accuracy"]), count


def near_chance(records: Records) -> Finding:
    """The reward model ranks pairs hardly better than a coin."""
    accuracy, count = _pairs(records)
    found = share(round(accuracy * count), count)
    evidence = f"{accuracy:.1%} of {count} held-out pairs are ranked as people do (limit {CHANCE:.0%}, a coin has 50 %)"
    epochs = records.config.reward.num_epochs
    remedy = f"reward.num_epochs = {epochs + 1}  # or more and cleaner data.pairs; is {epochs}"
    return Finding(evidence, phi(CHANCE - accuracy, found.error), remedy, (0, 0))


def miscalibration(records: Records) -> Finding:
    """The reward model is surer of its rankings than they are right."""
    accuracy, count = _pairs(records)
    sure = records.reward_stage.get("pair_confidence")
    if sure is None:
        raise CannotJudge("the stage reward has not noted its pair_confidence; run it again")
    gap = Estimate(float(sure) - accuracy, share(round(accuracy * count), count).error)
    evidence = (
        f"on {count} held-out pairs the mean of sigmoid(|margin|) is {sure:.1%}, and {accuracy:.1%} are ranked right: "
        f"{gap.value:+.1%} too sure (limit {OVERCONFIDENT:.0%})"
    )
    epochs = records.config.reward.num_epochs
    fewer = f"reward.num_epochs = {epochs // 2}" if epochs > 1 else "reward.weight_decay = 0.1"
    return Finding(evidence, gap.above(OVERCONFIDENT), f"{fewer}  # or more data.pairs", (0, 0))


DIAGNOSES = (
    Diagnosis(
        "reward saturation",
        "reward",
        "warning",
        "Nearly all responses get one and the same highest score, or are held by the clip: differences that could "
        "teach do not show.",
        f"Newest training rollout: share of responses with the highest score, limit {SAME:.0%}; share held by "
        f"`ppo.score_clip`, limit {CLIPPED:.0%}. The larger of the two confidences.",
        f"Stop here, or take a reward that goes on; raise `ppo.score_clip` where it holds them, else {NEARER}.",
        saturation,
    ),
    Diagnosis(
        "reward outliers",
        "reward",
        "warning",
        "Single scores are so far from all others that they decide what critic and actor learn.",
        "x = the largest distance of score_raw_min or score_raw_max of a row from the median of the scores of all kept "
        f"rollouts, in their spread; s = x / sqrt(2 n) for n scores. Confidence that x is above {FAR:g}. Not named "
        "where `ppo.score_clip` holds them.",
        "Set `ppo.score_clip`.",
        outliers,
    ),
    Diagnosis(
        "failing scorer",
        "reward",
        "ill",
        "Responses without a valid score: None, NaN, infinite, a function that raises, a service that does not answer; "
        "of the whole reward or of a part of it.",
        "Sum of invalid_scores is above 0, or the run stopped over it: a fact, confidence 1.",
        "Mend the scorer; `retries` of `reward` or of its part ask it again, `timeout_seconds` waits longer, "
        "`on_failure` = 'drop' leaves rows out.",
        failing_scorer,
    ),
    Diagnosis(
        "reward length bias",
        "reward",
        "warning",
        "The score follows the length of the response, and not because longer ones are better.",
        "Newest training rollout: x = the smaller of |rank correlation of score and length| and of the same with "
        "second opinions taken out (partial correlation): the mean score of the prompt's other responses, where each "
        "prompt has several (`sampling.responses_per_prompt`), and the judge's verdict, where there is one "
        "(`evaluation.judge`). Without any it is the plain correlation, which cannot tell long good answers from long "
        "ones; the evidence says so. Confidence (Fisher's z, error 1 / sqrt(n - 3 - k) with k opinions) that x is "
        f"above {LENGTH}.",
        "Set `ppo.length_penalty` with `ppo.length_range`; balance the lengths of chosen and rejected texts.",
        length_bias,
    ),
    Diagnosis(
        "reward model near chance",
        "reward",
        "ill",
        "The reward model ranks held-out pairs hardly better than a coin.",
        f"pair_accuracy of the stage reward, error of a share of test_pairs; confidence that it is below {CHANCE}. "
        f"{FEWEST_PAIRS} pairs are needed.",
        "More `data.pairs`, cleaner ones, or more `reward.num_epochs`.",
        near_chance,
    ),
    Diagnosis(
        "reward miscalibration",
        "reward",
        "warning",
        "The reward model is surer of its rankings than they are right, so its scores are stretched where it guesses.",
        f"pair_confidence - pair_accuracy of the stage reward (mean of sigmoid(|margin|), before standardising); "
        f"confidence that it is above {OVERCONFIDENT}.",
        "Lower `reward.num_epochs`, set `reward.weight_decay`, give more `data.pairs`.",
        miscalibration,
    ),
)
