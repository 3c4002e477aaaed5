"""Stage 3, ppo: assemble the four roles, check them, train, and compare before with after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fourfold.backends.local import LocalOptimizer
from fourfold.backends.scaling import LossScale
from fourfold.config.checks import reference_at_llama_cpp
from fourfold.config.schema import MemorySection, OptimizerSection, RunConfig
from fourfold.diagnostics.judges import make_judge
from fourfold.diagnostics.outside_trackers import Described
from fourfold.diagnostics.progress import stage_progress
from fourfold.diagnostics.tables import as_text, role_rows, roles_table
from fourfold.diagnostics.trackers import make_trackers
from fourfold.memory.budget import BatchSize, BatchSizes, tensor_bytes
from fourfold.memory.meter import PhaseMeter, PhaseUsage
from fourfold.models.assembly import FourModels, assemble, record_for
from fourfold.models.external import External
from fourfold.models.loading import Base
from fourfold.models.priors import MovingReference
from fourfold.models.quantized import check_gradients
from fourfold.models.residency import place
from fourfold.models.roles import Scorer
from fourfold.models.storage import save_role
from fourfold.models.trunk import layer_parameters
from fourfold.rollout.prompts import PromptStream
from fourfold.scoring.ahead import Ahead
from fourfold.scoring.combined import Reward, told_by
from fourfold.training.census import Census
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.dimensions import Dimensions
from fourfold.training.folder import RunFolder
from fourfold.training.gradients import TrunkGradients
from fourfold.training.held_out_texts import HeldOutTexts
from fourfold.training.inputs import Inputs
from fourfold.training.kept_rollouts import KeptRollouts
from fourfold.training.learner import Learner, TrunkLearner
from fourfold.training.pretraining import pretrain_critic
from fourfold.training.prior import Prior
from fourfold.training.reward_sources import reward_source
from fourfold.training.rows import TIMED_PHASES
from fourfold.training.sampled import evaluation_prompts, sampler_of
from fourfold.training.services import (
    reference_at_llama_server,
    reference_at_service,
)
from fourfold.training.supervised import Texts
from fourfold.training.timeline import Timeline
from fourfold.training.trainer import StepCallback, Trainer

log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stores:
    """Folders of the roles that PPO starts from; None is the base model, or no reward model."""

    sft: Path | None
    reward: Path | None


def build_trainer(
    config: RunConfig,
    models: FourModels,
    reward: Reward,
    prompts: Texts,
    prompts_test: Texts,
    folder: Path,
    meter: PhaseMeter,
    callbacks: tuple[StepCallback, ...] = (),
    texts_test: Texts = (),
) -> Trainer:
    """A trainer that has taken up the newest checkpoint in `folder`, if there is one."""
    sampling = config.sampling
    _place_frozen(config, models, folder)
    learner = _learner(config, models, folder)
    in_backward = config.memory.optimizer_in_backward
    sizes = BatchSizes.of(config.ppo, sampling.batch_size, models.base.budget, in_backward=in_backward)
    census = _census(config, models, learner)
    sizes.describe_with(census.describe)
    sizes.measure_with(meter.role)
    ahead = _ahead(config, models, reward, sizes)
    kept = KeptRollouts(folder, config)
    trainer = Trainer(
        config=config,
        models=models,
        reward=reward,
        sampler=sampler_of(config, models, sizes, ahead),
        learner=learner,
        sizes=sizes,
        census=census,
        prompts=PromptStream(
            prompts,
            seed=config.seed,
            rows=config.rows_at,
            responses_per_prompt=sampling.responses_per_prompt,
            new_tokens=config.new_tokens_at,
            told=told_by(reward),
        ),
        evaluation_prompts=evaluation_prompts(config, prompts_test, reward),
        kept=kept,
        store=CheckpointStore(folder / "checkpoints", keep_last=config.checkpoint.keep_last),
        trackers=[],
        meter=meter,
        prior=Prior(models, sampling.temperature, sizes.score, _held_out(config, models.base, texts_test, census)),
        judge=make_judge(config.evaluation.judge),
        ahead=ahead,
        callbacks=callbacks,
    )
    resumed = trainer.resume()
    kept.go_on_from(trainer.progress.step)
    trainer.trackers = make_trackers(
        config.tracking.trackers,
        folder,
        resume_after_step=trainer.progress.step if resumed else None,
        described=Described(config.tracking.project, folder.parent.resolve().name, config.model_dump(mode="json")),
    )
    return trainer


def _census(config: RunConfig, models: FourModels, learner: Learner) -> Census:
    trained: dict[str, nn.Module] = {"actor": models.actor, "critic": models.critic}
    trunk = learner.trunk
    if trunk is not None:
        trained["trunk"] = trunk.part
    return Census(
        config,
        models.base,
        trained,
        learner.optimizers().values(),
        weights=lambda: {row.model: row.resident_bytes for row in role_rows(models)},
        set_aside=lambda: 0 if trunk is None else trunk.gradients.bytes,
    )


def _held_out(config: RunConfig, base: Base, texts: Texts, census: Census) -> HeldOutTexts | None:
    """Held-out texts whose likelihood evaluations tell; None where there are none, or the settings want none."""
    if not texts:
        return None
    rows = config.ppo.micro_batch_size
    return HeldOutTexts(base, texts, BatchSize("evaluate", "actor", rows, base.budget, describe=census.describe))


def _place_frozen(config: RunConfig, models: FourModels, folder: Path) -> None:
    """Reference and reward go where the settings want them; a reward at a service is there since `reward_source`.

    A reference that moves does so from where it lies.
    """
    if reference_at_llama_cpp(config):
        models.reference = reference_at_llama_server(config, models.base, models.actor)
    elif config.reference.residency == "service":
        models.reference = reference_at_service(config, models.base, models.reference, models.actor)
    else:
        place(models.reference, config.reference.residency, models.own_parameters(models.reference), folder)
    if models.step_0 is not None:
        residency: Any = config.reference.residency  # never a service's
        place(models.step_0, residency, models.own_parameters(models.step_0), folder)
    if config.reference.kind == "moving":
        share = models.base.shares_head
        models.moving = MovingReference(config.reference, models.actor, models.reference, shares_head=share)
    for reward in (models.reward, *models.classifiers.values()):
        if isinstance(reward, Scorer | External) and config.reward.residency != "service":
            place(reward, config.reward.residency, models.own_parameters(reward), folder)


def _ahead(config: RunConfig, models: FourModels, reward: Reward, sizes: BatchSizes) -> Ahead | None:
    """Scoring beside sampling, where the settings ask for it."""
    if not config.sampling.overlap_scoring:
        return None
    if not 0 < config.sampling.batch_size < config.ppo.rollout_batch_size:
        log.warning(
            "sampling.overlap_scoring: sampling.batch_size = %d takes the whole rollout of %d at once, so scoring "
            "starts when sampling is over, beside log-probs and the critic only; give a smaller sampling.batch_size",
            config.sampling.batch_size,
            config.ppo.rollout_batch_size,
        )
    return Ahead(models.reference, reward, config.sampling.temperature, sizes.ahead)


def _learner(config: RunConfig, models: FourModels, folder: Path) -> Learner:
    """The trained roles with their optimizers, whose states are made at once."""
    memory, room, steps = config.memory, models.room, config.optimizer_steps
    given: dict[str, Any] = {
        "memory": memory,
        "folder": folder,
        "loss_scale": LossScale.of(config.precision, models.base.budget.device),
        "budget": models.base.budget,
    }

    def optimizer(name: str, module: nn.Module, settings: OptimizerSection, total_steps: int) -> LocalOptimizer:
        with room.role(f"{name}'s optimizer", _moments(module, memory)):
            return LocalOptimizer(name, module, settings, total_steps=total_steps, **given)

    actor = optimizer("actor", models.actor, config.ppo, steps["actor"])
    critic = optimizer("critic", models.critic, config.critic, steps["critic"])
    trunk = None
    if models.trunk is not None and models.base.trunk is not None:
        # Warm-up, schedule, clipping and decay are the actor's: without the actor the trunk never steps.
        slower = {"learning_rate": config.trunk.lr_scale * config.ppo.learning_rate}
        stepped = optimizer("trunk", models.trunk, config.ppo.model_copy(update=slower), steps["actor"])
        gradients = TrunkGradients(layer_parameters(models.trunk))
        trunk = TrunkLearner(models.trunk, models.base.trunk, stepped, config.trunk, gradients)
    return Learner(models.actor, models.critic, actor, critic, trunk, Dimensions.of(config))


def _moments(role: nn.Module, memory: MemorySection) -> int:
    """Bytes of AdamW's two float32 moments of what is trained; those that lie elsewhere take no memory."""
    kept = memory.optimizer_residency == "keep"
    return 2 * tensor_bytes(p for p in role.parameters() if p.requires_grad) if kept else 0


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
    stage, timeline = folder.stage("ppo"), Timeline(folder.root)
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
                lambda step, _: timeline.spans("ppo", step, meter.take_spans()),
                *callbacks,
            ),
            inputs.texts_test,
        )
        progress.advance(trainer.progress.step)
        timeline.go_on_from(trainer.progress.step)
        sizes = {row.model: row.resident_bytes for row in role_rows(models)}
        timeline.resident("ppo", trainer.progress.step, sizes)
        try:
            _check_and_run(trainer, folder, timeline, say)
        finally:
            for tracker in trainer.trackers:
                tracker.close()
    if trainer.evaluation_prompts is not None:
        _write_evaluation(folder, "after", trainer)
    save_role(folder.model("ppo"), models.actor, record_for(config, "policy"))
    return {name: folder.read_json(f"ppo/{name}.json") for name in ("before", "after")}


