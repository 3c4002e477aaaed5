"""`fourfold run`: the stages one after the other; finished ones are skipped, an interrupted one goes on."""

from __future__ import annotations

import contextlib
import difflib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from fourfold.config import RunConfig, check_packages, check_paths
from fourfold.config.checks import is_given
from fourfold.config.checks.critic import critic_warnings
from fourfold.config.checks.memory import needs_cuda
from fourfold.config.checks.precision import precision, precision_warnings
from fourfold.diagnostics.metrics import METRICS
from fourfold.diagnostics.run_files import PLAN
from fourfold.diagnostics.run_state import noted_state
from fourfold.memory.meter import PhaseMeter
from fourfold.memory.precision import resolve_compute
from fourfold.models.assembly import record_for
from fourfold.models.critics import check_critic
from fourfold.models.loading import Base, device_of, load_base
from fourfold.models.reference import check_reference
from fourfold.models.storage import stored_tensors
from fourfold.models.text_rewards import check_text_rewards
from fourfold.rollout.sampler import row_seed
from fourfold.scoring.sources import import_function
from fourfold.training.folder import SUMMARY, RunFolder, reward_model, sft_model
from fourfold.training.inputs import Inputs, Records, encode_inputs, read_records
from fourfold.training.planned import Chosen, Prediction, choose_levers, note_memory, predict
from fourfold.training.ppo import Stores, train_ppo
from fourfold.training.reward_model import train_reward
from fourfold.training.rows import TIMED_PHASES
from fourfold.training.supervised import train_sft
from fourfold.training.texts import TextCache
from fourfold.training.timeline import Timeline
from fourfold.training.told_texts import tell_texts

Say = Callable[[str], None]


def resolve(config: RunConfig) -> RunConfig:
    """The settings with everything that depends on the machine, or on other settings, filled in."""
    compute = resolve_compute(config.precision.compute, device_of(config))
    precision = config.precision.model_copy(update={"compute": compute})
    ppo = config.ppo.model_copy(update={"importance": config.importance})
    return config.model_copy(update={"precision": precision, "ppo": ppo})


def prepare(config: RunConfig) -> RunConfig:
    """Check everything that can be checked before a model is loaded, and set threads and seed."""
    check_paths(config)
    check_packages(config)
    _check_best_metric(config)
    if device_of(config).type == "cpu" and (problems := needs_cuda(config)):
        raise ValueError("\n".join(problems))
    for key, name in config.reward.functions.items():
        import_function(name, key)
    config = on_this_machine(config)
    _seed_all(config.seed)
    return config


def on_this_machine(config: RunConfig) -> RunConfig:
    """The settings resolved and their types checked again, and torch's threads set as they say."""
    if config.system.threads:
        torch.set_num_threads(config.system.threads)
    config = resolve(config)
    if problems := list(precision(config)):
        raise ValueError("\n".join(problems))
    return config


