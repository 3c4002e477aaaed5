"""PPO with four models: the loop of the paper's algorithm box (Ouyang et al. 2022; Schulman et al. 2017).

Read `Trainer.step` first: generate, score, estimate advantages, update. Everything else keeps that loop safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fourfold.batch import Rollout
from fourfold.config.schema import RunConfig
from fourfold.diagnostics.metrics import check_row
from fourfold.diagnostics.trackers import Tracker
from fourfold.errors import Interrupted, RunFailed
from fourfold.memory.budget import BatchSizes
from fourfold.memory.meter import PhaseMeter
from fourfold.models.assembly import FourModels, set_new_head_bias
from fourfold.models.roles import Activations
from fourfold.rollout.prompts import PromptStream
from fourfold.rollout.sampler import PromptBatch, Sampler, row_seed
from fourfold.scoring.ahead import Ahead
from fourfold.scoring.combined import Reward
from fourfold.scoring.pipeline import Scored, learnable, score
from fourfold.training.accounting import Accountant
from fourfold.training.census import Census
from fourfold.training.checkpoint import CheckpointStore, restore_rng, rng_state
from fourfold.training.evaluation import Evaluation, Judge, summarise
from fourfold.training.experience import estimate_advantages
from fourfold.training.kept_rollouts import KeptRollouts
from fourfold.training.preflight import Preflight, ReferenceBias, preflight, reference_differs
from fourfold.training.prior import Prior
from fourfold.training.rows import counters, training_row
from fourfold.training.signals import StopRequest
from fourfold.training.state import Progress, collect, restore
from fourfold.training.update import Learner, update

StepCallback = Callable[[int, dict[str, float]], None]


@dataclass
class Trainer:
    """Everything a run of PPO needs; `run` goes from where the newest checkpoint stands to the last step."""

    config: RunConfig
    models: FourModels
    reward: Reward
    sampler: Sampler
    learner: Learner
    sizes: BatchSizes
    census: Census
    prompts: PromptStream
    evaluation_prompts: PromptBatch | None
    kept: KeptRollouts
    store: CheckpointStore
    trackers: list[Tracker]
    meter: PhaseMeter
    prior: Prior
    judge: Judge | None = None
    ahead: Ahead | None = None
    callbacks: tuple[StepCallback, ...] = ()

    def __post_init__(self) -> None:
        self.progress = Progress(kl_coef=self.config.ppo.kl_coef)
        self.accountant = Accountant(self.models, self.config.memory, self.ahead)
        self.last_evaluation: Evaluation | None = None

    def resume(self) -> bool:
        """Take up the newest good checkpoint, if there is one."""
        if (checkpoint := self.store.latest()) is not None:
            self.progress = restore(checkpoint, self.models, self.learner, self.sizes)
        self.prior.start()
        return checkpoint is not None

    def check(self) -> Preflight:
        """Pre-flight on the prompts of the coming step; a new critic head also learns the mean score here."""
        step, random_state = self.progress.step, rng_state()
        prompts, fresh, bias = self.prompts.batch(step), step == 0, None
        if fresh and reference_differs(self.models, self.config):  # a bias is a mean over a whole rollout
            bias = ReferenceBias.measured(self._score(*self.sampler.generate(prompts, policy_version=step))[0])
        rollout, activations = self.sampler.generate(prompts.first(self.sizes.actor.size), policy_version=step)
        scored, valid = self._score(rollout, activations)
        if fresh and self.models.new_value_head and bool(valid.any()):
            set_new_head_bias(self.models.critic, self.progress.mean_shaped_score(scored, valid, self.config.ppo))
        restore_rng(*random_state)  # measuring changes nothing, so that a resumed run goes on as if it had not been
        return preflight(self.models, scored, activations, self.config, bias, fresh=fresh, size=self.sizes.actor)

    def run(self) -> None:
        """Steps to the end; a stop request or a finished run leaves a checkpoint behind."""
        steps = self.config.ppo.steps
        with StopRequest() as stop:
            while self.progress.step < steps:
                best = self._advance()
                finished = self.progress.step == steps
                # Rows are logged before the checkpoint: resuming drops rows after it, so none is lost or doubled.
                if best or finished or stop.requested or self.progress.step % self.config.checkpoint.every == 0:
                    self.save(is_best=best)
                if stop.requested and not finished:
                    done = f"stopped after step {self.progress.step} of {steps}"
                    raise Interrupted(f"{done}; the same command goes on from there")

    def _advance(self) -> bool:
        """A step, its row, and an evaluation where one is due; True when that is the best so far."""
        step = self.progress.step + 1
        try:
            row = self.step()
            self._log(row, "ppo_step")
            for callback in self.callbacks:
                callback(step, row)
            return self._evaluate_if_due()
        except RunFailed as error:
            raise RunFailed(f"step {step}: {error}") from error

    def step(self) -> dict[str, float]:
        """One rollout: generate, score, estimate advantages, learn."""
        step, settings = self.progress.step, self.config.ppo
        self.accountant.begin()
        with self.census.phase(self.meter, "generate"):
            rollout, activations = self.sampler.generate(self.prompts.batch(step), policy_version=step)
            self.census.cached_bytes = activations.bytes
        with self.census.phase(self.meter, "score"):
            scored, valid = self._score(rollout, activations)
            self.progress.observe(scored, valid)
            rows = learnable(scored, valid, truncation=settings.truncation, on_failure=self.config.reward.on_invalid)
            shaping = self.progress.shaping
            experience = estimate_advantages(scored.select(rows), settings, shaping)
            drift = self.prior.drift(rollout, activations)
        with self.census.phase(self.meter, "learn"):
            learned = update(
                self.learner,
                experience,
                activations.select(rows),
                settings,
                temperature=self.config.sampling.temperature,
                seed=row_seed("update", self.config.seed, step),
                critic=self.config.critic,
                train_actor=step >= self.config.critic.warmup_rollouts,
                sizes=self.sizes,
            )
        self.prior.follow(step + 1)
        self.kept.training(step + 1, experience)
        self.progress.count(scored, int(learned.metrics["actor_optimizer_steps"]), settings)
        return training_row(
            self.progress,
            experience,
            scored,
            valid,
            learned.metrics | self.sizes.metrics(len(rollout.sequences)) | drift,
            self.accountant.step(rollout, learned, full_kl=settings.kl_estimator == "full"),
            self.meter.take(),
            config=self.config,
            shaping=shaping,
        )

    def _score(self, rollout: Rollout, activations: Activations) -> Scored:
        return score(
            rollout,
            activations,
            actor=self.models.actor,
            reference=self.models.reference,
            critic=self.models.critic,
            reward=self.reward,
            temperature=self.config.sampling.temperature,
            kl_estimator=self.config.ppo.kl_estimator,
            micro_batch_size=self.sizes.score,
            ahead=self.ahead,
        )

    def evaluate(self) -> Evaluation:
        """Held-out prompts under the actor as it is now, always with the same random numbers."""
        prompts = self.evaluation_prompts
        assert prompts is not None, "without data.prompts_test nothing is evaluated"
        with self.meter.phase("evaluate"):
            rollout, activations = self.sampler.generate(prompts, policy_version=self.progress.step)
            scored, valid = self._score(rollout, activations)
            drift = self.prior.evaluated(rollout, activations, valid)
        held_out = self.kept.held_out(scored, valid, self.progress)
        return summarise(held_out, self.models.base.tokenizer, self.judge, self.reward, drift)

    def _evaluate_if_due(self) -> bool:
        """Evaluate every so many steps and at the end; True when the result is the best so far."""
        if not self.config.evaluated_after(self.progress.step) or self.evaluation_prompts is None:
            return False
        self.last_evaluation = self.evaluate()
        metrics = self.last_evaluation.metrics
        self._log({**counters(self.progress), **metrics}, "evaluation")
        return self.progress.is_best(metrics[self.config.checkpoint.best_metric], self.config.checkpoint.best_mode)

    def save(self, *, is_best: bool) -> None:
        """Write a checkpoint, after making sure that nothing frozen has moved."""
        with self.census.phase(self.meter, "save"):
            self.prior.require_unmoved(self.progress.step)
            collected = collect(self.models, self.learner, self.progress, self.sizes)
            self.store.save(self.progress.step, *collected, is_best=is_best)

    def _log(self, row: dict[str, float], kind: str) -> None:
        check_row(row, kind)
        for tracker in self.trackers:
            tracker.log(row, kind)
