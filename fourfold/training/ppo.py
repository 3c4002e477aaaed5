"""Stage 3, ppo: assemble the four roles, check them, train, and compare before with after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.backends.local import LocalOptimizer
from fourfold.backends.scaling import LossScale
from fourfold.config.schema import MemorySection, RunConfig
from fourfold.diagnostics.judges import make_judge
from fourfold.diagnostics.progress import stage_progress
from fourfold.diagnostics.tables import as_text, role_rows, roles_table
from fourfold.diagnostics.trackers import make_trackers
from fourfold.memory.budget import BatchSizes, tensor_bytes
from fourfold.memory.meter import PhaseMeter, PhaseUsage
from fourfold.models.assembly import FourModels, assemble, record_for
from fourfold.models.loading import Base
from fourfold.models.residency import place
from fourfold.models.roles import Policy, Scorer
from fourfold.models.storage import save_role
from fourfold.rollout.local import LocalSampler, SamplingSettings
from fourfold.rollout.prompts import PromptStream, evaluation_batch
from fourfold.scoring.sources import FunctionReward, ModelReward, RewardSource
from fourfold.training.census import Census
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.folder import RunFolder
from fourfold.training.inputs import Inputs
from fourfold.training.rows import TIMED_PHASES
from fourfold.training.supervised import Texts
from fourfold.training.timeline import Timeline
from fourfold.training.trainer import StepCallback, Trainer
from fourfold.training.update import Learner

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stores:
    """Folders of the roles that PPO starts from; None is the base model, or no reward model."""

    sft: Path | None
    reward: Path | None


def reward_source(config: RunConfig, models: FourModels) -> RewardSource:
    """The reward model, or the function that the settings name."""
    if config.reward.source == "function":
        return FunctionReward.named(
            config.reward.function,
            models.base.tokenizer,
            retries=config.reward.retries,
            on_failure=config.reward.on_failure,
        )
    assert models.reward is not None, "assemble has loaded the reward model"
    return ModelReward(models.reward)


def build_trainer(
    config: RunConfig,
    models: FourModels,
    reward: RewardSource,
    prompts: Texts,
    prompts_test: Texts,
    folder: Path,
    meter: PhaseMeter,
    callbacks: tuple[StepCallback, ...] = (),
) -> Trainer:
    """A trainer that has taken up the newest checkpoint in `folder`, if there is one."""
    ppo, sampling, evaluation = config.ppo, config.sampling, config.evaluation
    settings = SamplingSettings(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        batch_size=sampling.batch_size,
        score_batch_size=ppo.micro_batch_size,
        stop_strings=sampling.stop_strings,
    )
    place(models.reference, config.reference.residency, models.own_parameters(models.reference), folder)
    if models.reward is not None:
        place(models.reward, config.reward.residency, models.own_parameters(models.reward), folder)
    learner = _learner(config, models, folder)
    sizes = BatchSizes.of(ppo, sampling.batch_size, models.base.budget)
    census = Census(
        config,
        models.base,
        {"actor": models.actor, "critic": models.critic},
        (learner.actor_optimizer, learner.critic_optimizer),
        lambda: {row.model: row.bytes for row in role_rows(models)},
    )
    sizes.describe_with(census.describe)
    sizes.measure_with(meter.role)
    trainer = Trainer(
        config=config,
        models=models,
        reward=reward,
        sampler=LocalSampler(models.base, models.actor, settings, sizes),
        learner=learner,
        sizes=sizes,
        census=census,
        prompts=PromptStream(
            prompts, seed=config.seed, rows=ppo.rollout_batch_size, responses_per_prompt=sampling.responses_per_prompt
        ),
        evaluation_prompts=(
            evaluation_batch(prompts_test, seed=config.seed, responses_per_prompt=evaluation.responses_per_prompt)
            if prompts_test
            else None
        ),
        store=CheckpointStore(folder / "checkpoints", keep_last=config.checkpoint.keep_last),
        trackers=[],
        meter=meter,
        judge=make_judge(evaluation.judge),
        callbacks=callbacks,
    )
    resumed = trainer.resume()
    trainer.trackers = make_trackers(
        config.tracking.trackers, folder, resume_after_step=trainer.progress.step if resumed else None
    )
    return trainer


def _learner(config: RunConfig, models: FourModels, folder: Path) -> Learner:
    """The trained roles with their optimizers, whose states are made at once."""
    ppo, memory = config.ppo, config.memory
    actor_steps = (ppo.steps - config.critic.warmup_rollouts) * ppo.updates_a_rollout
    room, scale = models.base.room(config), LossScale.of(config.precision, models.base.budget.device)
    critic_steps = ppo.steps * ppo.updates_a_rollout
    both: dict[str, Any] = {"memory": memory, "folder": folder, "loss_scale": scale}
    with room.role("actor's optimizer", _moments(models.actor, memory)):
        actor = LocalOptimizer("actor", models.actor, ppo, total_steps=actor_steps, **both)
    with room.role("critic's optimizer", _moments(models.critic, memory)):
        critic = LocalOptimizer("critic", models.critic, config.critic, total_steps=critic_steps, **both)
    return Learner(models.actor, models.critic, actor, critic)


def _moments(role: Policy | Scorer, memory: MemorySection) -> int:
    """Bytes of AdamW's two float32 moments of what is trained; parked ones take no memory."""
    return (
        0 if memory.optimizer_residency == "park" else 2 * tensor_bytes(p for p in role.parameters() if p.requires_grad)
    )


