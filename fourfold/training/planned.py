"""The planner in a run: levers chosen at its start, and predicted beside measured bytes at its end (docs/plan.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fourfold.config import RunConfig, check_paths
from fourfold.config.loading import CONFIG, Contradiction, with_settings
from fourfold.config.paths import missing_packages
from fourfold.diagnostics.machine import ensure_measured
from fourfold.diagnostics.predicted import Prediction, measured_peaks, predicted_peaks
from fourfold.diagnostics.run_files import PLAN, TIMELINE
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.memory.precision import resolve_compute
from fourfold.models.loading import device_of
from fourfold.planner.hardware.machine import GIB
from fourfold.planner.lever import Change
from fourfold.planner.levers import LEVERS
from fourfold.planner.plan import Plan
from fourfold.planner.remedies import remedies, shortage
from fourfold.planner.request import architectures_of, host_memory, lengths_of
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.search import search
from fourfold.planner.units import seconds, size
from fourfold.training.folder import RunFolder

CHANGES: dict[str, tuple[Change, ...]] = {"exact": ("exact",), "bounded": ("exact", "bounded")}
HELPS = 4


@dataclass(frozen=True)
class Chosen:
    """The settings with the levers in them, what to say of them, and what is recorded of a choice made now."""

    config: RunConfig
    lines: tuple[str, ...] = ()
    record: dict[str, Any] | None = None

    def save(self, folder: RunFolder) -> None:
        """Into the folder of a new run, once it is the run's own."""
        if self.record is not None:
            folder.write_json(PLAN, self.record)


def choose_levers(config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> Chosen:
    """The levers that `memory.levers` asks for: chosen now, or as they were chosen when the run began.

    A machine that nobody has measured is measured first, which takes seconds. A ValueError says what is missing, and
    what would help, where nothing fits.
    """
    if config.memory.levers == "given" or "ppo" not in config.stages:
        return Chosen(config)
    if (record := folder.read_json(PLAN)) is not None and "levers" in record:
        settings = {key: value for step in record["levers"] for key, value in step["settings"].items()}
        names = ", ".join(step["lever"] for step in record["levers"][1:]) or "none"
        return Chosen(with_settings(config, settings), (f"levers: as chosen when this run began: {names}",))
    if (folder.root / CONFIG).is_file():
        return Chosen(config)  # begun without a plan: what differs is refused with the other settings
    check_paths(config)
    plan = _plan(config, say)
    settings = {key: value for step in plan.steps for key, value in step.settings.items()}
    record = {"budget_bytes": plan.budget, "levers": [asdict(step) for step in plan.steps]}
    return Chosen(with_settings(config, settings), tuple(_said(plan)), record)


def _plan(config: RunConfig, say: Callable[[str], None]) -> Plan:
    cluster = ensure_measured(say)
    if (cluster.device.kind == "cpu") != (device_of(config).type == "cpu"):
        raise ValueError(
            f"memory.levers: given {config.memory.levers!r} beside system.device = {config.system.device!r}, but plans "
            f'are for the measured {cluster.device.name}; set system.device = "auto", or memory.levers = "given"'
        )
    resolved = _resolved(config)
    scene = Scene(resolved, architectures_of(config)[0], cluster, lengths_of(config))
    budget = round(config.memory.budget_gib * GIB) or cluster.device.memory
    changes = CHANGES[config.memory.levers]
    plan = search(scene, budget, host_memory(cluster), refused=_without_package(config), changes=changes)[0]
    if not plan.fits:
        helps = [str(each) for each in remedies(plan)][:HELPS]
        more = ['memory.levers = "bounded" lets levers round'] if config.memory.levers == "exact" else []
        raise ValueError(
            f"memory.levers = {config.memory.levers!r}: {shortage(plan)}. Try: {'; '.join([*helps, *more])}"
        )
    return plan


def _resolved(config: RunConfig) -> RunConfig:
    """With the compute type of this machine, as the run itself resolves it."""
    return with_settings(config, {"precision.compute": resolve_compute(config.precision.compute, device_of(config))})


def _without_package(config: RunConfig) -> list[str]:
    """Names of levers that need a package which is not installed."""
    before, found = set(missing_packages(config)), list[str]()
    for lever in LEVERS:
        try:
            with_lever = with_settings(config, lever.switches)
        except Contradiction:
            continue
        if set(missing_packages(with_lever)) - before:
            found.append(lever.name)
    return found


def _said(plan: Plan) -> list[str]:
    moment, peak = plan.peak
    lines = [
        f"levers: planned for {size(plan.budget)}: {size(peak)} at most (in {moment}), about "
        f"{seconds(plan.costs.step_seconds)} a step; {len(plan.steps) - 1 or 'no'} levers taken"
    ]
    for step in plan.steps[1:]:
        settings = ", ".join(f"{key} = {value!r}" for key, value in step.settings.items())
        lines.append(f"  {step.lever} ({settings}): {step.reason}; then {size(step.peak_bytes)}")
    return lines


def predict(config: RunConfig, prompts: Sequence[Sequence[int]]) -> Prediction:
    """What ppo will take by the planner, of resolved settings: before it begins, so that no run ends by a prediction.

    Lengths are the longest that the prompts and the settings allow.
    """
    try:
        models, _ = architectures_of(config)
    except ValueError as error:
        return Prediction({}, f"memory is not predicted: {error}")
    longest, new = max(len(prompt) for prompt in prompts), config.sampling.max_new_tokens
    mean = sum(len(prompt) for prompt in prompts) / len(prompts)
    return predicted_peaks(config, models, Lengths(longest, new, mean, new), device_of(config).type)


def note_memory(predicted: Prediction, folder: RunFolder) -> None:
    """Write predicted beside measured bytes into plan.json, when ppo has finished."""
    measured = measured_peaks(read_jsonl(folder.root / TIMELINE))
    both = {
        name: {"predicted_bytes": peak, "measured_bytes": measured[name]}
        for name, peak in predicted.peaks.items()
        if name in measured
    }
    if both:
        folder.write_json(PLAN, (folder.read_json(PLAN) or {}) | {"memory": both})
