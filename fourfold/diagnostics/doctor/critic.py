"""What can be wrong with the critic: read from held-out rollouts, and from the rows of its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy

from fourfold.config import RunConfig
from fourfold.diagnostics.doctor.fit import (
    ALIKE,
    Fit,
    first_states,
    newest_fit,
    newest_kept,
    over_rows,
    rank_correlation,
)
from fourfold.diagnostics.doctor.records import CannotJudge, Records, Series
from fourfold.diagnostics.doctor.remedies import first_taken
from fourfold.diagnostics.doctor.robust import (
    Estimate,
    Numbers,
    correlation,
    fisher,
    least_squares,
    level,
    partial_correlation,
    ranks,
    spread,
)
from fourfold.diagnostics.doctor.verdict import Diagnosis, Finding

# An error that is systematic, in parts of the variance of returns; a share of that variance explained.
SYSTEMATIC, EXPLAINED = 0.5, 0.1
# Gain in explained variance from the first third of the steps to the last below which nothing moves.
GAIN = 0.1
# Factors of the value loss: usual change from one step to the next, and a single jump.
OSCILLATES, JUMPS = 3.0, 10.0
# Fisher's z of the training correlation less that of the held-out one; and the same of explained variance.
MEMORISED = 0.3
# Error of the values on fresh responses, in parts of that in the last pass over them.
TAKEN = 2.0
LENGTH = 0.5
# Variance of returns of responses to one prompt, in parts of what values miss at the first token.
NOISE = 0.5
DRIFT = 0.1


def _on_both(records: Records, judge: Callable[[Fit], float]) -> float:
    """The smaller confidence of newest held-out and training rollout: what is ill on one alone is no underfit."""
    found = []
    for newest in (records.last_held_out, records.last_training):
        with contextlib.suppress(CannotJudge):
            found.append(judge(Fit.of(newest()[1])))
    return min(found)


def underfit_bias(records: Records) -> Finding:
    """Systematically off: too high or low, or by length."""
    step, fit, where = newest_fit(records)
    found = over_rows(fit, "systematic")
    confidence = _on_both(records, lambda fit: over_rows(fit, "systematic").above(SYSTEMATIC))
    error, usual = fit.returns - fit.values, float(fit.returns.std())
    (offset, slope, by_length), _ = least_squares(fit.returns, [fit.values, fit.so_far])
    evidence = (
        f"{where} rollout of step {step}: return - value is {error.mean():+.3g} on average (returns have the standard "
        f"deviation {usual:.3g}); return = {offset:+.2g} {slope:+.2g} value {by_length:+.2g} x tokens so far; what is "
        f"systematic is {found.value:.2f} ± {found.error:.2f} of the variance of returns (limit {SYSTEMATIC})"
    )
    return Finding(evidence, confidence, _faster(records), (step, step))


def underfit_variance(records: Records) -> Finding:
    """Explains next to nothing, without being off on the whole."""
    step, fit, where = newest_fit(records)
    explained, systematic = over_rows(fit, "explained"), over_rows(fit, "systematic")
    confidence = _on_both(
        records,
        lambda fit: min(over_rows(fit, "explained").below(EXPLAINED), over_rows(fit, "systematic").below(SYSTEMATIC)),
    )
    evidence = (
        f"{where} rollout of step {step}: values explain {explained.value:.2f} ± {explained.error:.2f} of the variance "
        f"of returns (limit {EXPLAINED}); a straight line in value and in tokens so far would explain "
        f"{systematic.value:.2f} more; values spread by {fit.values.std():.2g}, returns by {fit.returns.std():.2g}"
    )
    if (first := first_states(newest_kept(records)[1])) is not None:
        evidence += (
            f"; at the first token values miss by {first[0] ** 0.5:.2g} (root mean square), responses to one prompt "
            f"differ by {first[1] ** 0.5:.2g}"
        )
    return Finding(evidence, confidence, _more(records) or _faster(records), (step, step))


def _more(records: Records) -> str:
    """The remedy where returns of one prompt's responses differ so much that the critic is not to blame, else ""."""
    try:
        first = first_states(newest_kept(records)[1])
    except CannotJudge:
        return ""
    if first is None or first[1] <= NOISE * first[0]:
        return ""
    more = 2 * records.config.sampling.responses_per_prompt
    why = "returns differ that much among responses to one prompt"
    return first_taken(records.config, f"sampling.responses_per_prompt = {more}  # {why}")


