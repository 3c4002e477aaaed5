"""`fourfold run`: the stages one after the other; finished ones are skipped, an interrupted one goes on."""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from fourfold.config import RunConfig, check_packages, check_paths
from fourfold.diagnostics.metrics import METRICS
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.memory.meter import PhaseMeter
from fourfold.memory.precision import resolve_compute
from fourfold.models.loading import Base, device_of, load_base
from fourfold.rollout.sampler import row_seed
from fourfold.training.folder import SUMMARY, RunFolder
from fourfold.training.inputs import Inputs, read_inputs
from fourfold.training.ppo import Stores, train_ppo
from fourfold.training.reward_model import train_reward
from fourfold.training.rows import TIMED_PHASES
from fourfold.training.supervised import train_sft
from fourfold.training.texts import TextCache

Say = Callable[[str], None]


def resolve(config: RunConfig) -> RunConfig:
    """The settings with everything that depends on the machine filled in."""
    compute = resolve_compute(config.precision.compute, device_of(config))
    return config.model_copy(update={"precision": config.precision.model_copy(update={"compute": compute})})


def prepare(config: RunConfig) -> RunConfig:
    """Check everything that can be checked before a model is loaded, and set threads and seed."""
    check_paths(config)
    check_packages(config)
    _check_best_metric(config)
    config = resolve(config)
    if config.system.threads:
        torch.set_num_threads(config.system.threads)
    _seed_all(config.seed)
    return config


def _seed_all(seed: int) -> None:
    """Global generators: the program draws from its own, but a reward function may use them."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_best_metric(config: RunConfig) -> None:
    known = [name for name in METRICS["evaluation"] if name.startswith("eval_")]
    if config.evaluation.judge == "none":
        known.remove("eval_judge_mean")
    if (given := config.checkpoint.best_metric) not in known:
        near = difflib.get_close_matches(given, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        allowed = ", ".join(known)
        raise ValueError(f"checkpoint.best_metric: given {given!r}; {hint}allowed with these settings: {allowed}")


def run_stages(config: RunConfig, say: Say) -> dict[str, Any]:
    """Carry out `config.stages` in the run's folder; returns (and writes) the summary."""
    config = prepare(config)
    folder = RunFolder(Path(config.output).expanduser())
    folder.claim(config)
    todo = [stage for stage in config.stages if folder.finished(stage) is None]
    for stage in config.stages:
        if stage not in todo:
            say(f"{stage}: finished earlier, skipped")
    if todo:
        _carry_out(config, folder, todo, say)
    summary = summarise_run(config, folder)
    folder.write_json(SUMMARY, summary)
    return summary


def _carry_out(config: RunConfig, folder: RunFolder, todo: list[str], say: Say) -> None:
    meter = PhaseMeter(device_of(config))
    with meter.phase("load"):
        base = load_base(config)
    needed = config.model_copy(update={"stages": tuple(todo)})
    inputs = read_inputs(needed, base, say)
    if "sft" in todo:
        _stage(
            config,
            folder,
            meter,
            "sft",
            lambda: train_sft(config, base, TextCache(base), inputs.texts, inputs.texts_test, folder.stage("sft")),
        )
    if "reward" in todo:
        _stage(config, folder, meter, "reward", lambda: _reward(config, base, inputs, folder))
    if "ppo" in todo:
        stores = Stores(_sft_model(folder), _reward_model(config, folder))
        inputs = Inputs(prompts=inputs.prompts, prompts_test=inputs.prompts_test)
        _stage(config, folder, meter, "ppo", lambda: train_ppo(config, base, inputs, stores, folder, meter, say))


def _reward(config: RunConfig, base: Base, inputs: Inputs, folder: RunFolder) -> dict[str, Any]:
    if config.reward.source != "train":
        return {"source": config.reward.source}
    return train_reward(
        config,
        base,
        TextCache(base),
        inputs.pairs,
        inputs.pairs_test,
        inputs.texts,
        _sft_model(folder),
        folder.stage("reward"),
    )


def _stage(
    config: RunConfig, folder: RunFolder, meter: PhaseMeter, name: str, work: Callable[[], dict[str, Any]]
) -> None:
    _seed_all(row_seed("stage", config.seed, name))  # the same whether or not the stages before ran in this process
    started = time.perf_counter()
    with meter.phase(name):
        metrics = work()
    seconds, peak = time.perf_counter() - started, meter.totals()[name].peak_bytes
    load = meter.totals()["load"]
    record = {"metrics": metrics, "seconds": seconds, "peak_bytes": peak}
    folder.finish(name, {**record, "load_seconds": load.seconds, "load_peak_bytes": load.peak_bytes})


def _sft_model(folder: RunFolder) -> Path | None:
    return folder.model("sft") if folder.finished("sft") is not None else None


def _reward_model(config: RunConfig, folder: RunFolder) -> Path | None:
    if config.reward.source == "function":
        return None
    if config.reward.source == "checkpoint":
        return Path(config.reward.checkpoint).expanduser()
    if folder.finished("reward") is None:
        raise ValueError(
            f"ppo needs a reward model and {folder.stage('reward')} has none; run the stage reward first, "
            'or set reward.source = "checkpoint" or "function"'
        )
    return folder.model("reward")


def summarise_run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """Everything a reader wants to know of a run: before, after, reward model, seconds and bytes by phase."""
    summary: dict[str, Any] = {"output": str(folder.root), "seed": config.seed, "stages": {}}
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for stage in ("sft", "reward", "ppo"):
        record = folder.finished(stage)
        if record is None:
            continue
        seconds[stage], peaks[stage] = record["seconds"], record["peak_bytes"]
        seconds["load"] = max(seconds.get("load", 0.0), record["load_seconds"])
        peaks["load"] = max(peaks.get("load", 0), record["load_peak_bytes"])
        if stage != "ppo":
            summary["stages"][stage] = record["metrics"]
    if "pair_accuracy" in summary["stages"].get("reward", {}):
        summary["reward_model"] = {"pair_accuracy": summary["stages"]["reward"]["pair_accuracy"]}
    metrics = folder.stage("ppo") / "metrics.jsonl"
    for row in read_jsonl(metrics, "ppo_step") if metrics.is_file() else ():
        for phase in TIMED_PHASES:
            seconds[phase] = seconds.get(phase, 0.0) + row[f"{phase}_seconds"]
            peaks[phase] = max(peaks.get(phase, 0), row[f"{phase}_peak_bytes"])
    for name in ("before", "after"):
        evaluation = folder.read_json(f"ppo/{name}.json")
        if evaluation is not None:
            summary[name] = evaluation["metrics"]
    return {**summary, "seconds": seconds, "peak_bytes": peaks}
