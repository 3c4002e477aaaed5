"""What the planner says of a run's memory and time, beside what the run has measured."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fourfold.config import RunConfig
from fourfold.diagnostics.run_record import RunRecord
from fourfold.models.loading import device_of
from fourfold.planner.architectures import Architecture
from fourfold.planner.bill import PHASES, Footprint
from fourfold.planner.costs import costs
from fourfold.planner.footprint import footprint
from fourfold.planner.hardware.machine import Cluster, Device, Node
from fourfold.planner.hardware.measured import read_measured
from fourfold.planner.request import architectures_of, lengths_of
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.units import size


@dataclass(frozen=True)
class Prediction:
    """Peak bytes of ppo by phase, and by phase and role as "phase/role"; `said` says of what, or why there are none."""

    peaks: Mapping[str, int]
    said: str


@dataclass(frozen=True)
class Timing:
    """Seconds of a PPO step by phase, and by phase and role; `said` says of what, or why there are none."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    said: str = ""


def predicted_peaks(config: RunConfig, models: Mapping[str, Architecture], lengths: Lengths, kind: str) -> Prediction:
    """Memory of resolved settings on a device of a kind, "cpu" or "cuda"."""
    assert kind in ("cuda", "cpu"), kind
    # As much detail as memory needs: a resolved compute type leaves nothing to look up.
    this = Cluster(Node(Device("this machine", kind, 0, 1.0, {config.precision.compute: 1.0})))
    bill = footprint(Scene(config, models, this, lengths))
    moment, most = bill.peak()
    if kind == "cuda":  # torch's allocations, which are measured there, are without CUDA's context
        bill = Footprint(tuple(item for item in bill.items if item.kind != "framework"))
    peaks = {str(each): bill.held(each) for each in bill.moments}
    peaks |= {phase: bill.peak(phase)[1] for phase in PHASES if any(each.phase == phase for each in bill.moments)}
    return Prediction(peaks, f"memory: {size(most)} are predicted at most, in {moment}")


def measured_peaks(timeline: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The most bytes by phase, and by phase and role, over all of ppo's steps and loads and processes of the run."""
    peaks: dict[str, int] = {}
    for row in timeline:
        # Of roles that score beside sampling there are no bytes.
        if row["kind"] != "span" or row["stage"] not in ("", "ppo") or (peak := row["peak_bytes"]) is None:
            continue
        if row["phase"] in PHASES:
            name = f"{row['phase']}/{row['role']}" if row["role"] else row["phase"]
            peaks[name] = max(peaks.get(name, 0), peak)
    return peaks


def memory_of(record: RunRecord) -> Prediction:
    """As the run itself has predicted it, or, while it has not written that, as the planner does of its settings."""
    if "memory" in record.plan:
        saved = {name: both["predicted_bytes"] for name, both in record.plan["memory"].items()}
        return Prediction(saved, "as the run predicted it before its first step")
    try:
        models, _ = architectures_of(record.config)
        found = predicted_peaks(record.config, models, lengths_of(record.config), device_of(record.config).type)
    except ValueError as error:
        return Prediction({}, str(error))
    return Prediction(found.peaks, "by the planner, for the longest prompts and responses that the settings allow")


def time_of(record: RunRecord) -> Timing:
    """A step by the planner on this machine as it was measured, for the mean lengths of the run."""
    if not record.steps:
        return Timing(said="no step has been logged")
    if record.state.host and record.state.host != socket.gethostname():
        return Timing(said=f"the run was made on another machine ({record.state.host})")
    try:
        cluster = read_measured()
        scene = Scene(record.config, architectures_of(record.config)[0], cluster, _lengths(record))
        cost = costs(scene, footprint(scene))
    except ValueError as error:  # this machine is not measured, or the planner does not know the model
        return Timing(said=str(error))
    seconds = {str(each.moment): each.seconds for each in cost.work} | {str(k): v for k, v in cost.seconds.items()}
    return Timing(seconds, f"by the planner for {cluster.device.name} as measured, at the run's mean lengths")


def _lengths(record: RunRecord) -> Lengths:
    """The longest by the settings; the means as the run has had them (accounting.py: an actor's pass sees all but the
    last token of each row)."""
    longest, rows = lengths_of(record.config), record.config.ppo.rollout_batch_size
    response = median(row["response_length_mean"] for row in record.steps)
    both = median(row["actor_forward_tokens"] / (row["actor_forward_passes"] * rows) for row in record.steps) + 1
    return longest._replace(mean_prompt=min(max(both - response, 1.0), longest.prompt), mean_response=response)