def _check_and_run(trainer: Trainer, folder: RunFolder, timeline: Timeline, say: Say) -> None:
    meter = trainer.meter
    for warning in trainer.store.warnings:
        say(f"warning: {warning}")
    say(describe_roles(trainer))
    with meter.phase("preflight"):
        report = trainer.check().with_stored(folder.read_json("ppo/preflight.json"))
    say(report.describe())
    if (warning := report.warning()) is not None:
        say(f"warning: {warning}")
    check_trained_gradients(trainer.models)
    folder.write_json("ppo/preflight.json", report.as_dict())
    if trainer.config.critic.pretrain_rollouts and trainer.progress.step == 0:
        pretrained = pretrain_critic(trainer)
        say(pretrained.describe())
        folder.write_json("ppo/pretraining.json", pretrained.as_dict())
    if trainer.progress.step == 0 and trainer.evaluation_prompts is not None:
        _write_evaluation(folder, "before", trainer)
    meter.take()  # what came before the first step belongs to no step
    timeline.spans("ppo", 0, meter.take_spans())
    before = meter.totals().get("generate")  # of the critic's pretraining
    trainer.run()
    timeline.spans("ppo", trainer.progress.step, meter.take_spans())
    sampled = meter.totals().get("generate")
    if sampled is not None:
        seconds = sampled.seconds - (0.0 if before is None else before.seconds)
        if said := trainer.accountant.hiding.condition(seconds):
            say(said)


def check_trained_gradients(models: FourModels) -> None:
    """Above a quantised base: what actor and critic would learn from, now that a rollout has been sampled."""
    for name, role in (("actor", models.actor), ("critic", models.critic)):
        check_gradients(role.branch, models.base.trunk, models.base.probe(), name)


def describe_roles(trainer: Trainer) -> str:
    """Who is held where and in which type, and which heads nothing has trained yet."""
    text = "weights of the roles:\n" + as_text(roles_table(role_rows(trainer.models)))
    if trainer.models.new_value_head and trainer.progress.step == 0:
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
