"""What a run wastes, and where its numbers do not fit their type."""

from __future__ import annotations

import numpy

from fourfold.diagnostics.doctor.records import CannotJudge, Records
from fourfold.diagnostics.doctor.remedies import first_taken
from fourfold.diagnostics.doctor.robust import level
from fourfold.diagnostics.doctor.verdict import Diagnosis, Finding

BUBBLE, HIDDEN = 0.4, 0.5
USED = 0.5
OVERFLOWS, UNDERFLOWS = 0.2, 0.05


def bubble(records: Records) -> Finding:
    """The actor waits while others score."""
    score, step = records.series("score_seconds"), records.series("step_seconds")
    part = level(score.values[-score.third :] / step.values[-score.third :])
    evidence = (
        f"scoring takes {part.value:.0%} ± {part.error:.0%} of a step in steps {score.end_steps[0]} to "
        f"{score.end_steps[1]} (limit {BUBBLE:.0%})"
    )
    sampling = records.config.sampling
    slots = max(1, records.config.ppo.rollout_batch_size // 4)
    remedy = f"sampling.overlap_scoring = true; sampling.batch_size = {slots}  # responses that have ended are scored"
    if sampling.overlap_scoring:
        hidden = records.series("score_hidden_share").end
        evidence += f"; {hidden.value:.0%} of what goes on beside sampling is hidden"
        remedy = f"sampling.batch_size = {max(1, sampling.batch_size // 2)}  # less is left when sampling ends"
    return Finding(evidence, part.above(BUBBLE), first_taken(records.config, remedy), score.end_steps)


def unused_budget(records: Records) -> Finding:
    """Memory that was given and lies idle, while rows go through in small pieces."""
    budget = records.config.memory.budget_gib * 2**30
    if not budget:
        raise CannotJudge("memory.budget_gib is not given")
    peaks = [
        (row[name], name, int(row["step"]))
        for row in records.rows
        for name in ("generate_peak_bytes", "score_peak_bytes", "learn_peak_bytes")
    ]
    if not peaks:
        raise CannotJudge("no step has ended")
    most, name, step = max(peaks)
    ppo = records.config.ppo
    evidence = (
        f"the highest peak is {most / 2**30:.2f} GiB ({name}, step {step}) of {budget / 2**30:g} GiB (limit {USED:.0%})"
    )
    steps = (int(records.rows[0]["step"]), records.last_step)
    whole = ppo.micro_batch_size >= ppo.mini_batch_size
    remedy = f"ppo.micro_batch_size = {min(2 * ppo.micro_batch_size, ppo.mini_batch_size)}  # is {ppo.micro_batch_size}"
    if whole:
        remedy = f"memory.budget_gib = {1.25 * most / 2**30:.2g}  # or larger mini-batches"
    return Finding(evidence, float(most < USED * budget), remedy, steps)


def halved(records: Records) -> Finding:
    """Memory ran out, and rows went through in smaller pieces than the settings say."""
    rows = records.series("micro_batch_size", 1)
    given = min(records.config.ppo.micro_batch_size, records.config.ppo.mini_batch_size)
    now = int(rows.values[-1])
    evidence = f"{now} rows went through actor and critic at once, {given} were asked for"
    remedy = f"ppo.micro_batch_size = {now}  # or memory.checkpointing = 'layers'"
    return Finding(evidence, float(now < given), remedy, rows.all_steps)


def overflow(records: Records) -> Finding:
    """float16 cannot hold the gradients: steps are skipped."""
    _needs_float16(records)
    skipped = records.series("steps_skipped_overflow")
    given, passes = records.config, records.config.critic.updates_per_actor
    counts = numpy.array([passes * given.ppo.updates_of(given.rows_at(step - 1)) for step in skipped.steps])
    part = level((skipped.values / counts)[-skipped.third :])
    evidence = (
        f"{part.value:.0%} of the optimizer steps were skipped in steps {skipped.end_steps[0]} to "
        f"{skipped.end_steps[1]} (limit {OVERFLOWS:.0%}); the loss scale is {records.rows[-1].get('loss_scale', 0):g}"
    )
    lower = max(records.config.precision.loss_scale / 2**10, 1.0)
    remedy = first_taken(
        records.config,
        "precision.compute = 'bfloat16'  # the range of float32; or lower learning rates",
        f"precision.loss_scale = {lower:g}  # or leave it out, and set precision.compute = 'bfloat16'",
    )
    return Finding(evidence, part.above(OVERFLOWS), remedy, skipped.end_steps)


def underflow(records: Records) -> Finding:
    """float16 rounds gradients to 0."""
    _needs_float16(records)
    lost = records.series("gradient_underflow_fraction")
    evidence = (
        f"{lost.end.value:.1%} ± {lost.end.error:.1%} of the gradients' entries are below 2^-14 in steps "
        f"{lost.end_steps[0]} to {lost.end_steps[1]} (limit {UNDERFLOWS:.0%})"
    )
    remedy = f"precision.loss_scale = {16 * records.config.precision.loss_scale:g}  # or precision.compute = 'bfloat16'"
    return Finding(evidence, lost.end.above(UNDERFLOWS), remedy, lost.end_steps)


def _needs_float16(records: Records) -> None:
    if records.config.precision.compute != "float16":
        raise CannotJudge("precision.compute is not 'float16'")


DIAGNOSES = (
    Diagnosis(
        "bubble",
        "system",
        "note",
        "Sampling and learning wait while reference and reward score.",
        f"score_seconds / step_seconds in the last third of the steps; confidence that its level is above {BUBBLE}.",
        "Set `sampling.overlap_scoring`, or lower `sampling.batch_size` under it; `reward.residency` = 'keep'.",
        bubble,
    ),
    Diagnosis(
        "unused budget",
        "system",
        "note",
        "Memory that was given lies idle.",
        f"The highest peak of all steps is below {USED:.0%} of `memory.budget_gib`: a fact, confidence 1.",
        "Raise `ppo.micro_batch_size`, or lower `memory.budget_gib`.",
        unused_budget,
    ),
    Diagnosis(
        "micro-batch halved",
        "system",
        "note",
        "Memory ran out, and rows go through in smaller pieces than the settings say.",
        "micro_batch_size of the last row is below the settings': a fact, confidence 1.",
        "Lower `ppo.micro_batch_size`, or take a lever of docs/memory.md.",
        halved,
    ),
    Diagnosis(
        "float16 overflow",
        "system",
        "warning",
        "float16 cannot hold gradients or losses, and optimizer steps are skipped.",
        "steps_skipped_overflow over the optimizer steps of a rollout, in the last third of the steps; confidence that "
        f"its level is above {OVERFLOWS}.",
        "`precision.compute` = 'bfloat16', a lower `precision.loss_scale`, or lower learning rates.",
        overflow,
    ),
    Diagnosis(
        "float16 underflow",
        "system",
        "warning",
        "float16 rounds gradients to 0.",
        f"Level of gradient_underflow_fraction in the last third of the steps; confidence that it is above "
        f"{UNDERFLOWS}.",
        "Raise `precision.loss_scale`, or `precision.compute` = 'bfloat16'.",
        underflow,
    ),
)