def train_ppo(
    config: RunConfig,
    base: Base,
    inputs: Inputs,
    stores: Stores,
    folder: RunFolder,
    meter: PhaseMeter,
    say: Say,
    callbacks: tuple[StepCallback, ...] = (),
) -> dict[str, Any]:
    """Train, store the actor in `ppo/model`; returns the evaluations before and after."""
    started = time.perf_counter()
    with meter.phase("load"):
        models = assemble(config, base, stores.sft, stores.reward)
    reward = reward_source(config, models)
    stage, timeline = folder.stage("ppo"), list[Timeline]()
    with stage_progress("ppo", config.ppo.steps, unit="steps") as progress:
        trainer = build_trainer(
            config,
            models,
            reward,
            inputs.prompts,
            inputs.prompts_test,
            stage,
            meter,
            (
                lambda _, row: progress.advance(1, note=_note(row)),
                lambda _, row: _note_spent(folder, meter, started),
                lambda step, _: timeline[0].note(step, meter.take_spans()),
                *callbacks,
            ),
        )
        progress.advance(trainer.progress.step)
        resident = {row.model: row.bytes for row in role_rows(models)}
        timeline.append(Timeline(stage, step=trainer.progress.step, resident=resident))
        try:
            _check_and_run(trainer, folder, meter, say)
        finally:
            for tracker in trainer.trackers:
                tracker.close()
    if trainer.evaluation_prompts is not None:
        _write_evaluation(folder, "after", trainer)
    save_role(folder.model("ppo"), models.actor, record_for(config, "policy"))
    return {name: folder.read_json(f"ppo/{name}.json") for name in ("before", "after")}


def _check_and_run(trainer: Trainer, folder: RunFolder, meter: PhaseMeter, say: Say) -> None:
    for warning in trainer.store.warnings:
        say(f"warning: {warning}")
    say(describe_roles(trainer))
    report = trainer.check().with_stored(folder.read_json("ppo/preflight.json"))
    say(report.describe())
    if (warning := report.warning()) is not None:
        say(f"warning: {warning}")
    folder.write_json("ppo/preflight.json", report.as_dict())
    if trainer.progress.step == 0 and trainer.evaluation_prompts is not None:
        _write_evaluation(folder, "before", trainer)
    meter.take()  # what came before the first step belongs to no step
    meter.take_spans()
    trainer.run()
    sampled = meter.totals().get("generate")
    if sampled is not None and (said := trainer.accountant.hide_condition(sampled.seconds)):
        say(said)


def describe_roles(trainer: Trainer) -> str:
    """Who is held where and in which type, and which heads nothing has trained yet."""
    text = "weights of the roles:\n" + as_text(roles_table(role_rows(trainer.models)))
    if trainer.config.critic.init != "reward" and trainer.progress.step == 0:
        text += "\nnewly initialised: value head (of the critic: zeros, and the mean score as its bias)"
    return text


def _note_spent(folder: RunFolder, meter: PhaseMeter, started: float) -> None:
    """The stage is still open in the meter, so its own seconds are counted from its start."""
    closed = meter.totals()
    peak = max(closed[phase].peak_bytes for phase in TIMED_PHASES if phase in closed)
    folder.note_spent(closed | {"ppo": PhaseUsage(time.perf_counter() - started, peak)})


def _note(row: dict[str, float]) -> str:
    return f"score {row['score_mean']:+.2f}, KL {row['kl_per_sequence_mean']:.1f}"


def _write_evaluation(folder: RunFolder, name: str, trainer: Trainer) -> None:
    evaluation = trainer.last_evaluation if name == "after" else None
    evaluation = evaluation or trainer.evaluate()
    metrics = {key.removeprefix("eval_"): value for key, value in evaluation.metrics.items()}
    folder.write_json(
        f"ppo/{name}.json", {"metrics": metrics, "prompts": evaluation.prompts, "responses": evaluation.responses}
    )