def _faster(records: Records) -> str:
    rate, actor = records.config.critic.learning_rate, records.config.ppo.learning_rate
    if rate < actor or rate == 0:
        return f"critic.learning_rate = {max(actor, 10 * rate):g}  # is {rate:g}, the actor's {actor:g}"
    warmup = "critic.warmup_rollouts = 5  # the critic learns before the actor moves"
    larger = f"ppo.rollout_batch_size = {2 * records.config.ppo.rollout_batch_size}  # more returns a step"
    return first_taken(records.config, warmup if records.config.critic.warmup_rollouts == 0 else "", larger)


def _scores_differ(records: Records) -> None:
    """CannotJudge where in most steps all responses had one score: what the value loss then does says nothing."""
    spreads = records.series("score_std", 1)
    if numpy.median(spreads.values) <= ALIKE:
        raise CannotJudge("in most steps all responses have the same score: there is nothing for a critic to know")


def plateau(records: Records) -> Finding:
    """Neither good nor getting better."""
    explained = records.series("explained_variance", 9)
    start, end = explained.start, explained.end
    gain = end.minus(start)
    _scores_differ(records)
    confidence = min(end.below(EXPLAINED), gain.below(GAIN))
    loss = records.series("value_loss_per_token")
    evidence = (
        f"explained variance {end.value:.2f} ± {end.error:.2f} in steps {explained.end_steps[0]} to "
        f"{explained.end_steps[1]} (limit {EXPLAINED}), {gain.value:+.2f} since the first third (limit {GAIN}); value "
        f"loss {loss.start.value:.3g} -> {loss.end.value:.3g}"
    )
    return Finding(evidence, confidence, _plateau_remedy(records), explained.all_steps)


def _plateau_remedy(records: Records) -> str:
    if more := _more(records):
        return more
    if records.config.critic.learning_rate >= records.config.ppo.learning_rate > 0:
        if any(row.get("trunk_drift", 0.0) > DRIFT for row in records.rows):
            return f"trunk.lr_scale = {records.config.trunk.lr_scale / 10:g}  # the trunk moves under the critic"
        if records.config.sharing.mode == "trunk" and records.config.critic.of_the_run:
            return f"trunk.branch_layers = {records.config.trunk.branch_layers + 2}  # more layers of the critic's own"
    return _faster(records)


def _log_changes(series: Series) -> Numbers:
    return numpy.diff(numpy.log(numpy.maximum(series.values, 1e-12)))


def oscillation(records: Records) -> Finding:
    """The value loss jumps up and down."""
    _scores_differ(records)
    loss = records.series("value_loss_per_token", 9)
    late = Series(loss.name, loss.steps[loss.third :], loss.values[loss.third :])
    sizes = numpy.abs(_log_changes(late))
    usual = Estimate(float(numpy.median(sizes)), 1.2533 * spread(sizes) / len(sizes) ** 0.5)
    confidence = usual.above(float(numpy.log(OSCILLATES)))
    returns = records.series("return_std")
    evidence = (
        f"from one step to the next the value loss usually changes by a factor of {numpy.exp(usual.value):.2g} (limit "
        f"{OSCILLATES:g}) in steps {late.all_steps[0]} to {late.all_steps[1]}; returns have the standard deviation "
        f"{returns.start.value:.3g} in the first third of the steps, {returns.end.value:.3g} in the last"
    )
    rate = records.config.critic.learning_rate
    rows = 2 * records.config.ppo.rollout_batch_size
    remedy = f"critic.learning_rate = {rate / 10:g}  # or ppo.rollout_batch_size = {rows}"
    return Finding(evidence, confidence, remedy, late.all_steps)


