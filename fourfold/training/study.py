"""`fourfold study`: variants of one configuration side by side, each a run of its own, and what came of them.

OUTPUT/VARIANT/seed-N is a run as any other: finished ones are skipped, an interrupted one goes on, and it can be
sampled and exported. The stages before ppo that variants have in common are carried out once, in OUTPUT/shared, with
the seed of the configuration; runs link to them. So seeds differ in ppo alone.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from fourfold.config import RunConfig
from fourfold.config.checks import is_given
from fourfold.config.loading import CONFIG, with_settings
from fourfold.diagnostics.study_page import study_page
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import RunFailed
from fourfold.files import write_atomically
from fourfold.training.folder import RunFolder
from fourfold.training.pipeline import run_stages
from fourfold.training.studies import Measure, Study, Variant

Say = Callable[[str], None]
REPORT, PAGE = "study.json", "study.html"
# Evaluations in a run whose settings ask for none between its start and its end.
EVALUATIONS = 6
# What stages before ppo make of a run: runs that are alike in it can share them. Of the trunk its depth.
_OF_STAGES = ("model", "sharing", "adapters", "precision", "data", "sft", "reward")


@dataclass(frozen=True)
class Asked:
    """What `fourfold study` is asked to do beside its name and configuration."""

    variants: Sequence[str] = ()  # none: all
    seeds: Sequence[int] = ()  # none: that of the configuration
    steps: int | None = None
    output: str = ""


class Shared(NamedTuple):
    """The folder of stages that variants share, and the settings of the first of them, which carry them out."""

    folder: Path
    config: RunConfig


@dataclass(frozen=True)
class Planned:
    """A variant with its settings, and the stages that it shares; None where it has none before ppo."""

    variant: Variant
    config: RunConfig
    shared: Shared | None

    def run(self, seed: int, root: Path) -> RunConfig:
        """The settings of its run with this seed."""
        output = root / self.variant.name / f"seed-{seed}"
        return with_settings(self.config, {"seed": seed, "output": str(output)})


def run_study(study: Study, config: RunConfig, asked: Asked, say: Say) -> dict[str, Any]:
    """Carry out what is not done yet; returns (and writes) the report. Where a variant fails the others go on."""
    root = Path(asked.output or f"{config.output.rstrip('/')}-{study.name}").expanduser()
    if (root / CONFIG).is_file():
        raise ValueError(
            f"--output: {root} is the folder of a run (it has {CONFIG}), which variants would be put into; give a "
            "folder of its own"
        )
    config = _prepared(study, config, asked)
    seeds = list(asked.seeds) or [config.seed]
    # Where nothing is planned, what is asked for is made of what these stages leave.
    first = plan(study, config, asked, root) or _all_planned(study, config, asked, root)[:1]
    for folder, owner in dict(each.shared for each in first if each.shared is not None).items():
        say(f"study {study.name}: the stages before ppo, in {folder}")
        run_stages(_before_ppo(owner, folder), say)
    planned = plan(study, config, asked, root)  # a stage may have left checkpoints
    report: dict[str, Any] = {"study": study.name, "question": study.question, "output": str(root)}
    report |= {"steps": config.ppo.steps, "seeds": seeds}
    report |= {"measures": [_told(measure) for measure in study.measures], "variants": {}}
    for number, each in enumerate(planned, start=1):
        runs = []
        for seed in seeds:
            say(f"study {study.name}: {each.variant.name} ({number} of {len(planned)}), seed {seed}")
            runs.append(_carry_out(each, each.run(seed, root), study.measures, say))
            gc.collect()  # models of the run before
        report["variants"][each.variant.name] = {"about": each.variant.about, "runs": runs} | _over_seeds(runs)
        _write(report, root)
    return report


def plan(study: Study, config: RunConfig, asked: Asked, root: Path) -> list[Planned]:
    """The variants that are asked for, their settings checked; ValueError where one is unknown or not allowed."""
    shared = root / "shared"
    variants = study.variants(config, shared if shared.is_dir() else None)
    known = [variant.name for variant in variants]
    if unknown := [name for name in asked.variants if name not in known and not _may_come(name, config, shared)]:
        raise ValueError(
            f"--variants: given {', '.join(unknown)}; allowed for study {study.name} of this configuration: "
            f"{', '.join(known)}"
        )
    return [each for each in _all_planned(study, config, asked, root) if _is_asked(each.variant, asked)]


def _all_planned(study: Study, config: RunConfig, asked: Asked, root: Path) -> list[Planned]:
    """Every variant but those that are refused and not asked for: whatever is asked for shares the same folders."""
    shared = root / "shared"
    groups: dict[str, Shared] = {}
    planned = []
    for variant in study.variants(config, shared if shared.is_dir() else None):
        try:
            of_variant = with_settings(config, variant.settings)
        except ValueError as error:
            if not _is_asked(variant, asked):
                continue
            raise ValueError(f"study {study.name}, variant {variant.name}: {error}") from error
        group = None
        if set(config.stages) != {"ppo"}:
            folder = root / ("shared" if not groups else f"shared-{variant.name}")
            group = groups.setdefault(_of_stages(of_variant), Shared(folder, of_variant))
        planned.append(Planned(variant, of_variant, group))
    return planned


def _is_asked(variant: Variant, asked: Asked) -> bool:
    return not asked.variants or variant.name in asked.variants


def _may_come(name: str, config: RunConfig, shared: Path) -> bool:
    """Whether a variant is made of what the shared stages leave, and these have not been carried out yet."""
    return name == "older-sft" and "sft" in config.stages and not shared.is_dir()


def _prepared(study: Study, config: RunConfig, asked: Asked) -> RunConfig:
    """The settings that all variants have."""
    if "ppo" not in config.stages:
        raise ValueError(f"study {study.name}: stages are {list(config.stages)}; variants are compared in ppo; add it")
    if config.data.prompts_test is None:
        raise ValueError(
            f"study {study.name}: variants are compared on held-out prompts; give [data.prompts_test] with a path"
        )
    settings: dict[str, Any] = {} if asked.steps is None else {"ppo.steps": asked.steps}
    if not config.evaluation.every:
        settings["evaluation.every"] = max((asked.steps or config.ppo.steps) // EVALUATIONS, 1)
    return with_settings(config, settings)


def _of_stages(config: RunConfig) -> str:
    """What the stages before ppo depend on, to compare runs by."""
    sections: dict[str, Any] = {name: getattr(config, name).model_dump(mode="json") for name in _OF_STAGES}
    depth = config.trunk.branch_layers if config.sharing.mode == "trunk" else None
    return json.dumps(sections | {"depth": depth}, sort_keys=True)


def _before_ppo(config: RunConfig, folder: Path) -> RunConfig:
    """The run of the shared stages."""
    stages = [stage for stage in config.stages if stage != "ppo"]
    settings: dict[str, Any] = {"stages": stages, "output": str(folder)}
    if is_given(config, "memory.levers"):
        settings["memory.levers"] = None  # of ppo's plan
    return with_settings(config, settings)


def _carry_out(planned: Planned, config: RunConfig, measures: Sequence[Measure], say: Say) -> dict[str, Any]:
    """One run, and what came of it."""
    folder = RunFolder(Path(config.output).expanduser())
    if planned.shared is not None:
        _link(planned.shared.folder, folder.root, [stage for stage in config.stages if stage != "ppo"])
    record: dict[str, Any] = {"seed": config.seed, "output": str(folder.root), "status": "done"}
    try:
        summary = run_stages(config, say)
        record["seconds"] = summary["seconds"].get("ppo", 0.0)
    except (RunFailed, ValueError) as error:  # of one variant; an interrupt ends the study
        say(f"failed: {error}")
        record |= {"status": "failed", "error": str(error)}
    metrics = folder.stage("ppo") / "metrics.jsonl"
    rows = read_jsonl(metrics) if metrics.is_file() else []
    before = (folder.read_json("ppo/before.json") or {"metrics": {}})["metrics"]
    curves = {measure.name: measure.points(rows, before) for measure in measures}
    final = {measure.name: measure.final(curves[measure.name]) for measure in measures}
    return record | {
        "curves": {name: points for name, points in curves.items() if points},
        "final": {name: value for name, value in final.items() if value is not None},
    }


def _link(shared: Path, run: Path, stages: Sequence[str]) -> None:
    """The finished stages of the shared folder as those of a run."""
    run.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        link = run / stage
        if not link.exists():
            link.symlink_to(os.path.relpath(shared / stage, run))


def _over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation over the runs that are done."""
    finals = [run["final"] for run in runs if run["status"] == "done"]
    names = dict.fromkeys(name for final in finals for name in final)
    values = {name: [final[name] for final in finals if name in final] for name in names}
    return {
        "mean": {name: mean(numbers) for name, numbers in values.items()},
        "std": {name: stdev(numbers) for name, numbers in values.items() if len(numbers) > 1},
    }


def _told(measure: Measure) -> dict[str, str]:
    return {"name": measure.name, "title": measure.title, "unit": measure.unit}


def _write(report: Mapping[str, Any], root: Path) -> None:
    """After every variant, so that an interrupted study has what was done."""
    root.mkdir(parents=True, exist_ok=True)
    write_atomically(root / REPORT, json.dumps(report, indent=1) + "\n")
    write_atomically(root / PAGE, study_page(report))