def _seed_all(seed: int) -> None:
    """Global generators: the program draws from its own, but a reward function may use them."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_best_metric(config: RunConfig) -> None:
    parts = config.reward.dimensions if config.reward.source == "combined" else ()
    named = [name for name in METRICS["evaluation"] if name.startswith("eval_")]
    known = [name for name in named if not name.endswith("/NAME")]
    known += [name.replace("NAME", part) for name in named if name.endswith("/NAME") for part in parts]
    there = {
        "eval_judge_mean": config.evaluation.judge != "none",
        "eval_kl_step_0_per_sequence": config.reference.holds_step_0,
        "eval_step_0_log_prob_per_token": config.reference.holds_step_0,
        "eval_text_nll_per_token": config.data.texts_test is not None and config.evaluation.max_texts > 0,
        "eval_steering": config.reward.weights == "sampled",
    }
    known = [name for name in known if there.get(name.partition("/")[0], True)]
    if (given := config.checkpoint.best_metric) not in known:
        near = difflib.get_close_matches(given, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        allowed = ", ".join(known)
        raise ValueError(f"checkpoint.best_metric: given {given!r}; {hint}allowed with these settings: {allowed}")


def _check_what_stages_start_from(config: RunConfig, folder: RunFolder) -> None:
    """Refuse a stage that lacks the model it starts from, before one is loaded and the folder is taken."""
    reward = config.reward
    if config.sft.checkpoint:
        allowed = "the folder sft/model of a run, a checkpoint of its stage sft, or a LoRA adapter of peft"
        _check_stored(config, "policy", "sft.checkpoint", Path(config.sft.checkpoint).expanduser(), allowed)
    if config.reference.checkpoint:
        allowed = "the folder sft/model or ppo/model of a run, or a checkpoint of a stage sft"
        place = Path(config.reference.checkpoint).expanduser()
        _check_stored(config, "policy", "reference.checkpoint", place, allowed)
    if reward.stored:
        allowed = "the folder reward/model of a run, or a checkpoint of its stage reward"
        _check_stored(config, "scorer", reward.stored_key, Path(reward.stored).expanduser(), allowed)
    elif "ppo" in config.stages and folder.finished("ppo") is None and "reward" not in config.stages:
        reward_model(config, folder)
    if _reward_lacks_sft(config, folder) and is_given(config, "reward.init"):
        raise ValueError(
            f"reward.init: given 'sft', but stages has no sft and {folder.stage('sft')} no finished one; run the stage "
            'sft first, put it into stages, or set reward.init = "base"'
        )


def _check_stored(config: RunConfig, kind: str, key: str, folder: Path, allowed: str) -> None:
    """Whether a folder holds such a role for this run's model and cut, by its record; weights are not read."""
    try:
        stored_tensors(folder, record_for(config, kind))
    except ValueError as error:
        raise ValueError(f"{key}: {error}; allowed: {allowed}") from error


def _reward_lacks_sft(config: RunConfig, folder: RunFolder) -> bool:
    """Whether a reward model that is to start from the sft model finds none."""
    trains = "reward" in config.stages and config.reward.trains and folder.finished("reward") is None
    has_sft = "sft" in config.stages or sft_model(config, folder) is not None
    return trains and config.reward.init == "sft" and not has_sft


def run_stages(config: RunConfig, say: Say) -> dict[str, Any]:
    """Carry out `config.stages` in the run's folder; returns (and writes) the summary."""
    folder = RunFolder(Path(config.output).expanduser())
    chosen = choose_levers(config, folder, say)
    config = prepare(chosen.config)
    _check_what_stages_start_from(config, folder)
    todo = [stage for stage in config.stages if folder.finished(stage) is None]
    folder.require_same_settings(config)
    records = read_records(config.model_copy(update={"stages": tuple(todo)}))
    warnings = (*precision_warnings(config), *critic_warnings(config))
    for line in (*chosen.lines, *(f"warning: {warning}" for warning in warnings)):
        say(line)
    for stage in config.stages:
        if stage not in todo:
            say(f"{stage}: finished earlier, skipped")
    if todo:
        _carry_out(config, chosen, folder, todo, records, say)
    summary = summarise_run(config, folder)
    folder.write_json(SUMMARY, summary)
    return summary


def _carry_out(
    config: RunConfig, chosen: Chosen, folder: RunFolder, todo: list[str], records: Records, say: Say
) -> None:
    if _reward_lacks_sft(config, folder):
        say("reward.init: there is no stage sft, so the reward model starts from the base model")
    meter = PhaseMeter(device_of(config), count_tensors=config.memory.count_tensors)
    with meter.phase("load"):
        base = load_base(config)
    if "ppo" in todo:  # before hours of other stages, and before the folder is bound to these settings
        check_critic(config, base)
        check_reference(config, base)
        check_text_rewards(config)
    inputs = encode_inputs(config, base, records, say)
    folder.claim(config)  # not before: to mend what is wrong with model or data can take other settings
    with noted_state(folder.root, todo):
        chosen.save(folder)
        Timeline(folder.root).spans("", 0, meter.take_spans())
        inputs = tell_texts(config, base, inputs, folder, say)
        _stages(config, folder, base, inputs, todo, meter, say)