def spike(records: Records) -> Finding:
    """The value loss jumps once, or is no number any more."""
    if records.stopped_by_numbers_of("critic"):
        step = records.last_step
        remedy = f"critic.learning_rate = {records.config.critic.learning_rate / 10:g}  # and ppo.score_clip = 5.0"
        return Finding(f"the run stopped: {records.failure}", 1.0, remedy, (step, step + 1))
    _scores_differ(records)
    loss = records.series("value_loss_per_token")
    changes = _log_changes(loss)
    at = int(changes.argmax())
    usual = spread(numpy.delete(changes, at))
    jump = Estimate(float(changes[at]), usual)
    confidence = jump.above(float(numpy.log(JUMPS)))
    step = loss.steps[at + 1]
    row = next(row for row in records.rows if row["step"] == step)
    evidence = (
        f"at step {step} the value loss is {loss.values[at + 1]:.3g}, {numpy.exp(changes[at]):.3g} times that of the "
        f"step before (limit {JUMPS:g}; usual change {numpy.exp(usual):.2g}); scores from {row['score_raw_min']:.3g} "
        f"to {row['score_raw_max']:.3g}, the critic's gradient norm {row.get('critic_grad_norm', float('nan')):.3g}"
    )
    remedy = "ppo.score_clip = 5.0  # scores that are far out; else critic.learning_rate = " + (
        f"{records.config.critic.learning_rate / 10:g}"
    )
    return Finding(evidence, confidence, remedy, (loss.steps[at], step))


def overfit(records: Records) -> Finding:
    """Knows what it has learned from, and what it has not seen no better than before: prompts, or responses."""
    found, reasons = list[Finding](), list[str]()
    for judge in (_knows_prompts, _knows_responses):
        try:
            found.append(judge(records))
        except CannotJudge as reason:
            reasons.append(str(reason))
    if not found:
        raise CannotJudge("; ".join(reasons))
    return max(found, key=lambda each: each.confidence)


def _knows_responses(records: Records) -> Finding:
    """Passes over a rollout take the error on it away, and the next rollout's error rises all the same."""
    names = "value_loss_fresh_per_token", "value_loss_last_pass_per_token"
    fresh, last = (records.series(name, 9) for name in names)
    if fresh.steps != last.steps:
        raise CannotJudge("value_loss_fresh_per_token and value_loss_last_pass_per_token are of different steps")
    taken = level(numpy.log(fresh.values / last.values)[-fresh.third :])
    confidence = min(taken.above(numpy.log(TAKEN)), fresh.end.minus(fresh.start).above(0.0))
    evidence = (
        f"the error of the values in steps {fresh.end_steps[0]} to {fresh.end_steps[1]} is {fresh.end.value:.3g} on "
        f"responses not learned from yet and {last.end.value:.3g} in the last pass over them "
        f"({numpy.exp(taken.value):.2g} times, limit {TAKEN:g}), and the former rises: it was "
        f"{fresh.start.value:.3g} in the first third"
    )
    return Finding(evidence, confidence, first_taken(records.config, *_less_by_heart(records.config)), fresh.all_steps)


def _knows_prompts(records: Records) -> Finding:
    """Orders the returns of its own rollouts, and not held-out ones."""
    step, kept = records.last_held_out()
    at, learned = records.last_training()
    held, own = Fit.of(kept), Fit.of(learned)
    rank_gap = fisher(rank_correlation(own), own.rows).minus(fisher(rank_correlation(held), held.rows))
    explained = over_rows(own, "explained"), over_rows(held, "explained")
    gap = explained[0].minus(explained[1])
    confidence = min(rank_gap.above(MEMORISED), gap.above(MEMORISED))
    evidence = (
        f"training rollout of step {at}: Spearman {rank_correlation(own):.2f}, explained {explained[0].value:.2f}; "
        f"held-out rollout of step {step}: {rank_correlation(held):.2f} and {explained[1].value:.2f} (gaps "
        f"{rank_gap.value:.2f} of Fisher's z and {gap.value:.2f}, limit {MEMORISED})"
    )
    why = "  # and more prompts in data.prompts"
    remedy = first_taken(records.config, *(each + why for each in _less_by_heart(records.config)))
    return Finding(evidence, confidence, remedy, (at, step))


