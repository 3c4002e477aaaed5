"""Plans as JSON: everything that the terminal shows and more, in bytes and seconds (docs/plan.md describes it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from typing import Any

from fourfold.planner.bill import PHASES, TIERS
from fourfold.planner.plan import Plan
from fourfold.planner.remedies import Remedy, shortage
from fourfold.planner.request import Wanted

# Raised when a reader of the old form would misread the new one.
SCHEMA = 1


def report(asked: Wanted, plans: Sequence[Plan], helps: Sequence[Remedy]) -> dict[str, Any]:
    """The answer to a request: whether it fits, the plans (the best first), and what would help where none does."""
    scene, cluster = asked.scene, asked.scene.cluster
    return {
        "schema": SCHEMA,
        "fits": plans[0].fits,
        "shortage": "" if plans[0].fits else shortage(plans[0]),
        "remedies": [{"change": each.text, "missing_bytes": each.missing} for each in helps],
        "budget_bytes": asked.budget,
        "host_budget_bytes": asked.host_budget,
        "hardware": _plain(asdict(cluster)),
        "models": {role: _plain(asdict(model)) for role, model in scene.models.items()},
        "lengths": scene.lengths._asdict(),
        "compute": scene.compute,
        "notes": list(asked.notes),
        "plans": [as_dict(plan) for plan in plans],
    }


def _plain(value: Any) -> Any:
    """With mappings and lists that JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(value)
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def as_dict(plan: Plan) -> dict[str, Any]:
    """One plan."""
    bill, costs = plan.footprint, plan.costs
    peaks = {tier: bill.peak(tier=tier) for tier in TIERS}
    return {
        "fits": plan.fits,
        "missing_bytes": plan.missing,
        "settings": plan.scene.config.model_dump(mode="json", exclude_defaults=True),
        "layout": asdict(plan.scene.layout) | {"devices": plan.scene.layout.devices},
        "levers": [asdict(step) for step in plan.steps],
        "peaks": {tier: {"moment": str(moment), "bytes": held} for tier, (moment, held) in peaks.items()},
        "moments": [
            {"phase": moment.phase, "role": moment.role, **{f"{tier}_bytes": bill.held(moment, tier) for tier in TIERS}}
            for moment in bill.moments
        ],
        "items": [
            {
                "holder": item.holder,
                "kind": item.kind,
                "tier": item.tier,
                "bytes": item.bytes,
                "moments": [str(moment) for moment in bill.moments if moment in item.moments],
                "why": item.why,
            }
            for item in bill.items
        ],
        "step_seconds": costs.step_seconds,
        "phase_seconds": {phase: costs.seconds[phase] for phase in PHASES if phase in costs.seconds},
        "bubble_seconds": costs.bubble,
        "hidden_seconds": costs.hidden,
        "flops": costs.flops,
        "utilisation": costs.utilisation,
        "work": [asdict(each) | {"moment": str(each.moment)} for each in costs.work],
        "traffic": [asdict(flow) for flow in costs.flows],
        "warnings": list(plan.warnings),
    }