def _stages(
    config: RunConfig, folder: RunFolder, base: Base, inputs: Inputs, todo: list[str], meter: PhaseMeter, say: Say
) -> None:
    predicted = Prediction({}, "")
    if "ppo" in todo:
        say(planned_ppo(config, len(inputs.prompts)))
        predicted = predict(config, inputs.prompts)
        say(predicted.said)
    if "sft" in todo:
        _stage(
            config,
            folder,
            meter,
            "sft",
            lambda: train_sft(config, base, TextCache(base), inputs.texts, inputs.texts_test, folder.stage("sft"), say),
        )
    if "reward" in todo:
        _stage(config, folder, meter, "reward", lambda: _reward(config, base, inputs, folder, say))
    if "ppo" in todo:
        stores = Stores(sft_model(config, folder), reward_model(config, folder))
        held_out = inputs.texts_test[: config.evaluation.max_texts]
        inputs = Inputs(prompts=inputs.prompts, prompts_test=inputs.prompts_test, texts_test=held_out)
        _stage(config, folder, meter, "ppo", lambda: train_ppo(config, base, inputs, stores, folder, meter, say))
        note_memory(predicted, folder)


def planned_ppo(config: RunConfig, prompts: int) -> str:
    """What the stage ppo does in all, in one line; `target_kl` and dropped rows can make it fewer optimizer steps."""
    ppo = config.ppo
    responses = sum(map(config.rows_at, range(ppo.steps)))
    drawn = responses // config.sampling.responses_per_prompt
    steps, first = config.optimizer_steps, config.rows_at(0)
    rows = f"x {first:,}" if first == ppo.rollout_batch_size else f"of {first:,} to {ppo.rollout_batch_size:,}"
    return (
        f"ppo: {ppo.steps:,} steps {rows} = {responses:,} responses to {drawn:,} prompts "
        f"({drawn / prompts:.1f} times the {prompts:,} given); {steps['actor']:,} optimizer steps of the actor, "
        f"{steps['critic']:,} of the critic"
    )


def _reward(config: RunConfig, base: Base, inputs: Inputs, folder: RunFolder, say: Say) -> dict[str, Any]:
    if not config.reward.trains:
        return {"source": config.reward.source}
    return train_reward(
        config,
        base,
        TextCache(base),
        inputs.pairs,
        inputs.pairs_test,
        inputs.texts,
        sft_model(config, folder),
        folder.stage("reward"),
        say,
    )


def _stage(
    config: RunConfig, folder: RunFolder, meter: PhaseMeter, name: str, work: Callable[[], dict[str, Any]]
) -> None:
    _seed_all(row_seed("stage", config.seed, name))  # the same whether or not the stages before ran in this process
    folder.note_spent(meter.totals())

    def note() -> None:
        folder.note_spent(meter.totals())
        Timeline(folder.root).spans(name, 0, meter.take_spans())

    try:
        with meter.phase(name):
            metrics = work()
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            note()
        raise
    note()
    folder.finish(name, {"metrics": metrics, **folder.spent()[name]._asdict()})


def summarise_run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """Everything a reader wants to know of a run: before, after, reward model, seconds and bytes by phase."""
    summary: dict[str, Any] = {"output": str(folder.root), "seed": config.seed, "stages": {}}
    for stage in ("sft", "reward", "ppo"):
        record = folder.finished(stage)
        if record is not None and stage != "ppo":
            summary["stages"][stage] = record["metrics"]
    if "pair_accuracy" in summary["stages"].get("reward", {}):
        summary["reward_model"] = {"pair_accuracy": summary["stages"]["reward"]["pair_accuracy"]}
    for name in ("before", "after"):
        evaluation = folder.read_json(f"ppo/{name}.json")
        if evaluation is not None:
            summary[name] = evaluation["metrics"]
    spent = folder.spent()
    order = [name for name in ("load", "sft", "reward", "ppo", *TIMED_PHASES) if name in spent]
    summary["seconds"] = {name: spent[name].seconds for name in order}
    summary["peak_bytes"] = {name: spent[name].peak_bytes for name in order}
    if (plan := folder.read_json(PLAN)) is not None and "memory" in plan:
        summary["memory"] = plan["memory"]
    return summary