def _less_by_heart(config: RunConfig) -> Iterator[str]:
    """What makes the critic see a response less often, else what makes it harder to remember."""
    passes, epochs, critic = config.critic.updates_per_actor, config.ppo.num_epochs, config.critic
    if passes > 1:
        yield f"critic.updates_per_actor = {passes // 2}"
    if epochs > 1:
        yield f"ppo.num_epochs = {epochs // 2}"
    if critic.dropout < 0.5:
        yield f"critic.dropout = {critic.dropout + 0.1:g}"
    yield f"critic.weight_decay = {2 * critic.weight_decay or 0.1:g}"


def length_bias(records: Records) -> Finding:
    """Values follow the length of a response where returns do not."""
    step, fit, where = newest_fit(records)
    value, got, length = fit.means()
    partial = partial_correlation(value, length, got)
    own = correlation(ranks(got), ranks(length))
    found, real = fisher(abs(partial), fit.rows, 1), fisher(abs(own), fit.rows)
    confidence = min(found.above(fisher(LENGTH, fit.rows).value), found.minus(real).above(0.0))
    evidence = (
        f"{where} rollout of step {step}: values and lengths correlate by {partial:+.2f} with returns taken out (limit "
        f"{LENGTH}), returns and lengths by {own:+.2f}"
    )
    given = records.config.critic
    remedy = first_taken(
        records.config,
        f"critic.init = 'actor'  # instead of {given.init!r}; and more critic.warmup_rollouts"
        * (given.init != "actor"),
        f"critic.warmup_rollouts = {given.warmup_rollouts + 5}  # is {given.warmup_rollouts}",
        f"critic.pretrain_rollouts = {given.pretrain_rollouts + 5}  # is {given.pretrain_rollouts}",
    )
    return Finding(evidence, confidence, remedy, (step, step))


def trunk_drift(records: Records) -> Finding:
    """The shared layers move so far that what the branches have learned is about other features."""
    if not records.config.trunk.train:
        raise CannotJudge("the trunk is not trained (trunk.train = false)")
    drift = records.series("trunk_drift", 1)
    now = float(drift.values[-1])
    explained = records.series("explained_variance", 1)
    evidence = (
        f"after step {drift.steps[-1]} the trunk's weights have moved by {now:.1%} of their norm (limit {DRIFT:.0%}); "
        f"explained variance was at best {explained.values.max():.2f} and is {explained.values[-1]:.2f}"
    )
    remedy = f"trunk.lr_scale = {records.config.trunk.lr_scale / 10:g}  # is {records.config.trunk.lr_scale:g}"
    return Finding(evidence, float(now > DRIFT), remedy, drift.all_steps)


_ROLLOUT = "Newest held-out and newest training rollout, e = return - value token by token; "
_GROUPS = "the standard error s leaves out each of ten groups of responses (jackknife)"

