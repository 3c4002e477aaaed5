"""The good verdict of a family in which nothing was found, with the numbers that say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fourfold.diagnostics.doctor.critic import EXPLAINED
from fourfold.diagnostics.doctor.fit import newest_fit, over_rows, rank_correlation
from fourfold.diagnostics.doctor.records import CannotJudge, Records
from fourfold.diagnostics.doctor.verdict import CONFIDENT, Family, Finding, Verdict


def _critic(records: Records) -> Finding:
    step, fit, where = newest_fit(records)
    explained = over_rows(fit, "explained")
    evidence = (
        f"{where} rollout of step {step}: values explain {explained.value:.2f} ± {explained.error:.2f} of the variance "
        f"of returns; Spearman {rank_correlation(fit):.2f}"
    )
    confidence = explained.above(EXPLAINED)
    if confidence < CONFIDENT:
        raise CannotJudge(f"{evidence}: too little to call it healthy, too uncertain to call it ill")
    return Finding(evidence, confidence, "", (step, step))


def _policy(records: Records) -> Finding:
    entropy, kl = records.series("entropy_per_token_mean"), records.series("kl_per_sequence_mean")
    clipped = records.series("policy_clip_fraction")
    evidence = (
        f"entropy {entropy.start.value:.3g} -> {entropy.end.value:.3g} nats a token, KL {kl.end.value:.3g} nats a "
        f"response, {clipped.end.value:.1%} clipped"
    )
    if records.preflight.get("fresh"):
        ratio, gap = records.preflight["ratio_gap_mean"], records.preflight["kl_gap_mean"]
        evidence += f"; before the first step |log ratio| was {ratio:.1e} and KL {gap:.1e} nats a token"
    return Finding(evidence, 1.0, "", entropy.all_steps)


def _reward(records: Records) -> Finding:
    score = records.series("score_mean")
    evidence = (
        f"mean score {score.start.value:.3g} -> {score.end.value:.3g}, from the first to the last third of the steps"
    )
    if "pair_accuracy" in records.reward_stage:
        evidence += f"; {records.reward_stage['pair_accuracy']:.1%} of the held-out pairs ranked right"
    return Finding(evidence, 1.0, "", score.all_steps)


def _system(records: Records) -> Finding:
    step, score = records.series("step_seconds"), records.series("score_seconds")
    evidence = f"a step takes {step.end.value:.3g} s, of which scoring {score.end.value:.3g} s"
    return Finding(evidence, 1.0, "", step.all_steps)


_SHOWN: dict[Family, Callable[[Records], Finding]] = {
    "critic": _critic,
    "policy": _policy,
    "reward": _reward,
    "system": _system,
}


def healthy(family: Family, records: Records, findings: Sequence[Finding]) -> Verdict:
    """The good verdict; its confidence is 1 less the largest of any disease of the family that was looked for."""
    found = _SHOWN[family](records)
    confidence = min(found.confidence, 1.0 - max((each.confidence for each in findings), default=0.0))
    return Verdict(f"{family} healthy", "good", found.evidence, confidence, "", found.steps)