DIAGNOSES = (
    Diagnosis(
        "critic underfit: bias",
        "critic",
        "ill",
        "Values are systematically off, all of them or with the length of the response: advantages point elsewhere.",
        f"{_ROLLOUT}x = (mean e^2 - mean r^2) / var(return), r what a line in value and tokens so far leaves of e; "
        f"{_GROUPS}. Confidence Phi((x - {SYSTEMATIC}) / s), the smaller of both rollouts.",
        "Raise `critic.learning_rate`, `critic.warmup_rollouts` or `ppo.rollout_batch_size`.",
        underfit_bias,
    ),
    Diagnosis(
        "critic underfit: variance",
        "critic",
        "warning",
        "Values explain next to nothing of the returns without being off on the whole: advantages are as noisy as "
        "returns. The evidence says how far responses to one prompt differ: that no value of the prompt can know.",
        f"{_ROLLOUT}x = 1 - mean e^2 / var(return); {_GROUPS}. The smaller of Phi(({EXPLAINED} - x) / s) and of the "
        f"confidence that what is systematic is below {SYSTEMATIC}, on both rollouts.",
        "Where responses to one prompt differ as much as values are off, raise `sampling.responses_per_prompt`; else "
        "raise `critic.learning_rate`, `critic.warmup_rollouts` or `ppo.rollout_batch_size`.",
        underfit_variance,
    ),
    Diagnosis(
        "critic plateau",
        "critic",
        "warning",
        "The critic is no good and gets no better.",
        f"explained_variance of the rows: a = its level in the last third of the steps, b = a less that of the first "
        f"third. The smaller of the confidences that a < {EXPLAINED} and that b < {GAIN}. 9 steps are needed.",
        "Where responses to one prompt differ as much as values are off, raise `sampling.responses_per_prompt`; where "
        "the critic learns as fast as the actor, lower `trunk.lr_scale` if the trunk has drifted, else raise "
        "`trunk.branch_layers` above a trunk; else raise `critic.learning_rate`, `critic.warmup_rollouts` or "
        "`ppo.rollout_batch_size`.",
        plateau,
    ),
    Diagnosis(
        "critic oscillation",
        "critic",
        "warning",
        "The value loss goes up and down by large factors from step to step.",
        f"x = median of |log(loss_t / loss_(t-1))| after the first third of the steps, s = 1.2533 spread / sqrt(n). "
        f"Confidence Phi((x - log {OSCILLATES:g}) / s). 9 steps are needed.",
        "Lower `critic.learning_rate`, raise `ppo.rollout_batch_size`.",
        oscillation,
    ),
    Diagnosis(
        "critic spike or NaN",
        "critic",
        "ill",
        "A single step in which the value loss jumps, or numbers of the critic that are no numbers any more.",
        f"x = the largest log(loss_t / loss_(t-1)), s = spread of all the others. Confidence Phi((x - log {JUMPS:g}) / "
        "s); 1 where the run stopped because a number of the critic was not finite.",
        "Set `ppo.score_clip`; lower `critic.learning_rate`.",
        spike,
    ),
    Diagnosis(
        "critic overfit",
        "critic",
        "warning",
        "The critic knows by heart what it has learned from: returns of its own prompts, while it orders those of "
        "held-out ones far worse; or of its own responses, while it errs more and more on the next ones.",
        "Newest training and held-out rollouts: x = difference of Fisher's z of Spearman's correlation of values and "
        "returns, s = sqrt(1 / (n1 - 3) + 1 / (n2 - 3)) for n responses; y = difference of 1 - mean e^2 / var(return). "
        f"The smaller of the confidences that x and y are above {MEMORISED}. Or, of the rows: the smaller of the "
        f"confidences that value_loss_fresh_per_token / value_loss_last_pass_per_token is above {TAKEN:g} in the "
        "last third of the steps, and that the former is higher there than in the first third (9 steps are needed). "
        "The larger of the two.",
        "Lower `critic.updates_per_actor` or `ppo.num_epochs`, set `critic.dropout` or `critic.weight_decay`, give "
        "more prompts.",
        overfit,
    ),
    Diagnosis(
        "critic length bias",
        "critic",
        "warning",
        "Values follow the length of the response more than returns do.",
        f"Means over each response of the newest held-out rollout (where none is held out, of training): x = |partial "
        f"rank correlation of value and length, return taken out|, y = |rank correlation of return and length|. The "
        f"smaller of the confidences (Fisher's z, errors 1 / sqrt(n - 4) and 1 / sqrt(n - 3)) that x > {LENGTH} and "
        "that x > y.",
        "Take another `critic.init`, raise `critic.warmup_rollouts` or `critic.pretrain_rollouts`.",
        length_bias,
    ),
    Diagnosis(
        "trunk drift",
        "critic",
        "warning",
        "The shared layers move so far that what the critic has learned is about other features.",
        f"trunk_drift of the last row is above {DRIFT:.0%}: a fact, confidence 1. With `trunk.train` only.",
        "Lower `trunk.lr_scale`.",
        trunk_drift,
    ),
)
